"""Notebook 13, the exercises that train a model: tied weights in one unit, adapters beside frozen weights, and a job
that must fit.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from fsdplab.teaching.core.exercise import Case, Exercise, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference
from fsdplab.workloads import build_model, loss_of
from fsdplab.workloads.twin import replay_gradients

from . import on_ranks

_RANKS = 2
DRIVERS = str(Path(on_ranks.__file__))
_HUNG = "the ranks make different calls: shard the same modules in the same order on every rank"

# --- tied weights

_TIED_STUB = '''\
from fsdplab.engine import fully_shard


def shard_tied(model):
    """Shard a GPT whose head shows the embedding's weight; blocks are units, the model is the last one."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model.token_embedding)
    fully_shard(model.head)
    fully_shard(model)
'''

_TIED = '''\
from fsdplab.engine import fully_shard


def shard_tied(model):
    """Shard a GPT whose head shows the embedding's weight; blocks are units, the model is the last one."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard([model.token_embedding, model.head])
    fully_shard(model)
'''


@lru_cache
def _tied_gradient() -> torch.Tensor:
    """The tied weight's gradient in the unsharded twin."""
    model = build_model(on_ranks.TIED)
    replay_gradients(model, [[on_ranks.batch(0, rank, _RANKS)] for rank in range(_RANKS)], loss_of)
    return model.token_embedding.weight.grad


def _tied_cases() -> list[Case]:
    parameters = sum(parameter.numel() for parameter in build_model(on_ranks.TIED, device="meta").parameters())
    expected = {
        "blocks that are units": on_ranks.TIED.layers,
        "the model is a unit": True,
        "head and embedding show one parameter": True,
        "bytes gathered in the forward": 4 * parameters,
        "gradient of the tied weight": _tied_gradient(),
    }
    return [Case("one backward of a small GPT", ((),) * _RANKS, (expected,) * _RANKS)]


def _explain_tied(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    got, right, what = trial.returned, case.expected[0], difference.tensor
    if "blocks" in what:
        return None, "every block stays a unit of its own: call fully_shard(block) for each"
    if "the model" in what:
        return None, "call fully_shard(model) last: it holds what no unit below it holds"
    if "one parameter" in what:
        return (
            None,
            (
                "head and embedding have weights of their own now: they began equal, and from the first update on they"
                " differ. Keep the one parameter, in one unit"
            ),
        )
    if "gathered" in what:
        less = got["bytes gathered in the forward"] < right["bytes gathered in the forward"]
        return None, (
            "a parameter is in no unit: nobody averages its gradient over the ranks"
            if less
            else "the weight is gathered twice: one unit holds it for both uses"
        )
    return (
        None,
        "the tied weight's gradient is the sum of two, from the embedding and from the head, averaged over the ranks",
    )


_PAIR = "fully_shard([model.token_embedding, model.head])"

shard_tied = Exercise(
    id="13.shard_tied",
    title="One weight, two uses, one unit",
    statement="Repair shard_tied(model), so that the tied weight is one parameter in one unit. Blocks stay units.",
    stub=_TIED_STUB,
    reference=_TIED,
    hints=(
        "The error message names two remedies. Both are a matter of one line.",
        (
            "`fully_shard` takes a list of modules: they become one unit. And what no unit claims is left to the last"
            " call, fully_shard(model)."
        ),
        "Replace the two lines by `fully_shard([model.token_embedding, model.head])`, or delete both.",
    ),
    cases=_tied_cases,
    explain=_explain_tied,
    hung=_HUNG,
    world_size=_RANKS,
    tolerance=1e-5,
    time_limit=20.0,
    driver=(DRIVERS, "drive_tied"),
    wrong=(
        Wrong(
            "untied",
            edited(
                _TIED,
                (
                    _PAIR,
                    (
                        "model.head.weight = type(model.head.weight)(model.head.weight.detach().clone())\n   "
                        " fully_shard(model.token_embedding)\n    fully_shard(model.head)"
                    ),
                ),
            ),
            "weights of their own",
        ),
        Wrong(
            "left out",
            edited(
                _TIED, (_PAIR + "\n    fully_shard(model)", "fully_shard(model, ignored_params={model.head.weight})")
            ),
            "in no unit",
        ),
        Wrong(
            "no blocks",
            edited(_TIED, ("    for block in model.blocks:\n        fully_shard(block)\n", "")),
            "every block stays a unit",
        ),
        Wrong("no root", edited(_TIED, ("    fully_shard(model)\n", "")), "call fully_shard(model) last"),
        Wrong(
            "embedding alone",
            edited(_TIED, (_PAIR, "fully_shard(model.token_embedding)")),
            "shared with a parameter already managed by another FSDP group",
            ends="raises",
        ),
    ),
)

# --- frozen parameters

_TUNE_STUB = '''\
import torch


def fine_tune(model, shard):
    """Freeze all but the adapters, call shard(model) once, and return an AdamW over what is trained."""
    ...  # adapters are the parameters with "adapter" in their name
'''

_TUNE = '''\
import torch


def fine_tune(model, shard):
    """Freeze all but the adapters, call shard(model) once, and return an AdamW over what is trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("adapter" in name)
    shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2)
'''
_FREEZE = '    for name, parameter in model.named_parameters():\n        parameter.requires_grad_("adapter" in name)\n'
_TRAINED = "[parameter for parameter in model.parameters() if parameter.requires_grad]"


def adapter_bytes() -> int:
    """Bytes of all adapters of the small model, in fp32."""
    model = on_ranks.adapted_model()
    return sum(parameter.nbytes for name, parameter in model.named_parameters() if name in on_ranks.adapters_of(model))


def _tune_cases() -> list[Case]:
    expected = {
        "an optimizer was returned": True,
        "the model is sharded": True,
        "adapters that did not move": [],
        "frozen parameters that moved": [],
        "bytes reduced in a step": adapter_bytes(),
        "bytes of optimizer state": 2 * adapter_bytes() // _RANKS,
    }
    return [Case("two steps of a small GPT with adapters", ((),) * _RANKS, (expected,) * _RANKS)]


def _explain_tune(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    got, right, what = trial.returned, case.expected[0], difference.tensor
    if "an optimizer" in what:
        return None, "return the optimizer: `return torch.optim.AdamW(...)`"
    if "sharded" in what:
        return None, "shard(model) was not called, so every rank trains a whole model of its own"
    if "did not move" in what:
        return None, "adapters are frozen or not in the optimizer; they are what shall be trained"
    if "moved" in what:
        return None, "weights outside the adapters are trained too: set requires_grad_(False) on them"
    if got["bytes reduced in a step"] > right["bytes reduced in a step"]:
        return (
            None,
            (
                "right weights move, but gradients of the others are computed, held and reduced for nothing"
                f" ({got['bytes reduced in a step']:,} bytes): leaving a parameter out of the optimizer does not freeze"
                " it, requires_grad_(False) does"
            ),
        )
    return (
        None,
        (
            "fewer bytes are reduced, or more are kept, than the adapters have: train all of them with AdamW, and"
            " nothing else"
        ),
    )


fine_tune = Exercise(
    id="13.fine_tune",
    title="Train the adapters only",
    statement=(
        "Write fine_tune(model, shard): freeze all but the adapters, shard the model with shard(model), return an AdamW"
        " over what is trained."
    ),
    stub=_TUNE_STUB,
    reference=_TUNE,
    hints=(
        "Three lines of work: freeze, shard, build the optimizer. Two orders are wrong: which, and why?",
        (
            "Freezing is `parameter.requires_grad_(False)`. shard(model) replaces the parameters by slices, so an"
            " optimizer that was built before it holds the old ones."
        ),
        (
            'In a loop over model.named_parameters(): `parameter.requires_grad_("adapter" in name)`. Then shard(model).'
            " Then AdamW over the parameters with requires_grad."
        ),
    ),
    cases=_tune_cases,
    explain=_explain_tune,
    hung=_HUNG,
    world_size=_RANKS,
    time_limit=20.0,
    driver=(DRIVERS, "drive_fine_tune"),
    wrong=(
        Wrong(
            "optimizer first",
            edited(
                _TUNE,
                ("    shard(model)\n", ""),
                ("    return", "    optimizer ="),
                ("lr=1e-2)\n", "lr=1e-2)\n    shard(model)\n    return optimizer\n"),
            ),
            "built before the model was sharded",
            ends="raises",
        ),
        Wrong("not frozen", edited(_TUNE, (_FREEZE, "")), "trained too"),
        Wrong(
            "only left out",
            edited(
                _TUNE,
                (_FREEZE, ""),
                (_TRAINED, '[parameter for name, parameter in model.named_parameters() if "adapter" in name]'),
            ),
            "does not freeze it",
        ),
        Wrong(
            "the other way round",
            edited(_TUNE, ('"adapter" in name', '"adapter" not in name')),
            "they are what shall be trained",
        ),
        Wrong(
            "one of the pair",
            edited(_TUNE, ('"adapter" in name', '"adapter_up" in name')),
            "they are what shall be trained",
        ),
        Wrong(
            "biases too",
            edited(_TUNE, ('"adapter" in name', '"adapter" in name or name.endswith("bias")')),
            "trained too",
        ),
        Wrong("not sharded", edited(_TUNE, ("    shard(model)\n", "")), "was not called"),
        Wrong("no optimizer", edited(_TUNE, ("    return torch", "    torch")), "return the optimizer"),
        Wrong("no moments", edited(_TUNE, ("AdamW(", "SGD(")), "with AdamW"),
        Wrong(
            "nothing trained",
            edited(_TUNE, ('"adapter" in name', "False"), (_TRAINED, "list(model.parameters())")),
            "read the last line",
            ends="raises",
        ),
    ),
)

# --- the job that must fit

_FIT_STUB = '''\
def fit():
    """What to give up so that the job fits its card."""
    return {
        "precision": "fp32",  # "fp32", "bf16"
        "checkpoint": "none",  # "none", "selective", "full"
        "offload": "none",  # "none", "cpu"
    }
'''

_FIT = '''\
def fit():
    """What to give up so that the job fits its card."""
    return {
        "precision": "bf16",  # "fp32", "bf16"
        "checkpoint": "none",  # "none", "selective", "full"
        "offload": "cpu",  # "none", "cpu"
    }
'''


def _fit_cases() -> list[Case]:
    return [
        Case(
            f"two steps of {on_ranks.JOB['model']} on a card of {on_ranks.CARD / 1e6:g} MB",
            ((),) * _RANKS,
            ({"choices": "", "bytes over the card": 0},) * _RANKS,
        )
    ]


def _explain_fit(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    if "choices" in difference.tensor:
        return None, trial.returned["choices"]
    over, held = trial.returned["bytes over the card"], trial.printed.strip().splitlines()[-1]
    largest = held.split(" MB")[0].rsplit(" ", 1)[0]
    remedy = {
        "activations": "activations are the largest part: compute them again, or in fewer bits",
        "optimizer state": (
            "the optimizer state is the largest part: neither bf16 nor checkpointing touches what rests, so it must go"
            " elsewhere"
        ),
    }.get(largest, "look at the largest part: which of the three choices touches it?")
    return f"the peak on this rank: {held}", f"{over / 1e6:.0f} MB too many. {remedy}"


def _chosen(**choices: str) -> str:
    start = _FIT_STUB
    for name, value in choices.items():
        start = edited(start, (f'"{name}": "{"fp32" if name == "precision" else "none"}"', f'"{name}": "{value}"'))
    return start


fit = Exercise(
    id="13.fit",
    title="Fit a model that did not fit",
    statement=(
        "Write fit(): a precision, a checkpoint and an offload with which the job fits a card of"
        f" {on_ranks.CARD / 1e6:g} MB."
    ),
    stub=_FIT_STUB,
    reference=_FIT,
    hints=(
        (
            "Read the bars: which segments rest between steps, and how many MB are they together? Can bf16 or"
            " recomputation touch them?"
        ),
        (
            "Parameters, moments and gradients at rest are 173 MB, more than the card. They must go elsewhere; then the"
            " activations are too many."
        ),
        '"offload": "cpu", and with it either "precision": "bf16" or some checkpointing.',
    ),
    cases=_fit_cases,
    explain=_explain_fit,
    hung=_HUNG,
    world_size=_RANKS,
    time_limit=90.0,
    driver=(DRIVERS, "drive_fit"),
    wrong=(
        Wrong("only bf16", _chosen(precision="bf16"), "MB too many"),
        Wrong(
            "bf16 and recomputation",
            _chosen(precision="bf16", checkpoint="full"),
            "the optimizer state is the largest part",
        ),
        Wrong("only offload", _chosen(offload="cpu"), "activations are the largest part"),
        Wrong(
            "a smaller batch", edited(_FIT, ('"offload": "cpu",', '"batch_size": 1,')), "batch_size belongs to the job"
        ),
        Wrong(
            "a word that is none", edited(_FIT, ('"checkpoint": "none"', '"checkpoint": "all"')), "unknown checkpoint"
        ),
        Wrong("a text", edited(_FIT, ("return {", "return str({"), ("    }\n", "    })\n")), "expected a dict"),
    ),
)

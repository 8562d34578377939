"""Notebook 13: what mixed precision keeps and where, one norm for all ranks, and the prices of recomputation and
transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdplab.teaching.core.exercise import Case, Choice, Exercise, Question, Slip, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference, Feedback

from .exercises_that_train import DRIVERS, fine_tune, fit, shard_tied
from .figures import KEPT
from .trading import bytes_each_reference, moved_over_the_bus

_RANKS = 2

# --- bytes per parameter

_BYTES_STUB = '''\
def bytes_each(cut, n):
    """Bytes a parameter on one of n ranks; `cut` may name "parameters", "gradients" and "optimizer"."""
    share = {state: 1 / n if state in cut else 1 for state in ("parameters", "gradients", "optimizer")}
    return {
        "working copy": ...,  # bf16, what forward and backward read
        "gradient": ...,  # fp32, as it is reduced
        "master": ...,  # fp32, what the optimizer updates
        "moments": ...,  # fp32, Adam's two
    }
'''

_BYTES = '''\
def bytes_each(cut, n):
    """Bytes a parameter on one of n ranks; `cut` may name "parameters", "gradients" and "optimizer"."""
    share = {state: 1 / n if state in cut else 1 for state in ("parameters", "gradients", "optimizer")}
    return {
        "working copy": 2 * share["parameters"],
        "gradient": 4 * share["gradients"],
        "master": 4 * share["optimizer"],
        "moments": 8 * share["optimizer"],
    }
'''
_CUTS = (
    ("no_shard on 4 ranks", (), 4),
    ("zero1 on 4 ranks", ("optimizer",), 4),
    ("zero2 on 4 ranks", ("gradients", "optimizer"), 4),
    ("full_shard on 8 ranks", ("parameters", "gradients", "optimizer"), 8),
)


def _bytes_cases() -> list[Case]:
    return [Case(name, ((list(cut), n),) * _RANKS, (bytes_each_reference(cut, n),) * _RANKS) for name, cut, n in _CUTS]


def _explain_bytes(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    which = next((name for name in KEPT if name in difference.tensor), None)
    if which is None or not isinstance(trial.returned, dict):
        return None, "return the dict with its four names, a number of bytes each"
    got, right, (cut, n) = trial.returned[which], case.expected[0][which], case.arguments[0]
    return None, _wrong_bytes(which, got, right, cut, n)


def _wrong_bytes(which: str, got: Any, right: float, cut: Sequence[str], n: int) -> str:
    if not isinstance(got, (int, float)):
        return f"{which}: a number of bytes is expected in place of the dots"
    if which == "master" and got in (right * n, right / n):
        return (
            "the master belongs to the optimizer: only the optimizer reads and writes it, so it is cut when the"
            " optimizer is, however whole the parameters are"
        )
    if which == "moments" and got == right / 2:
        return "Adam keeps two moments a parameter, 4 bytes each"
    if which == "moments" and got == right * 1.5:
        return "the master has a line of its own; the moments are two numbers of 4 bytes"
    if which == "gradient" and got == right / 2:
        return "2 bytes is what backward leaves in bf16; the ranks average in fp32, and that average is what is kept"
    if which == "working copy" and got == right * 2:
        return "the copy that forward and backward read is bf16: 2 bytes"
    if got in (right * n, right / n):
        return (
            f"{which} is {'cut' if got > right else 'whole'} here: what is in `cut` is divided by n, what is not stays"
            " whole"
        )
    return f"{which}: count the bytes of its format (bf16 2, fp32 4), then multiply by the share that a rank keeps"


bytes_each = Exercise(
    id="13.bytes_each",
    title="Bytes a parameter in mixed precision",
    statement="Write bytes_each(cut, n): how many bytes a parameter each of the four kept things costs one rank.",
    stub=_BYTES_STUB,
    reference=_BYTES,
    hints=(
        "Two questions for each line: how many bytes has the format, and which of the three states does it go with?",
        (
            "Who reads and writes the master? Not the forward: it reads the bf16 copy. So with which of the three is"
            " the master cut?"
        ),
        (
            'Master and moments take share["optimizer"]; the working copy share["parameters"]; the gradient'
            ' share["gradients"]. Bytes: 2, 4, 4, 8.'
        ),
    ),
    cases=_bytes_cases,
    explain=_explain_bytes,
    world_size=_RANKS,
    tolerance=1e-9,
    wrong=(
        Wrong(
            "master with the parameters",
            edited(_BYTES, ('4 * share["optimizer"]', '4 * share["parameters"]')),
            "belongs to the optimizer",
        ),
        Wrong("master whole", edited(_BYTES, ('4 * share["optimizer"]', "4")), "belongs to the optimizer"),
        Wrong("one moment", edited(_BYTES, ('8 * share["optimizer"]', '4 * share["optimizer"]')), "two moments"),
        Wrong(
            "master counted twice",
            edited(_BYTES, ('8 * share["optimizer"]', '12 * share["optimizer"]')),
            "a line of its own",
        ),
        Wrong("bf16 gradient", edited(_BYTES, ('4 * share["gradients"]', '2 * share["gradients"]')), "average in fp32"),
        Wrong("fp32 copy", edited(_BYTES, ('2 * share["parameters"]', '4 * share["parameters"]')), "bf16: 2 bytes"),
        Wrong(
            "gradient with the optimizer",
            edited(_BYTES, ('4 * share["gradients"]', '4 * share["optimizer"]')),
            "what is not stays whole",
        ),
        Wrong("copy never cut", edited(_BYTES, ('2 * share["parameters"]', "2")), "divided by n"),
        Wrong("everything cut", edited(_BYTES, ("1 / n if state in cut else 1", "1 / n")), "what is not stays whole"),
        Wrong("dots left", edited(_BYTES, ('4 * share["optimizer"]', "...")), "in place of the dots"),
        Wrong("a total", edited(_BYTES, ("return {", "return sum({"), ("    }\n", "    }.values())\n")), "four names"),
    ),
)

# --- one norm for all ranks

_NORM_STUB = '''\
import torch
import torch.distributed as dist


def global_norm(gradients):
    """The 2-norm of the whole gradient, equal on every rank, from this rank's slices (perhaps none)."""
    ...
'''

_NORM = '''\
import torch
import torch.distributed as dist


def global_norm(gradients):
    """The 2-norm of the whole gradient, equal on every rank, from this rank's slices (perhaps none)."""
    total = torch.zeros(())
    for gradient in gradients:
        total += gradient.float().square().sum()
    dist.all_reduce(total)
    return total.sqrt()
'''
_SUM = "    for gradient in gradients:\n        total += gradient.float().square().sum()\n"


def _norm_cases() -> list[Case]:
    """Norms of 13 and 5, and 10,000 small bf16 values whose squares a bf16 sum would lose."""
    two = ([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])], [torch.tensor([12.0])])
    one_empty: tuple[list[torch.Tensor], list[torch.Tensor]] = ([torch.tensor([-3.0, 4.0])], [])
    low = [torch.full((5000,), 0.0123).bfloat16()]
    value = 10_000**0.5 * float(low[0][0])
    return [
        _norm_case("slices of two parameters", two, 13.0),
        _norm_case("a rank without rows", one_empty, 5.0),
        _norm_case("bf16 gradients", (low, low), value),
    ]


def _norm_case(name: str, by_rank: Sequence[list[torch.Tensor]], norm: float) -> Case:
    return Case(name, tuple((each,) for each in by_rank), (norm,) * _RANKS)


def _explain_norm(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    got, right = trial.returned, case.expected[0]
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        return None, "one number is expected: a tensor with one element, or a float"
    norms = [float(sum(g.float().square().sum() for g in arguments[0])) ** 0.5 for arguments in case.arguments]
    per_tensor = [float(g.float().norm()) for arguments in case.arguments for g in arguments[0]]
    suspects = (
        (
            norms[trial.rank],
            (
                "this is the norm of this rank's slices alone. Every rank would scale by another number, and the slices"
                " would no longer belong to one model"
            ),
        ),
        (right**2, "this is the sum of squares; take the root in the end"),
        (sum(norms), "norms were added; squares add, norms do not: all_reduce the sum of squares, then take the root"),
        (sum(per_tensor), "the tensors' norms were added; squares add, norms do not"),
        (
            right / len(norms) ** 0.5,
            "the sum of squares was averaged over the ranks: each rank has other rows, so nothing is counted twice",
        ),
        (max(norms), "the largest rank's norm is not the whole one: add the squares"),
    )
    for wrong, cause in suspects:
        if abs(got - wrong) <= 1e-3 * abs(wrong) and abs(wrong - right) > 1e-3 * right:
            return None, cause
    if case.name.startswith("bf16") and abs(got - right) < 0.2 * right:
        return None, "the squares were summed or sent in bf16, which keeps 8 bits: convert with .float() first"
    return None, "sum of squares over all tensors and all ranks, then the root"


def _norm_rules(case: Case, trials: Sequence[Trial]) -> Feedback | None:
    for trial in trials:
        made = [call for call in trial.calls if call.kind != "barrier"]
        if len(made) > 1 or sum(call.nbytes for call in made) > 64:
            got = ", ".join(f"{call.kind} of {call.nbytes} bytes" for call in made)
            cause = (
                "the ranks need to exchange one number only: add up the squares of all tensors first, then all_reduce"
                " that sum once"
            )
            return Feedback(
                "The norm is right, but too much was sent.", "one all_reduce of one number", got, cause, trial.rank
            )
    return None


global_norm = Exercise(
    id="13.global_norm",
    title="One norm for all ranks",
    statement=(
        "Write global_norm(gradients): the norm of the whole gradient from this rank's slices, equal on every rank,"
        " with one collective."
    ),
    stub=_NORM_STUB,
    reference=_NORM,
    hints=(
        "The norm is the root of a sum of squares. Which part of that sum can a rank compute alone?",
        (
            "Each rank adds the squares of its own slices (in fp32); one all_reduce adds the ranks' sums; then"
            " everybody takes the root. A rank with no rows calls too, with 0."
        ),
        (
            "`total = torch.zeros(())`, in a loop `total += gradient.float().square().sum()`, then"
            " `dist.all_reduce(total)` and `return total.sqrt()`."
        ),
    ),
    cases=_norm_cases,
    explain=_explain_norm,
    rules=_norm_rules,
    hung=(
        "a rank waits in a collective that another never calls: a rank without gradients must take part too, with a sum"
        " of 0"
    ),
    world_size=_RANKS,
    tolerance=1e-5,
    driver=(DRIVERS, "drive_norm"),
    wrong=(
        Wrong("own slices only", edited(_NORM, ("    dist.all_reduce(total)\n", "")), "this rank's slices alone"),
        Wrong("no root", edited(_NORM, ("total.sqrt()", "total")), "take the root in the end"),
        Wrong(
            "norms added",
            edited(
                _NORM,
                (
                    "    dist.all_reduce(total)\n    return total.sqrt()",
                    "    total = total.sqrt()\n    dist.all_reduce(total)\n    return total",
                ),
            ),
            "squares add, norms do not",
        ),
        Wrong(
            "tensor norms added",
            edited(
                _NORM,
                ("gradient.float().square().sum()", "gradient.float().norm()"),
                ("return total.sqrt()", "return total"),
            ),
            "squares add, norms do not",
        ),
        Wrong(
            "averaged",
            edited(
                _NORM,
                ("    dist.all_reduce(total)\n", "    dist.all_reduce(total)\n    total /= dist.get_world_size()\n"),
            ),
            "nothing is counted twice",
        ),
        Wrong(
            "the largest",
            edited(_NORM, ("dist.all_reduce(total)", "dist.all_reduce(total, dist.ReduceOp.MAX)")),
            "add the squares",
        ),
        Wrong(
            "in bf16",
            edited(_NORM, ("torch.zeros(())", "torch.zeros((), dtype=torch.bfloat16)"), (".float()", "")),
            "8 bits",
        ),
        Wrong(
            "whole tensors sent",
            edited(
                _NORM,
                (
                    _SUM + "    dist.all_reduce(total)\n",
                    (
                        "    every = [None] * dist.get_world_size()\n    dist.all_gather_object(every,"
                        " [gradient.tolist() for gradient in gradients])\n    for one in every:\n        for values in"
                        " one:\n            total += torch.tensor(values).square().sum()\n"
                    ),
                ),
            ),
            "exchange one number only",
        ),
        Wrong("nothing", edited(_NORM, ("    return total.sqrt()\n", "    total.sqrt()\n")), "returns nothing"),
        Wrong(
            "without rows, without a call",
            edited(
                _NORM,
                (
                    "    total = torch.zeros(())\n",
                    "    if not gradients:\n        return torch.zeros(())\n    total = torch.zeros(())\n",
                ),
            ),
            "with a sum of 0",
            ends="hangs",
        ),
    ),
)

# --- prices

kept = Question(
    id="13.kept",
    statement=(
        "Full checkpointing keeps the input of each of the 12 blocks, a tensor [4, 128, 384] in fp32, and nothing else"
        " of them. How many MB is that?"
    ),
    unit="MB",
    expected=12 * 4 * 128 * 384 * 4 / 1e6,
    slips=(
        Slip("that is the input of one block", factor=1 / 12),
        Slip("fp32 has 4 bytes; these are the bytes of bf16", factor=0.5),
        Slip("a factor of 4 is missing: 4 sequences, and 4 bytes a value", factor=0.25),
    ),
    hints=(
        "How many values has one such tensor?",
        "4 x 128 x 384 values of 4 bytes, once a block.",
        "12 x 4 x 128 x 384 x 4 bytes.",
    ),
    explanation="Beside it live one block's own activations while its backward runs, and those of the head.",
)

recompute = Choice(
    id="13.recompute",
    statement=(
        "A backward costs about two forwards. With full checkpointing, what does a training step cost beside what it"
        " cost before?"
    ),
    options={
        "a": "a third more arithmetic, and the same traffic",
        "b": "a third more arithmetic, and one more all-gather of every block",
        "c": "twice the arithmetic, and the same traffic",
    },
    right="a",
    because={
        "a": (
            "one forward more, 4 instead of 3; it runs inside the block's own backward, where the parameters are"
            " gathered anyway."
        ),
        "b": (
            "look at the column of bytes sent: the second forward runs inside the block's backward, where the"
            " parameters are gathered anyway."
        ),
        "c": "forward + backward was 1 + 2; one more forward makes it 4 instead of 3.",
    },
)

_BUS = {"billions": 7, "ranks": 8, "gigabytes_per_second": 25}

bus = Question(
    id="13.bus",
    statement=(
        "A model of 7 billion parameters on 8 GPUs, everything at rest in host memory. In one step the bus of a GPU"
        " carries its slice down for the forward's gather and again for the backward's (fp32 each time), and its slice"
        " of the gradient up (fp32). The bus does 25 GB/s. How many seconds of transfers is that?"
    ),
    unit="s",
    expected=moved_over_the_bus(7, 8) / 25,
    slips=(
        Slip("that is the whole model; a GPU moves its slice, one eighth", factor=8.0),
        Slip("down for the forward only; the slice is brought again for the backward's gather", factor=2 / 3),
        Slip("that is one of the three transfers", factor=1 / 3),
        Slip("fp32 has 4 bytes a parameter, not 2", factor=0.5),
        Slip("bytes divided by seconds are a rate; here GB are divided by GB/s", value=25 / moved_over_the_bus(7, 8)),
    ),
    hints=("How many GB is one slice?", "7e9 x 4 bytes / 8 = 3.5 GB, three times.", "10.5 GB / 25 GB/s."),
    explanation=(
        "Whether that hurts depends on the step: hidden behind ten seconds of computing it is free, beside half a"
        " second it is not."
    ),
)

ITEMS = (bytes_each, global_norm, kept, recompute, bus, shard_tied, fine_tune, fit)

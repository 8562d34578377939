"""Notebook 06: the hooks that turn five functions into an engine, and the choice of its units for a memory target."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fsdplab.teaching.core.checking import solution_file
from fsdplab.teaching.core.exercise import Case, Exercise, Question, Slip, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference
from fsdplab.workloads import build_model, preset

from .drivers import LOSSES, PARAMETERS, compared
from .exercises_06_schedule import schedule
from .units import CHOICES, LIMIT, TARGET, plan

DRIVERS = str(Path(__file__).with_name("drivers.py"))
STEPS = ("shard", "unshard", "reshard", "guarded", "reduce")
_RANKS = 2
_MODEL, _TRAIN_STEPS = "gpt-tiny", 3
_WORK = {
    "ranks": _RANKS,
    "model": _MODEL,
    "steps": _TRAIN_STEPS,
    "batch_size": 2,
    "sequence_length": 32,
    "optimizer": "SGD",
    "learning_rate": 0.1,
    "seed": 1,
}

_HOOKS_STUB = '''\
def hooks(unit, unshard, reshard, reduce):
    """Four functions for one unit: before and after its forward, before and after its backward."""

    def before_forward():  # the module is about to read its parameters
        ...

    def after_forward():  # nobody reads them until backward; but the root's backward begins at once
        ...

    def before_backward():  # autograd is about to read them again
        ...

    def after_backward():  # the whole gradient is there: unit.take_gradient() hands it over, flat
        ...

    return before_forward, after_forward, before_backward, after_backward
'''

_HOOKS = '''\
def hooks(unit, unshard, reshard, reduce):
    """Four functions for one unit: before and after its forward, before and after its backward."""

    def before_forward():  # the module is about to read its parameters
        unshard(unit.mine, unit.whole)

    def after_forward():  # nobody reads them until backward; but the root's backward begins at once
        if not unit.is_root:
            reshard(unit.whole)

    def before_backward():  # autograd is about to read them again
        if not unit.is_root:
            unshard(unit.mine, unit.whole)

    def after_backward():  # the whole gradient is there: unit.take_gradient() hands it over, flat
        reshard(unit.whole)
        unit.mine.grad = reduce(unit.take_gradient())

    return before_forward, after_forward, before_backward, after_backward
'''


def parts_in_use(*names: str) -> dict[str, str]:
    """The file of each function of notebook 05 (and `hooks`, if named): the learner's where its check passed."""
    ids = {name: f"{'06' if name == 'hooks' else '05'}.{name}" for name in (*STEPS, *names)}
    return {name: str(solution_file(exercise)) for name, exercise in ids.items()}


def _hooks_cases() -> Sequence[Case]:
    blocks = preset(_MODEL).layers
    expected = {
        LOSSES: [0.0] * _TRAIN_STEPS,
        "gathers in a step": 2 * blocks + 1,
        "reductions in a step": blocks + 1,
        "bytes gathered after a step": 0,
        "bytes gathered at the peak": plan(_MODEL, CHOICES["every block"]).peak,
        PARAMETERS: _zeros(),
    }
    return [Case(f"{_MODEL}, {_TRAIN_STEPS} steps", ((parts_in_use(), _WORK),) * _RANKS, (expected,) * _RANKS)]


@lru_cache
def _zeros() -> dict[str, torch.Tensor]:
    parameters = build_model(_MODEL, device="meta").named_parameters()
    return {name: torch.zeros(parameter.shape) for name, parameter in parameters if compared(name)}


def _explain_hooks(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    got, right, what = trial.returned, case.expected[trial.rank], difference.tensor
    if LOSSES in what:
        step = next(index for index, apart in enumerate(got[LOSSES]) if apart != 0)
        return f"{step} (counted from 0)", _wrong_loss(step, got, right["reductions in a step"])
    if "gathers" in what and got["gathers in a step"] > right["gathers in a step"]:
        return (
            None,
            (
                "one gather too many: after its forward the root stays, because its backward begins at once; so it is"
                " neither dropped there nor gathered again"
            ),
        )
    if "gathers" in what or "peak" in what:
        return (
            None,
            (
                "blocks stay gathered from forward to backward, so the whole model is in memory: drop every unit but"
                " the root in after_forward"
            ),
        )
    if "reductions" in what:
        return None, "every unit reduces once a step, in after_backward"
    if "after a step" in what:
        return None, "something stays gathered after the step: after_backward drops the unit as well, the root too"
    return (
        None,
        (
            "losses agree and parameters do not: what after_backward leaves in `unit.mine.grad` is not this rank's"
            " slice of the mean gradient"
        ),
    )


def _wrong_loss(step: int, got: dict[str, Any], units: int) -> str:
    if step == 0:
        return (
            "already the first forward is wrong, before any update: parameters changed, or were read before they were"
            " gathered"
        )
    reduced = got["reductions in a step"]
    if not reduced:
        return (
            "the first loss is right and no gradient was reduced, so the ranks' gradients stayed apart: after_backward"
            " hands the whole gradient to `reduce`, and sets `unit.mine.grad` to what it returns"
        )
    if reduced < units:
        return (
            f"the first loss is right, but only {reduced} of {units} units reduced a gradient: every unit does in"
            " after_backward, the root too"
        )
    return (
        "the first loss is right, the first update is not: the optimizer reads `unit.mine.grad`; set it to what"
        " `reduce` returns"
    )


_DROP = "        if not unit.is_root:\n            reshard(unit.whole)\n"
_AGAIN = (
    "    def before_backward():  # autograd is about to read them again\n        if not unit.is_root:\n           "
    " unshard(unit.mine, unit.whole)\n"
)
_SET = "unit.mine.grad = reduce(unit.take_gradient())"
_CUT = "unit.mine.grad = unit.take_gradient()[: len(unit.mine)]"
_FIRST = (
    "    def before_forward():  # the module is about to read its parameters\n        unshard(unit.mine, unit.whole)\n"
)
_LAST = f"        reshard(unit.whole)\n        {_SET}\n"

hooks = Exercise(
    id="06.hooks",
    title="Four hooks make an engine",
    statement=(
        "Write the bodies of the four hooks. With your five functions they train a GPT as the unsharded twin does."
    ),
    stub=_HOOKS_STUB,
    reference=_HOOKS,
    hints=(
        (
            "Follow one block through a step in the figure of 05: at which of the four moments is it gathered, and at"
            " which dropped?"
        ),
        (
            "Before each use `unshard(unit.mine, unit.whole)`, after it `reshard(unit.whole)`. The optimizer updates"
            " `unit.mine` and reads `unit.mine.grad`. The root (`unit.is_root`) stays from forward to backward."
        ),
        (
            "after_backward is two lines: `reshard(unit.whole)` and `unit.mine.grad = reduce(unit.take_gradient())`;"
            " the other three have one call each, two of them under `if not unit.is_root:`."
        ),
    ),
    cases=_hooks_cases,
    explain=_explain_hooks,
    hung=(
        "the ranks gather or reduce different units at the same time: call the same functions in the same order on"
        " every rank"
    ),
    world_size=_RANKS,
    time_limit=60.0,
    driver=(DRIVERS, "drive_hooks"),
    wrong=(
        Wrong("never dropped in between", edited(_HOOKS, (_DROP, "        pass\n")), "the whole model is in memory"),
        Wrong(
            "kept until backward",
            edited(
                _HOOKS,
                (_DROP, "        pass\n"),
                (_AGAIN, _AGAIN.replace("if not unit.is_root:\n            unshard(unit.mine, unit.whole)", "pass")),
            ),
            "the whole model is in memory",
        ),
        Wrong(
            "the root dropped too",
            edited(
                _HOOKS,
                (_DROP, "        reshard(unit.whole)\n"),
                (_AGAIN, _AGAIN.replace("if not unit.is_root:\n            unshard", "unshard")),
            ),
            "one gather too many",
        ),
        Wrong(
            "the root gathered twice",
            edited(_HOOKS, (_AGAIN, _AGAIN.replace("if not unit.is_root:\n            unshard", "unshard"))),
            "one gather too many",
        ),
        Wrong("kept after the step", edited(_HOOKS, (_LAST, f"        {_SET}\n")), "stays gathered after the step"),
        Wrong(
            "the root kept after the step",
            edited(_HOOKS, (_LAST, f"{_DROP}        {_SET}\n")),
            "stays gathered after the step",
        ),
        Wrong("no reduction", edited(_HOOKS, (f"        {_SET}\n", "")), "no gradient was reduced"),
        Wrong(
            "the root not reduced",
            edited(_HOOKS, (_SET, f"if not unit.is_root:\n            {_SET}")),
            "only 2 of 3 units reduced",
        ),
        Wrong("not reduced but cut", edited(_HOOKS, (_SET, _CUT)), "no gradient was reduced"),
        Wrong("half the gradient", edited(_HOOKS, (_SET, f"{_SET} / 2")), "what `reduce` returns"),
        Wrong(
            "twice the gradient, which Adam would hide", edited(_HOOKS, (_SET, f"{_SET} * 2")), "what `reduce` returns"
        ),
        Wrong(
            "not handed over", edited(_HOOKS, (_SET, "reduce(unit.take_gradient())")), "set it to what `reduce` returns"
        ),
        Wrong("twice the gradient", edited(_HOOKS, (_SET, f"{_SET} * 2 - 1e-3")), "what `reduce` returns"),
        Wrong(
            "into the parameter",
            edited(_HOOKS, (_SET, "unit.mine.data = reduce(unit.take_gradient())")),
            "what `reduce` returns",
        ),
        Wrong(
            "not gathered again",
            edited(
                _HOOKS,
                (_AGAIN, _AGAIN.replace("if not unit.is_root:\n            unshard(unit.mine, unit.whole)", "pass")),
            ),
            "after before_backward: unit blocks.1",
            ends="raises",
        ),
        Wrong(
            "not gathered at all",
            edited(_HOOKS, (_FIRST, _FIRST.replace("unshard(unit.mine, unit.whole)", "pass"))),
            "after before_forward: unit root",
            ends="raises",
        ),
        Wrong(
            "swapped",
            edited(_HOOKS, (_FIRST, _FIRST.replace("unit.mine, unit.whole", "unit.whole, unit.mine"))),
            "write unshard(unit.mine, unit.whole)",
            ends="raises",
        ),
        Wrong(
            "called, not returned",
            edited(
                _HOOKS,
                (
                    "return before_forward, after_forward, before_backward, after_backward",
                    "return before_forward, after_forward",
                ),
            ),
            "hooks returned 2 things",
            ends="raises",
        ),
    ),
)


_UNITS_STUB = '''\
def choose_units(name, module):
    """True where `module`, called `name` in the model, is to be a unit of its own."""
    ...  # name is such as "blocks.3.feed_forward.up", type(module).__name__ such as "GPTBlock" or "Linear"
'''

_UNITS = '''\
def choose_units(name, module):
    """True where `module`, called `name` in the model, is to be a unit of its own."""
    return name.endswith((".attention", ".feed_forward"))
'''
_UNITS_WORK = {"ranks": _RANKS, "model": "gpt-20m", "seed": 0, "target": TARGET, "limit": LIMIT}


def _units_cases() -> Sequence[Case]:
    met = {"bytes over the target": 0, "collectives over the limit": 0}
    return [Case("gpt-20m, one step", ((parts_in_use("hooks"), _UNITS_WORK),) * _RANKS, (met,) * _RANKS)]


def _explain_units(case: Case, trial: Trial, difference: Difference) -> tuple[str, str]:
    seen = trial.printed.strip().splitlines()[-1]
    if "collectives" in difference.tensor:
        return (
            seen,
            (
                f"at most {LIMIT} collectives a step: units this small send many small messages; join what is used"
                " together"
            ),
        )
    if seen.startswith("1 units"):
        return (
            seen,
            "everything is one unit, the root: the whole model is gathered at once. Return True for some modules",
        )
    return (
        seen,
        (
            f"at most {TARGET:,} bytes gathered: a unit is gathered while it runs, and with it the root and every unit"
            " around it; what no unit claims belongs to the root. The largest unit must be smaller"
        ),
    )


_RETURN = 'name.endswith((".attention", ".feed_forward"))'

choose_units = Exercise(
    id="06.choose_units",
    title="Meet a memory target",
    statement=(
        f"Choose units for gpt-20m so that at most {TARGET / 1e6:g} MB are gathered at any moment, with at most {LIMIT}"
        " collectives a step."
    ),
    stub=_UNITS_STUB,
    reference=_UNITS,
    hints=(
        (
            "Two forces: large units hold much memory at once, small ones need many messages. The figure shows where"
            " the blocks stand."
        ),
        "A block has two halves that run one after the other. Look at the names in the table above.",
        'Units named "...attention" and "...feed_forward": test `name.endswith(...)`, which takes a tuple of endings.',
    ),
    cases=_units_cases,
    explain=_explain_units,
    world_size=_RANKS,
    time_limit=60.0,
    driver=(DRIVERS, "drive_units"),
    wrong=(
        Wrong("one unit", edited(_UNITS, (_RETURN, "False")), "everything is one unit"),
        Wrong(
            "blocks",
            edited(_UNITS, (_RETURN, 'type(module).__name__ == "GPTBlock"')),
            "The largest unit must be smaller",
        ),
        Wrong(
            "one inside the other",
            edited(_UNITS, (_RETURN, 'type(module).__name__ == "GPTBlock" or name.endswith(".feed_forward")')),
            "every unit around it",
        ),
        Wrong(
            "half of the model",
            edited(_UNITS, ('(".attention", ".feed_forward")', '".feed_forward"')),
            "belongs to the root",
        ),
        Wrong(
            "every linear layer", edited(_UNITS, (_RETURN, 'type(module).__name__ == "Linear"')), "many small messages"
        ),
        Wrong("a list of blocks", edited(_UNITS, (_RETURN, 'name == "blocks"')), "never called", ends="raises"),
    ),
)

_LLAMA = preset("llama-2-7b")
_BLOCK, _ROOT, _LAYERS = (
    2e-6 * count for count in (_LLAMA.block_parameters, _LLAMA.root_parameters, _LLAMA.layers * _LLAMA.block_parameters)
)

llama = Question(
    id="06.llama",
    statement=(
        f"Llama 2 7B: {_LLAMA.layers} blocks of 202.4 million parameters each, and a root of 262.1 million, gathered in"
        " bf16 (2 bytes). Blocks are units, and nothing is gathered ahead. How many MB of gathered parameters does a"
        " rank hold at most?"
    ),
    unit="MB",
    expected=_BLOCK + _ROOT,
    slips=(
        Slip("the root stays gathered while the blocks run", value=_BLOCK),
        Slip("the root alone; a block is gathered beside it", value=_ROOT),
        Slip("that is the whole model; only one block at a time is there", value=_LAYERS + _ROOT),
        Slip("bf16 has 2 bytes a parameter, not 4", factor=2.0),
        Slip("the counts are parameters; each has 2 bytes", factor=0.5),
        Slip("that is with the next block gathered ahead, as the lab does by default", value=2 * _BLOCK + _ROOT),
    ),
    hints=(
        "Which units are gathered while a block computes?",
        "The root, from the beginning to the end, and one block.",
        "(202.4 + 262.1) million parameters, 2 bytes each.",
    ),
    explanation=(
        "One block and the root, 929 MB, however many ranks there are: this part of the peak does not shrink with n."
    ),
)

ITEMS = (hooks, choose_units, llama, schedule)

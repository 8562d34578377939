"""Notebook 06, the puzzle: order gathers, drops and reductions so that messages hide and memory stays small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsdplab.teaching.core.exercise import Case, Exercise, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference

from .schedules import MEMORY_TARGET, NOTHING, shortest

DRIVER = str(Path(__file__).with_name("schedules.py"))
_SIZES = (4, 6)

_STUB = '''\
def schedule(n):
    """One step of n blocks as a list of (action, block), in order."""
    steps = []
    for i in range(n):
        steps += [("gather", i), ("forward", i), ("drop", i)]
    for i in reversed(range(n)):
        steps += [("gather", i), ("backward", i), ("drop", i), ("reduce", i)]
    return steps
'''

_REFERENCE = '''\
def schedule(n):
    """One step of n blocks as a list of (action, block), in order."""
    steps = [("gather", 0)]
    for i in range(n - 1):
        steps += [("gather", i + 1), ("forward", i), ("drop", i)]
    steps += [("forward", n - 1)]  # its backward comes at once: it stays
    for i in reversed(range(n)):
        if i < n - 1:
            steps += [("reduce", i + 1)]
        if i > 0:
            steps += [("gather", i - 1)]
        steps += [("backward", i), ("drop", i)]
    return [*steps, ("reduce", 0)]
'''


def _cases() -> list[Case]:
    zeros = {f"{blocks} blocks": 0 for blocks in _SIZES}
    met = {"what cannot run": NOTHING, "blocks over the memory target": zeros, "ms over the time target": zeros}
    return [Case("4 and 6 blocks", ((list(_SIZES),),), (met,))]


def _explain(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    got: dict[str, Any] = trial.returned
    if got["what cannot run"] != NOTHING:
        return None, got["what cannot run"]
    late = got["ms over the time target"]
    missed = {size: over for size, over in got["blocks over the memory target"].items() if over}
    if missed:
        size, over = next(iter(missed.items()))
        return (
            size,
            (
                f"{MEMORY_TARGET + over} blocks in memory at once, the target is {MEMORY_TARGET}: gather one block"
                " ahead and not more, and send a finished gradient's reduction before the next gather, or it waits in"
                " memory"
            ),
        )
    size, over = next((size, over) for size, over in late.items() if over)
    best = shortest(int(size.split()[0]))
    return (
        size,
        (
            f"{best + over} ms, the target is {best}: look for the red pieces in the figure. A gather hides behind the"
            " computation that is listed after it; and what is dropped and gathered again at once costs a message"
        ),
    )


_LAST = '    steps += [("forward", n - 1)]  # its backward comes at once: it stays\n'
_AHEAD = '[("gather", i + 1), ("forward", i), ("drop", i)]'
_REDUCE = '        if i < n - 1:\n            steps += [("reduce", i + 1)]\n'
_GATHER = '        if i > 0:\n            steps += [("gather", i - 1)]\n'

schedule = Exercise(
    id="06.schedule",
    title="Order a step",
    statement=(
        f"Order gathers, drops and reductions: at most {MEMORY_TARGET} blocks in memory, and no time beyond the first"
        " gather, the computation and the last reduction."
    ),
    stub=_STUB,
    reference=_REFERENCE,
    hints=(
        "A message that is listed before a computation travels while it runs. Which gather could you list earlier?",
        (
            "Forward: list `gather i + 1` before `forward i`. Backward: `gather i - 1` before `backward i`. The link"
            " sends in the order of the list, and a gradient is in memory until its reduction has ended."
        ),
        (
            "Keep the last block from its forward to its backward. Before `backward i` list `reduce i + 1` first, then"
            " `gather i - 1`; `reduce 0` ends the list."
        ),
    ),
    cases=_cases,
    explain=_explain,
    world_size=1,
    pure=True,
    driver=(DRIVER, "drive_schedule"),
    wrong=(
        Wrong("with a remark", _STUB + "    # as it was\n", "look for the red pieces"),
        Wrong(
            "everything first",
            """\
def schedule(n):
    steps = [("gather", i) for i in range(n)] + [("forward", i) for i in range(n)]
    for i in reversed(range(n)):
        steps += [("backward", i), ("drop", i), ("reduce", i)]
    return steps
""",
            "gather one block ahead and not more",
        ),
        Wrong(
            "gather before reduce", edited(_REFERENCE, (_REDUCE + _GATHER, _GATHER + _REDUCE)), "before the next gather"
        ),
        Wrong(
            "the last block dropped",
            edited(_REFERENCE, (_LAST, '    steps += [("forward", n - 1), ("drop", n - 1), ("gather", n - 1)]\n')),
            "costs a message",
        ),
        Wrong(
            "only forward ahead",
            edited(
                _REFERENCE,
                (_GATHER, ""),
                ('+= [("backward", i)', '+= [("gather", i)] * (i < n - 1) + [("backward", i)'),
            ),
            "look for the red pieces",
        ),
        Wrong("never reduced", edited(_REFERENCE, (_REDUCE, "")), "was never reduced"),
        Wrong("not gathered", edited(_REFERENCE, (_GATHER, "")), "are not gathered"),
        Wrong("gathered twice", edited(_REFERENCE, (_AHEAD, _AHEAD.replace("i + 1", "i"))), "gathered already"),
        Wrong("kept", edited(_REFERENCE, ('("backward", i), ("drop", i)', '("backward", i)')), "is still gathered"),
        Wrong(
            "used too early",
            edited(_REFERENCE, ('[("gather", 0)]', '[("gather", 0), ("drop", 0), ("gather", 0)]')),
            "still under way",
        ),
        Wrong("reduced too early", edited(_REFERENCE, ('("reduce", i + 1)', '("reduce", i)')), "no gradient to reduce"),
        Wrong(
            "backward upwards", edited(_REFERENCE, ("in reversed(range(n))", "in range(n)")), "no gradient to reduce"
        ),
        Wrong("misspelt", edited(_REFERENCE, ('("forward", n - 1)', '("foward", n - 1)')), "the actions are gather"),
        Wrong(
            "printed",
            edited(_REFERENCE, ('return [*steps, ("reduce", 0)]', 'print([*steps, ("reduce", 0)])')),
            "`return steps`",
        ),
        Wrong("words", edited(_REFERENCE, ('[*steps, ("reduce", 0)]', '[*steps, "reduce 0"]')), "expected a pair"),
        Wrong(
            "one block too many",
            edited(_REFERENCE, ("for i in range(n - 1)", "for i in range(n)")),
            "there are blocks 0 to 3",
        ),
        Wrong("nothing", edited(_REFERENCE, ('return [*steps, ("reduce", 0)]', "steps")), "expected a list"),
        Wrong("a computation left out", edited(_REFERENCE, (_LAST, "")), "now comes forward 3"),
        Wrong(
            "four blocks only",
            edited(_REFERENCE, ('    steps = [("gather", 0)]\n', '    n, steps = 4, [("gather", 0)]\n')),
            "now comes forward 4",
        ),
    ),
)

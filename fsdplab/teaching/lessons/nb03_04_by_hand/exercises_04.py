"""Notebook 04: who owns which rows, reduce-scatter into them, a local step and an all-gather: ZeRO-1 and ZeRO-2 by
hand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdplab.teaching.core.exercise import Case, Exercise, Rules, Trial, Wrong, edited
from fsdplab.teaching.core.findings import Difference, Finding, first_difference

from . import grading
from .questions_04 import state_bytes, zero1_total, zero2_total
from .rows_04 import rows_of

_RANKS = 3
_DRIVERS = grading.DRIVERS
_HUNG = (
    "deadlock: a rank waits in a collective that another rank never calls; every rank must make the same calls in the"
    " same order"
)

# --- reduce-scatter

_REDUCE = '''\
import torch
import torch.distributed as dist


def reduce_rows(parameter, mine):
    """mine.grad = this rank's rows of the averaged gradient; the whole gradient is dropped."""
    blocks = list(parameter.grad.chunk(dist.get_world_size()))  # one block of rows for each rank
    {}
'''
_SCATTER = "dist.reduce_scatter(mine.grad, blocks)"
_MAKE = "mine.grad = torch.empty_like(mine)"
_DIVIDE = "mine.grad /= dist.get_world_size()"
_DROP = "parameter.grad = None"
_REDUCE_REFERENCE = _REDUCE.format(f"{_MAKE}\n    {_SCATTER}\n    {_DIVIDE}\n    {_DROP}")
_SLICED = "start = dist.get_rank() * len(mine)\n    "
_SHAPES = {"a matrix [6, 2]": (6, 2), "a bias [3]": (3,)}


def _whole_gradient(rank: int, shape: tuple[int, ...]) -> Tensor:
    """Rank 0 has threes, rank 1 thirties, rank 2 three hundreds: an average tells whose shares are in it."""
    elements = torch.Size(shape).numel()
    return 3 * 10.0**rank * torch.arange(1, elements + 1).reshape(shape)


def _average(shape: tuple[int, ...]) -> Tensor:
    return sum(_whole_gradient(rank, shape) for rank in range(_RANKS)) / _RANKS


def _reduce_cases() -> list[Case]:
    cases = []
    for name, shape in _SHAPES.items():
        arguments = tuple((_whole_gradient(rank, shape),) for rank in range(_RANKS))
        expected = tuple({"mine.grad": rows, "parameter.grad": None} for rows in _average(shape).chunk(_RANKS))
        cases.append(Case(name, arguments, expected))
    return cases


def _explain_reduce(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    if "parameter.grad" in difference.tensor:
        return None, "the whole gradient is still there; set `parameter.grad = None`: that is the memory to be saved"
    got, whole = trial.returned["mine.grad"], case.arguments[trial.rank][0]
    if difference.problem == "type":
        return (
            None,
            "`mine` has no gradient: make one like `mine` (torch.empty_like) and let the reduce_scatter write into it",
        )
    if difference.problem != "value":
        return None, "`mine.grad` holds this rank's rows only: it has the shape of `mine`"
    return None, _whose(got, whole, trial.rank)


def _whose(got: Tensor, whole: Tensor, rank: int) -> str:
    """The likely mistake behind a wrong block."""
    average = list(_average(tuple(whole.shape)).chunk(_RANKS))
    own = list(whole.chunk(_RANKS))
    suspects = (
        (average[rank] * _RANKS, f"this is the sum over the ranks, {_RANKS} times the average: divide by their number"),
        (average[rank] / _RANKS, "divided twice by the number of ranks"),
        (average[rank] * _RANKS / 2, f"divided by 2, but there are {_RANKS} ranks: ask `dist.get_world_size()`"),
        (own[rank], "these are the rank's own rows: nothing came from the other ranks"),
        (own[rank] / _RANKS, "these are the rank's own rows, divided: nothing came from the other ranks"),
        *(
            (average[other], f"these are rank {other}'s rows; this is rank {rank}")
            for other in range(_RANKS)
            if other != rank
        ),
    )
    return next(
        (cause for wrong, cause in suspects if first_difference(wrong, got) is None),
        "these are other numbers: was the buffer filled by the reduce_scatter?",
    )


def _within(half: str, cause: str) -> Rules:
    """A rule: at most P (n-1)/n bytes, where P is what `half` names."""

    def rule(case: Case, trials: Sequence[Trial]) -> Finding | None:
        for trial in trials:
            allowed = _payload(case, trial.rank) * (_RANKS - 1) / _RANKS
            broken = grading.too_many_bytes(
                trial, trial.calls, _RANKS, f"P (n-1)/n, P the bytes of {half}", allowed, cause
            )
            if broken:
                return broken
        return None

    return rule


def _payload(case: Case, rank: int) -> int:
    """Bytes of the wholes that a case is about, times its steps."""
    first, *rest = case.arguments[rank]
    wholes = [first] if isinstance(first, Tensor) else first
    return sum(whole.nbytes for whole in wholes) * (rest[-1] if rest else 1)


reduce_rows = Exercise(
    id="04.reduce_rows",
    title="Reduce into the owner's rows",
    statement=(
        "Write reduce_rows(parameter, mine): mine.grad becomes this rank's rows of the averaged gradient,"
        " parameter.grad becomes None."
    ),
    stub=_REDUCE.format("...  # a gradient for mine, reduce_scatter into it, average, drop the whole"),
    reference=_REDUCE_REFERENCE,
    hints=(
        "Which of the three collectives of notebook 01 gives each rank one block of the sum?",
        (
            "dist.reduce_scatter(output, blocks) writes this rank's block of the sum into `output`, so `mine.grad` must"
            " exist first. Then average, and drop the whole gradient."
        ),
        (
            "`mine.grad = torch.empty_like(mine)`, `dist.reduce_scatter(mine.grad, blocks)`, `mine.grad /="
            " dist.get_world_size()`, `parameter.grad = None`."
        ),
    ),
    cases=_reduce_cases,
    explain=_explain_reduce,
    rules=_within(
        "the gradient",
        "an all_reduce brings every rank the whole sum, and it then keeps a third: a reduce_scatter sends half as much",
    ),
    hung=_HUNG,
    world_size=_RANKS,
    tolerance=1e-6,
    driver=(_DRIVERS, "reduced"),
    wrong=(
        Wrong("no division", edited(_REDUCE_REFERENCE, (f"    {_DIVIDE}\n", "")), "divide by their number"),
        Wrong("divided by two", edited(_REDUCE_REFERENCE, (_DIVIDE, "mine.grad /= 2")), "ask `dist.get_world_size()`"),
        Wrong("divided twice", edited(_REDUCE_REFERENCE, (_DIVIDE, f"{_DIVIDE}\n    {_DIVIDE}")), "divided twice"),
        Wrong("whole kept", edited(_REDUCE_REFERENCE, (f"    {_DROP}\n", "")), "the memory to be saved"),
        Wrong("whole cleared", edited(_REDUCE_REFERENCE, (_DROP, "parameter.grad.zero_()")), "the memory to be saved"),
        Wrong(
            "nothing received",
            edited(_REDUCE_REFERENCE, (_SCATTER, "mine.grad.copy_(blocks[dist.get_rank()])")),
            "the rank's own rows",
        ),
        Wrong(
            "the next rank's rows",
            edited(_REDUCE_REFERENCE, (_SCATTER, "dist.reduce_scatter(mine.grad, blocks[1:] + blocks[:1])")),
            "'s rows; this is rank",
        ),
        Wrong(
            "the first rows",
            edited(
                _REDUCE_REFERENCE,
                (_MAKE, "dist.all_reduce(parameter.grad)"),
                (_SCATTER, "mine.grad = parameter.grad[: len(mine)].clone()"),
            ),
            "rank 0's rows",
        ),
        Wrong(
            "the whole gradient",
            edited(
                _REDUCE_REFERENCE,
                (_MAKE, "dist.all_reduce(parameter.grad)"),
                (_SCATTER, "mine.__dict__['grads'] = parameter.grad"),
                (_DIVIDE, "pass"),
            ),
            "has no gradient",
        ),
        Wrong(
            "a local buffer",
            edited(
                _REDUCE_REFERENCE,
                (_MAKE, "own = torch.empty_like(mine)"),
                (_SCATTER, "dist.reduce_scatter(own, blocks)"),
                (_DIVIDE, "own /= len(blocks)"),
            ),
            "has no gradient",
        ),
        Wrong(
            "all_reduce and cut",
            edited(
                _REDUCE_REFERENCE,
                (_MAKE, f"{_SLICED}dist.all_reduce(parameter.grad)"),
                (_SCATTER, "mine.grad = parameter.grad[start : start + len(mine)].clone()"),
            ),
            "half as much",
        ),
        Wrong(
            "no gradient made", edited(_REDUCE_REFERENCE, (f"    {_MAKE}\n", "")), "read the last line", ends="raises"
        ),
    ),
)

# --- local step, all-gather

_STEP = '''\
import torch.distributed as dist


def step_and_gather(pairs, optimizer):
    """Update this rank's rows, then gather every rank's into the parameters; pairs: (parameter, mine)."""
    {}
'''
_LOOP = "for parameter, mine in pairs:"
_BLOCKS = "blocks = list(parameter.detach().chunk(dist.get_world_size()))"
_GATHER = "dist.all_gather(blocks, mine.detach())"
_STEP_REFERENCE = _STEP.format(f"optimizer.step()\n    {_LOOP}\n        {_BLOCKS}\n        {_GATHER}")
_STEPS = 2


def _step_case() -> list[Case]:
    """Two parameters of hundreds; every rank lowers its rows by one (rank 0), two, three in each of two steps."""
    wholes = [100.0 * torch.arange(1, 13).reshape(6, 2), 100.0 * torch.arange(1, 4)]
    slices = [[torch.full_like(rows, rank + 1.0) for rank, rows in enumerate(whole.chunk(_RANKS))] for whole in wholes]
    expected = {}
    for step in range(_STEPS):
        for index, whole in enumerate(wholes):
            expected[f"step {step}, parameter {index}"] = whole - (step + 1) * torch.cat(slices[index])
    arguments = tuple((wholes, [by_rank[rank] for by_rank in slices], _STEPS) for rank in range(_RANKS))
    return [Case("a matrix [6, 2] and a bias [3]", arguments, (expected,) * _RANKS)]


def _explain_step(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    """Whose rows are wrong, and whether they are old, foreign or stepped twice."""
    key = next((name for name in case.expected[0] if name in difference.tensor), None)
    if key is None or difference.problem != "value" or difference.index is None:
        return None, "write into the parameter's own memory; it keeps its shape"
    step, index = int(key.split()[1].rstrip(",")), int(key.split()[-1])
    right, got, start = case.expected[0][key], trial.returned[key], case.arguments[0][0][index]
    old = start if step == 0 else case.expected[0][f"step {step - 1}, parameter {index}"]
    rows = len(right) // _RANKS
    owner = difference.index[0] // rows
    part = slice(owner * rows, (owner + 1) * rows)
    when = f"{step} (steps count from 0), the rows of rank {owner}"
    return when, _step_cause(got, right, old, part, owner, trial.rank)


def _step_cause(got: Tensor, right: Tensor, old: Tensor, part: slice, owner: int, rank: int) -> str:
    if torch.equal(got, old):
        return "nothing has changed: the optimizer was not asked to step"
    if torch.equal(got[part], old[part]) and owner != rank:
        return (
            "another rank's rows are still the old ones: gather after the step, and into the parameter itself (a chunk"
            " of `parameter.detach()` is a window on it)"
        )
    if torch.equal(got[part], old[part]):
        return "this rank's own rows are the old ones: step before you gather"
    if torch.equal(got[part], old[part] - 2 * (old[part] - right[part])):
        return "these rows were stepped twice: one optimizer.step() for all pairs, not one a pair"
    if any(torch.equal(got[part], block) for block in right.chunk(_RANKS)):
        return "these are another rank's rows: block r of the list belongs to rank r"
    return "other numbers: perhaps a sum where the rows themselves are wanted"


step_and_gather = Exercise(
    id="04.step_and_gather",
    title="A local step, then an all-gather",
    statement=(
        "Write step_and_gather(pairs, optimizer): the optimizer updates this rank's rows, then every parameter is whole"
        " and new on every rank."
    ),
    stub=_STEP.format("...  # one step, then an all_gather into every parameter"),
    reference=_STEP_REFERENCE,
    hints=(
        "After the optimizer's step, which rows of a parameter are new on this rank, and who has the others?",
        (
            "`parameter.detach().chunk(n)` is a list of windows on the parameter's memory, block r for rank r: an"
            " all_gather into that list needs no copying afterwards."
        ),
        (
            "`optimizer.step()` once; then for every pair"
            " `dist.all_gather(list(parameter.detach().chunk(dist.get_world_size())), mine.detach())`."
        ),
    ),
    cases=_step_case,
    explain=_explain_step,
    rules=_within(
        "the parameters",
        "an all_gather brings every rank the others' rows once; adding up zero-filled wholes, or gathering twice, sends"
        " more",
    ),
    hung=_HUNG,
    world_size=_RANKS,
    driver=(_DRIVERS, "stepped"),
    wrong=(
        Wrong("no gather", edited(_STEP_REFERENCE, (_GATHER, "pass")), "still the old ones"),
        Wrong("no step", edited(_STEP_REFERENCE, ("    optimizer.step()\n", "")), "not asked to step"),
        Wrong(
            "gather, then step",
            _STEP.format(f"{_LOOP}\n        {_BLOCKS}\n        {_GATHER}\n    optimizer.step()"),
            "gather after the step",
        ),
        Wrong(
            "a step a pair",
            _STEP.format(f"{_LOOP}\n        optimizer.step()\n        {_BLOCKS}\n        {_GATHER}"),
            "stepped twice",
        ),
        Wrong(
            "into a copy",
            edited(_STEP_REFERENCE, ("parameter.detach().chunk", "parameter.detach().clone().chunk")),
            "still the old ones",
        ),
        Wrong(
            "in another order",
            edited(_STEP_REFERENCE, (_GATHER, "dist.all_gather(blocks[1:] + blocks[:1], mine.detach().clone())")),
            "another rank's rows",
        ),
        Wrong("the first pair only", edited(_STEP_REFERENCE, ("in pairs:", "in pairs[:1]:")), "still the old ones"),
        Wrong(
            "a sum of wholes",
            edited(
                _STEP_REFERENCE,
                (
                    _GATHER,
                    (
                        "[block.zero_() for rank, block in enumerate(blocks) if rank != dist.get_rank()]\n       "
                        " dist.all_reduce(parameter.detach())"
                    ),
                ),
            ),
            "sends more",
        ),
        Wrong("gathered twice", edited(_STEP_REFERENCE, (_GATHER, f"{_GATHER}\n        {_GATHER}")), "sends more"),
        Wrong(
            "averaged wholes",
            edited(
                _STEP_REFERENCE,
                (_GATHER, "dist.all_reduce(parameter.detach())\n        parameter.detach().div_(len(blocks))"),
            ),
            "other numbers",
        ),
    ),
)

ITEMS = (rows_of, reduce_rows, step_and_gather, state_bytes, zero1_total, zero2_total)

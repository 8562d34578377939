"""Notebook 04: who owns which rows, reduce-scatter into them, a local step and an all-gather: ZeRO-1 and ZeRO-2 by
hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdplab.teaching.core.comm_log import nothing_added_up, to_one_rank_only
from fsdplab.teaching.core.exercise import Case, Exercise, Question, Rules, Slip, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference, Feedback, first_difference

from . import grading
from .on_ranks import SHARED

if TYPE_CHECKING:
    from .runs import Runs

_RANKS = 3
_DRIVERS = grading.DRIVERS
_HUNG = (
    "deadlock: a rank waits in a collective that another rank never calls; every rank must make the same calls in the"
    " same order"
)

# --- who owns which rows

_ROWS = '''\
def rows_of(rows, rank, n):
    """The rows [start, stop) that `rank` owns: blocks of ceil(rows / n), the last ones short or empty."""
    {}
'''
_ROWS_REFERENCE = _ROWS.format(
    "size = -(-rows // n)  # rounded up\n    return min(rank * size, rows), min((rank + 1) * size, rows)"
)
_QUESTIONS = [(6, 3), (8, 2), (10, 3), (4, 3), (2, 4), (1, 3), (257, 8)]


def _spans(rows: int, n: int) -> list[tuple[int, int]]:
    """The partition that torch's FSDP2 and this package use: `_spans(10, 3) == [(0, 4), (4, 8), (8, 10)]`."""
    size = -(-rows // n)
    return [(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(n)]


def _row_cases() -> list[Case]:
    expected = {f"{rows} rows on {n} ranks": _spans(rows, n) for rows, n in _QUESTIONS}
    return [Case("who owns which rows", ((_QUESTIONS,),), (expected,))]


def _explain_rows(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    """What is wrong with the first partition that differs: rows with no owner, with two, or owned in another way."""
    question = next((name for name in case.expected[0] if f"'{name}'" in difference.tensor), None)
    given = None if question is None else trial.returned.get(question)
    if (
        question is None
        or not isinstance(given, list)
        or not all(isinstance(span, list) and len(span) == 2 for span in given)
    ):
        return None, "return two whole numbers, `start, stop`; the rows are those of `tensor[start:stop]`"
    if not all(isinstance(edge, int) for span in given for edge in span):
        return None, "row numbers are whole: `//` divides without a fraction, and -(-rows // n) rounds up"
    return None, f"{question} gives {given}: {_fault(given, case.expected[0][question], int(question.split()[0]))}"


def _fault(given: list[list[int]], right: list[tuple[int, int]], rows: int) -> str:
    if any(start < 0 for start, _ in given):
        return "a start below 0: ranks count from 0, so rank 0 owns the first rows"
    if all(start > stop for start, stop in given):
        return "every start lies behind its stop: return `start, stop`, in this order"
    if any(start > stop for start, stop in given):
        return "a rank with no rows must get start == stop: clamp both ends to `rows`"
    if any(stop > rows or start > rows for start, stop in given):
        return f"there are only {rows} rows: clamp the ends with min(..., rows)"
    owners = [sum(start <= row < stop for start, stop in given) for row in range(rows)]
    if 0 in owners:
        missing = owners.index(0)
        return (
            f"row {missing} has no owner, so nobody would ever update it (rounded down? `stop` is not included, as in a"
            " slice)"
        )
    if max(owners) > 1:
        return f"row {owners.index(max(owners))} has two owners (`stop` is not included, as in a slice)"
    sizes = [stop - start for start, stop in given]
    if sizes == sorted(sizes) and sizes != sorted(sizes, reverse=True):
        return "every row has one owner, but the short block comes first; here the first ranks have full blocks"
    if max(sizes) == right[0][1]:
        return (
            "balanced, and every row has one owner; but then a block does not begin at rank * ceil(rows / n), where an"
            " all_gather puts it. Full blocks first, the rest is short"
        )
    return "every row has one owner, but a full block has ceil(rows / n) rows"


rows_of = Exercise(
    id="04.rows_of",
    title="Who owns which rows?",
    statement="Write rows_of(rows, rank, n): the rows [start, stop) that a rank owns, in blocks of ceil(rows / n).",
    stub=_ROWS.format("..."),
    reference=_ROWS_REFERENCE,
    hints=(
        "How large is a full block? Where would block number `rank` begin if there were rows without end?",
        (
            "A block has -(-rows // n) rows (rounded up). It runs from rank * size to (rank + 1) * size, unless the"
            " rows end before."
        ),
        "`size = -(-rows // n)`, then `return min(rank * size, rows), min((rank + 1) * size, rows)`.",
    ),
    cases=_row_cases,
    explain=_explain_rows,
    world_size=1,
    pure=True,
    driver=(grading.DRIVERS, "spans"),
    wrong=(
        Wrong("rounded down", edited(_ROWS_REFERENCE, ("-(-rows // n)", "rows // n")), "has no owner"),
        Wrong("start not clamped", edited(_ROWS_REFERENCE, ("min(rank * size, rows)", "rank * size")), "start == stop"),
        Wrong(
            "nothing clamped",
            edited(
                _ROWS_REFERENCE,
                ("min(rank * size, rows)", "rank * size"),
                ("min((rank + 1) * size, rows)", "(rank + 1) * size"),
            ),
            "clamp the ends",
        ),
        Wrong(
            "stop included",
            edited(_ROWS_REFERENCE, ("min((rank + 1) * size, rows)", "min((rank + 1) * size, rows) - 1")),
            "`stop` is not included",
        ),
        Wrong(
            "balanced",
            _ROWS.format(
                "whole, rest = divmod(rows, n)\n    start = rank * whole + min(rank, rest)\n    return start, start +"
                " whole + (rank < rest)"
            ),
            "Full blocks first",
        ),
        Wrong(
            "the last takes the rest",
            _ROWS.format("size = rows // n\n    return rank * size, rows if rank == n - 1 else (rank + 1) * size"),
            "short block comes first",
        ),
        Wrong("a fraction", edited(_ROWS_REFERENCE, ("-(-rows // n)", "rows / n")), "whole"),
        Wrong(
            "overlapping",
            edited(_ROWS_REFERENCE, ("min((rank + 1) * size, rows)", "min((rank + 1) * size + 1, rows)")),
            "two owners",
        ),
        Wrong("start and length", edited(_ROWS_REFERENCE, ("min((rank + 1) * size, rows)", "size")), "start == stop"),
        Wrong(
            "numbers with a fraction of zero",
            _ROWS.format(
                "import math\n    size = math.ceil(rows / n)\n    return min(rank * size, rows) / 1, min((rank + 1) *"
                " size, rows) / 1"
            ),
            "row numbers are whole",
        ),
        Wrong(
            "ranks from one",
            edited(
                _ROWS_REFERENCE,
                ("min(rank * size, rows)", "(rank - 1) * size"),
                ("min((rank + 1) * size, rows)", "min(rank * size, rows)"),
            ),
            "ranks count from 0",
        ),
        Wrong(
            "stop, start",
            _ROWS.format("size = -(-rows // n)\n    return min((rank + 1) * size, rows), min(rank * size, rows)"),
            "in this order",
        ),
        Wrong("only the start", edited(_ROWS_REFERENCE, (", min((rank + 1) * size, rows)", "")), "two whole numbers"),
        Wrong("nothing", _ROWS.format("size = -(-rows // n)"), "two whole numbers"),
    ),
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
    return None, to_one_rank_only(trial.calls) or _whose(got, whole, trial)


def _whose(got: Tensor, whole: Tensor, trial: Trial) -> str:
    """The likely mistake behind a wrong block."""
    rank = trial.rank
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
    otherwise = nothing_added_up(trial.calls) or "these are other numbers: was the buffer filled by the reduce_scatter?"
    return next((cause for wrong, cause in suspects if first_difference(wrong, got) is None), otherwise)


def _within(half: str, cause: str) -> Rules:
    """A rule: at most P (n-1)/n bytes, where P is what `half` names."""

    def rule(case: Case, trials: Sequence[Trial]) -> Feedback | None:
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
            " exist first. Then average (op=dist.ReduceOp.AVG does that too), and drop the whole gradient."
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
            "adds its own blocks up",
            edited(_REDUCE_REFERENCE, (_MAKE, "mine.grad = sum(blocks)"), (f"    {_SCATTER}\n", "")),
            "no collective was called",
        ),
        Wrong(
            "gathers rows, then adds",
            edited(
                _REDUCE_REFERENCE,
                (_MAKE, "every = [torch.empty_like(mine) for _ in blocks]"),
                (_SCATTER, "dist.all_gather(every, blocks[dist.get_rank()])\n    mine.grad = sum(every)"),
            ),
            "adds nothing up",
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
            "reduced to rank 0",
            edited(
                _REDUCE_REFERENCE,
                (_MAKE, f"{_SLICED}dist.reduce(parameter.grad, dst=0)"),
                (_SCATTER, "mine.grad = parameter.grad[start : start + len(mine)].clone()"),
            ),
            "on one rank only",
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
            "no gradient made", edited(_REDUCE_REFERENCE, (f"    {_MAKE}\n", "")), "something is None", ends="raises"
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
    expected: dict[str, Any] = {}
    for step in range(_STEPS):
        for index, whole in enumerate(wholes):
            expected[f"step {step}, parameter {index}"] = whole - (step + 1) * torch.cat(slices[index])
    expected[SHARED] = [True] * len(wholes)
    arguments = tuple((wholes, [by_rank[rank] for by_rank in slices], _STEPS) for rank in range(_RANKS))
    return [Case("a matrix [6, 2] and a bias [3]", arguments, (expected,) * _RANKS)]


def _explain_step(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    """Whose rows are wrong, and whether they are old, another rank's or stepped twice."""
    key = next((name for name in case.expected[0] if name in difference.tensor), None)
    if key == SHARED:
        return None, (
            "the values are right, but the parameter has new memory now, beside that of `mine`: gather into the"
            " parameter's own memory (a chunk of `parameter.detach()` is a window on it)"
        )
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
        return (
            "nothing has changed: the optimizer was not asked to step, or its gradients were gone by then (`zero_grad`"
            " comes after the step)"
        )
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
        Wrong(
            "new memory",
            edited(
                _STEP_REFERENCE,
                (_BLOCKS, "blocks = [mine.detach().clone() for _ in range(dist.get_world_size())]"),
                (_GATHER, f"{_GATHER}\n        parameter.data = __import__('torch').cat(blocks)"),
            ),
            "has new memory now",
        ),
        Wrong(
            "cleared before the step",
            edited(_STEP_REFERENCE, ("optimizer.step()", "optimizer.zero_grad()\n    optimizer.step()")),
            "gradients were gone",
        ),
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

# --- questions


def _moments(run: Runs) -> float:
    return run.moment_bytes / 1e3


state_bytes = Question(
    id="04.state_bytes",
    statement=(
        "How many kB of Adam's moments does one rank hold in your ZeRO-1 run (2 ranks, 141,056 parameters in fp32)?"
    ),
    unit="kB",
    expected=_moments,
    slips=(
        Slip("that is what DDP holds on every rank: here each rank has 1/n of it", factor=2.0),
        Slip("Adam keeps two moments for every parameter, a mean and a mean of squares", factor=0.5),
        Slip("that is the number of moments in thousands; each is 4 bytes", factor=0.25),
    ),
    hints=(
        "Two numbers of 4 bytes for every parameter that this rank owns.",
        "Of 141,056 parameters a rank owns half.",
        "141,056 / 2 parameters, 8 bytes each, in kB.",
    ),
    explanation="8 bytes for each of the 70,528 parameters that this rank owns: 1/n of DDP's.",
)

zero1_total = Question(
    id="04.zero1_total",
    statement=(
        "A model of 1 billion parameters, fp32 with Adam, on 8 ranks: how many GB of model state (parameters,"
        " gradients, moments) rest on each rank with ZeRO-1?"
    ),
    unit="GB",
    expected=9.0,
    slips=(
        Slip("that is DDP: with ZeRO-1 the 8 GB of moments are cut into 8", value=16.0),
        Slip("the moments' slice was left out: it is cut into 8, but it is not nothing", value=8.0),
        Slip("that is full sharding, everything cut into 8", value=2.0),
        Slip("that is ZeRO-2: ZeRO-1 keeps whole gradients", value=5.5),
    ),
    hints=(
        "Three states: which of them does ZeRO-1 cut?",
        "4 GB of parameters and 4 GB of gradients are whole; 8 GB of moments are cut into 8.",
        "4 + 4 + 8 / 8.",
    ),
    explanation="4 + 4 + 8/8.",
)

zero2_total = Question(
    id="04.zero2_total",
    statement="The same model and ranks with ZeRO-2?",
    unit="GB",
    expected=5.5,
    slips=(
        Slip("that is ZeRO-1: ZeRO-2 cuts the gradients too", value=9.0),
        Slip("that is full sharding; ZeRO-2 keeps the parameters whole", value=2.0),
        Slip("the gradients' own slice, 0.5 GB, was forgotten", value=5.0),
        Slip("the moments' slice, 1 GB, was forgotten", value=4.5),
    ),
    hints=("One more state is cut.", "4 GB of gradients are cut into 8 as well.", "4 + 4 / 8 + 8 / 8."),
    explanation="4 + 4/8 + 8/8: what is left to cut is the parameters (05).",
)

ITEMS = (rows_of, reduce_rows, step_and_gather, state_bytes, zero1_total, zero2_total)

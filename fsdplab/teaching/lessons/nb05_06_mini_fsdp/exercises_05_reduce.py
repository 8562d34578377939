"""Notebook 05, the last part: `reduce` the whole gradient to this rank's slice of the mean, and two questions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdplab.teaching.core.comm_log import nothing_added_up, to_one_rank_only
from fsdplab.teaching.core.exercise import Case, Choice, Exercise, Question, Slip, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference, Feedback

_RANKS = 3

_REDUCE_STUB = '''\
import torch
import torch.distributed as dist


def reduce(gradient):
    """This rank's rows, padded as in `shard`, of the ranks' mean `gradient` [rows, ...]: [c, ...]."""
    n = dist.get_world_size()
    c = -(-len(gradient) // n)
    ...  # pad to n * c rows, reduce-scatter, and make the sum a mean
'''

_REDUCE = '''\
import torch
import torch.distributed as dist


def reduce(gradient):
    """This rank's rows, padded as in `shard`, of the ranks' mean `gradient` [rows, ...]: [c, ...]."""
    n = dist.get_world_size()
    c = -(-len(gradient) // n)
    padded = gradient.new_zeros(n * c, *gradient.shape[1:])
    padded[: len(gradient)] = gradient
    mine = gradient.new_empty(c, *gradient.shape[1:])
    dist.reduce_scatter(mine, list(padded.chunk(n)))
    return mine / n
'''
_SHAPES = {
    "floats [7, 2]: 3, 3 and 1 rows": (7, 2),
    "floats [4]: 2, 2 and no rows": (4,),
    "doubles [6, 1]: 2 rows each": (6, 1),
}


def _reduce_cases() -> list[Case]:
    """Multiples of the number of ranks, so that the mean is exact in whatever order it is taken."""
    return [_reduce_case(name, shape) for name, shape in _SHAPES.items()]


def _reduce_case(name: str, shape: tuple[int, ...]) -> Case:
    dtype = torch.float64 if name.startswith("doubles") else torch.float32
    base = 1 + torch.arange(shape[0] * (shape[1] if shape[1:] else 1), dtype=dtype).reshape(shape)
    gradients = [_RANKS * base * (1 + 10 * rank) for rank in range(_RANKS)]
    mean, c = sum(gradients) / _RANKS, -(-shape[0] // _RANKS)
    padded = torch.cat([mean, mean.new_zeros(_RANKS * c - shape[0], *shape[1:])])
    return Case(name, tuple((gradient,) for gradient in gradients), tuple(piece.clone() for piece in padded.split(c)))


def _explain_reduce(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    got, right = trial.returned, case.expected[trial.rank]
    if difference.problem == "shape":
        rows = f"{len(got)} row{'s' * (len(got) != 1)}" if got.dim() else "a single number"
        return None, f"this rank gets its own c = ceil(rows / n) rows, as `shard` cuts them; this has {rows}"
    if difference.problem in ("type", "dtype"):
        return None, "return this rank's slice, a tensor like the gradient"
    if only := to_one_rank_only(trial.calls):
        return None, only
    if torch.allclose(got, right * _RANKS):
        return None, "this is the sum over the ranks; data parallel training averages: divide by the number of ranks"
    if torch.allclose(got * _RANKS, right):
        return None, "the sum was divided twice: once is enough, and ReduceOp.AVG divides already"
    own = case.arguments[trial.rank][0]
    c = len(right)
    if torch.equal(got[: len(own[trial.rank * c : (trial.rank + 1) * c])], own[trial.rank * c : (trial.rank + 1) * c]):
        return None, "this is a slice of the rank's own gradient: nothing came from the other ranks"
    if any(torch.allclose(got, slice_of_another) for slice_of_another in case.expected):
        return None, "this is the slice of another rank: rank r gets piece r"
    if alone := nothing_added_up(trial.calls):
        return None, alone
    factor = float((got * right).sum() / (right * right).sum()) if right.any() else 0.0
    if factor and torch.allclose(got, right * factor):
        return (
            None,
            f"the sum must be divided by the number of ranks, {_RANKS}; here it is divided by {_RANKS / factor:.4g}",
        )
    return (
        None,
        "compare with the mean of all gradients, rows r * c to (r + 1) * c, then zeros: what does the padding hold, and"
        " does it stand after the rows?",
    )


def _reduce_rules(case: Case, trials: Sequence[Trial]) -> Feedback | None:
    """Right values, and no rank receives more than its share needs."""
    for trial in trials:
        kinds = [call.kind for call in trial.calls]
        for kind, cost in (("all_reduce", "twice the bytes"), ("all_gather", "n times the memory")):
            if kind in kinds:
                cause = (
                    f"{kind} brings every rank the whole gradient, at {cost}, and then most of it is thrown away: use "
                    "reduce_scatter"
                )
                return Feedback(
                    "The values are right, but the whole gradient travelled to every rank.",
                    "one reduce_scatter",
                    kind,
                    cause,
                    trial.rank,
                )
        if kinds.count("reduce") < _RANKS and (only := to_one_rank_only(trial.calls)):
            return Feedback(
                "The values are right by luck: only one rank is promised the sum.",
                "one reduce_scatter",
                "reduce",
                only,
                trial.rank,
            )
        if kinds.count("reduce_scatter") > 1:
            cause = "one reduce_scatter does it"
            return Feedback(
                "The values are right, but it was reduced more than once.",
                "one reduce_scatter",
                f"{kinds.count('reduce_scatter')}",
                cause,
                trial.rank,
            )
    return None


_SCATTER = "dist.reduce_scatter(mine, list(padded.chunk(n)))"

reduce = Exercise(
    id="05.reduce",
    title="Reduce and scatter the gradient",
    statement="Write reduce(gradient): this rank's rows of the mean over all ranks.",
    stub=_REDUCE_STUB,
    reference=_REDUCE,
    hints=(
        (
            "It is the mirror of unshard: there n slices become a whole, here n wholes become a slice, and they are"
            " added on the way."
        ),
        (
            "Zero rows up to n * c first. `dist.reduce_scatter(mine, pieces)` adds up piece r of all ranks and leaves"
            " the sum with rank r; then divide."
        ),
        (
            "`padded = gradient.new_zeros(n * c, *gradient.shape[1:])`, copy the gradient into its first rows, `mine ="
            " gradient.new_empty(c, *gradient.shape[1:])`, `dist.reduce_scatter(mine, list(padded.chunk(n)))`, and"
            " return `mine / n`."
        ),
    ),
    cases=_reduce_cases,
    explain=_explain_reduce,
    rules=_reduce_rules,
    hung="some rank does not take part: every rank calls reduce_scatter, also one that gets only padding",
    world_size=_RANKS,
    tolerance=1e-6,
    time_limit=30.0,
    wrong=(
        Wrong("a sum", edited(_REDUCE, ("return mine / n", "return mine")), "this is the sum"),
        Wrong("divided twice", edited(_REDUCE, ("return mine / n", "return mine / n / n")), "divided twice"),
        Wrong(
            "own slice",
            edited(_REDUCE, (_SCATTER, "mine = padded.chunk(n)[dist.get_rank()] * n")),
            "nothing came from the other ranks",
        ),
        Wrong(
            "pieces of its own", edited(_REDUCE, (_SCATTER, "mine = sum(padded.chunk(n))")), "no collective was called"
        ),
        Wrong("divided by its rows", edited(_REDUCE, ("return mine / n", "return mine / c")), "it is divided by 2"),
        Wrong(
            "padding first",
            edited(_REDUCE, ("padded[: len(gradient)]", "padded[n * c - len(gradient) :]")),
            "stand after the rows",
        ),
        Wrong("backwards", edited(_REDUCE, ("list(padded.chunk(n))", "list(padded.chunk(n))[::-1]")), "another rank"),
        Wrong(
            "padding not cleared",
            edited(_REDUCE, ("gradient.new_zeros", "99 + gradient.new_zeros")),
            "what does the padding hold",
        ),
        Wrong(
            "the whole mean",
            edited(_REDUCE, ("return mine / n", "dist.all_reduce(gradient)\n    return gradient / n")),
            "as `shard` cuts them",
        ),
        Wrong(
            "all_reduce and cut",
            edited(_REDUCE, (_SCATTER, "dist.all_reduce(padded)\n    mine = padded.chunk(n)[dist.get_rank()]")),
            "twice the bytes",
        ),
        Wrong(
            "reduced to rank 0",
            edited(_REDUCE, (_SCATTER, "dist.reduce(padded, dst=0)\n    mine = padded.chunk(n)[dist.get_rank()]")),
            "on one rank only",
        ),
        Wrong(
            "gather and add",
            edited(
                _REDUCE,
                (
                    _SCATTER,
                    (
                        "every = [torch.empty_like(padded) for _ in range(n)]\n    dist.all_gather(every, padded)\n   "
                        " mine = sum(every).chunk(n)[dist.get_rank()]"
                    ),
                ),
            ),
            "n times the memory",
        ),
        Wrong("default dtype", edited(_REDUCE, ("return mine / n", "return (mine / n).float()")), "default dtype"),
        Wrong("returns nothing", edited(_REDUCE, ("return mine / n", "mine / n")), "returns nothing"),
        Wrong(
            "no padding",
            edited(
                _REDUCE,
                (
                    "padded = gradient.new_zeros(n * c, *gradient.shape[1:])\n    padded[: len(gradient)] = gradient",
                    "padded = gradient",
                ),
            ),
            "pad the short ones",
            ends="raises",
        ),
    ),
)

peak = Question(
    id="05.peak",
    statement=(
        "A weight of 100 MB is cut over 8 ranks. Its backward has just ended: the weight is still gathered and its"
        " gradient is not reduced yet. How many MB do the weight and its gradient take on one rank (slices included)?"
    ),
    unit="MB",
    expected=212.5,
    slips=(
        Slip("the slice is there all the time, beside the gathered weight", value=200.0),
        Slip("the gradient that autograd leaves is whole too, until it is reduced", value=112.5),
        Slip("that is at rest, two slices; in backward the whole weight and the whole gradient are there", value=25.0),
        Slip("the gradient slice comes with the reduction, which has not happened yet", value=225.0),
    ),
    hints=(
        "Find the same moment in the figure: the row `backward`.",
        "Three things: the slice, the gathered weight, the whole gradient.",
        "100/8 + 100 + 100.",
    ),
    explanation="12.5 MB of slice, 100 MB gathered, 100 MB of whole gradient; at rest 25 MB.",
)

alias = Choice(
    id="05.alias",
    statement=(
        "Why does `reshard` empty the storage, and not simply let go of the tensor (`del whole`, or `weight.data ="
        " mine`)?"
    ),
    options={
        "a": "the memory would be freed too late, when Python next collects garbage",
        "b": "autograd's view of the weight would keep the memory, and miss the next gather",
        "c": "the optimizer looks at the whole tensor's shape when it steps",
    },
    right="b",
    because={
        "a": "it would not be freed at all: `del` removes a name, and others still look at the storage.",
        "b": (
            "the view that forward left with autograd looks at the same storage, so it is empty between forward and"
            " backward and full again when backward reads it."
        ),
        "c": "the optimizer sees the slice only, as a parameter of its own.",
    },
)

REDUCE_ITEMS = (reduce, peak, alias)

"""The checks of the by-hand exercises: gradients against the unsharded twin's, and counted bytes against the formula.

A wrong gradient is compared with what known mistakes lead to (the sum, one rank's own, divided twice), so that a failed
check names the step, the parameter and the likely cause. Right values are not enough: the calls are counted too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from fsdplab.teaching.core.comm_log import to_one_rank_only
from fsdplab.teaching.core.exercise import Call, Case, Trial
from fsdplab.teaching.core.verdicts import Difference, Feedback, first_difference
from fsdplab.workloads import ByteText, build_model, loss_of
from fsdplab.workloads.twin import replay_gradients

from .on_ranks import MARK, RATE, SMALL, batch, compared_gradients

DRIVERS = str(Path(__file__).with_name("on_ranks.py"))
TOLERANCE = 1e-4  # of a tensor's largest value: three ranks may add in another order
SLACK = 1.01  # for padding to whole blocks
# times nbytes (n-1)/n; whatever is not here counts once
_SENT = {"all_reduce": 2.0, "send": 0.0, "recv": 0.0, "barrier": 0.0}
_NAME = re.compile(r"step (\d+), gradient of ([\w.]+)")


def wire_bytes(calls: Iterable[Call], ranks: int) -> float:
    """Bytes that one rank must send for these calls: 2 b (n-1)/n for an all_reduce of b bytes, b (n-1)/n for other
    collectives.

    A reduce_scatter is counted by its output, one block of n: `wire_bytes([Call("reduce_scatter", 8)], 2) == 8.0`.
    """
    each = (ranks - 1) / ranks
    total = 0.0
    for call in calls:
        whole = call.nbytes * (ranks if call.kind == "reduce_scatter" else 1)
        total += call.nbytes if call.kind == "send" else whole * each * _SENT.get(call.kind, 1.0)
    return total


def is_mark(call: Call) -> bool:
    """Whether a call is a driver's mark between two parts of a step."""
    return call == Call("broadcast", MARK)


def parts_of(calls: Sequence[Call]) -> list[list[Call]]:
    """The calls between marks: backward and finish of the first step, backward and finish of the second, ..."""
    parts: list[list[Call]] = [[]]
    for call in calls:
        parts.append([]) if is_mark(call) else parts[-1].append(call)
    return parts[:-1]


@lru_cache(maxsize=4)
def twin_gradients(ranks: int, steps: int) -> dict[str, Tensor]:
    """The expected gradients after each step of a check: the unsharded twin's."""
    return _replayed(ranks, steps)[0]


@lru_cache(maxsize=4)
def own_gradients(ranks: int, steps: int) -> tuple[dict[str, Tensor], ...]:
    """The gradients of each rank's own text, by rank, before anything is sent."""
    return _replayed(ranks, steps)[1]


@lru_cache(maxsize=4)
def _replayed(ranks: int, steps: int) -> tuple[dict[str, Tensor], tuple[dict[str, Tensor], ...]]:
    text, twin = ByteText.from_standard_library(), build_model(SMALL)
    optimizer = torch.optim.SGD(twin.parameters(), lr=RATE)
    average: dict[str, Tensor] = {}
    own: tuple[dict[str, Tensor], ...] = tuple({} for _ in range(ranks))
    for step in range(steps):
        batches = [[batch(text, step, rank, ranks)] for rank in range(ranks)]
        for rank in range(ranks):
            replay_gradients(twin, [batches[rank]], loss_of)
            own[rank].update(compared_gradients(twin, step))
            optimizer.zero_grad()
        replay_gradients(twin, batches, loss_of)
        average |= compared_gradients(twin, step)
        optimizer.step()
        optimizer.zero_grad()
    return average, own


def explain_gradient(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    """(step, likely cause) of the first gradient that differs from the twin's."""
    found = _NAME.search(difference.tensor)
    if found is None:
        return None, "compare the gradients with those of the twin"
    step, key = f"{found[1]} (steps count from 0)", found[0]
    if difference.problem == "type":
        return step, "this parameter has no gradient any more: write the average into its `.grad`"
    if difference.problem != "value":
        return (
            step,
            "a gradient keeps its parameter's shape and dtype: write each piece back with `view_as(parameter.grad)`",
        )
    ranks, steps = len(case.expected), 1 + max(int(named[1]) for named in map(_NAME.search, case.expected[0]) if named)
    cause = to_one_rank_only(trial.calls) or _cause(
        trial.returned[key], case.expected[0][key], own_gradients(ranks, steps), trial.rank, key
    )
    if cause is _OTHERWISE and any(map(is_mark, trial.calls)):
        cause = _OTHER_PIECES
    if int(found[1]) > 0:
        cause = (
            "step 0 was right on this rank, so something is left over from it (a list that was not emptied?), or it was"
            f" wrong on another rank (an `if rank == 0`?) and the models have differed since; here: {cause}"
        )
    return step, f"{cause} ({_how_many(case, trial, found[1])})"


def _cause(got: Tensor, average: Tensor, own: Sequence[dict[str, Tensor]], rank: int, key: str) -> str:
    n = len(own)
    suspects = (
        (average * n, f"this is the sum over the ranks, {n} times the average: it was never divided by their number"),
        (average / n, "divided twice by the number of ranks"),
        (average * n / 2, f"divided by 2, but there are {n} ranks: ask `dist.get_world_size()`"),
        (own[rank][key], _OWN),
        (
            own[rank][key] / n,
            "this is the rank's own gradient divided by the number of ranks: the others' shares were never added",
        ),
        (torch.zeros_like(average), "the gradient is zero: average it, do not clear it"),
    )
    return next((cause for wrong, cause in suspects if _close(wrong, got)), _another_factor(got, average, n))


def _another_factor(got: Tensor, average: Tensor, n: int) -> str:
    """The cause where the sum over the ranks was divided by some number that is not theirs; else that it is unknown."""
    factor = float((got * average).sum() / (average * average).sum())
    if not factor or not _close(average * factor, got):
        return _OTHERWISE
    return f"the sum over the ranks must be divided by their number, {n}; here it is divided by {n / factor:.4g}"


_OWN = (
    "this is the rank's own gradient: nothing came from the other ranks, or the average was not written back into"
    " `.grad`"
)
_OTHERWISE = "these are other numbers: `.grad` should hold the sum over all ranks, divided by their number"
_OTHER_PIECES = (
    "these are other numbers: perhaps pieces were written back to the wrong parameters; "
    "cut the bucket in the order in which it was joined"
)


def _close(wrong: Tensor, got: Tensor) -> bool:
    return first_difference(wrong, got, 1e-3) is None


def _how_many(case: Case, trial: Trial, step: str) -> str:
    """`"2 of 35 gradients differ in this step, all of them 1-D: biases and norms"`."""
    names = [name for name in case.expected[trial.rank] if name.startswith(f"step {step},")]
    off = [name for name in names if first_difference(case.expected[trial.rank][name], trial.returned[name], TOLERANCE)]
    flat = {case.expected[trial.rank][name].dim() for name in off}
    kind = ", all of them 1-D: biases and norms" if flat == {1} else ", all of them matrices" if flat == {2} else ""
    return f"{len(off)} of {len(names)} gradients differ in this step{kind}"


def too_many_bytes(
    trial: Trial, calls: Sequence[Call], ranks: int, formula: str, allowed: float, cause: str
) -> Feedback | None:
    """Feedback where these calls need more than `allowed` bytes to be sent by a rank."""
    calls = [call for call in calls if not is_mark(call)]
    sent = wire_bytes(calls, ranks)
    if sent <= allowed * SLACK:
        return None
    kinds = ", ".join(dict.fromkeys(call.kind for call in calls))
    got = f"{sent:,.0f} bytes, in {len(calls)} calls ({kinds})"
    expected = f"at most {formula} = {allowed:,.0f} bytes"
    return Feedback("The values are right, but too much was sent.", expected, got, cause, trial.rank)


def steps_of(calls: Sequence[Call]) -> list[tuple[list[Call], list[Call]]]:
    """(calls during backward, calls after it) of every step."""
    parts = parts_of(calls)
    return list(zip(parts[::2], parts[1::2]))


@lru_cache(maxsize=1)
def gradient_sizes() -> tuple[int, ...]:
    """Bytes of every gradient of a check's model, in about the order in which they become ready."""
    return tuple(4 * parameter.numel() for parameter in reversed(list(build_model(SMALL, device="meta").parameters())))


LARGEST = 4 * SMALL.vocabulary * SMALL.width  # bytes of the head's gradient


def step_bytes(ranks: int) -> float:
    """The bytes that one rank sends when every gradient is all-reduced once: 2 P (n-1)/n."""
    return 2 * sum(gradient_sizes()) * (ranks - 1) / ranks


def most_buckets(limit: int) -> int:
    """Buckets of a step when each is closed before it would exceed `limit` bytes: the most that any rule leads to."""
    count, filled = 0, 0
    for size in gradient_sizes():
        if filled and filled + size > limit:
            count, filled = count + 1, 0
        filled += size
    return count + bool(filled)

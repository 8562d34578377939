"""Computes the few numbers that a comparison shows from a record's rows. Pure functions.

A step is as slow as its slowest rank, and a job needs cards as large as its largest rank, so times and memory are the
worst rank's. Losses are means over ranks, because each rank reads other text.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdplab.records import Spread, Summary
from fsdplab.records.spread import step_seconds
from fsdplab.records.summary import Card, Comm, Link, Peak, Predicted, Profile
from fsdplab.records.typed import read
from fsdplab.sessions.calibration import find_calibration
from fsdplab.sessions.changes import best_change
from fsdplab.sessions.formula import formula_bytes
from fsdplab.sessions.prediction import predict
from fsdplab.sessions.spec import RunSpec
from fsdplab.sessions.steady_card import steady_step

Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[dict[str, Any]]]


def summarise(
    spec: RunSpec,
    steps: Sequence[Row],
    ledger: Sequence[Row],
    memory: Mapping[int, Mapping[str, Any]],
    samples: int | None,
    results: Sequence[Row],
    tables: Tables,
) -> Summary:
    """Summarise a record. `memory[rank]` holds bytes: `total`, `by_category`, `resident_growth`, `workspaces`,
    `samples` those of one step of all ranks, where a model of one's own reads no tokens. `results` are those of the
    ranks that have ended, `tables` those of their traces.

    What was not measured is None: times of a run that ended before its timed steps, bytes sent by an engine without a
    ledger. `comm.exposed_s` is the mean of the profiled steps, from the trace, with its parts; `comm.blocked_s` is for
    how long the host of a timed step was blocked for collectives, from the ledger.
    """
    own = measured(steps, memory)
    peak, median = own.peak_memory_bytes.total, own.step_time_s.median
    tokens = None
    if spec.tokens_per_rank is not None:
        tokens = spec.tokens_per_rank * spec.world_size
    # what other engines sent is read from their traces
    sent = sent_per_step(spec, ledger) if spec.engine == "lab" else None
    world_size = None if spec.engine == "twin" else spec.world_size
    blocked_s = blocked(ledger, first=spec.untimed, last=spec.untimed + spec.steps)
    link = results[0]["link"] if results else None
    card = None
    if spec.card is not None:
        card = Card(spec.card, bool(peak and peak > spec.card))
    return replace(
        own,
        tokens_per_s=_a_second(tokens, median),
        samples_per_s=_a_second(samples, median),
        comm=communication(tables, world_size, sent, blocked_s),
        profile=profile_of(spec.profile, [result["profiled_s"] for result in results], own, tables),
        link=link and read(Link, link, "link"),
        formula_bytes_per_step=formula_bytes(spec),
        **_computed(spec, steps),
        card=card,
    )


def _computed(spec: RunSpec, steps: Sequence[Row]) -> dict[str, Any]:
    """Compute the prediction, the step on the steady card, and the best change, by field of the summary.

    All three run the code of a model of one's own in this process. Where no rank came through a step of it, that code
    may hang or end the process, and it is left alone.
    """
    if spec.own_model and not steps:
        return {"predicted": Predicted(why_not="no rank finished a step of this model, so it was not run here either")}
    predicted = predict(spec, find_calibration(spec.world_size).calibration).recorded()
    return {"predicted": predicted, "steady": steady_step(spec), "change": best_change(spec)}


def measured(steps: Sequence[Row], memory: Mapping[int, Mapping[str, Any]]) -> Summary:
    """Summarise what the ranks measured themselves, of a run that nobody specified too: times, memory, losses."""
    by_rank = dict(sorted(memory.items()))
    peak = Peak()
    if by_rank:
        # one rank's categories, so that they add up to the peak
        worst = max(by_rank.values(), key=lambda row: row["total"])
        peak = Peak(worst["total"], worst["by_category"])
    workspaces = [row.get("workspaces") or 0 for row in by_rank.values()]
    return Summary(
        step_time_s=Spread.of(step_seconds(steps)),
        cpu_share=cpu_share(steps),
        peak_memory_bytes=peak,
        memory_start_ns={rank: row["start_ns"] for rank, row in by_rank.items()},
        peak_by_rank=tuple(row["total"] for row in by_rank.values()),
        workspace_bytes=max(workspaces, default=0) or None,
        resident_growth_by_rank=tuple(row["resident_growth"] for row in by_rank.values()),
        losses=mean_losses(steps),
    )


def _a_second(amount: float | None, seconds: float | None) -> float | None:
    if not amount or not seconds:
        return None
    return amount / seconds


def cpu_share(steps: Sequence[Row]) -> float | None:
    """Return the part of the timed steps in which a rank had a core when it wanted one, of the rank that lacked one
    longest.

    A rank that waited for a core for 0.6 s of steps of 1 s has a share of 0.4. None where no wait was counted.
    """
    waited: dict[int, float] = defaultdict(float)
    total: dict[int, float] = defaultdict(float)
    for row in steps:
        seconds = row["step_time_s"]
        if seconds is None:
            continue
        if row.get("core_wait_s") is None:
            return None
        # the readings lie just outside of the step's clock: no share falls below 0
        waited[row["rank"]] += min(row["core_wait_s"], seconds)
        total[row["rank"]] += seconds
    return min((1 - waited[rank] / total[rank] for rank in total if total[rank]), default=None)


def mean_losses(steps: Sequence[Row]) -> tuple[float | None, ...]:
    """Return the loss of each step that all ranks finished, averaged over them in rank order; None for one that is no
    number.
    """
    by_step: dict[int, dict[int, float]] = defaultdict(dict)
    for row in steps:
        by_step[row["step"]][row["rank"]] = math.nan if row["loss"] is None else row["loss"]
    ranks = max(map(len, by_step.values()), default=0)
    means: list[float | None] = []
    for _, losses in sorted(by_step.items()):
        # some rank ended before it had finished this step
        if len(losses) < ranks:
            continue
        mean = sum(losses[rank] for rank in sorted(losses)) / ranks
        # JSON has no nan
        means.append(mean if math.isfinite(mean) else None)
    return tuple(means)


def sent_per_step(spec: RunSpec, ledger: Sequence[Row]) -> Comm:
    """Count the bytes that one rank sends in one step, and its collectives: of the last step, since the first ones may
    send more.
    """
    unknown = not ledger and spec.world_size > 1  # the run ended before a rank wrote its ledger
    if spec.engine != "lab" or unknown:
        return Comm()
    last = max((row["step"] for row in ledger), default=0)
    bytes_of, count_of = Counter[int](), Counter[int]()
    for row in ledger:
        if row["step"] == last:
            bytes_of[row["rank"]] += row["wire_bytes"]
            count_of[row["rank"]] += 1
    return Comm(max(bytes_of.values(), default=0), max(count_of.values(), default=0))


# ---- of the profiled steps


def profile_of(steps: int, profiled_s: Sequence[Sequence[float]], summary: Summary, tables: Tables) -> Profile:
    """Summarise the profiled steps beside the timed ones."""
    from fsdplab.profiling.step_summary import of_the_worst

    cost = overhead(profiled_s, summary.step_time_s.median)
    source = "trace" if tables.get("breakdown") else None
    stepping = of_the_worst(tables)
    if stepping is None:
        return Profile(steps, cost, source, None, None)
    return Profile(steps, cost, source, stepping.seconds, stepping.exchange_s)


def communication(tables: Tables, world_size: int | None, sent: Comm | None, blocked_s: float | None) -> Comm:
    """Summarise what a step sent and what that cost; without `sent`, the traces' collectives are counted.

    `world_size` is None where one process plays all ranks.
    """
    from fsdplab.profiling.step_summary import exposure
    from fsdplab.profiling.traces import skew

    cost = exposure(tables.get("breakdown", []))
    if world_size == 1:
        cost = dict.fromkeys(cost, 0.0) | {"overlap": None}  # nothing travels
    # the lab's engine has a ledger; what others sent is in their traces alone
    if sent is None:
        counted = skew.sent_per_step(tables.get("collectives", []), world_size or 1)
    else:
        counted = (sent.bytes_per_step, sent.collectives_per_step)
    return Comm(*counted, **cost, blocked_s=blocked_s)


def blocked(ledger: Sequence[Row], first: int, last: int) -> float | None:
    """Return the seconds for which a rank was blocked for collectives in steps `first` to `last` - 1, by the ledger:
    the median over steps of the rank that was blocked longest; None if unknown.
    """
    # rank -> step -> nanoseconds
    waits: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for row in ledger:
        if first <= row["step"] < last:
            if row["waited_ns"] is None:
                return None
            waits[row["rank"]][row["step"]] += row["waited_ns"]
    # rank 0 blocked for 10, 12, 50 ms and rank 1 for 20, 22, 24: medians 12 and 22, so 22 ms
    medians = [statistics.median(of_steps.values()) for of_steps in waits.values()]
    if not medians:
        return None
    return max(medians) / 1e9


def overhead(profiled_s: Sequence[Sequence[float]], timed_median: float | None) -> float | None:
    """Return how much longer profiled steps took than timed ones, as a part (0.08 = 8 %): the slowest rank's median
    against the run's.
    """
    medians = [statistics.median(seconds) for seconds in profiled_s if seconds]
    if not medians or not timed_median:
        return None
    # 1.08 s for 1.00 s: 0.08
    return max(medians) / timed_median - 1

"""The few numbers that a comparison shows, from a record's rows. Pure functions.

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
    """The summary of a record. `memory[rank]` holds bytes: `total`, `by_category`, `resident_growth`, `workspaces`,
    `samples` those of one step of all ranks, where a model of one's own reads no tokens. `results` are those of the
    ranks that have ended, `tables` those of their traces.

    What was not measured is None: times of a run that ended before its timed steps, bytes sent by an engine without a
    ledger. `comm.exposed_s` is the mean of the profiled steps, from the trace, with its parts; `comm.blocked_s` is for
    how long the host of a timed step was blocked for collectives, from the ledger.
    """
    found = measured(steps, memory)
    peak, median = found.peak_memory_bytes.total, found.step_time_s.median
    link = next((result["link"] for result in results), None)
    sent = sent_per_step(spec, ledger) if spec.engine == "lab" else None  # what others sent is read from their traces
    world_size = None if spec.engine == "twin" else spec.world_size
    return replace(
        found,
        tokens_per_s=_a_second(spec.tokens_per_rank and spec.tokens_per_rank * spec.world_size, median),
        samples_per_s=_a_second(samples, median),
        comm=communication(tables, world_size, sent, blocked(ledger, spec.untimed, spec.untimed + spec.steps)),
        profile=profile_of(spec.profile, [result["profiled_s"] for result in results], found, tables),
        link=link and read(Link, link, "link"),
        formula_bytes_per_step=formula_bytes(spec),
        **_computed(spec, steps),
        card=None if spec.card is None else Card(spec.card, bool(peak and peak > spec.card)),
    )


def _computed(spec: RunSpec, steps: Sequence[Row]) -> dict[str, Any]:
    """The prediction, the step on the steady card, and the best change, by field of the summary.

    All three run the code of a model of one's own in this process. Where no rank came through a step of it, that code
    may hang or end the process, and it is left alone.
    """
    if spec.own_model and not steps:
        return {"predicted": Predicted(why_not="no rank finished a step of this model, so it was not run here either")}
    predicted = predict(spec, find_calibration(spec.world_size).calibration).recorded()
    return {"predicted": predicted, "steady": steady_step(spec), "change": best_change(spec)}


def measured(steps: Sequence[Row], memory: Mapping[int, Mapping[str, Any]]) -> Summary:
    """What the ranks measured themselves, of a run that nobody specified too: times, memory, losses."""
    worst = max(memory.values(), key=lambda peak: peak["total"], default=None)
    return Summary(
        step_time_s=Spread.of(step_seconds(steps)),
        cpu_share=cpu_share(steps),
        peak_memory_bytes=Peak(worst["total"], worst["by_category"]) if worst else Peak(),
        memory_start_ns={rank: memory[rank]["start_ns"] for rank in sorted(memory)},
        peak_by_rank=tuple(memory[rank]["total"] for rank in sorted(memory)),
        workspace_bytes=max((memory[rank].get("workspaces") or 0 for rank in memory), default=0) or None,
        resident_growth_by_rank=tuple(memory[rank]["resident_growth"] for rank in sorted(memory)),
        losses=mean_losses(steps),
    )


def _a_second(many: float | None, seconds: float | None) -> float | None:
    return many / seconds if many and seconds else None


def cpu_share(steps: Sequence[Row]) -> float | None:
    """The part of the timed steps in which a rank had a core when it wanted one, of the rank that lacked one longest.

    A rank that waited for a core for 0.6 s of steps of 1 s has a share of 0.4. None where no wait was counted.
    """
    spans: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in steps:
        if row["step_time_s"] is not None:
            if row.get("core_wait_s") is None:
                return None
            spans[row["rank"]][0] += min(row["core_wait_s"], row["step_time_s"])
            spans[row["rank"]][1] += row["step_time_s"]
    return min((1 - waited / seconds for waited, seconds in spans.values() if seconds), default=None)


def mean_losses(steps: Sequence[Row]) -> tuple[float | None, ...]:
    """The loss of each step that all ranks finished, averaged over them in rank order;
    None for one that is no number.
    """
    by_step: dict[int, dict[int, float]] = defaultdict(dict)
    for row in steps:
        by_step[row["step"]][row["rank"]] = math.nan if row["loss"] is None else row["loss"]
    ranks = max(map(len, by_step.values()), default=0)
    whole = [by_step[step] for step in sorted(by_step) if len(by_step[step]) == ranks]
    means = [sum(losses[rank] for rank in sorted(losses)) / ranks for losses in whole]
    return tuple(mean if math.isfinite(mean) else None for mean in means)


def sent_per_step(spec: RunSpec, ledger: Sequence[Row]) -> Comm:
    """Bytes that one rank sends in one step, and its collectives: of the last step, since the first ones may send
    more.
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
    """The profiled steps beside the timed ones."""
    from fsdplab.profiling.step_summary import of_the_worst

    cost, stepping = overhead(profiled_s, summary.step_time_s.median), of_the_worst(tables)
    parts = (stepping.seconds, stepping.exchange_s) if stepping else (None, None)
    return Profile(steps, cost, "trace" if tables.get("breakdown") else None, *parts)


def communication(tables: Tables, world_size: int | None, sent: Comm | None, blocked_s: float | None) -> Comm:
    """What a step sent and what that cost; where nobody counted what was `sent`, the traces' collectives tell.

    `world_size` is None where one process plays all ranks.
    """
    from fsdplab.profiling.step_summary import exposure
    from fsdplab.profiling.traces import skew

    cost = exposure(tables.get("breakdown", []))
    if world_size == 1:
        cost = dict.fromkeys(cost, 0.0) | {"overlap": None}  # nothing travels
    if sent is None:
        counted = skew.sent_per_step(tables.get("collectives", []), world_size or 1)
    else:
        counted = (sent.bytes_per_step, sent.collectives_per_step)
    return Comm(*counted, **cost, blocked_s=blocked_s)


def blocked(ledger: Sequence[Row], first: int, last: int) -> float | None:
    """Seconds for which a rank was blocked for collectives in steps `first` to `last` - 1, by the ledger: the median
    over steps of the rank that was blocked longest; None if unknown.
    """
    waits: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for row in ledger:
        if first <= row["step"] < last:
            if row["waited_ns"] is None:
                return None
            waits[row["rank"]][row["step"]] += row["waited_ns"]
    return max((statistics.median(steps.values()) / 1e9 for steps in waits.values()), default=None)


def overhead(profiled_s: Sequence[Sequence[float]], timed_median: float | None) -> float | None:
    """How much longer profiled steps took than timed ones, as a part (0.08 = 8 %): slowest rank's median against the
    run's.
    """
    medians = [statistics.median(seconds) for seconds in profiled_s if seconds]
    return max(medians) / timed_median - 1 if medians and timed_median else None

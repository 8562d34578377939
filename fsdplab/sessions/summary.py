"""The few numbers that a comparison shows, from a record's rows. Pure functions.

A step is as slow as its slowest rank, and a job needs cards as large as its largest rank, so times and memory are the
worst rank's. Losses are means over ranks, because each rank reads other text.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fsdplab.sessions.calibration import find_calibration
from fsdplab.sessions.formula import formula_bytes
from fsdplab.sessions.prediction import predict
from fsdplab.sessions.spec import RunSpec

Row = Mapping[str, Any]


def summarise(
    spec: RunSpec, steps: Sequence[Row], ledger: Sequence[Row], memory: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """The summary of a record. `memory[rank]` holds `total`, `by_category` and `resident_growth` in bytes.

    What was not measured is None: times of a run that ended before its timed steps, bytes sent by an engine without a
    ledger.
    """
    seconds = step_seconds(steps)
    worst = max(memory.values(), key=lambda peak: peak["total"], default=None)
    return {
        "step_time_s": (
            {"median": statistics.median(seconds), "min": min(seconds)} if seconds else {"median": None, "min": None}
        ),
        "tokens_per_s": spec.tokens_per_rank * spec.world_size / statistics.median(seconds) if seconds else None,
        "peak_memory_bytes": {name: worst[name] if worst else None for name in ("total", "by_category")},
        "memory_start_ns": {str(rank): memory[rank]["start_ns"] for rank in sorted(memory)},
        "peak_by_rank": [memory[rank]["total"] for rank in sorted(memory)],
        "resident_growth_by_rank": [memory[rank]["resident_growth"] for rank in sorted(memory)],
        "comm": sent_per_step(spec, ledger),
        "formula_bytes_per_step": formula_bytes(spec),
        "predicted": predict(spec, find_calibration(spec.world_size).calibration).as_dict(),
        "losses": mean_losses(steps),
        "card": (
            None if spec.card is None else {"bytes": spec.card, "exceeded": bool(worst and worst["total"] > spec.card)}
        ),
    }


def step_seconds(steps: Sequence[Row]) -> list[float]:
    """Seconds of each timed step: its slowest rank's."""
    slowest: dict[int, float] = defaultdict(float)
    for row in steps:
        if row["step_time_s"] is not None:
            slowest[row["step"]] = max(slowest[row["step"]], row["step_time_s"])
    return list(slowest.values())


def mean_losses(steps: Sequence[Row]) -> list[float | None]:
    """The loss of each step that all ranks finished, averaged over them in rank order;
    None for one that is no number.
    """
    by_step: dict[int, dict[int, float]] = defaultdict(dict)
    for row in steps:
        by_step[row["step"]][row["rank"]] = row["loss"]
    ranks = max(map(len, by_step.values()), default=0)
    whole = [by_step[step] for step in sorted(by_step) if len(by_step[step]) == ranks]
    means = [sum(losses[rank] for rank in sorted(losses)) / ranks for losses in whole]
    return [mean if math.isfinite(mean) else None for mean in means]


def sent_per_step(spec: RunSpec, ledger: Sequence[Row]) -> dict[str, int | None]:
    """Bytes that one rank sends in one step, and its collectives: of the last step, since the first ones may send
    more.
    """
    if spec.engine != "lab":
        return {"bytes_per_step": None, "collectives_per_step": None}
    if not ledger and spec.world_size > 1:  # the run ended before a rank wrote its ledger
        return {"bytes_per_step": None, "collectives_per_step": None}
    last = max((row["step"] for row in ledger), default=0)
    bytes_of, count_of = Counter[int](), Counter[int]()
    for row in ledger:
        if row["step"] == last:
            bytes_of[row["rank"]] += row["wire_bytes"]
            count_of[row["rank"]] += 1
    return {
        "bytes_per_step": max(bytes_of.values(), default=0),
        "collectives_per_step": max(count_of.values(), default=0),
    }

"""Several records side by side, with the fields of `fsdplab compare --json`.

Readers of that file need not guess: every field is always present, and null says that this run did not measure it. Two
runs agree when their losses do, step by step, within the accuracy of their arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .drift import drift_of
from .record import RunRecord

# Relative difference of the loss at any step that rounding alone explains over some tens of steps. fp32: a sum of
# gradients in another order changes the seventh digit of a gradient, and Adam amplifies it where gradients are near
# zero. bf16 keeps 8 bits, and engines that cast in different places (autocast, parameters) differed by 4e-4 in ten
# steps.
TOLERANCE = {"fp32": 2e-5, "bf16": 5e-3}


# exposed_s: what no computing hid, mean of the profiled steps of the rank exposed longest; on_link_s + copying_s +
# waiting_s is exposed_s. blocked_s: how long the host of a timed step was blocked for collectives, by the ledger
COMM = (
    "bytes_per_step", "collectives_per_step", "exposed_s", "on_link_s", "copying_s", "waiting_s", "overlap",
    "blocked_s",
)  # fmt: skip

FORMAT = 1  # of the JSON that commands write


def losses_of(record: RunRecord) -> list[float]:
    """The mean loss over ranks, step by step: `[5.71, 5.62, ...]`; empty when the run ended before its first step."""
    return record.summary.get("losses") or []


def matches_reference(losses: Sequence[float], reference: Sequence[float], precision: str) -> bool:
    """Whether two runs' losses agree at every step: same length, and within 2e-5 (fp32) or 5e-3 (bf16) of the
    reference, relatively.

    >>> matches_reference([5.0, 4.0], [5.0, 4.00001], "fp32"), matches_reference([5.0, 4.0], [5.0, 4.001], "fp32")
    (True, False)
    """
    if precision not in TOLERANCE:
        raise ValueError(f"precision is one of {', '.join(TOLERANCE)}; got {precision!r}.")
    same_length = len(losses) == len(reference) > 0
    return same_length and all(math.isclose(a, b, rel_tol=TOLERANCE[precision]) for a, b in zip(losses, reference))


def comparison_json(records: Sequence[RunRecord], reference: RunRecord | None = None) -> dict[str, Any]:
    """The comparison of several runs as one JSON-able dict: `{"format": 1, "spec": ..., "environment": ..., "runs":
    [...]}`.

    `format` is raised when a field changes its meaning or goes; a new field leaves it. `spec` holds what all runs have
    in common (strategy, engine and world size differ and stand with each run). `in_turns` says whether the runs' timed
    steps took turns; where they did not, `drift` may have the first run's step time at first and again (drift.py).
    `status` is `finished`, `out_of_memory` (of the emulated card) or `failed`: the times of such a run are of the steps
    that it did. `matches_reference` is null without a reference and for runs that did not finish; it compares all steps
    that the reference did, which are at least the run's warm-up and timed steps.
    """
    return {
        "format": FORMAT,
        "spec": _common_spec(records),
        "environment": records[0].environment if records else {},
        "in_turns": any(record.summary.get("in_turns") for record in records),
        "drift": drift_of(records),
        "runs": [_run_entry(record, reference) for record in records],
    }


def _common_spec(records: Sequence[RunRecord]) -> dict[str, Any]:
    first = records[0].spec if records else {}
    return {name: value for name, value in first.items() if all(record.spec.get(name) == value for record in records)}


def _run_entry(record: RunRecord, reference: RunRecord | None) -> dict[str, Any]:
    summary = record.summary
    times, memory, comm = (summary.get(name) or {} for name in ("step_time_s", "peak_memory_bytes", "comm"))
    if record.status == "failed":
        comm = {}  # traffic before a failure is no whole step's
    return {
        "strategy": record.spec.get("strategy"),
        "engine": record.spec.get("engine"),
        "world_size": record.spec.get("world_size"),
        "status": record.status,
        "step_time_s": {name: times.get(name) for name in ("median", "min")},
        "tokens_per_s": summary.get("tokens_per_s"),
        "peak_memory_bytes": {name: memory.get(name) for name in ("total", "by_category")},
        "comm": {name: comm.get(name) for name in COMM},
        "losses": losses_of(record),
        "matches_reference": _agreement(record, reference),
        "provenance": record.provenance,
        "predicted": _predicted(summary),
    }


def _predicted(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What arithmetic says of the run, in the fields of what was measured; records of before have the bytes only."""
    known = summary.get("predicted") or {}
    peak = known.get("peak_memory_bytes") or {}
    return {
        "peak_memory_bytes": {name: peak.get(name) for name in ("total", "by_category")},
        "comm_bytes_per_step": summary.get("formula_bytes_per_step"),
        "step_time_s": known.get("step_time_s"),
    }


def _agreement(record: RunRecord, reference: RunRecord | None) -> bool | None:
    if reference is None or record.status != "finished" or reference.status != "finished":
        return None
    losses, expected = losses_of(record), losses_of(reference)
    if len(expected) >= record.spec.get("warmup", 0) + record.spec.get("steps", len(losses)):
        losses = losses[: len(expected)]  # steps under the profiler come last, and the reference may have none
    return matches_reference(losses, expected, record.spec.get("precision", "fp32"))

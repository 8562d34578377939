"""Several records side by side, with the fields of `fsdplab compare --json`.

Readers of that file need not guess: every field is always present, and null says that this run did not measure it. Two
runs agree when their losses do, step by step, within the accuracy of their arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .drift import drift_of
from .record import RunRecord
from .summary import Comm
from .typed import plain

# Relative difference of the loss at any step that rounding alone explains over some tens of steps. fp32: a sum of
# gradients in another order changes the seventh digit of a gradient, and Adam amplifies it where gradients are near
# zero. bf16 keeps 8 bits, and engines that cast in different places (autocast, parameters) differed by 4e-4 in ten
# steps.
TOLERANCE = {"fp32": 2e-5, "bf16": 5e-3}


FORMAT = 1  # of the JSON that commands write


def matches_reference(losses: Sequence[float | None], reference: Sequence[float | None], precision: str) -> bool:
    """Whether two runs' losses agree at every step: same length, and within 2e-5 (fp32) or 5e-3 (bf16) of the
    reference, relatively.

    >>> matches_reference([5.0, 4.0], [5.0, 4.00001], "fp32"), matches_reference([5.0, 4.0], [5.0, 4.001], "fp32")
    (True, False)
    """
    if precision not in TOLERANCE:
        raise ValueError(f"precision is one of {', '.join(TOLERANCE)}; got {precision!r}.")
    pairs = list(zip(losses, reference))
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    same_length = len(losses) == len(reference) == len(known) > 0
    return same_length and all(math.isclose(a, b, rel_tol=TOLERANCE[precision]) for a, b in known)


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
        "in_turns": any(record.summary.in_turns for record in records),
        "drift": drift_of(records),
        "runs": [_run_entry(record, reference) for record in records],
    }


def _common_spec(records: Sequence[RunRecord]) -> dict[str, Any]:
    first = records[0].spec if records else {}
    return {name: value for name, value in first.items() if all(record.spec.get(name) == value for record in records)}


def _run_entry(record: RunRecord, reference: RunRecord | None) -> dict[str, Any]:
    summary = record.summary
    comm = summary.comm if record.status != "failed" else Comm()  # traffic before a failure is no whole step's
    return {
        "strategy": record.spec.get("strategy"),
        "engine": record.spec.get("engine"),
        "world_size": record.spec.get("world_size"),
        "status": record.status,
        "step_time_s": plain(summary.step_time_s),
        "cpu_share": summary.cpu_share,
        "tokens_per_s": summary.tokens_per_s,
        "peak_memory_bytes": plain(summary.peak_memory_bytes),
        "comm": plain(comm),
        "losses": plain(summary.losses),
        "matches_reference": _agreement(record, reference),
        "provenance": record.provenance,
        "predicted": {
            "peak_memory_bytes": plain(summary.predicted.peak_memory_bytes),
            "comm_bytes_per_step": summary.formula_bytes_per_step,
            "step_time_s": summary.predicted.step_time_s,
        },
    }


def _agreement(record: RunRecord, reference: RunRecord | None) -> bool | None:
    if reference is None or record.status != "finished" or reference.status != "finished":
        return None
    losses, expected = record.summary.losses, reference.summary.losses
    if len(expected) >= record.spec.get("warmup", 0) + record.spec.get("steps", len(losses)):
        losses = losses[: len(expected)]  # steps under the profiler come last, and the reference may have none
    return matches_reference(losses, expected, record.spec.get("precision", "fp32"))

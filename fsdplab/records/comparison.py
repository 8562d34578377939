"""Several records side by side, with the fields of `fsdplab compare --json`.

Readers of that file need not guess: every field is always present, and null says that this run did not measure it. Two
runs agree when their losses do, step by step, within the accuracy of their arithmetic. Where runs did not take turns,
the first one is run again last: a step that takes longer the second time was slowed by the machine, and so may the runs
in between have been.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdplab.common.sizes import seconds

from .record import RunRecord
from .summary import Comm
from .typed import plain

# Relative difference of the loss at any step that rounding alone explains over some tens of steps. fp32: a sum of
# gradients in another order changes the seventh digit of a gradient, and Adam amplifies it where gradients are near
# zero. bf16 keeps 8 bits, and engines that cast in different places (autocast, parameters) differed by 4e-4 in ten
# steps.
TOLERANCE = {"fp32": 2e-5, "bf16": 5e-3}
_OF_SUMMARY = ("step_time_s", "cpu_share", "tokens_per_s", "peak_memory_bytes", "comm", "steady", "change", "losses")
FORMAT = 2  # of the JSON that commands write; 1 had other names of memory categories
_DRIFT = 0.03  # of the first median, from which on a drift is said


def matches_reference(losses: Sequence[float | None], reference: Sequence[float | None], precision: str) -> bool:
    """Return whether two runs' losses agree at every step.

    They have the same length, and are within 2e-5 (fp32) or 5e-3 (bf16) of the reference, relatively.

    >>> matches_reference([5.0, 4.0], [5.0, 4.00001], "fp32"), matches_reference([5.0, 4.0], [5.0, 4.001], "fp32")
    (True, False)
    """
    if precision not in TOLERANCE:
        raise ValueError(f"precision is one of {', '.join(TOLERANCE)}; got {precision!r}.")
    if not losses or len(losses) != len(reference):
        return False
    for loss, expected in zip(losses, reference):
        if loss is None or expected is None:
            return False
        if not math.isclose(loss, expected, rel_tol=TOLERANCE[precision]):
            return False
    return True


def comparison_json(records: Sequence[RunRecord], reference: RunRecord | None = None) -> dict[str, Any]:
    """Compare several runs in one JSON-able dict: `{"format": 2, "spec": ..., "environment": ..., "runs": [...]}`.

    `format` is raised when a field changes its meaning or goes; a new field leaves it. `spec` holds what all runs have
    in common (strategy, engine and world size differ and stand with each run). `in_turns` says whether the runs' timed
    steps took turns; where they did not, `drift` may have the first run's step time at first and again.
    `status` is `finished` or `failed`, in older records also `out_of_memory`: the times of such a run are of the steps
    that it did. `steady` is the run's step on the steady card, simulated: the same on every machine, and
    `change` what would gain most there.
    `matches_reference` is null without a reference and for runs that did not finish; it compares all steps that the
    reference did, which are at least the run's warm-up and timed steps.
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
    if record.status == "failed":  # traffic before a failure is no whole step's
        summary = replace(summary, comm=Comm())
    return {
        **{name: record.spec.get(name) for name in ("strategy", "engine", "world_size")},
        "status": record.status,
        **{name: plain(getattr(summary, name)) for name in _OF_SUMMARY},
        "matches_reference": _agreement(record, reference),
        "provenance": record.provenance,
        "predicted": {
            "peak_memory_bytes": plain(summary.predicted.peak_memory_bytes),
            "comm_bytes_per_step": summary.formula_bytes_per_step,
            "step_time_s": summary.predicted.step_time_s,
            "step_scatter": summary.predicted.step_scatter,
            "step_from": summary.predicted.step_from,
        },
    }


def _agreement(record: RunRecord, reference: RunRecord | None) -> bool | None:
    if reference is None or record.status != "finished" or reference.status != "finished":
        return None
    losses, expected = record.summary.losses, reference.summary.losses
    if len(expected) >= record.spec.get("warmup", 0) + record.spec.get("steps", len(losses)):
        losses = losses[: len(expected)]  # steps under the profiler come last, and the reference may have none
    return matches_reference(losses, expected, record.spec.get("precision", "fp32"))


def drift_of(records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Return how the step of the run that was run again has changed; None where no run was.

    It holds the median at first and again, in seconds, and `relative`, 0.12 for a step that took 12 % longer.
    """
    for record in records:
        first, again = record.summary.step_time_s.median, record.summary.again_s
        if first and again:
            named = {name: record.spec.get(name) for name in ("strategy", "engine")}
            return {**named, "first_s": first, "again_s": again, "relative": again / first - 1}
    return None


def drift_sentence(comparison: Mapping[str, Any]) -> str:
    """Write one sentence on a drift above 3 %, of the dict of a comparison; "" where there is none."""
    drift = comparison.get("drift")
    if not drift or abs(drift["relative"]) <= _DRIFT:
        return ""
    name = drift["strategy"]
    if drift["engine"] != "lab":
        name = f"{name} ({drift['engine']})"
    direction = "longer" if drift["relative"] > 0 else "less time"
    changed = f"{abs(drift['relative']):.0%} {direction}"
    again, first = seconds(drift["again_s"]), seconds(drift["first_s"])
    return (
        f"The machine's speed drifted: {name} was run again last, and its step took {changed} ({again} instead of"
        f" {first}), so a difference of this size between two runs may not be theirs."
    )

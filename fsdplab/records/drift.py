"""The drift of a comparison whose runs did not take turns: its first run was run again last.

A step that takes longer the second time was slowed by the machine, and so may the runs in between have been.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdplab.common.sizes import seconds

from .record import RunRecord

WORTH_SAYING = 0.03  # of the first median


def drift_of(records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """How the step of the run that was run again has changed: its median at first and again, in seconds, and
    `relative`, 0.12 for a step that took 12 % longer. None where no run was.
    """
    for record in records:
        first, again = record.summary.step_time_s.median, record.summary.again_s
        if first and again:
            named = {name: record.spec.get(name) for name in ("strategy", "engine")}
            return {**named, "first_s": first, "again_s": again, "relative": again / first - 1}
    return None


def drift_sentence(comparison: Mapping[str, Any]) -> str:
    """One sentence on a drift above 3 %, of the dict of a comparison; "" where there is none."""
    drift = comparison.get("drift")
    if not drift or abs(drift["relative"]) <= WORTH_SAYING:
        return ""
    name = drift["strategy"] if drift["engine"] == "lab" else f"{drift['strategy']} ({drift['engine']})"
    changed = f"{abs(drift['relative']):.0%} {'longer' if drift['relative'] > 0 else 'less time'}"
    return (
        f"The machine's speed drifted: {name} was run again last, and its step took {changed}"
        f" ({seconds(drift['again_s'])} instead of {seconds(drift['first_s'])}), so a difference of this size between"
        " two runs may not be theirs."
    )

"""Looks at a GradScaler: whether gradients are clipped while they are scaled, and how often it has skipped a step.

It skips a step whose gradients are infinite or NaN and makes its scale smaller, and nothing says so. Its scale is a
number on the device, so it is read twice, after the step whose memory is measured and after the last profiled one; the
smaller it has become between them, the more steps were skipped.
"""

from __future__ import annotations

import math
from typing import Any

_SCALED_NORM = 1000  # a norm to clip to from which on it may be meant for scaled gradients, or be no limit


class Scales:
    """Told of the scaler of each step, None for none: `read` after two of them."""

    def __init__(self) -> None:
        self.scaler: Any = None
        self._read: list[tuple[int, float]] = []  # steps that have ended, and the scale then

    def read(self, step: int) -> None:
        """Note the scale after this step; on a GPU this waits for it."""
        if self.scaler is not None:
            self._read.append((step, float(self.scaler.get_scale())))

    def as_report(self) -> dict[str, Any]:
        """Return the first scale, the last one, and in how many of the steps between the scaler has made it smaller; {}
        without a scaler.
        """
        if self.scaler is None or len(self._read) < 2:
            return {}
        (first_step, first), (last_step, last) = self._read[0], self._read[-1]
        skipped = 0
        if 0 < last < first:
            # 65536 to 1024 by halves: 6 steps
            skipped = round(math.log(first / last) / -math.log(self.scaler.get_backoff_factor()))
        return {"scale": first, "last_scale": last, "skipped": skipped, "scaled_steps": last_step - first_step}


def are_scaled(scaler: Any, max_norm: Any) -> bool:
    """Return whether gradients that are about to be clipped to this norm are scaled: `unscale_` was not called for any
    optimizer since the last update.
    """
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is None or not isinstance(max_norm, (int, float)) or max_norm >= _SCALED_NORM:
        return False
    return all(getattr(state.get("stage"), "name", "") == "READY" for state in states.values())

"""Times full collections of Python's garbage collector, in processes that are ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

_OLDEST = 2  # only collections of this generation look at all objects, and take long


class Collections:
    """Calls `note` with the nanoseconds of each full collection between `begin` and `end`.

    Python drops an exception that a signal raises in a callback of the collector, and with it the signal. So processes
    that are no ranks, such as torchrun's, have no such callback.
    """

    def __init__(self, note: Callable[[int], None]) -> None:
        self._note, self._began_ns = note, 0

    def begin(self) -> None:
        """Be called before and after each collection from now on."""
        gc.callbacks.append(self)

    def end(self) -> None:
        """Be called no more; nothing happens where `begin` was not called."""
        if self in gc.callbacks:
            gc.callbacks.remove(self)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] != _OLDEST:
            return
        if phase == "start":
            self._began_ns = time.perf_counter_ns()
        else:
            self._note(time.perf_counter_ns() - self._began_ns)

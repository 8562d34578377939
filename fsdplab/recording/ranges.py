"""Ranges of the job's own (`record_function`) that are open when a profile of the recording ends.

The end of such a range writes into the profile under which it began, which is gone by then: torch crashes, at once or
at the end of the process. So they end with the profile, and their own end does nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import record_function


@contextmanager
def ended_with_the_profile() -> Iterator[None]:
    """Inside, a profile runs; ranges that this thread began and has not ended by the end are ended then."""
    begun: dict[int, record_function] = {}
    enter, leave, thread = record_function.__enter__, record_function.__exit__, threading.get_ident()

    def entering(self: record_function) -> record_function:
        if threading.get_ident() == thread:
            begun[id(self)] = self
        return enter(self)

    def leaving(self: record_function, *error: Any) -> None:
        begun.pop(id(self), None)
        leave(self, *error)

    record_function.__enter__, record_function.__exit__ = entering, leaving
    try:
        yield
    finally:
        record_function.__enter__, record_function.__exit__ = enter, leave
        for each in reversed(begun.values()):
            leave(each, None, None, None)
            each.run_callbacks_on_exit = False

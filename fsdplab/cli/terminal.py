"""Turns the signals that end a command into an exception.

Ctrl-C, SIGTERM and SIGHUP all end a command as an exception does: ranks are ended and temporary folders removed on the
way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fsdplab.common.processes import asked_to_end

_CLEANING_S = 15.0  # ending ranks is bounded by ten seconds; a signal after this long is taken again


class Ended(KeyboardInterrupt):
    """A signal asked the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class Signals:
    """The signals that one command has received. `number` is the first of them, or None."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._raised_at = -_CLEANING_S

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: raise `Ended`, but not while what an earlier one has ended is cleaned up."""
        self.number = self.number or number
        # a second Ctrl-C while ranks are being ended would leave some behind
        if time.monotonic() - self._raised_at > _CLEANING_S:
            self._raised_at = time.monotonic()
            raise Ended(self.number)

    def look(self) -> None:
        """Raise `Ended` again where a library has caught it (an import that goes on without an optional part)."""
        if self.number is not None:
            raise Ended(self.number)


of_this_command = Signals()


def look_for_signals() -> None:
    """End the command, if a signal has asked for that."""
    of_this_command.look()


@contextmanager
def signals_as_exceptions(until_the_end: bool) -> Iterator[Signals]:
    """Inside, the first of the signals raises `Ended`; others do nothing, so that what it began is finished.

    `until_the_end` of the process: afterwards signals are still ignored, while Python ends and the last processes with
    it. Only the main thread has signals.
    """
    global of_this_command
    of_this_command = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield of_this_command
        return
    with asked_to_end(of_this_command.take, restore=not until_the_end):
        yield of_this_command

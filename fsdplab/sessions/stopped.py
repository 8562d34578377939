"""Ends the interrupt of a cell that runs ranks (the stop button, Ctrl-C) in one line instead of a traceback."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


class RanksStopped(KeyboardInterrupt):
    """The caller was interrupted, and the ranks that worked for it have ended."""

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows instead of a traceback through the library."""
        return [str(self)]


def stopped_after(began: float, ranks: str = "the ranks have ended") -> str:
    """`stopped after 7 s; the ranks have ended`, for a call that began at that value of `time.monotonic()`."""
    return f"stopped after {time.monotonic() - began:.0f} s; {ranks}"


def stops_in_one_line(call: Callable[Given, Result]) -> Callable[Given, Result]:
    """Decorate a function that ends its ranks when it is interrupted: RanksStopped says so.

    Other kinds of interrupts, such as a terminal's request to end, pass unchanged.
    """

    @functools.wraps(call)
    def called(*args: Given.args, **settings: Given.kwargs) -> Result:
        began = time.monotonic()
        try:
            return call(*args, **settings)
        except KeyboardInterrupt as interrupt:
            if type(interrupt) is not KeyboardInterrupt:
                raise
            raise RanksStopped(stopped_after(began)) from None

    return called

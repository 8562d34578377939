"""Keeps the buffers of work in flight alive. A lifetime rule is a type here, not a comment.

A collective reads and writes buffers after the call that started it returned. Whoever starts one gets a `Pending`: it
keeps those buffers alive until somebody waits, and it knows how to wait, on the host (gloo) or on a stream (CUDA).
"""

from __future__ import annotations

from collections.abc import Callable

Step = Callable[[], object]  # what it returns is not used


class Pending:
    """Holds `buffers` until `wait` has run `finish` to its end, which it does once; a wait that was interrupted runs it
    again. `on_drop` is run instead where the work is abandoned, or nobody ever waits. `event`: what another stream can
    wait for (a `torch.Event`), where the work runs on one. A transport that began anew sets `lost` on the work that it
    had under way.

    >>> done = []
    >>> work = Pending(lambda: done.append("waited"), "buffer")
    >>> work.wait(); work.wait(); done
    ['waited']
    """

    __slots__ = ("__weakref__", "_buffers", "_early", "_finish", "_on_drop", "event", "lost")

    def __init__(
        self,
        finish: Step,
        *buffers: object,
        early: Step | None = None,
        on_drop: Step | None = None,
        event: object = None,
    ) -> None:
        self.event = event
        self._early = early
        self._finish: Step | None = finish
        self.lost = False
        self._buffers = buffers
        self._on_drop = on_drop  # what makes it safe to free the buffers if nobody ever waits

    def wait(self) -> None:
        """Complete the work for the current stream (or the host), then let its buffers go."""
        if self._finish is not None:
            self._finish()
            self._finish = None
        self._buffers = ()

    def parts(self) -> tuple[Pending, Pending]:
        """What peers wait for, where the work has such a part, and the rest of it."""
        return Pending(self.advance, self, on_drop=self.abandon), self

    def advance(self) -> None:
        """Do what peers wait for, where the work has such a part; the rest is left to `wait`."""
        if self._finish is not None and self._early is not None:
            self._early()

    def abandon(self) -> None:
        """Let the buffers go without the work's result: at once where that is safe, else when it is complete."""
        # With `on_drop` nothing is left to finish below; without, the work is completed.
        if self._finish is not None and self._on_drop is not None:
            self._finish = None
            self._on_drop()
        self.wait()

    def __del__(self) -> None:
        if self._finish is not None and self._on_drop is not None:
            self._on_drop()

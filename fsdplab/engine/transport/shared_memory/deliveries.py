"""Completes collectives when an emulated link has delivered them, for engines that wait on c10d's own `Work`.

Torch's DDP and FSDP issue a collective, go on computing, and wait later, in C++. So the work they get is a future that
one thread of this process completes at the time the link says.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time

import torch


class Deliveries:
    """One daemon thread that sets futures at given times."""

    def __init__(self) -> None:
        self._due: list[tuple[int, int, torch.futures.Future, list[torch.Tensor]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def at(self, time_ns: int, result: list[torch.Tensor]) -> torch.futures.Future:
        """A future that holds `result` from `time_ns` (as `time.time_ns()`) on."""
        future: torch.futures.Future = torch.futures.Future()
        if time_ns <= time.time_ns():
            future.set_result(result)
            return future
        with self._changed:
            heapq.heappush(self._due, (time_ns, next(self._order), future, result))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="emulated link", daemon=True)
                self._thread.start()
            self._changed.notify()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.time_ns():
                    self._changed.wait(None if not self._due else (self._due[0][0] - time.time_ns()) / 1e9)
                _, _, future, result = heapq.heappop(self._due)
            future.set_result(result)

"""Measures how many ranks of the course this machine carries at once, from two ranks that train for a moment.

A rank needs memory, and a core of its own where a lesson is about time: ranks that share a core wait for each other.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from fsdplab.common.machine import cores, free_memory
from fsdplab.common.processes import descendants, resident_bytes
from fsdplab.common.sizes import size
from fsdplab.common.temporary import temporary_folder
from fsdplab.records import RunRecord
from fsdplab.sessions.run_and_record import run
from fsdplab.sessions.spec import RunSpec
from fsdplab.sessions.watcher import Watcher

RANKS_OF_A_LEARNER = 2
# A kernel that has imported torch, plotly, pandas and ipywidgets held 257 MB (Pss) where nobody shared pages with it.
KERNEL_BYTES = 260_000_000
_LOOK_EVERY_S = 0.2  # /proc is read for every process: some milliseconds


@dataclass(frozen=True)
class Room:
    """What ranks that train need of this machine, and what it has.

    `bytes_a_rank` is the highest memory of all processes of a run over its ranks, measured; `free_bytes` is what new
    processes could use before the run. Both are None where the system does not say (macOS).

    >>> room = Room(cores=64, free_bytes=128 * 10**9, bytes_a_rank=640 * 10**6)
    >>> room.ranks_by_memory, room.learners
    (200, 83)
    >>> room.sentence
    'carries 200 ranks at once: 640 MB a rank, 128 GB free; 64 of them with a core each, as lessons about time need'
    """

    cores: int
    free_bytes: int | None
    bytes_a_rank: int | None

    @property
    def ranks_by_memory(self) -> int | None:
        """How many ranks fit into the free memory at once; None where that is unknown."""
        if self.free_bytes is None or not self.bytes_a_rank:
            return None
        return self.free_bytes // self.bytes_a_rank

    @property
    def learners(self) -> int | None:
        """How many learners fit into the free memory, each with a kernel and two ranks of the default model."""
        if self.free_bytes is None or not self.bytes_a_rank:
            return None
        # 128 GB // (2 * 640 MB + 260 MB) = 83
        return self.free_bytes // (RANKS_OF_A_LEARNER * self.bytes_a_rank + KERNEL_BYTES)

    @property
    def sentence(self) -> str:
        """What this machine carries, and what limits it."""
        ranks, steady = self.ranks_by_memory, "as lessons about time need"
        if ranks is None:
            return f"carries {self.cores} ranks with a core each, {steady}; what memory allows is not known here"
        # neither is None where there is a number of ranks
        needed, free = size(self.bytes_a_rank or 0), size(self.free_bytes or 0)
        each_with_a_core = f"{min(ranks, self.cores)} of them with a core each, {steady}"
        return f"carries {ranks} ranks at once: {needed} a rank, {free} free; {each_with_a_core}"


class _Highest(Watcher):
    """Measures the memory of this process's descendants while ranks run, and keeps the highest."""

    def __init__(self) -> None:
        self.bytes = 0
        self._next_look_s = 0.0

    def look(self) -> None:
        now = time.monotonic()
        if now < self._next_look_s:
            return
        self._next_look_s = now + _LOOK_EVERY_S
        held = [resident_bytes(pid) or 0 for pid in descendants(os.getpid())]
        self.bytes = max(self.bytes, sum(held))


def measure_room() -> tuple[RunRecord, Room]:
    """Train the default model on two ranks for one step; return the record of the run and what the machine carries."""
    free = free_memory()
    highest = _Highest()
    spec = RunSpec(steps=1, world_size=RANKS_OF_A_LEARNER, device="cpu")
    record = run(spec, directory=temporary_folder("room"), watcher=highest)
    # the starter's memory is counted to the ranks: a learner has a starter too
    bytes_a_rank = highest.bytes // RANKS_OF_A_LEARNER or None
    return record, Room(cores(), free, bytes_a_rank)

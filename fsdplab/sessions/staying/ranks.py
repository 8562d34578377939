"""Ranks that stay: started once, they run cells one after another with the same names (the rank's side: cell_loop.py).

    ranks = StayingRanks.start(2)
    ranks.run("x = torch.tensor([rank])")
    ranks.run("dist.all_reduce(x); print(x)")     # prints [rank 0] tensor([1]) and [rank 1] tensor([1]), while it runs
    ranks.stop()

The warm starter (or torchrun) starts them as it does the ranks of every run, so they are watched and ended the same
way, need no port and end with their caller; ipyparallel would need a broker and separate engines.

A rank in Python code can be interrupted and keeps its names. One that waits in a collective cannot, and a group without
one of its ranks is useless, so then all ranks end, with a report.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdplab.common.temporary import temporary_folder
from fsdplab.sessions.launch.failure_report import Failure, RanksFailed
from fsdplab.sessions.launch.launcher import RunningRanks, end_ranks, once_more
from fsdplab.sessions.launch.mailbox import LiveOutput, Mailbox, OnOutput, read_heartbeats
from fsdplab.sessions.spec import SpecError, check_ranks_run_here, check_whole
from fsdplab.sessions.staying.cell_loop import IDLE
from fsdplab.sessions.staying.cell_reports import CellInterrupted
from fsdplab.sessions.staying.cell_watch import CellWatch, Living

CELL_LIMIT_S = 90.0
_START_LIMIT_S = 90.0
_PROGRAM = ("-m", "fsdplab.sessions.staying.cell_loop")
_numbers = itertools.count(1)  # of all cells of this process, so that titles are unique
_STOPPED = Failure("died", "The ranks were stopped, and what they held is gone.")


def print_labelled(rank: int, line: str) -> None:
    """`[rank 1] a line`."""
    print(f"[rank {rank}] {line}")


@dataclass(frozen=True)
class RankStatus:
    """The state of a rank. `names`: the latest names that its cells defined, of `held` in all."""

    rank: int
    pid: int
    alive: bool
    busy: bool
    names: tuple[str, ...]
    held: int
    collective: str | None

    def __str__(self) -> str:
        if not self.alive:
            return f"rank {self.rank}: ended (it was process {self.pid})"
        more = f" and {self.held - len(self.names)} more" if self.held > len(self.names) else ""
        names = f"holds {', '.join(self.names)}{more}" if self.names else "holds no names yet"
        return (
            f"rank {self.rank}: {'busy' if self.busy else 'idle'}, process {self.pid}, {names}; last collective:"
            f" {self.collective or 'none'}"
        )


class StayingRanks:
    """Ranks of one group that run cells until they are stopped; `failure` says how they ended, None while they run."""

    def __init__(self, living: Living) -> None:
        """Use `StayingRanks.start`."""
        self.world_size = living.ranks.world_size
        self.failure: Failure | None = None
        self._living = living
        self._last_results: dict[int, dict[str, Any]] = {}  # by rank: the result of its last cell
        self._one_cell = threading.Lock()
        self._end_all = weakref.finalize(self, _end, os.getpid(), living)

    @classmethod
    def start(
        cls, world_size: int, start: str = "auto", *, before: str = "", time_limit: float = _START_LIMIT_S
    ) -> StayingRanks:
        """Start ranks and return when they form a group; `start` as in run_ranks. RanksFailed when that fails or takes
        too long.

        `before` is source that every rank runs before each cell, in a separate namespace.
        """
        check_whole("world_size", world_size, 1)
        check_ranks_run_here()
        return once_more(lambda: cls(_started(world_size, start, before, time_limit)))

    def run(
        self,
        source: str,
        ranks: Sequence[int] | None = None,
        *,
        time_limit: float = CELL_LIMIT_S,
        on_output: OnOutput = print_labelled,
    ) -> None:
        """Run source on all ranks, or some, and return when all have ended it; `on_output(rank, line)` gets what they
        print, as they print it.

        RanksFailed when it raises, a rank dies, or the limit is over; CellInterrupted when the caller is interrupted.
        `alive` tells whether the ranks stay. On some ranks only, a collective of the whole group would wait for the
        others: give it to groups of these ranks.
        """
        chosen = self._checked(ranks)
        if not self._one_cell.acquire(blocking=False):
            raise SpecError("the ranks run another cell at the moment; wait for its end or interrupt it")
        try:
            if not self.alive and self.failure is not None:
                raise RanksFailed(self.failure)
            self._living.output.on_output = on_output
            self._run(CellWatch(self._living, next(_numbers), chosen), source, time_limit)
        finally:
            self._one_cell.release()

    @property
    def alive(self) -> bool:
        """Whether all ranks are there and can run a cell."""
        if self.failure is None and (self._living.missing() or not self._living.ranks.agent.running()):
            self._end(self._living.death())
        return self.failure is None

    def status(self) -> list[RankStatus]:
        """The state of each rank."""
        alive, heartbeats = self.alive, read_heartbeats(self._living.ranks.mailbox, self.world_size)
        found = []
        for rank, pid in self._living.pids.items():
            last, heartbeat = self._last_results.get(rank, {}), heartbeats.get(rank)
            busy, collective = (heartbeat.phase != IDLE, heartbeat.collective) if heartbeat else (False, None)
            found.append(
                RankStatus(rank, pid, alive, busy, tuple(last.get("names", ())), last.get("held", 0), collective)
            )
        return found

    def stop(self) -> None:
        """End all ranks and return when none is left; does nothing when they have ended."""
        self._end(_STOPPED)

    def _run(self, cell: CellWatch, source: str, time_limit: float) -> None:
        interrupted = False
        try:
            try:
                cell.send(source)
                outcome = cell.wait(time_limit)
            except KeyboardInterrupt:
                interrupted, outcome = True, cell.interrupt("The cell was interrupted")
            self._last_results.update(cell.results())
            if outcome.lost:
                self._end(outcome.failure)
        except BaseException:  # a second interrupt, or an error in on_output: the state of the ranks is unknown
            self._end(Failure("died", "The ranks were ended, because the caller left in the middle of a cell."))
            raise
        if interrupted:
            just_ended = Failure("hung", "Interrupted when the cell had just ended. All ranks stay.")
            raise CellInterrupted(outcome.failure or just_ended)
        if outcome.failure is not None:
            raise RanksFailed(outcome.failure)

    def _end(self, failure: Failure | None) -> None:
        self.failure = self.failure or failure
        self._end_all()

    def _checked(self, ranks: Sequence[int] | None) -> list[int]:
        chosen = list(range(self.world_size)) if ranks is None else list(ranks)
        unknown = [rank for rank in chosen if not 0 <= rank < self.world_size]
        if unknown or not chosen or len(set(chosen)) < len(chosen):
            raise SpecError(f"ranks is {chosen}; expected some of {list(range(self.world_size))}, each once", "ranks")
        return sorted(chosen)


def _started(world_size: int, start: str, before: str, time_limit: float) -> Living:
    mailbox = Mailbox(temporary_folder("ranks"))
    (mailbox.folder / "before.py").write_text(before, encoding="utf-8")
    running: list[RunningRanks] = []
    try:
        program = [*_PROGRAM, str(mailbox.folder)]
        running.append(RunningRanks.start(program, mailbox, world_size, time_limit, start, in_turns=True))
        if not running[0].watch(to_the_end=False):
            raise RanksFailed(running[0].how_it_ended())
    except BaseException:
        _clear(mailbox, running)
        raise
    return Living(running[0], LiveOutput(mailbox, world_size, print_labelled))


def _end(owner: int, living: Living) -> None:
    if os.getpid() == owner:  # not in a process that was forked from it
        _clear(living.ranks.mailbox, [living.ranks])


def _clear(mailbox: Mailbox, running: Sequence[RunningRanks]) -> None:
    """End the ranks, if they were started, and delete their files."""
    end_ranks(running)
    shutil.rmtree(mailbox.folder, ignore_errors=True)

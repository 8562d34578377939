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
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdplab.common.processes import gone, send
from fsdplab.common.temporary import temporary_folder
from fsdplab.sessions.cell_ranks.cell_loop import IDLE, show_source, source_of, title
from fsdplab.sessions.cell_ranks.cell_reports import CellInterrupted, interrupted, raised, waiting_for_ever
from fsdplab.sessions.launch.failure_report import Failure, PostMortem, RanksFailed, ask_for_stacks, failed_first
from fsdplab.sessions.launch.launcher import RankActivity, RunningRanks, end_ranks, once_more
from fsdplab.sessions.launch.mailbox import Heartbeat, LiveOutput, Mailbox, OnOutput, Tail, read_heartbeats, read_lines
from fsdplab.sessions.launch.stacks import waits_for_others
from fsdplab.sessions.launch.turns import Turns
from fsdplab.sessions.spec import SpecError, check_ranks_run_here, check_whole
from fsdplab.sessions.stopped import stopped_after, stops_in_one_line

CELL_LIMIT_S = 90.0
_START_LIMIT_S = 90.0
_PROGRAM = ("-m", "fsdplab.sessions.cell_ranks.cell_loop")
_numbers = itertools.count(1)  # of all cells of this process, so that titles are unique
_STOPPED = Failure("died", "The ranks were stopped, and what they held is gone.")
_LOOK_EVERY_S = 0.02
# A failed rank ends the others (starter.py, torchrun), and exit codes are reported; a rank that left with exit code 0
# does not.
_OTHERS_FOLLOW_S, _OTHERS_GONE_S = 3.0, 15.0
_ANSWER_WITHIN_S = 2.0
# Ranks that wait in a collective, so long without a move, while another has raised; and while another has only no part
# in it.
_PATIENCE_S, _LONG_PATIENCE_S = 2.0, 5.0


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
        # the ranks end with the last reference to this object, or with Python
        self._end_all = weakref.finalize(self, _end, os.getpid(), living)

    @classmethod
    @stops_in_one_line
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
        # two threads of a notebook: the second cell is refused and does not wait
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
        """Return the state of each rank."""
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
        left, began = False, time.monotonic()
        try:
            try:
                cell.send(source)
                outcome = cell.wait(time_limit)
            except KeyboardInterrupt:
                left, outcome = True, cell.interrupt("The cell was interrupted")
            self._last_results.update(cell.results())
            if outcome.lost:
                self._end(outcome.failure)
        except BaseException:  # a second interrupt, or an error in on_output: the state of the ranks is unknown
            self._end(Failure("died", "The ranks were ended, because the caller left in the middle of a cell."))
            raise
        if left:
            # Ctrl-C between the last rank's end and the next look
            just_ended = Failure("hung", "Interrupted when the cell had just ended. All ranks stay.")
            ranks = "the ranks have ended" if outcome.lost else "the ranks stay, with what they hold"
            raise CellInterrupted(outcome.failure or just_ended, stopped_after(began, ranks))
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


# ---- the ranks, and one cell on them


@dataclass(frozen=True)
class Living:
    """The handles of ranks that stay."""

    ranks: RunningRanks
    output: LiveOutput

    @property
    def turns(self) -> Turns:
        """By which the ranks are told the number of a cell."""
        assert self.ranks.turns is not None, "ranks that stay wait for cells"
        return self.ranks.turns

    @property
    def pids(self) -> dict[int, int]:
        """The process id of each rank."""
        return {rank: heartbeat.pid for rank, heartbeat in sorted(self.ranks.activity.heartbeats.items())}

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Return the latest heartbeats."""
        return read_heartbeats(self.ranks.mailbox, self.ranks.world_size)

    def missing(self) -> list[int]:
        """Return the ranks that have died."""
        return [rank for rank, pid in self.pids.items() if gone(pid)]

    def death(self) -> Failure:
        """Return the report after a rank died: waits a moment for its exit code, and shows what was still printed."""
        first, began = next(iter(self.missing()), None), time.monotonic()
        # until the starter has ended the others; a rank that left with exit code 0 ends nobody
        while self.ranks.agent.running(_LOOK_EVERY_S) and (first is None or self.ranks.agent.left.get(first) != 0):
            if time.monotonic() - began > (_OTHERS_GONE_S if len(self.missing()) > 1 else _OTHERS_FOLLOW_S):
                break
        self.output.flush()
        if not self.ranks.agent.running():
            return self._with_last_words(self.ranks.how_it_ended())
        of_first = {rank: heartbeat for rank, heartbeat in self.heartbeats().items() if rank == first}
        return failed_first(PostMortem(heartbeats=of_first))

    def _with_last_words(self, failure: Failure) -> Failure:
        """Return the report of a rank that was ended by an exit code, with its last line on standard error: a C library
        that ends a process says there why.
        """
        if failure.kind != "died" or failure.rank is None or self.ranks.agent.left.get(failure.rank, 0) <= 0:
            return failure
        said = Tail(self.ranks.mailbox.of(failure.rank, "err")).last()
        return replace(failure, message=f"{failure.message} Its last words: {said[-1]}") if said else failure


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell: `failure` is None where it ended well. `lost`: the ranks cannot be used again and must be
    ended.
    """

    failure: Failure | None
    lost: bool = False


@dataclass
class CellWatch:
    """A cell on some of the ranks."""

    living: Living
    number: int
    ranks: Sequence[int]
    activity: RankActivity = field(default_factory=RankActivity)
    _ask_again: float = 0.0

    def send(self, source: str) -> None:
        """Write the source, then start the ranks."""
        show_source(source, title(self.number))
        source_of(self.living.ranks.mailbox, self.number).write_text(source, encoding="utf-8")
        self.living.turns.tell(str(self.number), self.ranks)

    def wait(self, time_limit: float) -> Outcome:
        """Return when the cell has ended or failed."""
        deadline = time.monotonic() + time_limit
        while True:
            running = self._look()
            if not self.unfinished():
                return self._ended()
            if not running or self.living.missing():
                return Outcome(self.living.death(), lost=True)
            if time.monotonic() > deadline:
                return self.interrupt(f"The cell did not end within {time_limit:g} s")
            if (stuck := self._stuck()) is not None:
                return Outcome(stuck, lost=True)

    def interrupt(self, why: str) -> Outcome:
        """Take the stacks of the ranks that still run the cell, interrupt them, and wait a moment for their end."""
        running = self._look()
        heartbeats, before = self._heartbeats(), self.results()
        if not heartbeats:
            return self._ended()
        stacks = ask_for_stacks(self.living.ranks.mailbox, heartbeats)
        for heartbeat in heartbeats.values():
            send(heartbeat.pid, signal.SIGINT)
        deadline = time.monotonic() + _ANSWER_WITHIN_S
        while self.unfinished() and time.monotonic() < deadline and running:
            running = self._look()
        self.living.output.flush()
        # a rank that waits in a collective does not take the signal, and without it the group is useless
        deaf = self.unfinished()
        return Outcome(interrupted(why, heartbeats, stacks, before, deaf), lost=bool(deaf))

    def results(self) -> dict[int, dict[str, Any]]:
        """Return what each rank that has ended the cell wrote at its end."""
        # of each rank the last line, which may be of an earlier cell
        last = {rank: read_lines(self.living.ranks.mailbox.of(rank, "cells"))[-1:] for rank in self.ranks}
        return {rank: lines[0] for rank, lines in last.items() if lines and lines[0]["cell"] == self.number}

    def unfinished(self) -> list[int]:
        """Return the ranks that have not ended the cell."""
        return self.living.turns.busy

    def _look(self) -> bool:
        """See what the ranks have done, after a moment or as soon as all have ended the cell; whether they still run.

        A rank prints before it reports its end, and reports before it waits.
        """
        self.living.turns.look(_LOOK_EVERY_S)
        self.activity.look(self.living.heartbeats())
        before = self.living.output.lines
        self.living.output.look()
        # a rank that prints moves
        if self.living.output.lines > before:
            self.activity.last = time.monotonic()
        return self.living.ranks.agent.running()

    def _ended(self) -> Outcome:
        self.living.output.flush()
        return Outcome(raised(self.results()))

    def _heartbeats(self) -> dict[int, Heartbeat]:
        # a heartbeat that was being rewritten just now is missing, so the last one stands in
        heartbeats = {**self.activity.heartbeats, **self.living.heartbeats()}
        return {rank: heartbeats[rank] for rank in self.unfinished()}

    def _stuck(self) -> Failure | None:
        """Return the report if all unfinished ranks wait in a collective that another will not enter; None while they
        move.
        """
        heartbeats = self._heartbeats()
        # none has ended the cell, so none is known to stay away
        if len(heartbeats) == self.living.ranks.world_size or self.activity.idle < _PATIENCE_S:
            return None
        results = self.results()
        patience = _PATIENCE_S if any(result["error"] for result in results.values()) else _LONG_PATIENCE_S
        if self.activity.idle < patience or time.monotonic() < self._ask_again:
            return None
        # stacks cost the ranks an interruption: not at every look
        self._ask_again = time.monotonic() + patience
        stacks = ask_for_stacks(self.living.ranks.mailbox, heartbeats)
        if not all(waits_for_others(stacks.get(rank, "")) for rank in heartbeats):
            return None
        self.living.output.flush()
        return waiting_for_ever(heartbeats, stacks, results, self.living.ranks.world_size)


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

"""Watches one cell on ranks that stay until all ranks ended it, one died, or it hung and was interrupted."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdplab.common.processes import gone, send
from fsdplab.sessions.launch.failure_report import Failure, PostMortem, ask_for_stacks, failed_first
from fsdplab.sessions.launch.launcher import RankActivity, RunningRanks
from fsdplab.sessions.launch.mailbox import Heartbeat, LiveOutput, Tail, read_heartbeats, read_lines
from fsdplab.sessions.launch.stacks import waits_for_others
from fsdplab.sessions.launch.turns import Turns
from fsdplab.sessions.staying.cell_loop import show_source, source_of, title
from fsdplab.sessions.staying.cell_reports import interrupted, raised, waiting_for_ever

_LOOK_EVERY_S = 0.02
# A failed rank ends the others (starter.py, torchrun), and exit codes are reported; a rank that left with exit code 0
# does not.
_OTHERS_FOLLOW_S, _OTHERS_GONE_S = 3.0, 15.0
_ANSWER_WITHIN_S = 2.0
# Ranks that wait in a collective, so long without a move, while another has raised; and while another has only no part
# in it.
_PATIENCE_S, _LONG_PATIENCE_S = 2.0, 5.0


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
        """The latest heartbeats."""
        return read_heartbeats(self.ranks.mailbox, self.ranks.world_size)

    def missing(self) -> list[int]:
        """The ranks that have died."""
        return [rank for rank, pid in self.pids.items() if gone(pid)]

    def death(self) -> Failure:
        """The report after a rank died: waits a moment for its exit code, and shows what was still printed."""
        first, began = next(iter(self.missing()), None), time.monotonic()
        while self.ranks.agent.running(_LOOK_EVERY_S) and (first is None or self.ranks.agent.left.get(first) != 0):
            if time.monotonic() - began > (_OTHERS_GONE_S if len(self.missing()) > 1 else _OTHERS_FOLLOW_S):
                break
        self.output.flush()
        if not self.ranks.agent.running():
            return self._with_last_words(self.ranks.how_it_ended())
        of_first = {rank: heartbeat for rank, heartbeat in self.heartbeats().items() if rank == first}
        return failed_first(PostMortem(heartbeats=of_first))

    def _with_last_words(self, failure: Failure) -> Failure:
        """The report of a rank that was ended by an exit code, with its last line on standard error: a C library that
        ends a process says there why.
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
        deaf = self.unfinished()
        return Outcome(interrupted(why, heartbeats, stacks, before, deaf), lost=bool(deaf))

    def results(self) -> dict[int, dict[str, Any]]:
        """What each rank that has ended the cell wrote at its end."""
        last = {rank: read_lines(self.living.ranks.mailbox.of(rank, "cells"))[-1:] for rank in self.ranks}
        return {rank: lines[0] for rank, lines in last.items() if lines and lines[0]["cell"] == self.number}

    def unfinished(self) -> list[int]:
        """The ranks that have not ended the cell."""
        return self.living.turns.busy

    def _look(self) -> bool:
        """See what the ranks have done, after a moment or as soon as all have ended the cell; whether they still run.

        A rank prints before it reports its end, and reports before it waits.
        """
        self.living.turns.look(_LOOK_EVERY_S)
        self.activity.look(self.living.heartbeats())
        before = self.living.output.lines
        self.living.output.look()
        if self.living.output.lines > before:
            self.activity.last = time.monotonic()
        return self.living.ranks.agent.running()

    def _ended(self) -> Outcome:
        self.living.output.flush()
        return Outcome(raised(self.results()))

    def _heartbeats(self) -> dict[int, Heartbeat]:
        heartbeats = {**self.activity.heartbeats, **self.living.heartbeats()}
        return {rank: heartbeats[rank] for rank in self.unfinished()}

    def _stuck(self) -> Failure | None:
        """The report if all unfinished ranks wait in a collective that another will not enter; None while they move."""
        heartbeats = self._heartbeats()
        if len(heartbeats) == self.living.ranks.world_size or self.activity.idle < _PATIENCE_S:
            return None
        results = self.results()
        patience = _PATIENCE_S if any(result["error"] for result in results.values()) else _LONG_PATIENCE_S
        if self.activity.idle < patience or time.monotonic() < self._ask_again:
            return None
        self._ask_again = time.monotonic() + patience
        stacks = ask_for_stacks(self.living.ranks.mailbox, heartbeats)
        if not all(waits_for_others(stacks.get(rank, "")) for rank in heartbeats):
            return None
        self.living.output.flush()
        return waiting_for_ever(heartbeats, stacks, results, self.living.ranks.world_size)

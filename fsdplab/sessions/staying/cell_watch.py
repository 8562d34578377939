"""One cell on ranks that stay, from its sending to its end: all ranks ended it, or one died, or it hung and was
interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdplab.common.processes import gone, send
from fsdplab.sessions.launch.ending import Agent
from fsdplab.sessions.launch.failure_report import Failure, PostMortem, failed_first
from fsdplab.sessions.launch.launcher import Progress, how_it_ended, still_running
from fsdplab.sessions.launch.live_output import LiveOutput, Tail
from fsdplab.sessions.launch.mailbox import Beat, Mailbox, read_beats
from fsdplab.sessions.launch.post_mortem import ask_for_stacks
from fsdplab.sessions.launch.stacks import waits_for_others
from fsdplab.sessions.staying.cell_code import show_source, source_of, title
from fsdplab.sessions.staying.cell_reports import interrupted, raised, waiting_for_ever

_LOOK_EVERY_S = 0.02
# A rank that ended badly ends the others (starter.py, torchrun), and then the exit codes are told; one that left with
# exit code 0 does not.
_OTHERS_FOLLOW_S, _OTHERS_GONE_S = 3.0, 15.0
_ANSWER_WITHIN_S = 2.0
# Ranks that wait in a collective, so long without a move, while another has raised; and while another has only no part
# in it any more.
_PATIENCE_S, _LONG_PATIENCE_S = 2.0, 5.0


@dataclass(frozen=True)
class Living:
    """Ranks that stay, as those who watch them need them."""

    agent: Agent
    mailbox: Mailbox
    world_size: int
    pids: dict[int, int]
    requests: list[int]  # file descriptors, by rank: the writing end of its FIFO
    ends: list[Tail]  # by rank: what it says at the end of each cell
    output: LiveOutput

    def missing(self) -> list[int]:
        """The ranks that have died."""
        return [rank for rank, pid in self.pids.items() if gone(pid)]

    def death(self) -> Failure:
        """The report after a rank died: waits a moment for its exit code, and shows what was still printed."""
        first, began = next(iter(self.missing()), None), time.monotonic()
        while still_running(self.agent, _LOOK_EVERY_S) and (first is None or self.agent.left.get(first) != 0):
            if time.monotonic() - began > (_OTHERS_GONE_S if len(self.missing()) > 1 else _OTHERS_FOLLOW_S):
                break
        self.output.flush()
        if self.agent.poll() is not None:
            return how_it_ended(self.agent, self.mailbox, self.world_size)
        return failed_first(
            PostMortem(
                beats={rank: beat for rank, beat in read_beats(self.mailbox, self.world_size).items() if rank == first}
            )
        )


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: well without a failure. `lost`: the ranks are of no more use and must be ended."""

    failure: Failure | None
    lost: bool = False


@dataclass
class CellWatch:
    """A cell on some of the ranks; `said` is what each told when it had ended it."""

    living: Living
    number: int
    ranks: Sequence[int]
    said: dict[int, dict[str, Any]] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    _ask_again: float = 0.0

    def send(self, source: str) -> None:
        """Let the ranks begin: the source is there as a whole before the first is told."""
        show_source(source, title(self.number))
        source_of(self.living.mailbox, self.number).write_text(source, encoding="utf-8")
        for rank in self.ranks:
            os.write(self.living.requests[rank], f"{self.number}\n".encode())

    def wait(self, time_limit: float) -> Outcome:
        """Return when the cell has ended, however."""
        deadline = time.monotonic() + time_limit
        while True:
            running = still_running(self.living.agent, _LOOK_EVERY_S)
            self._look()
            if not self.unfinished():
                return self._ended()
            if not running or self.living.missing():
                return Outcome(self.living.death(), lost=True)
            if time.monotonic() > deadline:
                return self.interrupt(f"The cell did not end within {time_limit:g} s")
            if (stuck := self._stuck()) is not None:
                return Outcome(stuck, lost=True)

    def interrupt(self, why: str) -> Outcome:
        """Ask the ranks that still run the cell where they stand, interrupt them, and wait a moment for their end of
        it.
        """
        self._look()
        beats, before = self._beats(), dict(self.said)
        if not beats:
            return self._ended()
        stacks = ask_for_stacks(self.living.mailbox, beats)
        for beat in beats.values():
            send(beat.pid, signal.SIGINT)
        deadline = time.monotonic() + _ANSWER_WITHIN_S
        while self.unfinished() and time.monotonic() < deadline and still_running(self.living.agent, _LOOK_EVERY_S):
            self._look()
        self.living.output.flush()
        deaf = self.unfinished()
        return Outcome(interrupted(why, beats, stacks, before, deaf), lost=bool(deaf))

    def unfinished(self) -> list[int]:
        """The ranks that have not ended the cell."""
        return [rank for rank in self.ranks if rank not in self.said]

    def _look(self) -> None:
        for rank in self.unfinished():  # before the output: what a rank printed is there when it says that it has ended
            for line in self.living.ends[rank].lines():
                self._hear(rank, line)
        self.progress.look(read_beats(self.living.mailbox, self.living.world_size))
        before = self.living.output.lines
        self.living.output.look()
        if self.living.output.lines > before:
            self.progress.last = time.monotonic()

    def _hear(self, rank: int, line: str) -> None:
        said = json.loads(line)
        if said["cell"] == self.number:
            self.said[rank] = said

    def _ended(self) -> Outcome:
        self.living.output.flush()
        return Outcome(raised(self.said))

    def _beats(self) -> dict[int, Beat]:
        beats = {**self.progress.beats, **read_beats(self.living.mailbox, self.living.world_size)}
        return {rank: beats[rank] for rank in self.unfinished()}

    def _stuck(self) -> Failure | None:
        """The report of a cell in which all that still run wait in a collective to which another will not come; None as
        long as they move.
        """
        patience = _PATIENCE_S if any(said["error"] for said in self.said.values()) else _LONG_PATIENCE_S
        beats = self._beats()
        if len(beats) == self.living.world_size or self.progress.idle < patience or time.monotonic() < self._ask_again:
            return None
        self._ask_again = time.monotonic() + patience
        stacks = ask_for_stacks(self.living.mailbox, beats)
        if not all(waits_for_others(stacks.get(rank, "")) for rank in beats):
            return None
        self.living.output.flush()
        return waiting_for_ever(beats, stacks, self.said, self.living.world_size)

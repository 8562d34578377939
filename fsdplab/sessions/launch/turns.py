"""Tells ranks that wait what to do next: a step of their run, where runs take turns, or a cell of a notebook.

Runs whose ranks are alive side by side train one step at a time, so that a slow machine slows all alike.

    rank0.turn     a FIFO to the rank: a line, what it does next
    rank0.waits    a FIFO from the rank: one byte each time it begins to wait

A rank that waits is blocked in a read: it uses no processor (a thread of gloo looks a hundred times a second, 0.2 % of
a core), and its step begins within a fraction of a millisecond. The caller makes both FIFOs before it starts the ranks,
and removes their names when all ranks have opened them: no program that reads a record's folder finds one. They work
for forked ranks and for those of torchrun.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fsdplab.sessions.launch.mailbox import HeartbeatWriter, Mailbox, readable

WAITING = "waiting for its turn"  # the phase of a rank that waits
# what ranks of a run are told: to take their next step and to wait again, or to go on to their end
STEP, TO_THE_END = "step", "all"
_WAITS = b"w"


def fifos_in(folder: Path) -> bool:
    """Return whether the file system of a folder has FIFOs; some that copy to a cloud have none. Makes a missing
    folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trial = folder / f".fifo-{os.getpid()}"
    with suppress(OSError):
        os.mkfifo(trial)
        trial.unlink()
        return True
    return False


class Turns:
    """The caller's side, of all ranks of one run."""

    def __init__(self, mailbox: Mailbox, world_size: int) -> None:
        self._names = [mailbox.of(rank, kind) for kind in ("turn", "waits") for rank in range(world_size)]
        self._files: list[int] = []
        try:
            for name in self._names:
                os.mkfifo(name, 0o600)
                self._files.append(os.open(name, os.O_RDWR))  # for one direction, open would wait for the rank
        except OSError:
            self.close()
            raise
        # the names are in this order: every rank's turn, then every rank's waits
        self._turns, self._waits = self._files[:world_size], self._files[world_size:]
        self._busy = {file: rank for rank, file in enumerate(self._waits)}

    @property
    def busy(self) -> list[int]:
        """The ranks that do not wait, as far as the last look has seen."""
        return sorted(self._busy.values())

    @property
    def all_wait(self) -> bool:
        """Whether all ranks wait, as far as the last look has seen."""
        return not self._busy

    def look(self, within_s: float) -> None:
        """Return as soon as all ranks wait, or after `within_s` seconds."""
        deadline = time.monotonic() + within_s
        while self._busy:
            ready = readable(self._busy, deadline - time.monotonic())
            if not ready:
                return
            for file in ready:
                # the byte that the rank wrote when it began to wait
                os.read(file, 1)
                del self._busy[file]
        self._remove_names()

    def tell(self, what: str, ranks: Iterable[int] | None = None) -> None:
        """Let all ranks, which wait, or some of them go on with `what`, one line; then they wait again."""
        chosen = range(len(self._waits)) if ranks is None else ranks
        self._busy = {self._waits[rank]: rank for rank in chosen}
        for rank in chosen:
            os.write(self._turns[rank], f"{what}\n".encode())

    def close(self) -> None:
        """Remove the FIFOs, after the ranks have ended; does nothing the second time."""
        self._remove_names()
        while self._files:
            os.close(self._files.pop())

    def _remove_names(self) -> None:
        while self._names:
            self._names.pop().unlink(missing_ok=True)


class OwnTurns:
    """The rank's side; `phase` is what its heartbeat says while it waits."""

    def __init__(self, mailbox: Mailbox, rank: int, heartbeat: HeartbeatWriter, phase: str = WAITING) -> None:
        self._heartbeat, self._phase = heartbeat, phase
        self._takes_turns = mailbox.of(rank, "turn").exists()
        if self._takes_turns:
            self._turn = mailbox.of(rank, "turn").open(encoding="utf-8")
            self._waits = os.open(mailbox.of(rank, "waits"), os.O_WRONLY)

    def wait(self) -> None:
        """Wait until the caller allows the next step; return at once where the run takes no turns, or no more."""
        if self._takes_turns:
            self._takes_turns = self.next() == STEP

    def next(self) -> str:
        """Wait until the caller says what is next; "" where there is nothing more."""
        self._heartbeat.enter(self._phase)
        os.write(self._waits, _WAITS)
        return self._turn.readline().rstrip("\n")

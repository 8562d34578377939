"""Reads and writes the folder through which ranks report to their caller: plain files, which outlive a dead rank.

rank0.heartbeat    a checksum and one line of JSON, rewritten in place: where the rank is now
rank0.steps        one line of JSON a finished step
rank0.ledger       one line of JSON a collective, written after each step
rank0.failure      the exception that ended the rank
rank0.stack        the stack of a rank, written on SIGUSR1
rank0.turn, .waits FIFOs of ranks that are told what to do next (turns.py)
rank0.memory       the memory of the measured step
rank0.result       the rank's result
rank0.out, .err    what it printed
agent.log          the output of torchrun, or of a rank that could not start
"""

from __future__ import annotations

import json
import math
import os
import select
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from socket import socket
from typing import Any
from zlib import crc32

AGENT_PID = "FSDPLAB_AGENT_PID"
RANKS_STORE = "FSDPLAB_RANKS_STORE"
NOT_FORKED = "FSDPLAB_NOT_FORKED"  # why torchrun starts these ranks, where they were to be forked if possible
BUILDING = "building the model"  # the phase of a rank before its first step
_HEARTBEAT_BYTES = 512  # a heartbeat with two names of the longest kind fits
_LONGEST_NAME = 100
OnOutput = Callable[[int, str], None]
_LOOKS = 5  # at a heartbeat; writing one takes microseconds


@dataclass(frozen=True)
class Mailbox:
    """Names of the files in one folder. `Mailbox(folder).of(1, "heartbeat")` is `folder/rank1.heartbeat`."""

    folder: Path

    def of(self, rank: int, kind: str) -> Path:
        """Return the file of one rank."""
        return self.folder / f"rank{rank}.{kind}"

    def reports(self, kind: str) -> dict[int, dict[str, Any]]:
        """Return what ranks wrote of one kind, by rank: the first line of each file."""
        files = {int(path.name.split(".")[0][4:]): read_lines(path) for path in self.folder.glob(f"rank*.{kind}")}
        return {rank: lines[0] for rank, lines in sorted(files.items()) if lines}

    @property
    def agent_log(self) -> Path:
        """The output of torchrun, or of a rank that could not start."""
        return self.folder / "agent.log"


@dataclass(frozen=True)
class Heartbeat:
    """The position of a rank: the phase and the collective it entered last, how many of each it has entered so far, and
    its process id.

    `completed` is the last collective that the engine's ledger says is done; engines without a ledger leave it None.
    Ranks run the same program, so the rank with the lowest (`phases`, `collectives`) is the one the others wait for.
    """

    rank: int
    pid: int
    step: int | None = None
    phase: str = "start"
    phases: int = 0
    collectives: int = 0
    collective: str | None = None
    completed: str | None = None


class HeartbeatWriter:
    """The rank's side of the heartbeat: a few microseconds a call, no lock, no thread."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = str(path)
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        self._now: dict[str, Any] = asdict(Heartbeat(rank, os.getpid()))
        self.write()

    @property
    def step(self) -> int | None:
        """The step that the rank is in, None before the first."""
        return self._now["step"]

    def enter(self, phase: str, step: int | None = None) -> None:
        """Note that the rank enters a phase (`"forward"`), possibly of a new step."""
        self._now["phase"] = phase
        self._now["phases"] += 1
        # phases inside a step leave its number
        self._now["step"] = self._now["step"] if step is None else step
        self.write()

    def issue(self, collective: str) -> None:
        """Note that the rank is about to take part in a collective (`"all_reduce of 4096 bytes"`)."""
        self._now["collectives"] += 1
        self._now["collective"] = collective[:_LONGEST_NAME]
        self.write()

    def complete(self, collective: str) -> None:
        """Note that a collective is done (`"all_gather of GPTBlock.3 in forward"`)."""
        self._now["completed"] = collective[:_LONGEST_NAME]
        self.write()

    def write(self) -> None:
        """Write the heartbeat at once; a reader in between may see half of it, and knows by the checksum."""
        line = json.dumps(self._now).encode()
        try:
            # always 512 bytes: nothing of a longer line before is left behind a shorter one
            os.pwrite(self._file, (b"%08x " % crc32(line) + line).ljust(_HEARTBEAT_BYTES - 1) + b"\n", 0)
        except OSError as error:  # a full disk
            error.filename = self._path
            raise

    def last(self) -> Heartbeat:
        """Return the heartbeat as it was last written."""
        return Heartbeat(**self._now)


def read_heartbeats(mailbox: Mailbox, world_size: int) -> dict[int, Heartbeat]:
    """Return the heartbeats of the ranks that have one."""
    heartbeats = {rank: read_heartbeat(mailbox.of(rank, "heartbeat")) for rank in range(world_size)}
    return {rank: heartbeat for rank, heartbeat in heartbeats.items() if heartbeat is not None}


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Return one rank's heartbeat; None before the rank has started, or where it was rewritten at each of several
    looks.
    """
    for _ in range(_LOOKS):
        try:
            first = path.read_bytes().partition(b"\n")[0]
        except FileNotFoundError:
            return None
        checksum, _, line = first.rstrip().partition(b" ")
        if checksum == b"%08x" % crc32(line):
            return Heartbeat(**json.loads(line))
    return None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file of JSON lines; none when there is no file. A line that is still being written
    is left for later.
    """
    if not path.exists():
        return []
    with path.open() as lines:  # one at a time: of a long run they are many
        return [json.loads(line) for line in lines if line.endswith("\n")]


# ---- files that are read as they grow


class Tail:
    """The complete lines that a growing file has got since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._begun = path, 0, b""

    def lines(self) -> list[str]:
        """Return the new lines, without their ends; none where there is no file yet."""
        try:
            size = os.stat(self._path).st_size
        except FileNotFoundError:
            return []
        if size <= self._at:
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            new = file.read(size - self._at)  # no more: a rank may print for ever
        self._at += len(new)
        # what follows the last newline is kept until its line is complete
        *whole, self._begun = (self._begun + new).split(b"\n")
        return [_shown(line) for line in whole]

    def last(self) -> list[str]:
        """Return the new lines and the unfinished one."""
        lines, begun = self.lines(), self._begun
        self._begun = b""
        return [*lines, _shown(begun)] if begun else lines


def _shown(line: bytes) -> str:
    """Return the line as a terminal shows it: after the last carriage return."""
    # a progress bar writes "10 %\r20 %": its latest state is shown
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


class LiveOutput:
    """Hands over what the ranks of a mailbox print: `on_output(1, "a line")`; `lines` counts them."""

    def __init__(self, mailbox: Mailbox, world_size: int, on_output: OnOutput) -> None:
        self.on_output, self.lines = on_output, 0
        self._tails = [Tail(mailbox.of(rank, "out")) for rank in range(world_size)]

    def look(self) -> None:
        """Hand over the lines that are complete."""
        self._hand_over([tail.lines() for tail in self._tails])

    def flush(self) -> None:
        """Hand over everything, after the ranks have ended."""
        self._hand_over([tail.last() for tail in self._tails])

    def _hand_over(self, by_rank: list[list[str]]) -> None:
        for rank, lines in enumerate(by_rank):
            for line in lines:
                self.lines += 1
                self.on_output(rank, line)


def readable(files: Iterable[int | socket], within_s: float) -> list[int]:
    """Return the descriptors among `files` that can be read or have ended, as soon as there is one; none after
    `within_s` seconds. (`select` fails from the 1,024th open file on.)
    """
    waiting = select.poll()
    for file in files:
        waiting.register(file, select.POLLIN)
    # poll takes whole milliseconds: rounded up, it does not return early in a loop
    return [number for number, _ in waiting.poll(math.ceil(1000 * max(0.0, within_s)))]

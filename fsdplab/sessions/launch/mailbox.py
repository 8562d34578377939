"""The folder through which ranks and their caller speak: plain files, so that a rank that died has still said what it
said.

    rank0.beat          one line of JSON, rewritten in place: where the rank is now
    rank0.steps         one line of JSON a finished step
    rank0.failure       the exception that ended the rank
    rank0.stack         where a rank stood when it was asked (SIGUSR1)
    rank0.result        what the rank hands over at its end
    rank0.out, .err     what it printed
    exits.json          the exit code of each rank that ended badly
    agent.log           what torchrun, or a rank that could not even start, printed
    store               where forked ranks meet: the file of a FileStore
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

AGENT_PID = "FSDPLAB_AGENT_PID"
RANKS_STORE = "FSDPLAB_RANKS_STORE"
_BEAT_BYTES = 512  # a beat with two names of the longest kind fits
_LONGEST_NAME = 100


@dataclass(frozen=True)
class Mailbox:
    """Names of the files in one folder. `Mailbox(folder).of(1, "beat")` is `folder/rank1.beat`."""

    folder: Path

    def of(self, rank: int, kind: str) -> Path:
        """The file of one rank."""
        return self.folder / f"rank{rank}.{kind}"

    @property
    def exits(self) -> Path:
        """Exit codes of the ranks that ended badly."""
        return self.folder / "exits.json"

    @property
    def store(self) -> Path:
        """Where forked ranks meet."""
        return self.folder / "store"

    @property
    def agent_log(self) -> Path:
        """What torchrun, and a rank that could not even start, printed."""
        return self.folder / "agent.log"


@dataclass(frozen=True)
class Beat:
    """Where a rank is: the phase and the collective it entered last, how many of each it has entered so far, and its
    process id.

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


class Heartbeat:
    """The rank's side of the beat: a few microseconds a call, no lock, no thread."""

    def __init__(self, path: Path, rank: int) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        self._now: dict[str, Any] = asdict(Beat(rank, os.getpid()))
        self.write()

    @property
    def step(self) -> int | None:
        """The step that the rank is in, None before the first."""
        return self._now["step"]

    def enter(self, phase: str, step: int | None = None) -> None:
        """The rank enters a phase (`"forward"`), possibly of a new step."""
        self._now["phase"] = phase
        self._now["phases"] += 1
        self._now["step"] = self._now["step"] if step is None else step
        self.write()

    def issue(self, collective: str) -> None:
        """The rank is about to take part in a collective (`"all_reduce of 4096 bytes"`)."""
        self._now["collectives"] += 1
        self._now["collective"] = collective[:_LONGEST_NAME]
        self.write()

    def complete(self, collective: str) -> None:
        """A collective is done (`"all_gather of GPTBlock.3 in forward"`)."""
        self._now["completed"] = collective[:_LONGEST_NAME]
        self.write()

    def write(self) -> None:
        """Write the beat in one piece and always the same length, so that a reader sees an old line or a new one."""
        os.pwrite(self._file, json.dumps(self._now).ljust(_BEAT_BYTES - 1).encode() + b"\n", 0)

    def beat(self) -> Beat:
        """The beat as it was last written."""
        return Beat(**self._now)


def read_beats(mailbox: Mailbox, world_size: int) -> dict[int, Beat]:
    """The beats of the ranks that have one."""
    beats = {rank: read_beat(mailbox.of(rank, "beat")) for rank in range(world_size)}
    return {rank: beat for rank, beat in beats.items() if beat is not None}


def read_beat(path: Path) -> Beat | None:
    """One rank's beat; None before the rank has started, or in the instant in which it is rewritten."""
    try:
        return Beat(**json.loads(path.read_text()))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of JSON lines; none when there is no file. A line that is still being written is
    left for later.
    """
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]

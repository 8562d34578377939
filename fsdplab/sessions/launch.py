"""Starts the ranks, watches them, and ends them: when this module returns or raises, no process of the run is left.

The ranks are started by torch.distributed.run in a process of its own (see agent.py): no fork, so it works after CUDA was initialised
and from a notebook cell; no fixed port, so runs can stand side by side.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable, Iterator, Mapping, Sequence

from .faults import Failure, RanksFailed, Remains, failed_first, hung, not_started, too_slow
from .mailbox import Beat, Mailbox, read_beats, read_lines
from .processes import end, gone, send
from .stacks import readable

_LOOK_EVERY_S = 0.05
_ANSWER_WITHIN_S = 2.0
# After the first step, a pause this many times as long as the longest before it, and at least this long, is a hang.
_STALL_FACTOR, _STALL_LEAST_S = 20.0, 20.0
# At the time limit, ranks that move within the grace were slow, not hung; so were ranks that pause no longer than they did before.
_GRACE_S = 5.0
_STILL_MOVING_S = 2.0


@dataclass
class Progress:
    """When the ranks last moved, and the longest pause between two moves so far."""

    last: float = field(default_factory=time.monotonic)
    longest_pause: float = 0.0
    beats: dict[int, Beat] = field(default_factory=dict)

    def look(self, beats: dict[int, Beat]) -> None:
        """Take in the latest beats."""
        latest = {**self.beats, **beats}  # a beat that was being rewritten just now is missing
        if latest == self.beats:
            return
        if self.beats:
            self.longest_pause = max(self.longest_pause, self.idle)
        self.beats, self.last = latest, time.monotonic()

    @property
    def idle(self) -> float:
        """Seconds since any rank moved."""
        return time.monotonic() - self.last

    def stalled(self, world_size: int) -> bool:
        """Whether all ranks have finished a step and now none has moved for much longer than ever before."""
        trained = len(self.beats) == world_size and all(beat.step for beat in self.beats.values())
        return trained and self.idle > max(_STALL_LEAST_S, _STALL_FACTOR * self.longest_pause)

    def finished(self, world_size: int) -> bool:
        """Whether all ranks have done their work and ended; torchrun would take another half second to notice."""
        done = [beat for beat in self.beats.values() if beat.phase == "finished"]
        return len(done) == world_size and all(gone(beat.pid) for beat in done)

    @property
    def moving(self) -> bool:
        """Whether the ranks were still making progress a moment ago."""
        return bool(self.beats) and self.idle < max(_STILL_MOVING_S, self.longest_pause)


def run_ranks(
    program: Sequence[str],
    mailbox: Mailbox,
    *,
    world_size: int,
    time_limit: float,
    on_look: Callable[[], None] = lambda: None,
) -> None:
    """Run `python *program` as `world_size` ranks that speak into `mailbox`; RanksFailed when one fails or time is up.

    `on_look` is called about twenty times a second while the ranks run. An exception in it, Ctrl-C included, ends the ranks too.
    """
    mailbox.folder.mkdir(parents=True, exist_ok=True)
    agent = _starter.get()(program, mailbox, world_size)
    progress = Progress()
    try:
        failure = _watch(agent, mailbox, world_size, time_limit, progress, on_look)
    finally:
        end(agent, [beat.pid for beat in read_beats(mailbox, world_size).values()])
    if failure is not None:
        raise RanksFailed(failure)


def _start(program: Sequence[str], mailbox: Mailbox, world_size: int) -> subprocess.Popen[bytes]:
    arguments = [
        "--nnodes=1", f"--nproc-per-node={world_size}", "--max-restarts=0", "--monitor-interval=0.1",
        f"--log-dir={os.devnull}", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id={uuid.uuid4()}", "--local-addr=127.0.0.1",
    ]  # fmt: skip
    with mailbox.agent_log.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "fsdplab.sessions.agent", str(os.getpid()), str(mailbox.folder), *arguments, *program],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=rank_environment(),
            start_new_session=True,  # Ctrl-C in a terminal reaches the caller only, which then ends the ranks in order
        )


Start = Callable[[Sequence[str], Mailbox, int], "subprocess.Popen[bytes]"]
_starter: ContextVar[Start] = ContextVar("starter", default=_start)


@contextmanager
def ranks_started_by(start: Start) -> Iterator[None]:
    """Inside, `start(program, mailbox, world_size)` starts every run's agent (a session of its own), for ranks in other places than here."""
    token = _starter.set(start)
    try:
        yield
    finally:
        _starter.reset(token)


def rank_environment() -> dict[str, str]:
    """The caller's environment, so that a checkout works without being installed, each rank computes on one thread, and gloo finds loopback."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    checkout = str(Path(__file__).resolve().parents[2])
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, inherited.get("PYTHONPATH")]))
    inherited.setdefault("OMP_NUM_THREADS", "1")
    # the profiler tells stderr when it starts and stops, and that it did not see the beginning
    inherited.setdefault("KINETO_LOG_LEVEL", "99")
    inherited.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        inherited.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    return inherited


def _watch(
    agent: subprocess.Popen[bytes], mailbox: Mailbox, world_size: int, time_limit: float, progress: Progress, on_look: Callable[[], None]
) -> Failure | None:
    deadline = time.monotonic() + time_limit
    while _still_running(agent):
        progress.look(read_beats(mailbox, world_size))
        on_look()
        if progress.finished(world_size):
            return None
        if time.monotonic() > deadline or progress.stalled(world_size):
            return _late(agent, mailbox, world_size, time_limit, progress)
    on_look()
    return _ended(mailbox, world_size, progress)


def _ended(mailbox: Mailbox, world_size: int, progress: Progress) -> Failure | None:
    """What torchrun's own end means: it ends when all ranks have, or when one ended badly and it has ended the others."""
    progress.look(read_beats(mailbox, world_size))
    return None if progress.finished(world_size) else failed_first(_remains(mailbox, world_size))


def _still_running(agent: subprocess.Popen[bytes]) -> bool:
    try:
        agent.wait(_LOOK_EVERY_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _late(agent: subprocess.Popen[bytes], mailbox: Mailbox, world_size: int, time_limit: float, progress: Progress) -> Failure | None:
    if len(progress.beats) < world_size:
        return not_started(_remains(mailbox, world_size), time_limit, world_size)
    last_move, grace_ends = progress.last, time.monotonic() + _GRACE_S
    while progress.last == last_move and time.monotonic() < grace_ends:
        if not _still_running(agent):
            return _ended(mailbox, world_size, progress)
        progress.look(read_beats(mailbox, world_size))
    remains = replace(_remains(mailbox, world_size), beats=progress.beats)
    if progress.moving:
        return too_slow(remains, time_limit)
    return hung(replace(remains, stacks=_ask_for_stacks(mailbox, remains.beats)), progress.idle)


def _remains(mailbox: Mailbox, world_size: int) -> Remains:
    exits = json.loads(mailbox.exits.read_text()) if mailbox.exits.exists() else {}
    notes = {rank: read_lines(mailbox.of(rank, "failure")) for rank in range(world_size)}
    return Remains(
        exits={int(rank): code for rank, code in exits.items()},
        notes={rank: lines[0] for rank, lines in notes.items() if lines},
        beats=read_beats(mailbox, world_size),
        printed=_printed(mailbox, world_size),
    )


def _printed(mailbox: Mailbox, world_size: int) -> str:
    """What explains a rank that left no note: its standard error, or torchrun's log when it did not get that far."""
    errors = [mailbox.of(rank, "err") for rank in range(world_size)]
    texts = [path.read_text(errors="replace") for path in errors if path.exists()]
    return "\n".join(filter(None, texts)) or mailbox.agent_log.read_text(errors="replace")


def _ask_for_stacks(mailbox: Mailbox, beats: Mapping[int, Beat]) -> dict[int, str]:
    """Ask every rank where it stands; those that do not answer within two seconds are left out."""
    for beat in beats.values():
        send(beat.pid, signal.SIGUSR1)
    asked = {rank: mailbox.of(rank, "stack") for rank in beats}
    deadline = time.monotonic() + _ANSWER_WITHIN_S
    while time.monotonic() < deadline and not all(path.stat().st_size for path in asked.values()):
        time.sleep(_LOOK_EVERY_S)
    return {rank: stack for rank, path in asked.items() if (stack := readable(path.read_text(errors="replace")))}

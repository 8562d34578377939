"""Holds the ranks of one run for their caller. All starters of ranks use one protocol.

A starter forks ranks (starter.py: one process a caller, for run after run) or executes them (agent.py with torchrun:
one process a run). Each run has a pair of sockets of its own, on which a message is a line
of JSON. From the starter come

    {"pids": [...]}                    of the ranks, where it knows them
    {"left": {rank: exit code}}        as ranks end, where it sees that
    {"cannot": why}                    not all ranks could be started
    {"exits": {rank: exit code}}       at the end, at least of the ranks that ended badly
    the end of the stream              no rank is left; without "exits" before it, the starter was lost

A forking starter is asked over the same socket: a byte asks the ranks to end, the end of the stream kills them. One
that executes gets signals.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fsdplab.common.processes import descendants, name_of, send_group
from fsdplab.common.pythons import run_of
from fsdplab.sessions.launch.mailbox import Mailbox, readable

GONE_WITHIN_S = 3.0
_MOST_AT_ONCE = 1 << 16


class Ranks:
    """The ranks of one run, which has ended when all of them have.

    `left` holds the exit codes of ranks that ended before the others, `exits` in the end those that are known, but of
    ranks that were ended because others could not be started, for which `cannot` gives the reason; `lost` says that, or
    how their starter ended where it did before them.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._unread, self._ended = connection, b"", False
        self.pids: list[int] = []
        self.left: dict[int, int] = {}
        self.exits: dict[int, int] | None = None
        self.cannot: str | None = None
        self.lost: str | None = None

    def started(self) -> list[int]:
        """Return the process ids of the ranks, also of those without a heartbeat, and of what they have started, as far
        as it can be known.
        """
        return self.pids

    def running(self, within_s: float = 0.0) -> bool:
        """Return whether a rank still runs after `within_s` seconds; returns as soon as all have ended."""
        deadline = time.monotonic() + within_s
        while not self._ended and readable([self._connection], deadline - time.monotonic()):
            try:
                new = self._connection.recv(_MOST_AT_ONCE)
            except ConnectionResetError:  # it has left a request unread; what it has sent is still to be read
                continue
            # a message may come in two pieces
            *lines, self._unread = (self._unread + new).split(b"\n")
            for line in lines:
                self._hear(json.loads(line))
            # the end of the stream
            if not new:
                self._finish(self._how_lost())
        return not self._ended

    def terminate(self) -> None:
        """Ask all ranks to end."""
        raise NotImplementedError

    def kill(self) -> None:
        """End all ranks at once."""
        raise NotImplementedError

    def forget(self) -> None:
        """Hear no more of them, whatever becomes of them."""
        self._finish(None)

    def failed(self) -> dict[int, int]:
        """Return the exit codes of the ranks that ended badly."""
        return {rank: code for rank, code in (self.exits or {}).items() if code}

    def _how_lost(self) -> str | None:
        """Return how the starter ended, a sentence, once the stream has; None where it has done its work."""
        raise NotImplementedError

    def _hear(self, message: Mapping[str, Any]) -> None:
        if "cannot" in message:
            self.cannot = message["cannot"]
            self.lost = f"Not all ranks could be started: {self.cannot}."
        self.pids = message.get("pids", self.pids)
        self.left |= {int(rank): code for rank, code in message.get("left", {}).items()}
        # ranks that were ended because others could not start are not to blame
        if "exits" in message and self.lost is None:
            self.exits = {int(rank): code for rank, code in message["exits"].items()}

    def _finish(self, lost: str | None) -> None:
        self._ended, self.lost = True, self.lost or lost
        self._connection.close()


class ExecutedRanks(Ranks):
    """Ranks that a process of their own has started, with all that it has started: its group is ended with them."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        super().__init__(connection)
        self.process = process

    def started(self) -> list[int]:
        return descendants(self.process.pid)

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        send_group(self.process.pid, signal.SIGKILL)  # on which the ranks end, see parent_death.py

    def _how_lost(self) -> str | None:
        try:
            code = self.process.wait(GONE_WITHIN_S)  # it is about to end: the stream has ended
        except subprocess.TimeoutExpired:
            self.kill()
            code = max(0, self.process.wait())  # its ranks had ended before
        if code >= 0:
            return None
        return f"The launcher of the ranks was killed by {name_of(-code)}, and all ranks ended with it."


def execute(module: str, words: Sequence[object], mailbox: Mailbox, environment: Mapping[str, str]) -> ExecutedRanks:
    """Start `python -m module CONNECTION CALLER *words`, which starts ranks and tells of them over CONNECTION."""
    own, theirs = socket.socketpair()
    arguments = map(str, (theirs.fileno(), os.getpid(), *words))
    with theirs, mailbox.agent_log.open("wb") as log:
        process = subprocess.Popen(
            run_of(module, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C in a terminal reaches only the caller, which ends the ranks
        )
    return ExecutedRanks(own, process)


def tell(connection: socket.socket, **message: object) -> None:
    """Send a message of a starter to its caller, who may be gone."""
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        pass

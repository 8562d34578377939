"""The caller's side of the warm starter: one process a caller, started early, and replaced when it is out of date.

    begin()                      in the background: importing torch takes it two seconds
    start(program, ...)          forks the ranks of one run; waits for the starter where it is still importing
    why_not()                    why no ranks can be forked here; torchrun starts them then

A starter that was begun when its caller was another (inherited.py: LD_PRELOAD, OMP_NUM_THREADS, its user, ...), before
a source file of fsdplab changed, or that was killed, is left to its running ranks, and a new one is started.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from fsdplab.common.processes import name_of, state
from fsdplab.common.pythons import SAFE_PATH
from fsdplab.common.temporary import folder_of_this_process
from fsdplab.common.waiting import readable
from fsdplab.sessions.launch.inherited import fixed, inherited
from fsdplab.sessions.launch.mailbox import RANKS_STORE, Mailbox
from fsdplab.sessions.launch.served import GONE_WITHIN_S, Ranks

_PACKAGE = Path(__file__).resolve().parents[2]
_READY_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.05
_STANDS_STILL_S = 2.0
_STOPPED = "was stopped by SIGSTOP"
_BOOT = f"{SAFE_PATH}; from fsdplab.sessions.launch.starter import main; main(*sys.argv[1:])"


class StarterFailed(RuntimeError):
    """The warm starter could not be begun; the message is one line."""


class WarmRanks(Ranks):
    """The ranks of one run that a starter has forked; they meet in the file `store`."""

    def __init__(self, starter: _Starter, connection: socket.socket, store: Path) -> None:
        super().__init__(connection)
        self._starter, self._store = starter, store

    def wait(self, timeout: float) -> int:
        try:
            return super().wait(timeout)
        except subprocess.TimeoutExpired:
            if not self._starter.stands_still:
                raise
        self._starter.end(signal.SIGKILL)  # its ranks end with it
        self._finish(_lost(_STOPPED))
        return 0

    def terminate(self) -> None:
        """Ask all ranks to end; two seconds later they are killed."""
        with suppress(OSError):  # the starter is gone, and its ranks with it
            self._connection.send(b"e")

    def kill(self) -> None:
        """End all ranks at once; the starter too, if it does not answer."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)  # on which the starter kills remaining ranks
        self._read(GONE_WITHIN_S)
        if not self._ended:
            # a stopped starter, for example; its ranks end with it, and the next run starts another
            self._starter.end()
            self._finish(None)

    def _how_lost(self) -> str | None:
        return None if self.exits is not None or self.lost else _lost(self._starter.how_it_ended())

    def _finish(self, lost: str | None) -> None:
        super()._finish(lost)
        self._store.unlink(missing_ok=True)


def _lost(how: str) -> str:
    return (
        f"The warm starter, the process that forks the ranks, {how}, and all ranks ended with it. The next run starts a"
        " new one."
    )


class _Starter:
    """One starter process and the socket to it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.owner, self.key = os.getpid(), _key(environment)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the starter)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [str(theirs.fileno()), str(os.getpid())]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, *words],
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, pass_fds=(theirs.fileno(),),
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # numpy would start threads, which no fork may have
                start_new_session=True,  # Ctrl-C in a terminal reaches the caller only
            )  # fmt: skip
        finally:
            theirs.close()
        self._ready: dict[str, Any] = {}
        self._stopped_at = math.inf
        self._hearing = threading.Lock()

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a rank forked by it equals one started now, or it has said that it cannot fork."""
        lives = not self.gone or self.owner == os.getpid() and bool(self._ready.get("why_not"))
        return lives and self.key == _key(environment)

    def wait_until_ready(self, on_look: Callable[[], None]) -> None:
        """Return when it has imported everything, calling `on_look()` meanwhile; StarterFailed when it cannot."""
        deadline = time.monotonic() + _READY_WITHIN_S
        while not self._read_ready():
            if time.monotonic() > deadline:
                raise StarterFailed(f"the warm starter was not ready within {_READY_WITHIN_S:g} s")
            if self.stands_still:
                self.end(signal.SIGKILL)
                raise StarterFailed(f"the warm starter {_STOPPED}")
            on_look()
        if self._ready["why_not"]:
            raise StarterFailed(str(self._ready["why_not"]))

    def _read_ready(self) -> bool:
        with self._hearing:
            if not self._ready and readable([self._control], _LOOK_EVERY_S):
                message = self._control.recv(1 << 16)
                if not message:
                    raise StarterFailed(f"the warm starter {self.how_it_ended()}{self._output()}")
                self._ready = json.loads(message)
        return bool(self._ready)

    def fork(self, request: Mapping[str, object], store: Path) -> WarmRanks:
        """Send a request, with a socket for this run alone; in a file, for the environment may be longer than a
        packet.
        """
        own, theirs = socket.socketpair()
        folder = os.open(".", os.O_PATH)  # it may have been deleted, or have a path that is too long
        try:
            with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
                json.dump(request, file)
                file.seek(0)
                socket.send_fds(self._control, [b"r"], [theirs.fileno(), file.fileno(), folder])
        except OSError as error:
            own.close()
            raise StarterFailed(f"the warm starter {self.how_it_ended()}") from error
        finally:
            theirs.close()
            os.close(folder)
        return WarmRanks(self, own, store)

    def retire(self) -> None:
        """Send no more requests: it ends when its last run has."""
        if self.owner == os.getpid():
            self._control.close()
            self._log.close()

    @property
    def gone(self) -> bool:
        """Whether it has ended, or belongs to the process that this one was forked from."""
        return self.owner != os.getpid() or self.process.poll() is not None

    @property
    def stands_still(self) -> bool:
        """Whether it was stopped (SIGSTOP) some seconds ago, and has not gone on."""
        if state(self.process.pid)[0] != "T":
            self._stopped_at = math.inf
        elif self._stopped_at == math.inf:
            self._stopped_at = time.monotonic()
        return time.monotonic() - self._stopped_at > _STANDS_STILL_S

    def end(self, by: signal.Signals = signal.SIGTERM) -> None:
        """End it and all its ranks."""
        if self.owner != os.getpid():  # this process was forked from the one that began it
            return
        self._control.close()
        self.process.send_signal(by)
        try:
            self.process.wait(GONE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def how_it_ended(self) -> str:
        """`"was killed by SIGKILL"`; waits a moment for the system to know."""
        try:
            code = self.process.wait(GONE_WITHIN_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {name_of(-code)}" if code < 0 else f"ended with exit code {code}"

    def _output(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


_lock = threading.Lock()
_starters: list[_Starter] = []  # the last one gets requests; earlier ones only finish their runs


def why_not() -> str | None:
    """Why this system cannot fork ranks, in one line; None where it can."""
    if sys.platform != "linux":
        return f"ranks are forked on Linux only, and this is {sys.platform}"
    if not hasattr(os, "pidfd_open"):
        return "this Python has no os.pidfd_open, by which the starter sees its caller end"
    return None


def tried(environment: Mapping[str, str]) -> str | None:
    """Why no rank can be forked here, in one line, as a starter finds; None where one can."""
    if (refused := why_not()) is not None:
        return refused
    with _lock:
        starter = _fitting(environment)
    try:
        starter.wait_until_ready(lambda: None)
    except StarterFailed as failed:
        return str(failed)
    return None


def begin(environment: Mapping[str, str]) -> None:
    """Begin the starter in the background, unless one that fits is there; does nothing where ranks cannot be forked."""
    if why_not() is None:
        with _lock:
            _fitting(environment)


def start(
    program: Sequence[str],
    mailbox: Mailbox,
    world_size: int,
    environment: Mapping[str, str],
    on_look: Callable[[], None],
) -> WarmRanks:
    """Fork the ranks of one run, each as `python *program` would be; StarterFailed if that fails.

    While the starter still imports, `on_look()` is called about twenty times a second until it is ready.
    """
    mailbox.agent_log.touch()
    with _lock:
        starter = _fitting(environment)
    starter.wait_until_ready(on_look)
    # the ranks meet in a file, which they lock: the folder of a record may lie on a file system without locks
    store = folder_of_this_process() / f"store-{uuid.uuid4().hex}"
    ranks = {"program": list(program), "world_size": world_size, "log": str(mailbox.agent_log)}
    own = {"environment": {**environment, RANKS_STORE: str(store)}, "inherited": inherited()}
    return starter.fork({**ranks, **own}, store)


def starter_pid() -> int | None:
    """The process id of this caller's starter; None where there is none."""
    return _starters[-1].process.pid if _starters and not _starters[-1].gone else None


@atexit.register
def end() -> None:
    """End the starter, and the ranks that it may still have; the next run begins a new one."""
    with _lock:
        while _starters:
            _starters.pop().end()


def _fitting(environment: Mapping[str, str]) -> _Starter:
    if not _starters or not _starters[-1].fits(environment):
        for old in list(_starters):
            old.retire()
            if old.gone:
                _starters.remove(old)
        _starters.append(_Starter(environment))
    return _starters[-1]


def _key(environment: Mapping[str, str]) -> tuple[object, ...]:
    """The conditions to reuse a starter: equal interpreter, source files of fsdplab, and what no fork can change."""
    return sys.executable, _sources(str(_PACKAGE)), fixed(environment)


def _sources(folder: str) -> tuple[tuple[str, int, int], ...]:
    """Path, time of change and size of every Python file: 2 ms for the whole package."""
    found: list[tuple[str, int, int]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                found += _sources(entry.path) if entry.name != "__pycache__" else ()
            elif entry.name.endswith(".py"):
                with suppress(FileNotFoundError):  # deleted just now, or an editor's lock: a link to nowhere
                    status = entry.stat()
                    found.append((entry.path, status.st_mtime_ns, status.st_size))
    return tuple(sorted(found))

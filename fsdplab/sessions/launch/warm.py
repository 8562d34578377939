"""Starts and asks the warm starter: one process a caller, started early, and replaced when it is out of date.

    begin()                      in the background: importing torch takes it two seconds
    start(program, ...)          forks the ranks of one run; waits for the starter where it is still importing
    why_not(), tried()           why no ranks can be forked here, at a look and by a trial; torchrun starts them then

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
from fsdplab.common.temporary import folder_of_this_process, temporary_folder
from fsdplab.sessions.launch.inherited import fixed, inherited, rank_environment
from fsdplab.sessions.launch.mailbox import RANKS_STORE, Mailbox
from fsdplab.sessions.launch.served import GONE_WITHIN_S, Ranks

_PACKAGE = Path(__file__).resolve().parents[2]
_READY_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.05
_STANDS_STILL_S = 2.0
_TRIAL = ("-m", "fsdplab.sessions.worker.trial")
_BOOT = f"{SAFE_PATH}; from fsdplab.sessions.launch.starter import main; main(*sys.argv[1:])"


class StarterFailed(RuntimeError):
    """The warm starter could not be begun; the message is one line."""


class WarmRanks(Ranks):
    """The ranks of one run that a starter has forked; they meet in the file `store`."""

    def __init__(self, starter: _Starter, connection: socket.socket, store: Path) -> None:
        super().__init__(connection)
        self._starter, self._store = starter, store

    def running(self, within_s: float = 0.0) -> bool:
        if super().running(within_s) and self._starter.stands_still:
            self._starter.end(signal.SIGKILL)  # its ranks end with it
            self._finish(self._how_lost())
        return not self._ended

    def terminate(self) -> None:
        """Ask all ranks to end; two seconds later they are killed."""
        with suppress(OSError):  # the starter is gone, and its ranks with it
            self._connection.send(b"e")

    def kill(self) -> None:
        """End all ranks at once; the starter too, if it does not answer."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)  # on which the starter kills remaining ranks
        if super().running(GONE_WITHIN_S):
            # a stopped starter, for example; its ranks end with it, and the next run starts another
            self._starter.end()
            self._finish(None)

    def _how_lost(self) -> str | None:
        if self.exits is not None or self.lost:
            return None
        return (
            f"The warm starter, the process that forks the ranks, {self._starter.how_it_ended()}, and all ranks ended"
            " with it. The next run starts a new one."
        )

    def _finish(self, lost: str | None) -> None:
        super()._finish(lost)
        self._store.unlink(missing_ok=True)


class _Starter:
    """One starter process, the socket to it, and its first run, a trial, which waits there while it imports."""

    def __init__(self) -> None:
        self.owner, self.key = os.getpid(), _key()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the starter)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [str(theirs.fileno()), str(os.getpid())]
        self._refused: str | None = None  # by the trial; "" where it went well
        self._stopped_at = math.inf
        self._hearing = threading.RLock()
        self._mailbox = Mailbox(temporary_folder("trial"))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, *words],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(),),
                # numpy would start threads, which no fork may have
                env={**rank_environment(), "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C in a terminal reaches the caller only
            )
            self._trial = self.fork(_TRIAL, self._mailbox, 1, "/")  # the caller's folder may be one that none may enter

    def fits(self) -> bool:
        """Return whether a rank forked by it equals one started now, or the trial has shown that it cannot fork."""
        # one that has found that it cannot fork is kept: another would find the same
        lives = not self.gone or self.owner == os.getpid() and bool(self._refused)
        return lives and self.key == _key()

    def wait_until_ready(self, on_look: Callable[[], None]) -> None:
        """Return when it has imported everything and the trial went well, calling `on_look()` meanwhile; StarterFailed
        when it did not.
        """
        deadline = time.monotonic() + _READY_WITHIN_S
        while self._tries():
            if time.monotonic() > deadline:
                raise StarterFailed(f"the warm starter was not ready within {_READY_WITHIN_S:g} s")
            on_look()
        if self._refused:
            raise StarterFailed(self._refused)

    def _tries(self) -> bool:
        """Return whether the trial goes on, after a moment."""
        with self._hearing:
            if self._refused is None:
                if self._trial.running(_LOOK_EVERY_S):
                    return True
                self._refused = self._outcome()
        return False

    def _outcome(self) -> str:
        """Return why no ranks can be forked, by the trial, which has ended; "" if they can. StarterFailed if it was
        lost.
        """
        trial = self._trial
        if trial.cannot is None and trial.exits is None:
            raise StarterFailed(f"the warm starter {self.how_it_ended()}{self._output()}")
        refused = trial.cannot or ""
        # the trial is one rank, number 0
        if code := trial.failed().get(0):
            said = self._mailbox.agent_log.read_text(errors="replace").strip().splitlines()[-1:]
            how = f"was killed by {name_of(-code)}" if code < 0 else "".join(said) or f"ended with exit code {code}"
            refused = f"a rank forked on trial failed: {how}"
        if refused:
            self.end()
        return refused

    def fork(self, program: Sequence[str], mailbox: Mailbox, world_size: int, where: str = ".") -> WarmRanks:
        """Ask for the ranks of one run, with a socket for it alone; the request is a file, for the environment may be
        longer than a packet.
        """
        mailbox.agent_log.touch()
        # the ranks meet in a file, which they lock: the folder of a record may lie on a file system without locks
        store = folder_of_this_process() / f"store-{uuid.uuid4().hex}"
        request = {
            "program": list(program),
            "world_size": world_size,
            "log": str(mailbox.agent_log),
            "environment": {**rank_environment(), RANKS_STORE: str(store)},
            "inherited": inherited(),
        }
        with _written(request) as file:
            # a pair for this run alone: its end tells that no rank is left
            own, theirs = socket.socketpair()
            folder = os.open(where, os.O_PATH)  # it may have been deleted, or have a path that is too long
            try:
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
            with self._hearing:
                self._trial.forget()

    @property
    def gone(self) -> bool:
        """Whether it has ended, or belongs to the process that this one was forked from."""
        return self.owner != os.getpid() or self.process.poll() is not None

    @property
    def stands_still(self) -> bool:
        """Whether it was stopped (SIGSTOP) some seconds ago, and has not gone on."""
        # the state in /proc: T is a stopped process
        if state(self.process.pid)[0] != "T":
            self._stopped_at = math.inf
        elif self._stopped_at == math.inf:
            self._stopped_at = time.monotonic()
        return time.monotonic() - self._stopped_at > _STANDS_STILL_S

    def end(self, by: signal.Signals = signal.SIGTERM) -> None:
        """End it and all its ranks."""
        if self.owner != os.getpid():  # this process was forked from the one that began it
            return
        self.process.send_signal(by)
        try:
            self.process.wait(GONE_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.retire()

    def how_it_ended(self) -> str:
        """`"was killed by SIGKILL"`; waits a moment for the system to know."""
        if self._stopped_at < math.inf:
            return "was stopped by SIGSTOP"
        try:
            code = self.process.wait(GONE_WITHIN_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {name_of(-code)}" if code < 0 else f"ended with exit code {code}"

    def _output(self) -> str:
        if self._log.closed:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


def _written(request: Mapping[str, Any]) -> IO[str]:
    """Return a temporary file with a request, to be read from its beginning; StarterFailed where there is no room."""
    try:
        file = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (the caller closes it)
        json.dump(request, file)
        file.seek(0)
    except OSError as error:
        raise StarterFailed(f"{tempfile.gettempdir()} takes no file ({error.strerror}); make room there") from error
    return file


_lock = threading.Lock()
_starters: list[_Starter] = []  # the last one gets requests; earlier ones only finish their runs


def why_not() -> str | None:
    """Return why this system cannot fork ranks, in one line; None where it can."""
    if sys.platform != "linux":
        return f"ranks are forked on Linux only, and this is {sys.platform}"
    if not hasattr(os, "pidfd_open"):
        return "this Python has no os.pidfd_open, by which the starter sees its caller end"
    return None


def tried() -> str | None:
    """Return why no rank can be forked here, in one line, as a starter finds; None where one can."""
    if (refused := why_not()) is not None:
        return refused
    try:
        _ready(lambda: None)
    except StarterFailed as failed:
        return str(failed)
    return None


def begin() -> None:
    """Begin the starter in the background, so that the first run need not wait for it, unless one that fits is there;
    does nothing where ranks cannot be forked.
    """
    if why_not() is None:
        # the first run that needs it raises in its place
        with _lock, suppress(StarterFailed):
            _fitting()


def start(program: Sequence[str], mailbox: Mailbox, world_size: int, on_look: Callable[[], None]) -> WarmRanks:
    """Fork the ranks of one run, each as `python *program` would be; StarterFailed if that fails.

    While the starter still imports, `on_look()` is called about twenty times a second until it is ready.
    """
    return _ready(on_look).fork(program, mailbox, world_size)


def starter_pid() -> int | None:
    """Return the process id of this caller's starter; None where there is none."""
    return _starters[-1].process.pid if _starters and not _starters[-1].gone else None


@atexit.register
def end() -> None:
    """End the starter, and the ranks that it may still have; the next run begins a new one."""
    with _lock:
        while _starters:
            _starters.pop().end()


def _ready(on_look: Callable[[], None]) -> _Starter:
    with _lock:
        starter = _fitting()
    starter.wait_until_ready(on_look)
    return starter


def _fitting() -> _Starter:
    if not _starters or not _starters[-1].fits():
        for old in list(_starters):
            # its running ranks keep it, and it gets no further ones
            old.retire()
            if old.gone:
                _starters.remove(old)
        _starters.append(_Starter())
    return _starters[-1]


def _key() -> tuple[object, ...]:
    """Return the conditions to reuse a starter: equal interpreter, source files of fsdplab, and what no fork can
    change.
    """
    return sys.executable, _sources(str(_PACKAGE)), fixed(rank_environment())


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

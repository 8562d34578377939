"""Runs the warm starter: a process that has imported what ranks need, and forks the ranks of one run after another.

    caller  ->  starter (one a caller)  ->  ranks (forked: 0.1 s for a formed group instead of 4 to 6 s for a cold
    start)

The starter imports torch and the rank side of fsdplab and does nothing else: no process group, no CUDA context, no
thread. So a fork is as good as a fresh process, and runs cannot affect each other. From its caller (warm.py) it gets a
byte for each run over its control socket, with three descriptors: the run's own socket (served.py), a file with the
request, and the working folder. The first run is a trial of one rank (worker/trial.py); a starter that cannot fork
answers it with the reason, and ends. The end of the caller ends everything.

Why not Python's own means: multiprocessing's forkserver is shared with the user's code; its children keep it alive, so
ranks that hang would survive `kill -9` of the caller; it keeps the environment of its start and cannot be restarted.
torch.distributed.elastic forks from the process that it runs in, with threads and a TCP store.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from fsdplab.common.processes import Asked, end_as_if_by, raise_when_asked, send_group
from fsdplab.common.pythons import imports_that_stay
from fsdplab.sessions.launch.inherited import as_if_fresh, signals_of_the_lab, take_over
from fsdplab.sessions.launch.mailbox import AGENT_PID
from fsdplab.sessions.launch.parent_death import adopt_orphans, end_children, end_with_parent
from fsdplab.sessions.launch.program import end_process, print_into, run_and_end
from fsdplab.sessions.launch.served import tell
from fsdplab.sessions.launch.stacks import headline

# What ranks use, also lazily: anything missing here is imported again by every rank of every run.
RANK_SIDE = (
    "numpy.ma",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.profiler",
    "fsdplab.engine.shard",
    "fsdplab.engine.features.clipping",
    "fsdplab.engine.features.offloaded_optimizer",
    "fsdplab.engine.transport.shared_memory.process_group",
    "fsdplab.sessions.worker.training",
    "fsdplab.sessions.remote_call",
    "fsdplab.sessions.worker.trial",
    "fsdplab.sessions.cell_ranks.cell_loop",
    "fsdplab.sessions.bench_engines",
    "fsdplab.workloads.moe",
    "fsdplab.workloads.parallel",
)
_OTHERS_FOLLOW_S = 0.2  # after one rank ended badly, the others may still write their failures
_TERM_S = 2.0  # then they are asked to end, and this much later killed


@dataclass
class _Run:
    """The running ranks of one run, how the others ended, and when the rest must end."""

    socket: socket.socket
    living: dict[int, int] = field(default_factory=dict)  # process id -> rank
    exits: dict[int, int] = field(default_factory=dict)
    ask_at: float | None = None
    kill_at: float | None = None

    def signal_all(self, which: signal.Signals) -> None:
        for pid in self.living:
            send_group(pid, which)

    def end_soon(self, wait_s: float) -> None:
        if self.ask_at is None:
            self.ask_at = time.monotonic() + wait_s
            self.kill_at = self.ask_at + _TERM_S


def main(descriptor: str, caller: str) -> None:
    """Import, and fork on request until the caller is gone."""
    signals_of_the_lab()
    os.chdir("/")  # the caller's folder may be unmounted or deleted meanwhile
    with imports_that_stay():
        for module in RANK_SIDE:
            if os.getppid() == int(caller):
                importlib.import_module(module)
    control = socket.socket(fileno=int(descriptor))
    if os.getppid() != int(caller):
        os._exit(0)  # taking torch apart would take a second
    if (why_not := _why_not()) is not None:
        connection, *_ = socket.recv_fds(control, 1, 3)[1]
        tell(socket.socket(fileno=connection), cannot=why_not)
        os._exit(0)
    try:
        _Starter(control, int(caller)).serve()
    except (_Left, ProcessLookupError):  # also before it could be watched
        pass
    except Asked:
        end_as_if_by(signal.SIGTERM)
    os._exit(0)


def _why_not() -> str | None:
    """Return why this process cannot serve runs, as far as it shows before the first; None if it can."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return (
            f"the warm starter has {threads} threads after importing (look at sitecustomize.py and at what it loads),"
            " and only one survives a fork"
        )
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        return f"the warm starter cannot see its caller end: os.pidfd_open failed ({headline(error)})"
    return None


class _Starter:
    """What is registered in the selector belongs to the starter alone; its data is called when it can be read."""

    def __init__(self, control: socket.socket, caller: int) -> None:
        adopt_orphans()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # it watches each rank by a descriptor
        raise_when_asked()
        self.control, self.runs = control, list[_Run]()
        self.asked = True  # whether requests may still come
        self.selector = selectors.DefaultSelector()
        self._watch(control, self._accept)
        self._watch(os.pidfd_open(caller), self._caller_has_ended)

    def serve(self) -> None:
        """Until the caller has died, or has asked for the last run and it has ended."""
        try:
            while self.asked or self.runs:
                due = [at for run in self.runs for at in (run.ask_at, run.kill_at) if at is not None]
                # until the next deadline of a run; without one until something can be read
                timeout = max(0.0, min(due) - time.monotonic()) if due else None
                for key, _ in self.selector.select(timeout):
                    key.data()
                for run in list(self.runs):
                    self._follow(run)
        finally:
            for run in self.runs:
                run.signal_all(signal.SIGKILL)
            end_children()

    def _watch(self, file: socket.socket | int, read: Callable[[], None]) -> None:
        self.selector.register(file, selectors.EVENT_READ, read)

    def _caller_has_ended(self) -> None:
        raise _Left

    def _accept(self) -> None:
        """Accept a request, and fork its ranks."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self.control, 1, 3)
        except ConnectionError:
            message = b""
        if not message:  # the caller has closed its side and uses another starter now
            self.asked = False
            self.selector.unregister(self.control)
            return
        connection, content, folder = descriptors
        run = _Run(socket.socket(fileno=connection))
        with open(content, encoding="utf-8") as file:
            request = json.load(file)
        self.runs.append(run)
        self._watch(run.socket, partial(self._read_run_socket, run))
        try:
            for rank in range(request["world_size"]):
                pid = os.fork()
                if pid == 0:
                    self._become_rank(request, folder, rank)
                run.living[pid] = rank
                ended = os.pidfd_open(pid)
                self._watch(ended, partial(self._reap, run, pid, ended))
        except OSError as error:  # a limit on processes
            tell(run.socket, cannot=f"the warm starter cannot fork ({headline(error)})")
            run.end_soon(0.0)
        os.close(folder)
        tell(run.socket, pids=list(run.living))

    def _become_rank(self, request: Mapping[str, Any], folder: int, rank: int) -> NoReturn:
        """In the child: close what is the starter's, and be a rank; this process never returns."""
        try:
            signals_of_the_lab()
            # a copy of another run's socket in this child would hide the end of its stream
            for key in list(self.selector.get_map().values()):
                key.fileobj.close() if isinstance(key.fileobj, socket.socket) else os.close(key.fd)
            self.selector.close()
            be_rank(request, folder, rank)
        finally:
            os._exit(1)

    def _read_run_socket(self, run: _Run) -> None:
        """End the run: the caller asks for that, or has closed its side."""
        try:
            asked = run.socket.recv(64)
        except ConnectionError:
            asked = b""
        if asked == b"":
            self.selector.unregister(run.socket)
            run.signal_all(signal.SIGKILL)
        else:
            run.end_soon(0.0)

    def _reap(self, run: _Run, pid: int, ended: int) -> None:
        """Take the exit code of a rank that has ended, end what it has started, and soon the others if it failed."""
        self.selector.unregister(ended)
        os.close(ended)
        send_group(pid, signal.SIGKILL)  # before its id is reused
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        rank = run.living.pop(pid)
        run.exits[rank] = code
        end_children(but={pid for run in self.runs for pid in run.living})  # what it has started in another session
        tell(run.socket, left={rank: code})
        if code != 0:
            run.end_soon(_OTHERS_FOLLOW_S)

    def _follow(self, run: _Run) -> None:
        """Ask or kill the ranks where it is time to; report the exit codes after the last."""
        now = time.monotonic()
        if run.ask_at is not None and now >= run.ask_at:
            run.signal_all(signal.SIGTERM)
            run.ask_at = None
        if run.kill_at is not None and now >= run.kill_at:
            run.signal_all(signal.SIGKILL)
            run.kill_at = None
        if not run.living:
            tell(run.socket, exits=run.exits)
            with suppress(KeyError):  # the caller has closed its side before
                self.selector.unregister(run.socket)
            run.socket.close()
            self.runs.remove(run)


class _Left(Exception):
    """The caller has ended."""


def be_rank(request: Mapping[str, Any], folder: int, rank: int) -> NoReturn:
    """Run as rank `rank` of the request in this forked process, with its own session, environment, folder and
    program.
    """
    os.setsid()
    print_into(request["log"], request["log"])
    try:
        _become(request, folder, rank)
    except (OSError, ValueError) as error:  # nothing of the program's own has run: its cause is one line
        print(f"It could not take over what its caller has: {headline(error)}", file=sys.stderr)
        end_process(1)
    run_and_end(request["program"])


def _become(request: Mapping[str, Any], folder: int, rank: int) -> None:
    starter, world_size = os.getppid(), request["world_size"]
    end_with_parent(starter)
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": 0,
        AGENT_PID: starter,
    }
    os.fchdir(folder)
    os.close(folder)
    take_over(request["inherited"])
    as_if_fresh(request["environment"], {name: str(value) for name, value in variables.items()})

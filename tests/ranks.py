"""Real ranks for the engine's tests, forked from a process that has imported torch: 0.1 s a call, and no test sees what
another left behind.

`ranks(world_size, function, *arguments)` runs `function(*arguments)` on that many ranks of a fresh gloo process group
and returns what each rank returned. A rank that raises or dies fails the test with its traceback or exit code, a call
that outlives its time limit with the ranks that gave no answer; either way the ranks have ended when the call returns.
`ranks.ends(...)` does not fail: it tells how each rank ended, for tests in which ranks are meant to die.

Each rank gives its answer through a pipe to the mother, and then waits until all have: one that left before its peers
had connected to it would hang them. The mother imports the test's module too, once for all ranks of all its calls.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import selectors
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from fsdplab.common.pythons import imports_that_stay
from fsdplab.sessions.launch.parent_death import end_with_parent

TIME_LIMIT = 120.0
# when one rank has failed, those that wait for it in a collective are not waited for longer than this
_OTHERS_FOLLOW_S = 15.0
_START_LIMIT = 120.0
_PRELOAD = (
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint", "torch.profiler",
    "fsdplab.engine.shard", "fsdplab.engine.features.clipping", "fsdplab.engine.features.offloaded_optimizer",
    "fsdplab.checkpoint.state", "fsdplab.workloads.moe", "fsdplab.workloads.parallel",
    "fsdplab.workloads.text", "pytest",
)  # fmt: skip


def transports() -> tuple[str, ...]:
    """The transports between CPU ranks of this machine: shared memory is for Linux on x86-64."""
    from fsdplab.engine.transport.shared_memory.arena import machine_of_this_rank

    return ("shm", "gloo") if machine_of_this_rank() else ("gloo",)


class RankFailed(AssertionError):
    """A rank raised, died or outlived the time limit."""


class RankPool:
    """The process that forks ranks; begun at the first call, and again after a call that it did not answer."""

    def __init__(self) -> None:
        self._mother: tuple[Any, Connection] | None = None
        self._largest_call = 0

    def largest_call(self) -> int:
        """The largest number of ranks that was asked for since this was last asked."""
        largest, self._largest_call = self._largest_call, 0
        return largest

    def __call__(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        answers = self._answers(world_size, _OTHERS_FOLLOW_S, function, arguments)
        failures = [f"rank {rank}:\n{text}" for rank, (fine, text) in enumerate(answers) if not fine]
        if failures:
            raise RankFailed("\n".join(failures))
        return [value for _, value in answers]

    def ends(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank returned, or its traceback, or "died with exit code -9", or "gave no answer in time"."""
        return [end for _, end in self._answers(world_size, TIME_LIMIT, function, arguments)]

    def _answers(
        self, world_size: int, others_follow_s: float, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> list[tuple[bool, Any]]:
        self._largest_call = max(self._largest_call, world_size)
        process, connection = self._begun()
        with tempfile.TemporaryDirectory() as folder:
            call = pickle.dumps((function, arguments))
            connection.send_bytes(pickle.dumps((world_size, str(Path(folder) / "store"), others_follow_s, call)))
            try:
                if not connection.poll(TIME_LIMIT + _START_LIMIT):
                    raise EOFError
                return pickle.loads(connection.recv_bytes())
            except EOFError:
                self.close()
                raise RankFailed(
                    f"the process that forks the ranks gave no answer; its exit code is {process.exitcode}"
                ) from None

    def _begun(self) -> tuple[Any, Connection]:
        if self._mother is None:
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            self._mother = process, ours
        return self._mother

    def close(self) -> None:
        """End the mother, and the ranks with her."""
        if self._mother is not None:
            process, connection = self._mother
            process.kill()
            process.join()
            connection.close()
            self._mother = None


# ---- the mother


def _serve(connection: Connection, parent: int) -> None:
    end_with_parent(parent)
    # asking whether there is a GPU starts CUDA otherwise, which no fork survives
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    with imports_that_stay():
        for module in _PRELOAD:
            importlib.import_module(module)
    import torch

    torch.set_num_threads(1)
    try:
        while True:
            connection.send_bytes(pickle.dumps(_answers(*pickle.loads(connection.recv_bytes()))))
    except EOFError:
        return


def _answers(world_size: int, store: str, others_follow_s: float, call: bytes) -> list[tuple[bool, Any]]:
    """Fork the ranks of one call, collect what they say, end them."""
    try:
        function, arguments = pickle.loads(call)
    except Exception:
        return [(False, traceback.format_exc())]
    all_done, still_working = os.pipe()
    forked = [
        _fork(rank, world_size, store, lambda: function(*arguments), all_done, still_working)
        for rank in range(world_size)
    ]
    os.close(all_done)
    _collect(forked, others_follow_s)
    os.close(still_working)
    for rank in forked:
        if not rank.said_all:
            os.kill(rank.pid, signal.SIGKILL)
    exits = [os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1]) for rank in forked]
    return [rank.answer(code) for rank, code in zip(forked, exits)]


@dataclass
class _Forked:
    """One rank as the mother sees it."""

    pid: int
    pipe: int
    said: bytes = b""
    said_all: bool = False

    def answer(self, exit_code: int) -> tuple[bool, Any]:
        if self.said:
            return pickle.loads(self.said)
        how = f"died with exit code {exit_code}" if self.said_all else "gave no answer in time"
        return False, how

    @property
    def failed(self) -> bool:
        return self.said_all and not (self.said and pickle.loads(self.said)[0])


def _fork(
    rank: int, world_size: int, store: str, call: Callable[[], Any], all_done: int, still_working: int
) -> _Forked:
    pipe, mouth = os.pipe()
    mother, pid = os.getpid(), os.fork()
    if pid == 0:
        os.close(still_working)
        os.close(pipe)
        faulthandler.enable()  # a rank that is killed by its own fault says where it was
        _be_rank(mother, rank, world_size, store, call, mouth, all_done)
    os.close(mouth)
    return _Forked(pid, pipe)


def _collect(ranks: list[_Forked], others_follow_s: float) -> None:
    """Until each rank has closed its pipe or the time is up, which is sooner once one of them has failed."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.pipe, selectors.EVENT_READ, rank)
        deadline = time.monotonic() + TIME_LIMIT
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(deadline - time.monotonic()):
                if part := os.read(key.fd, 1 << 20):
                    key.data.said += part
                    continue
                key.data.said_all = True
                selector.unregister(key.fd)
                if key.data.failed:
                    deadline = min(deadline, time.monotonic() + others_follow_s)
    for rank in ranks:
        os.close(rank.pipe)


# ---- a rank


def _be_rank(
    mother: int, rank: int, world_size: int, store: str, call: Callable[[], Any], mouth: int, all_done: int
) -> NoReturn:
    try:
        end_with_parent(mother)
        answer = _answer_of(rank, world_size, store, call)
        with open(mouth, "wb") as file:
            file.write(answer)
        os.read(all_done, 1)  # its end, when the mother has heard all
        _leave_group()
        os._exit(0)
    finally:
        os._exit(1)


def _answer_of(rank: int, world_size: int, store: str, call: Callable[[], Any]) -> bytes:
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size, store=dist.FileStore(store, world_size))
        return pickle.dumps((True, call()))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _leave_group() -> None:
    import torch.distributed as dist

    from fsdplab.engine.transport.selection import forget_destroyed

    if dist.is_initialized():
        dist.destroy_process_group()
    forget_destroyed()

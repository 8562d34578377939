"""A pool of real rank processes shared by the engine's tests: importing torch once per process, not once per test.

`ranks(world_size, function, *arguments)` runs `function(*arguments)` on that many ranks of a fresh gloo process group
and returns what each rank returned. A rank that raises fails the test with its traceback; a call that outlives its time
limit ends the pool's processes, and the next call starts new ones.
"""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable

TIME_LIMIT = 120.0


class RankFailed(AssertionError):
    """A rank of the pool raised, died or outlived the time limit."""


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    from fsdplab.engine.choose import forget_destroyed

    torch.set_num_threads(1)
    while (task := connection.recv()) is not None:
        function, arguments, rank, world_size, store = task
        try:
            dist.init_process_group("gloo", rank=rank, world_size=world_size, store=dist.FileStore(store, world_size))
            reply = (True, function(*arguments))
        except BaseException:
            reply = (False, traceback.format_exc())
        connection.send(reply)
        connection.recv()  # a rank that left before its peers had connected to it would hang them
        if dist.is_initialized():
            dist.destroy_process_group()
        del reply
        forget_destroyed()
        gc.collect()


class RankPool:
    """Processes that wait for work; as many as the largest world size asked for so far."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._members: list[tuple[Any, Connection]] = []

    def __call__(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        self._grow(world_size)
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            for rank, (_, connection) in enumerate(self._members[:world_size]):
                connection.send((function, arguments, rank, world_size, store))
            replies = self._collect(world_size)
            for _, connection in self._members[:world_size]:
                connection.send("everybody is done")
        failures = [f"rank {rank}:\n{text}" for rank, (fine, text) in enumerate(replies) if not fine]
        if failures:
            raise RankFailed("\n".join(failures))
        return [value for _, value in replies]

    def _collect(self, world_size: int) -> list[tuple[bool, Any]]:
        deadline = time.monotonic() + TIME_LIMIT
        replies: list[tuple[bool, Any]] = []
        for rank, (process, connection) in enumerate(self._members[:world_size]):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise RankFailed(f"rank {rank} gave no answer within {TIME_LIMIT:.0f} s")
            try:
                replies.append(connection.recv())
            except EOFError:
                self.close()
                raise RankFailed(f"rank {rank} died with exit code {process.exitcode}") from None
        return replies

    def _grow(self, world_size: int) -> None:
        while len(self._members) < world_size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def close(self) -> None:
        """End every process."""
        for process, connection in self._members:
            process.kill()
            process.join()
            connection.close()
        self._members = []

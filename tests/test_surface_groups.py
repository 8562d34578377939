"""Process groups of other backends than gloo and NCCL: torch's threaded and fake test backends, and one in Python."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from fsdplab import engine
from fsdplab.engine import events
from fsdplab.engine.transport.selection import transport_of
from fsdplab.engine.transport.staged import StagedTransport
from tests.surface import Net, close, error_of, gradients, loss_of, sharded, twin_gradients

CPU = torch.device("cpu")

THREADS = """
import threading
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg
from fsdplab.engine import fully_shard
from tests.surface import Net, data

RANKS = 3
torch._C._distributed_c10d._set_thread_isolation_mode(True)
store, world, failures = dist.HashStore(), _install_threaded_pg(), []
expected = Net()
for number in range(RANKS):
    expected(torch.randn(4, 8, generator=torch.Generator().manual_seed(number + 1))).square().mean().backward()

def rank(number):
    try:
        dist.init_process_group("threaded", rank=number, world_size=RANKS, store=store)
        model, mesh = MODELS[number], init_device_mesh("cpu", (RANKS,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(2):
            model.zero_grad()
            model(data()).square().mean().backward()
        for (name, parameter), twin in zip(model.named_parameters(), expected.parameters()):
            torch.testing.assert_close(parameter.grad.full_tensor(), twin.grad / RANKS, msg=name)
    except BaseException as error:
        failures.append((number, repr(error)))
        raise

MODELS = [Net() for _ in range(RANKS)]
threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(RANKS)]
[thread.start() for thread in threads]
[thread.join(60) for thread in threads]
assert not failures, failures
assert not any(thread.is_alive() for thread in threads), "a thread still waits"
print("three threads are three ranks")
"""


def test_threads_as_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", THREADS], cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0 and "three threads are three ranks" in done.stdout, done.stderr[-3000:]


FAKE = """
import torch, torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from fsdplab.engine import fully_shard
from tests.surface import Net

dist.init_process_group("fake", rank=3, world_size=8, store=FakeStore())
model = Net()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
with CommDebugMode() as seen:
    model(torch.randn(4, 8)).square().mean().backward()
counts = {str(op).removeprefix("c10d."): n for op, n in seen.get_comm_counts().items()}
assert sum(n for op, n in counts.items() if "allgather" in op) == 7, counts
assert sum(n for op, n in counts.items() if "reduce_scatter" in op) == 4, counts
print("one rank of eight")
"""


def test_a_fake_group_of_many_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAKE], cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0 and "one rank of eight" in done.stdout, done.stderr[-3000:]


class InPython(dist.ProcessGroup):
    """A process group written in Python: it hands everything to gloo, and has no backend of its own."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner = inner

    def getBackendName(self) -> str:
        return "in_python"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._inner.allreduce(tensors, opts or dist.AllreduceOptions())

    def _allgather_base(self, output: Any, source: Any, opts: Any = None) -> Any:
        return self._inner._allgather_base(output, source, opts or dist.AllgatherOptions())

    def _reduce_scatter_base(self, output: Any, source: Any, opts: Any = None) -> Any:
        return self._inner._reduce_scatter_base(output, source, opts or dist.ReduceScatterOptions())

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # their names since torch 2.13

    def barrier(self, opts: Any = None) -> Any:
        return self._inner.barrier(opts or dist.BarrierOptions())


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    inner = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    inner._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
    inner._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return InPython(inner)


def over_python(listening: bool) -> list[str]:
    if "IN_PYTHON" not in dist.Backend._plugins:
        dist.Backend.register_backend("in_python", _create, devices=["cpu"])
    group = dist.new_group(backend="in_python")
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    model, twin, heard = sharded(engine, mesh=mesh), Net(), []
    unsubscribe = events.subscribe(heard.append) if listening else None
    with CommDebugMode():
        loss_of(model).backward()
    if unsubscribe:
        unsubscribe()
    close(gradients(model), twin_gradients(twin))
    refused = error_of(lambda: transport_of(group, CPU, "shm"))
    assert isinstance(transport_of(group, CPU), StagedTransport) and refused == "ValueError"
    return [event.kind for event in heard if isinstance(event, events.Collective)]


def test_a_group_written_in_python(ranks) -> None:
    ranks(2, over_python, False)
    assert ranks(2, over_python, True)[0].count("reduce_scatter") == 4

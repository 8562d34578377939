"""Miniature traces of a GPU rank as Kineto writes them, with answers that can be checked by eye.

A real FSDP2 trace of several GPUs is large, and nobody knows its right answers. Here a test says when the host launched
each piece of work and when the device did it, in microseconds; correlation numbers, streams and NCCL's arguments are
written as Kineto does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HOST, DEVICE = 4242, 0  # processes: the host's, and the GPU's, which Kineto numbers from 0
MAIN, BACKWARD = 4242, 4300  # threads of the host
COMPUTE, COMM, COPY = 7, 20, 24  # streams
_NCCL = {
    "all_gather": ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "_allgather_base"),
    "reduce_scatter": ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                       "_reduce_scatter_base"),
    "all_reduce": ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "allreduce"),
    "send_recv": ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send"),
    "all_to_all": ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "all_to_allv"),
}  # fmt: skip


class GpuRank:
    """One rank's trace; every method adds events and gives the rank back, so that a step can be written as one chain.

    >>> GpuRank().step(3, 0, 10).kernel(2, 100, 200).write("rank0.json")       # doctest: +SKIP
    """

    def __init__(
        self, rank: int = 0, world_size: int = 2, correlated: bool = True, base: int = 0, backend: str = "nccl",
        **around: Any,
    ) -> None:  # fmt: skip
        self.rank, self.world_size, self.base, self.backend = rank, world_size, base, backend
        self.around = around  # what stands around the events besides, such as `deviceProperties`
        self.events: list[dict[str, Any]] = []
        self._next = 1 if correlated else None

    def step(self, number: int, start: float, end: float) -> GpuRank:
        """The host's range of one step."""
        return self.range(f"ProfilerStep#{number}", start, end)

    def range(self, name: str, start: float, end: float, thread: int = MAIN, **arguments: Any) -> GpuRank:
        """A `record_function` range of the host."""
        return self._add("user_annotation", name, start, end, HOST, thread, arguments)

    def operator(self, name: str, start: float, end: float, thread: int = MAIN, **arguments: Any) -> GpuRank:
        """An operator of the host."""
        return self._add("cpu_op", name, start, end, HOST, thread, arguments)

    def kernel(
        self, launched: float | None, start: float, end: float, name: str = "sm90_gemm", stream: int = COMPUTE,
        thread: int = MAIN, **arguments: Any,
    ) -> GpuRank:  # fmt: skip
        """A kernel, and its launch by the host (None: before the trace began)."""
        return self._device("kernel", "cudaLaunchKernel", name, launched, start, end, stream, thread, arguments)

    def nccl(
        self, kind: str, launched: float | None, start: float, end: float, stream: int = COMM, elements: int = 1024,
        thread: int = MAIN, group: str = "default_pg", number: str = "0", ranks: Sequence[int] | None = None,
        size: int | None = None, **more: Any,
    ) -> GpuRank:  # fmt: skip
        """A kernel of NCCL's, with its arguments; `number` is what PyTorch calls the group, `ranks` are its members, as
        newer profilers write them. `more` are further arguments, None for one that is missing.
        """
        name, call = _NCCL[kind]
        arguments = {
            "Collective name": call, "In msg nelems": elements // 2, "Out msg nelems": elements,
            "Group size": len(ranks) if ranks else size or max(2, self.world_size), "dtype": "Float",
            "Process Group Name": number, "Process Group Description": group,
            "Process Group Ranks": None if ranks is None else str(list(ranks)), **more,
        }  # fmt: skip
        arguments = {key: value for key, value in arguments.items() if value is not None}
        return self._device("kernel", "cudaLaunchKernelExC", name, launched, start, end, stream, thread, arguments)

    def copy(
        self, launched: float | None, start: float, end: float, stream: int = COMPUTE,
        name: str = "Memcpy HtoD (Pinned -> Device)", **arguments: Any,
    ) -> GpuRank:  # fmt: skip
        """A copy by a copy engine; from the host, unless `name` says otherwise; `bytes` is an argument."""
        return self._device("gpu_memcpy", "cudaMemcpyAsync", name, launched, start, end, stream, MAIN, arguments)

    def synchronise(self, start: float, end: float) -> GpuRank:
        """The host waits for the device."""
        return self._add("cuda_runtime", "cudaStreamSynchronize", start, end, HOST, MAIN, {})

    def loader(self, start: float, end: float) -> GpuRank:
        """The host takes a batch from a DataLoader."""
        return self.range("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", start, end)

    def content(self) -> dict[str, Any]:
        """What is written to the file."""
        world = {"backend": self.backend, "rank": self.rank, "world_size": self.world_size}
        around = {"baseTimeNanoseconds": self.base, "distributedInfo": world, **self.around}
        return {**around, "traceEvents": self.events}

    def write(self, path: Path) -> Path:
        """Write the trace; returns its path."""
        path.write_text(json.dumps(self.content()))
        return path

    def _device(
        self, category: str, call: str, name: str, launched: float | None, start: float, end: float, stream: int,
        thread: int, arguments: dict[str, Any],
    ) -> GpuRank:  # fmt: skip
        arguments = {**arguments, "device": DEVICE, "stream": stream}
        if self._next is not None:
            arguments["correlation"] = self._next
            if launched is not None:
                own = {"correlation": self._next, "cbid": 211}
                self._add("cuda_runtime", call, launched, launched + 1, HOST, thread, own)
            self._next += 1
        return self._add(category, name, start, end, DEVICE, stream, arguments)

    def _add(
        self, category: str, name: str, start: float, end: float, process: int, thread: int, arguments: dict[str, Any]
    ) -> GpuRank:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "ts": start, "dur": end - start,
             "args": arguments}
        )  # fmt: skip
        return self

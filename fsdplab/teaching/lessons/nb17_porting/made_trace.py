"""Writes a simulated step as a trace of several GPUs: kernels, NCCL's and their arguments, as Kineto writes them.

It is made, and every event says so: no GPU ran. What it is good for: its right answers are known, so the reading of a
trace can be held against them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
_HOST, _DEVICE, _COMPUTE, _COMM = 4242, 0, 7, 20
_LAUNCHED_US = 5.0  # before a kernel begins
_NCCL = {
    "all_gather": ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "_allgather_base"),
    "reduce_scatter": (
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "_reduce_scatter_base",
    ),
}


def write(rows: Sequence[Row], folder: Path, ranks: int, late_us: Mapping[int, float] | None = None) -> list[Path]:
    """A trace a rank of the timeline of a simulated step. `late_us`: by how much a rank's step begins later."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _write(rows, folder / f"rank{rank}.json.gz", rank, ranks, (late_us or {}).get(rank, 0.0))
        for rank in range(ranks)
    ]


def _write(rows: Sequence[Row], path: Path, rank: int, ranks: int, late: float) -> Path:
    content = {
        "schemaVersion": 1,
        "made": "of a simulated step; no GPU ran",
        "deviceProperties": [{"id": 0, "name": "made by fsdplab"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks},
        "baseTimeNanoseconds": 0,
        "displayTimeUnit": "ms",
        "traceEvents": list(_events(rows, ranks, late)),
    }
    path.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))
    return path


def _events(rows: Sequence[Row], ranks: int, late: float) -> Iterator[dict[str, Any]]:
    for step in (1, 2):  # a reader takes the first for a warm-up where there is no other
        length = next(row["end_ns"] for row in rows if row["lane"] == "step") / 1e3 + late
        offset = 1000.0 + (step - 1) * (length + 100.0)
        yield _event("user_annotation", f"ProfilerStep#{step}", offset, length, _HOST, _HOST)
        for number, row in enumerate(each for each in rows if each["lane"] in ("compute", *_NCCL)):
            begin = offset + late + row["start_ns"] / 1e3 + _LAUNCHED_US
            takes = (row["end_ns"] - row["start_ns"]) / 1e3
            yield from _kernel(row, begin, takes, 1000 * step + number, ranks)


def _kernel(row: Row, begin: float, takes: float, correlation: int, ranks: int) -> Iterator[dict[str, Any]]:
    nccl = row["lane"] in _NCCL
    name, call = _NCCL.get(row["lane"], (f"gemm ({row['name']})", ""))
    arguments: dict[str, Any] = {"correlation": correlation, "stream": _COMM if nccl else _COMPUTE, "device": _DEVICE}
    if nccl:
        arguments |= {"Collective name": call, "Group size": ranks, "dtype": "Float", "Process Group Name": "0"}
    launch = "cudaLaunchKernelExC" if nccl else "cudaLaunchKernel"
    label = f"FSDP::{row['lane']} ({row['unit'] or 'root'})" if nccl else f"{row['name']}"
    yield _event("user_annotation", label, begin - _LAUNCHED_US, 3.0, _HOST, _HOST)
    yield _event("cuda_runtime", launch, begin - _LAUNCHED_US, 1.0, _HOST, _HOST, correlation=correlation)
    yield _event("kernel", name, begin, takes, _DEVICE, arguments["stream"], **arguments)


def _event(
    category: str, name: str, begin: float, takes: float, process: int, thread: int, **arguments: Any
) -> dict[str, Any]:
    where = {"cat": category, "name": name, "ts": begin, "dur": takes, "pid": process, "tid": thread}
    return {"ph": "X", **where, "args": {**arguments, "made": True}}

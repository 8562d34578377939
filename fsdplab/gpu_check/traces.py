"""Recorded runs: a few strategies under PyTorch's profiler, with their memory timelines, kept as run records.

These are what the notebooks on traces and memory open on a laptop. Several ranks share the one GPU where that transport
is there; on CPU two ranks run in its place.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from fsdplab.profiling.exports import traces_of
from fsdplab.profiling.traces.overlap import analyse_trace
from fsdplab.records import CATEGORIES, RunRecord
from fsdplab.records.summary import Peak
from fsdplab.sessions import RunSpec, SpecError

from .part import Sheet, first_line, part_main
from .several_ranks import REPORT_S, recorded

PARTS_OF_A_STEP = ("compute_only_ns", "overlapped_ns", "exposed_ns", "other_ns")
LARGE: dict[str, Any] = dict(model="gpt-20m", batch_size=16, sequence_length=256, precision="bf16", steps=6, profile=2)
TINY: dict[str, Any] = dict(model="gpt-tiny", batch_size=2, sequence_length=32, steps=2, profile=1)
_START_S = {"cuda": 18.0, "cpu": 6.0}  # a run is not begun with less than this


@dataclass(frozen=True)
class Job:
    """One run to record: strategy, ranks and transport."""

    strategy: str
    ranks: int
    transport: str

    @property
    def name(self) -> str:
        """The record's folder: `full_shard-2-shared_gpu`."""
        return f"{self.strategy}-{self.ranks}-{self.transport}"


ON_CUDA = (
    Job("full_shard", 2, "shared_gpu"), Job("full_shard", 1, "auto"), Job("shard_grad_op", 2, "shared_gpu"),
    Job("no_shard", 2, "shared_gpu"),
)  # fmt: skip
ON_CPU = (Job("full_shard", 2, "auto"), Job("no_shard", 2, "auto"))


def work(sheet: Sheet, device: torch.device) -> None:
    """Records as many of the jobs as the limit holds, the most telling first."""
    for job in ON_CUDA if device.type == "cuda" else ON_CPU:
        if sheet.left() < _START_S[device.type]:
            sheet.note(f"{job.name} was not recorded: {max(0.0, sheet.left()):.0f} s were left")
            continue
        with sheet.trying(f"{job.name} is recorded"):
            record_job(sheet, job, device)
    sheet.check("a run was recorded", bool(sheet.records), f"{len(sheet.records)} records", "at least 1")


def record_job(sheet: Sheet, job: Job, device: torch.device) -> None:
    """One run: its record, its row, its checks."""
    sizes = LARGE if device.type == "cuda" else TINY
    limit = max(1.0, sheet.left() - REPORT_S[device.type])
    try:
        spec = RunSpec(
            strategy=job.strategy, world_size=job.ranks, transport=job.transport, device=device.type, time_limit=limit,
            **sizes,
        )  # fmt: skip
    except SpecError as error:
        return sheet.note(f"{job.name} cannot run here: {first_line(error)}")
    record = recorded(sheet, job.name, spec)
    if record is not None:
        sheet.row(**figures(job, record))
        judge(sheet, job, record, device)


def figures(job: Job, record: RunRecord) -> dict[str, Any]:
    """The row of one record: times in ms (exposed and overlapped of the rank that exposes most), bytes, and the weight
    of its traces.
    """
    comm, peak, summary = record.summary.comm, record.summary.peak_memory_bytes, record.summary
    median = summary.step_time_s.median
    return {
        "record": job.name, "strategy": job.strategy, "ranks": job.ranks, "transport": job.transport,
        "model": record.spec["model"],
        "step_ms": None if median is None else 1e3 * median, "tokens_per_s": summary.tokens_per_s,
        "exposed_ms": None if comm.exposed_s is None else 1e3 * comm.exposed_s, "overlap": comm.overlap,
        "bytes_sent": comm.bytes_per_step, "collectives": comm.collectives_per_step,
        "peak_bytes": peak.total, "other_of_peak": other_share(peak),
        "last_loss": summary.losses[-1] if summary.losses else None,
        "memory_rows": len(record.table("memory")), "timeline_rows": len(record.table("timeline")),
        "trace_bytes": sum(path.stat().st_size for path in traces_of(record).values()),
    }  # fmt: skip


def other_share(peak: Peak) -> float | None:
    """The part of the peak that no category claims: 5 of 100 bytes is 0.05; None where memory was not measured."""
    return peak.split[CATEGORIES[-1]] / peak.total if peak.total else None


def judge(sheet: Sheet, job: Job, record: RunRecord, device: torch.device) -> None:
    """Every nanosecond of every profiled step is accounted for, the trace is of the device, and memory has its
    timeline.
    """
    sheet.check(f"{job.name} finished", record.status == "finished", record.status, "finished")
    worst = unaccounted_ns(record.table("breakdown"))
    got = "no profiled step" if worst is None else f"{worst} ns off"
    sheet.check(f"{job.name}: the parts of a step add up to it", worst == 0, got, "0 ns off")
    ledger = [row for row in record.table("ledger") if row["rank"] == 0]
    found = analyse_trace(traces_of(record)[0], ledger=ledger).device
    sheet.check(f"{job.name}: the trace shows the device's work", found == device.type, found, device.type)
    points = len(record.table("memory"))
    sheet.check(f"{job.name}: memory has a timeline", points > 1, f"{points} rows", "more than 1")


def unaccounted_ns(breakdown: list[dict[str, Any]]) -> int | None:
    """The largest gap between a step and the sum of its four parts: a step of 10 with parts 4, 3, 2, 1 gives 0; None
    without rows.
    """
    return max((abs(row["step_ns"] - sum(row[part] for part in PARTS_OF_A_STEP)) for row in breakdown), default=None)


if __name__ == "__main__":
    sys.exit(part_main("traces", work))

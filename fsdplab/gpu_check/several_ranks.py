"""Several ranks on one GPU: the transport `shared_gpu` for 2 and 4 ranks, PyTorch's FSDP2 on the same fabric, and NCCL
where it can.

What must hold is that nothing is computed wrongly: losses equal those of the unsharded twin, replayed on the CPU. Times
are shown and labelled, since ranks that take turns on a GPU say little of several GPUs. On CPU the same runs rehearse
the transport.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from fsdplab.records import RunRecord
from fsdplab.sessions import RanksFailed, RunSpec, SpecError, run
from fsdplab.sessions.spec.run_spec import MULTI_RANK_NCCL, nccl_version

from .part import Sheet, first_line, part_main

Losses = Sequence[float | None]
LARGE: dict[str, Any] = dict(model="gpt-20m", batch_size=4, sequence_length=64, steps=4)
TINY: dict[str, Any] = dict(model="gpt-tiny", batch_size=2, sequence_length=32, steps=2)
_LEAST_S = {"cuda": 18.0, "cpu": 8.0}  # a run is not begun with less than this
_MOST_S = {"cuda": 30.0, "cpu": 120.0}  # ranks that wait for each other for ever leave time for the next run
REPORT_S = {"cuda": 8.0, "cpu": 2.0}  # kept of the limit, to find out where ranks hang (`sessions/launch/launcher.py`)
# relative: a GPU's sums have another order than the CPU's, a wrong gradient shows by far more
_TOLERANCE = {"cuda": 1e-3, "cpu": 1e-6}


@dataclass(frozen=True)
class Job:
    """One run: engine, transport, ranks."""

    engine: str
    transport: str
    ranks: int

    @property
    def name(self) -> str:
        """The record's folder: `lab-2-shared_gpu`."""
        return f"{self.engine}-{self.ranks}-{self.transport}"


ON_CUDA = (
    Job("lab", "shared_gpu", 2),
    Job("torch-fsdp2", "shared_gpu", 2),
    Job("lab", "shared_gpu", 4),
    Job("lab", "nccl", 2),
)
ON_CPU = (Job("lab", "shared_gpu", 2), Job("torch-fsdp2", "shared_gpu", 2))


def work(sheet: Sheet, device: torch.device) -> None:
    """Runs as many of the jobs as the limit holds; the twins are replayed beside them."""
    jobs = ON_CUDA if device.type == "cuda" else ON_CPU
    with ThreadPoolExecutor(2) as beside:
        twins = {
            ranks: beside.submit(_twin, ranks, device, sheet.left()) for ranks in sorted({job.ranks for job in jobs})
        }
        for job in jobs:
            if job.transport == "nccl" and (found := nccl_version()) < MULTI_RANK_NCCL:
                sheet.note(
                    f"{job.name} cannot run here: NCCL takes several ranks on one GPU from 2.30 on, and torch brings"
                    f" {'.'.join(map(str, found))}"
                )
            elif sheet.left() < _LEAST_S[device.type]:
                sheet.note(f"{job.name} was not run: {max(0.0, sheet.left()):.0f} s were left")
            else:
                with sheet.trying(f"{job.name} runs"):
                    _run(sheet, job, device, twins[job.ranks])


def _sizes(device: torch.device) -> dict[str, Any]:
    return LARGE if device.type == "cuda" else TINY


def _twin(ranks: int, device: torch.device, seconds: float) -> Losses:
    """The losses of the unsharded twin of `ranks` ranks, on the CPU."""
    spec = RunSpec(
        engine="twin", world_size=ranks, device="cpu", time_limit=max(1.0, seconds - 2), memory=False, **_sizes(device)
    )
    return run(spec).summary.losses


def _run(sheet: Sheet, job: Job, device: torch.device, twin: Future[Losses]) -> None:
    limit = max(1.0, min(sheet.left() - REPORT_S[device.type], _MOST_S[device.type]))
    try:
        spec = RunSpec(
            engine=job.engine, transport=job.transport, world_size=job.ranks, device=device.type, time_limit=limit,
            **_sizes(device),
        )  # fmt: skip
    except SpecError as error:
        return sheet.check(f"{job.name} can run here", False, first_line(error), "it can")
    record = recorded(sheet, job.name, spec)
    if record is None:
        return
    sheet.row(**figures(job, record))
    _judge(sheet, job, record, twin.result(timeout=max(1.0, sheet.left() - 1)), _TOLERANCE[device.type])


def recorded(sheet: Sheet, name: str, spec: RunSpec) -> RunRecord | None:
    """The record of one run, kept with the sheet under `name`; None where it failed, which is a failed check."""
    try:
        record = run(spec, directory=sheet.folder / name)
    except RanksFailed as failed:
        print(failed, file=sys.stderr)
        sheet.check(f"{name} finishes", False, first_line(failed), "it does")
        return None
    sheet.record(name)
    return record


def figures(job: Job, record: RunRecord) -> dict[str, Any]:
    """The row of one record: step time in s (of the slowest rank), peak bytes (of the largest; the transport's arenas
    are beside it), last loss.
    """
    summary = record.summary
    return {
        "engine": job.engine, "transport": job.transport, "ranks": job.ranks,
        "times_are": record.provenance["step_time_s"],
        "step_time_s": summary.step_time_s.median, "tokens_per_s": summary.tokens_per_s,
        "peak_bytes": summary.peak_memory_bytes.total, "sent_bytes_per_step": summary.comm.bytes_per_step,
        "collectives_per_step": summary.comm.collectives_per_step, "last_loss": summary.losses[-1],
    }  # fmt: skip


def _judge(sheet: Sheet, job: Job, record: RunRecord, expected: Losses, tolerance: float) -> None:
    worst = furthest(record.summary.losses, expected)
    name, allowed = f"{job.name}: losses equal the CPU twin's", f"at most {tolerance:.0e} in {len(expected)} steps"
    sheet.check(name, worst <= tolerance, f"{worst:.1e} relative", allowed)
    label = record.provenance["step_time_s"]
    sheet.check(f"{job.name}: its times are labelled emulated", label == "emulated", label, "emulated")


def furthest(losses: Losses, expected: Losses) -> float:
    """The largest relative difference of two series of losses; infinite where one is shorter, or no number.

    >>> furthest([2.0, 1.0], [2.0, 1.25])
    0.2
    """
    pairs = [(ours, theirs) for ours, theirs in zip(losses, expected) if ours is not None and theirs is not None]
    if not len(losses) == len(expected) == len(pairs):
        return float("inf")
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


if __name__ == "__main__":
    sys.exit(part_main("several_ranks", work))

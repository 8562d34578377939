"""A recorded job beside measured runs of the lab: what it took, and what a run of the lab takes less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdplab.common.sizes import percent, seconds, size
from fsdplab.common.words import plural
from fsdplab.figures.table import scattered
from fsdplab.records import RunRecord, Spread, core_sentence
from fsdplab.records.spread import is_below

from .choices import NO_LINK, PRESETS, RANKS


def job_in(folder: str | Path) -> RunRecord:
    """The record of a job that `fsdplab record` left in `folder`; RecordError or NothingRecorded in one line."""
    from fsdplab.recording.assemble import open_record

    return open_record(folder)


def choices_beside(job: RunRecord, given: Mapping[str, Any]) -> dict[str, Any]:
    """The choices under which runs can be compared with a job: its ranks, and no link; {} for GPUs that are planned."""
    preset = PRESETS.get(given.get("preset", "laptop"))
    if preset is None or preset.gpu:
        return {}
    ranks = job.spec["world_size"]
    return {"link": NO_LINK} | ({"ranks": ranks} if ranks in RANKS else {})


def job_words(job: RunRecord, records: Sequence[RunRecord]) -> str:
    """What the job took, and the fastest run of the lab with as many ranks that is faster beyond the spread of both.

    Runs behind an emulated link do not count: the job had none.
    """
    step, peak = job.summary.step_time_s, job.summary.peak_memory_bytes.total
    took = " and ".join([f"{_with_scatter(step)} a step"] * bool(step.median) + [size(peak)] * bool(peak))
    name, ranks = job.spec.get("job") or job.path.name, plural(job.spec["world_size"], "rank")
    told = f"Your job ({name}, {job.spec['engine']} {job.spec['strategy']}, {ranks}) took {took or 'no timed step'}"
    alike = [each for each in records if each.status == "finished" and _comparable(each, job)]
    if not alike:
        return f"{told}; measure runs of {ranks} without a link to see them beside it."
    for each in (job, *alike):
        if each.summary.short_of_cores:
            return f"{told}. {core_sentence(each.summary.cpu_share or 0.0, 'your job' if each is job else '')}"
    faster = [each for each in alike if is_below(each.summary.step_time_s, step)]
    if not faster:
        return f"{told}; no measured run of the lab is faster beyond the spread of the steps."
    best = min(faster, key=lambda each: each.summary.step_time_s.median or 0.0)
    median = best.summary.step_time_s.median or 0.0
    less = percent(1 - median / (step.median or median))
    units = (best.environment.get("workload") or {}).get("units") or best.spec.get("units")
    lighter = best.summary.peak_memory_bytes.total
    memory = f" and {size(lighter)}" if lighter else ""
    takes = f"{_with_scatter(best.summary.step_time_s)}{memory}"
    return f"{told}; {best.spec['strategy']} in units of {units} takes {takes} in the lab, {less} less."


def _with_scatter(step: Spread) -> str:
    """`212 ms ±1 %`: the median and half the range of the middle half of the steps."""
    return seconds(step.median) + scattered(step.scatter)


def _comparable(record: RunRecord, job: RunRecord) -> bool:
    spec = record.spec
    return (
        spec.get("engine") == "lab" and not any(spec.get(name) for name in ("job", "link", "emulate"))
        and spec.get("world_size") == job.spec.get("world_size")
    )  # fmt: skip

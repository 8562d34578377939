"""A recorded job beside measured runs of the lab: what it took, and what a run of the lab takes less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdplab.common.sizes import percent, size
from fsdplab.common.words import plural
from fsdplab.figures.table import step_of
from fsdplab.figures.view import view
from fsdplab.records import RunRecord, core_sentence
from fsdplab.records.spread import is_below

from .choices import NO_LINK, PRESETS, RANKS


def choices_beside(job: RunRecord, given: Mapping[str, Any]) -> dict[str, Any]:
    """The choices under which runs can be compared with a job: its ranks, and no link; {} for GPUs that are planned."""
    preset, ranks = PRESETS.get(given.get("preset", "laptop")), job.spec["world_size"]
    if preset is None or preset.gpu:
        return {}
    return {"link": NO_LINK} | ({"ranks": ranks} if ranks in RANKS else {})


def job_words(job: RunRecord, records: Sequence[RunRecord]) -> str:
    """What the job took, and the fastest run of the lab with as many ranks that is faster beyond the spread of both.

    Runs behind an emulated link do not count: the job had none.
    """
    step, peak = job.summary.step_time_s, job.summary.peak_memory_bytes.total
    took = " and ".join([f"{step_of(view(job))} a step"] * bool(step.median) + [size(peak)] * bool(peak))
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
    best = view(min(faster, key=lambda each: each.summary.step_time_s.median or 0.0))
    units = (best.environment.get("workload") or {}).get("units") or best.spec.get("units")
    memory = f" and {size(best.peak)}" if best.peak else ""
    less = percent(1 - (best.step_median or 0.0) / (step.median or 1.0))
    return f"{told}; {best.strategy} in units of {units} takes {step_of(best)}{memory} in the lab, {less} less."


def _comparable(record: RunRecord, job: RunRecord) -> bool:
    spec = record.spec
    return (
        spec.get("engine") == "lab" and not any(spec.get(name) for name in ("job", "link", "emulate"))
        and spec.get("world_size") == job.spec.get("world_size")
    )  # fmt: skip

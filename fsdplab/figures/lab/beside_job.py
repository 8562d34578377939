"""A recorded job beside the runs that the lab has measured."""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.common.sizes import percent, size
from fsdplab.common.words import plural
from fsdplab.figures.table import step_of
from fsdplab.figures.view import view
from fsdplab.records import RunRecord, core_sentence
from fsdplab.records.spread import is_below


def job_words(job: RunRecord, records: Sequence[RunRecord]) -> str:
    """What the job took, and the fastest run of the lab with as many ranks that is faster beyond the spread of both.

    Runs behind an emulated link do not count: the job had none.
    """
    took = _what_it_took(job)
    ranks = plural(job.spec["world_size"], "rank")
    runs = [record for record in records if record.status == "finished" and _comparable(record, job)]
    if not runs:
        return f"{took}; measure runs of {ranks} without a link to see them beside it."
    for record in (job, *runs):
        if record.summary.short_of_cores:
            whose = "your job" if record is job else ""
            return f"{took}. {core_sentence(record.summary.cpu_share or 0.0, whose)}"
    faster = [record for record in runs if is_below(record.summary.step_time_s, job.summary.step_time_s)]
    if not faster:
        return f"{took}; no measured run of the lab is faster beyond the spread of the steps."
    fastest = min(faster, key=lambda record: record.summary.step_time_s.median or 0.0)
    return f"{took}; {_less_than(job, fastest)}"


def _what_it_took(job: RunRecord) -> str:
    """`Your job (train.py, torch-fsdp2 full_shard, 2 ranks) took 212 ms ±1 % a step and 400 MB`."""
    peak = job.summary.peak_memory_bytes.total
    amounts = []
    if job.summary.step_time_s.median:
        amounts.append(f"{step_of(view(job))} a step")
    if peak:
        amounts.append(size(peak))
    name = job.spec.get("job") or job.path.name
    ranks = plural(job.spec["world_size"], "rank")
    what = f"{name}, {job.spec['engine']} {job.spec['strategy']}, {ranks}"
    return f"Your job ({what}) took {' and '.join(amounts) or 'no timed step'}"


def _less_than(job: RunRecord, fastest: RunRecord) -> str:
    run = view(fastest)
    workload = run.environment.get("workload") or {}
    units = workload.get("units") or run.spec.get("units")
    takes = step_of(run)
    if run.peak:
        takes += f" and {size(run.peak)}"
    less = percent(1 - (run.step_median or 0.0) / (job.summary.step_time_s.median or 1.0))
    return f"{run.strategy} in units of {units} takes {takes} in the lab, {less} less."


def _comparable(record: RunRecord, job: RunRecord) -> bool:
    """A run of the lab's own engine on as many ranks, on the machine as it is."""
    spec = record.spec
    if spec.get("engine") != "lab" or spec.get("world_size") != job.spec.get("world_size"):
        return False
    return not any(spec.get(name) for name in ("job", "link", "emulate"))

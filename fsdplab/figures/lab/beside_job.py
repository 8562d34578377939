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
    runs = [record for record in records if _comparable(record, job)]
    if not runs:
        return f"{took}; measure runs of {ranks} without a link to see them beside it."
    # times that were taken on too few free cores are not compared
    for record in (job, *runs):
        if record.summary.short_of_cores:
            share = record.summary.cpu_share or 0.0
            whose = "your job" if record is job else ""
            return f"{took}. {core_sentence(share, whose)}"
    # faster beyond chance, by the scatter of both
    job_step = job.summary.step_time_s
    faster = [record for record in runs if is_below(record.summary.step_time_s, job_step)]
    if not faster:
        return f"{took}; no measured run of the lab is faster beyond the spread of the steps."
    fastest = min(faster, key=_median_step)
    return f"{took}; {_less_than(job, fastest)}"


def _median_step(record: RunRecord) -> float:
    return record.summary.step_time_s.median or 0.0


def _what_it_took(job: RunRecord) -> str:
    """`Your job (train.py, torch-fsdp2 full_shard, 2 ranks) took 212 ms ±1 % a step and 400 MB`."""
    amounts = []
    if job.summary.step_time_s.median:
        amounts.append(f"{step_of(view(job))} a step")
    peak = job.summary.peak_memory_bytes.total
    if peak:
        amounts.append(size(peak))
    took = " and ".join(amounts) or "no timed step"
    spec = job.spec
    name = spec.get("job") or job.path.name
    ranks = plural(spec["world_size"], "rank")
    return f"Your job ({name}, {spec['engine']} {spec['strategy']}, {ranks}) took {took}"


def _less_than(job: RunRecord, fastest: RunRecord) -> str:
    """`full_shard in units of 6 x Block takes 150 ms ±1 % and 300 MB in the lab, 29 % less.`"""
    run = view(fastest)
    workload = run.environment.get("workload") or {}
    units = workload.get("units") or run.spec.get("units")  # as they were made, or the word of the choice
    takes = step_of(run)
    if run.peak:
        takes += f" and {size(run.peak)}"
    # both are timed, else the run would not be among the faster ones
    run_s = run.step_median or 0.0
    job_s = job.summary.step_time_s.median or 1.0
    less = percent(1 - run_s / job_s)
    return f"{run.strategy} in units of {units} takes {takes} in the lab, {less} less."


def _comparable(record: RunRecord, job: RunRecord) -> bool:
    """Return whether a record is a finished run of the lab's own engine on as many ranks, on the machine as it is."""
    if record.status != "finished":
        return False
    spec = record.spec
    if spec.get("engine") != "lab":
        return False
    if spec.get("world_size") != job.spec.get("world_size"):
        return False
    behind_a_link = spec.get("link") or spec.get("emulate")
    return not (spec.get("job") or behind_a_link)

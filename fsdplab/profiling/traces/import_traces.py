"""A record made from traces of PyTorch's profiler, from any machine.

A trace has less than a run: no losses, no memory by category, no ledger. Its steps, overlap and exposed communication
become the same tables, so every figure and finding that needs only those works on it. What the tables leave out (device
work of no step, ranks that were not given) is kept as notes, so that it can be said beside them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplab.profiling.step_summary import exposure
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.profiling.traces.overlap import TraceAnalysis
from fsdplab.profiling.traces.ranks_of_files import check_one_job, ranks_by_name
from fsdplab.profiling.traces.side_by_side import Progress, Reading, read_all
from fsdplab.profiling.traces.skew import sent_per_step, with_peers
from fsdplab.records import RunRecord, Spread, Summary
from fsdplab.records.summary import Comm, Link, Peak, Profile, Traces

ENGINE = "trace"
TABLES = ("timeline", "breakdown", "exposed", "collectives", "idle")


_WITHOUT_LINK = (
    "the link between the ranks was emulated, and what it carried stands in the run's record, not in its traces:"
    " exposed time is shown without it; give the record's folder for all of it"
)


@dataclass
class TracedRecord(RunRecord):
    """A record that still has the analyses of its traces, so that nobody reads the files again for them."""

    analyses: tuple[TraceAnalysis, ...] = ()


def record_of_traces(
    paths: Sequence[str | Path],
    *,
    ranks: Sequence[int] | None = None,
    comm_patterns: Sequence[str] = (),
    progress: Progress | None = None,
) -> TracedRecord:
    """One record of the traces of one run's ranks, each a .json or .json.gz; nothing is written.

    `ranks`: of the files in their order, where neither they nor their names tell. `comm_patterns`: kernels that
    communicate beside NCCL's (`comm_kernels.comm_pattern`). `progress` is called after each trace. Raises TraceError
    for files that cannot be read, and for traces that are not of one job. `record_of_traces(["rank0.json.gz",
    "rank1.json.gz"])`.
    """
    files = [Path(path) for path in paths]
    if ranks is not None and len(ranks) != len(files):
        raise TraceError(
            f"{len(ranks)} ranks were given for {len(files)} traces; expected one for each file, in the files' order."
        )
    given: Sequence[int | None] = [None] * len(files) if ranks is None else ranks
    readings = [Reading(*one, tuple(comm_patterns)) for one in zip(files, given, ranks_by_name(files))]
    analyses = read_all(readings, progress)
    check_one_job(analyses)
    analyses = with_peers(analyses)
    tables = {name: [row for each in analyses for row in each.rows(name)] for name in TABLES}
    if not any(row["step_ns"] for row in tables["breakdown"]):
        raise TraceError(f"{files[0]} has steps that take no time; record it again with PyTorch's profiler.")
    tables["steps"], origin = _steps(analyses), analyses[0].origin
    said = {"device_name": origin.device_name, "backend": origin.backend, "torch": origin.torch}
    provenance = {"step_time_s": "measured", "exposed_s": "measured"}
    if origin.link is not None:
        provenance |= {"link": "emulated", "exposed_s": "emulated"}
    return TracedRecord(
        files[0].parent,
        spec={"strategy": _name(files), "engine": ENGINE, "world_size": analyses[0].world_size or len(analyses)},
        environment={"device": analyses[0].device, **{name: text for name, text in said.items() if text}},
        summary=_summary(analyses, comm_patterns, tables),
        provenance=provenance,
        tables=tables,
        analyses=tuple(analyses),
    )


def _name(files: Sequence[Path]) -> str:
    """What the job is called: its folder, where that holds nothing but its ranks; else the first file."""
    folder = files[0].absolute().parent
    if len(files) > 1 and {each for each in folder.iterdir() if each.is_file()} == {each.absolute() for each in files}:
        return folder.name
    return files[0].name.partition(".")[0]


def _steps(analyses: Sequence[TraceAnalysis]) -> list[dict[str, Any]]:
    """Rows of the table `steps`, where a trace shows a DataLoader: how long each step's data took, and no more."""
    if not any(step.loading_ns for each in analyses for step in each.steps):
        return []
    return [
        {"rank": each.rank, "step": step.step, "loss": None, "step_time_s": None, "tokens": None,
         "loading_s": step.loading_ns / 1e9}
        for each in analyses
        for step in each.steps
    ]  # fmt: skip


def _sources(analyses: Sequence[TraceAnalysis], comm_patterns: Sequence[str]) -> Traces:
    """What the record was read from and how: each rank's file, and what its tables leave out."""
    work = [each.no_step for each in analyses]
    said: dict[str, list[int]] = defaultdict(list)
    for each in analyses:
        for sentence in each.no_step.sentences():
            said[sentence].append(each.rank)
    notes = [f"{_ranks(ranks, len(analyses))}: {sentence}" for sentence, ranks in said.items()]
    held, job = len(analyses), analyses[0].world_size
    if analyses[0].origin.link is not None:
        notes.insert(0, _WITHOUT_LINK)
    if job and held < job:
        notes.insert(0, f"{held} of the job's {job} ranks were given: what the others did is not known")
    return Traces(
        ranks=held,
        files={each.rank: str(each.path) for each in analyses},
        comm_patterns=tuple(comm_patterns),
        no_step_s=sum(each.ns for each in work) / 1e9,
        no_step_share=sum(each.ns for each in work) / (sum(each.device_ns for each in work) or 1),
        notes=tuple(notes),
    )


def _ranks(ranks: Sequence[int], of: int) -> str:
    """Whose note it is: `rank 3`, `ranks 0, 2`, `every rank`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "every rank" if len(ranks) == of else f"ranks {', '.join(map(str, ranks))}"


def _summary(
    analyses: Sequence[TraceAnalysis], comm_patterns: Sequence[str], tables: dict[str, list[dict[str, Any]]]
) -> Summary:
    """Steps are as slow as their slowest rank. The lab's own traces tell the emulated link's name, not its speed."""
    by_step: dict[int, int] = defaultdict(int)
    for row in tables["breakdown"]:
        by_step[row["step"]] = max(by_step[row["step"]], row["step_ns"])
    link, peaks = analyses[0].origin.link, [each.allocated_peak for each in analyses]
    sent = sent_per_step(tables["collectives"], analyses[0].world_size or len(analyses))
    return Summary(
        step_time_s=Spread.of([nanoseconds / 1e9 for nanoseconds in by_step.values()]),
        peak_memory_bytes=Peak(max((peak for peak in peaks if peak is not None), default=None)),
        peak_by_rank=tuple(peaks) if any(peaks) else (),
        comm=Comm(*sent, **exposure(tables["breakdown"])),
        profile=Profile(len(by_step), source="trace"),
        traces=_sources(analyses, comm_patterns),
        link=None if link is None else Link(link),
    )

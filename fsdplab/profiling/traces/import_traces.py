"""A record made from traces of PyTorch's profiler, from any machine; and loading what a command is given.

A trace has less than a run: no losses, no memory by category, no ledger. Its steps, overlap and exposed communication
become the same tables, so every figure and finding that needs only those works on it. What the tables leave out (device
work of no step, ranks that were not given) is kept as notes, so that it can be said beside them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplab.common.words import plural
from fsdplab.profiling.step_summary import exposure
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.profiling.traces.clocks import in_words
from fsdplab.profiling.traces.one_job import of_one_job, ranks_by_name, traces_in
from fsdplab.profiling.traces.overlap import TraceAnalysis
from fsdplab.profiling.traces.several_devices import by_device
from fsdplab.profiling.traces.side_by_side import Progress, Reading, read_all
from fsdplab.profiling.traces.skew import sent_per_step, with_peers
from fsdplab.records import RunRecord, Spread, Summary
from fsdplab.records.summary import Comm, Link, Peak, Profile, Traces
from fsdplab.records.tables import Row

ENGINE = "trace"
TABLES = ("timeline", "breakdown", "exposed", "collectives", "idle", "activities")


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
    communicate beside NCCL's (`events.comm_pattern`). `progress` is called after each trace. Raises TraceError
    for files that cannot be read, and for traces that are not of one job. `record_of_traces(["rank0.json.gz",
    "rank1.json.gz"])`.
    """
    files = [Path(path) for path in paths]
    if ranks is not None and len(ranks) != len(files):
        raise TraceError(
            f"{len(ranks)} ranks were given for {len(files)} traces; expected one for each file, in the files' order."
        )
    # each file is read alone; then they are one job, on one clock, and tell who waited for whom
    readings = _readings(files, ranks, comm_patterns)
    analyses = by_device(read_all(readings, progress), comm_patterns)
    analyses, chosen = of_one_job(analyses)
    analyses = with_peers(analyses)

    tables: dict[str, list[Row]] = {}
    for name in TABLES:
        rows: list[Row] = []
        for analysis in analyses:
            rows += analysis.rows(name)
        tables[name] = rows
    if not any(row["step_ns"] for row in tables["breakdown"]):
        raise TraceError(f"{files[0]} has steps that take no time; record it again with PyTorch's profiler.")
    tables["steps"] = _steps(analyses)
    provenance = {"step_time_s": "measured", "exposed_s": "measured"}
    if analyses[0].origin.link is not None:
        provenance |= {"link": "emulated", "exposed_s": "emulated"}
    return TracedRecord(
        files[0].parent,
        spec={"strategy": _name(files), "engine": ENGINE, "world_size": analyses[0].world_size or len(analyses)},
        environment=_environment(analyses[0]),
        summary=_summary(analyses, comm_patterns, tables, chosen),
        provenance=provenance,
        tables=tables,
        analyses=tuple(analyses),
    )


def _readings(files: Sequence[Path], ranks: Sequence[int] | None, comm_patterns: Sequence[str]) -> list[Reading]:
    """What `analyse_trace` is told of each file: a rank that was given, or the one in its name."""
    # a rank that was given counts before the file's own, and the one in its name only where the file has none
    given: Sequence[int | None] = [None] * len(files) if ranks is None else ranks
    readings: list[Reading] = []
    for file, rank, by_name in zip(files, given, ranks_by_name(files)):
        options = {"rank": rank, "default_rank": by_name or 0, "comm_patterns": comm_patterns}
        readings.append((file, options))
    return readings


def _environment(analysis: TraceAnalysis) -> dict[str, Any]:
    """Where a trace was made, as far as it says."""
    origin = analysis.origin
    environment = {"device": analysis.device}
    for name in ("device_name", "backend", "torch"):
        text = getattr(origin, name)
        if text:
            environment[name] = text
    return environment


def _name(files: Sequence[Path]) -> str:
    """What the job is called: its folder, where that holds nothing but its ranks; else the first file."""
    folder = files[0].absolute().parent
    if len(files) > 1:
        # /traces/big-run/rank0.json, rank1.json and nothing beside them: the job is called big-run
        in_folder = {path for path in folder.iterdir() if path.is_file()}
        if in_folder == {file.absolute() for file in files}:
            return folder.name
    return files[0].name.partition(".")[0]


def _steps(analyses: Sequence[TraceAnalysis]) -> list[dict[str, Any]]:
    """Rows of the table `steps`, where a trace shows a DataLoader: how long each step's data took, and no more."""
    rows = []
    for analysis in analyses:
        for step in analysis.steps:
            rows.append(
                {
                    "rank": analysis.rank,
                    "step": step.step,
                    "loss": None,
                    "step_time_s": None,
                    "tokens": None,
                    "loading_s": step.loading_ns / 1e9,
                }
            )
    # zeros everywhere: the trace shows no DataLoader, rather than one that is never waited for
    shows_loading = any(row["loading_s"] for row in rows)
    return rows if shows_loading else []


def _sources(
    analyses: Sequence[TraceAnalysis],
    comm_patterns: Sequence[str],
    tables: Mapping[str, Sequence[Row]],
    chosen: Sequence[str],
) -> Traces:
    """What the record was read from and how: each rank's file, and what its tables leave out. `chosen`: what of the
    files was taken.
    """
    no_step_ns = sum(analysis.no_step.ns for analysis in analyses)
    device_ns = sum(analysis.no_step.device_ns for analysis in analyses)
    return Traces(
        ranks=len(analyses),
        files={analysis.rank: str(analysis.path) for analysis in analyses},
        comm_patterns=tuple(comm_patterns),
        no_step_s=no_step_ns / 1e9,
        no_step_share=no_step_ns / (device_ns or 1),
        notes=tuple(_notes(analyses, tables["collectives"], chosen)),
    )


def _notes(analyses: Sequence[TraceAnalysis], collectives: Sequence[Row], chosen: Sequence[str]) -> list[str]:
    """What must be said beside the tables: of the whole job first, then of ranks, clocks, bytes and steps."""
    # the whole job
    notes = []
    given = len(analyses)
    job = analyses[0].world_size
    # a straggler may be among the ranks that are not here
    if job and given < job:
        notes.append(f"{given} of the job's {job} ranks were given: what the others did is not known")
    if analyses[0].origin.link is not None:
        notes.append(_WITHOUT_LINK)

    # the ranks: what is said of several of them is said once
    ranks_by_note: dict[str, list[int]] = defaultdict(list)
    for analysis in analyses:
        for sentence in (*analysis.no_step.sentences(), *analysis.odd):
            ranks_by_note[sentence].append(analysis.rank)
    for sentence, ranks in ranks_by_note.items():
        notes.append(f"{_ranks(ranks, given)}: {sentence}")

    clocks = in_words({analysis.rank: analysis.clock for analysis in analyses})
    for sentence in (clocks, _unsaid(collectives)):
        if sentence:
            notes.append(sentence)
    return [*notes, *chosen]


def _unsaid(collectives: Sequence[Row]) -> str:
    """What to say where the bytes of some collectives are not known; "" where all are, or none."""
    # a barrier moves no bytes
    sent = [row for row in collectives if row["kind"] != "barrier"]
    unknown = [row for row in sent if row["logical_bytes"] is None]
    if not unknown or len(unknown) == len(sent):
        return ""
    kinds = ", ".join(sorted({row["kind"] for row in unknown}))
    return (
        f"the trace does not say how many bytes {len(unknown)} of {plural(len(sent), 'collective')} moved ({kinds}):"
        " what a step sends is without them"
    )


def _ranks(ranks: Sequence[int], of: int) -> str:
    """Whose note it is: `rank 3`, `ranks 0, 2`, `every rank`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == of:
        return "every rank"
    listed = ", ".join(map(str, ranks))
    return f"ranks {listed}"


def _summary(
    analyses: Sequence[TraceAnalysis], comm_patterns: Sequence[str], tables: dict[str, list[Row]], chosen: Sequence[str]
) -> Summary:
    """Steps are as slow as their slowest rank. The lab's own traces tell the emulated link's name, not its speed."""
    # by step: the others wait for the slowest rank
    slowest_ns: dict[int, int] = defaultdict(int)
    for row in tables["breakdown"]:
        slowest_ns[row["step"]] = max(slowest_ns[row["step"]], row["step_ns"])
    peaks = [analysis.allocated_peak for analysis in analyses]
    # bytes and collectives of a step, which become the first two fields of `Comm`
    sent = sent_per_step(tables["collectives"], analyses[0].world_size or len(analyses))
    link = analyses[0].origin.link
    return Summary(
        step_time_s=Spread.of([step_ns / 1e9 for step_ns in slowest_ns.values()]),
        peak_memory_bytes=Peak(max((peak for peak in peaks if peak is not None), default=None)),
        peak_by_rank=tuple(peaks) if any(peaks) else (),
        comm=Comm(*sent, **exposure(tables["breakdown"])),
        profile=Profile(len(slowest_ns), source="trace"),
        traces=_sources(analyses, comm_patterns, tables, chosen),
        link=None if link is None else Link(link),
    )


# ---- recorded runs and traces, as their files and folders tell what they are


@dataclass(frozen=True)
class TraceOptions:
    """What trace files may lack: their ranks, in the order of the files, and the names of kernels that communicate."""

    ranks: Sequence[int] | None = None
    comm_patterns: Sequence[str] = ()


def load_all(paths: Sequence[Path], options: TraceOptions, progress: Progress | None = None) -> list[RunRecord]:
    """The records at these places: folders are records, or hold records, or one run's traces; files are traces, all of
    one run. Raises RecordError, or TraceError, which name the file.
    """
    loaded: list[RunRecord] = []
    files: list[Path] = []
    folders: list[list[Path]] = []
    # what each place is; a folder of traces is one run, and all files together are one, too
    for path in map(_its_record, paths):
        if path.exists() and not path.is_dir():
            files.append(path)
        elif below := _records_below(path):
            loaded += map(RunRecord.load, below)
        elif path.is_dir() and not (path / "run.json").exists() and (traces := traces_in(path)):
            folders.append(traces)
        else:
            loaded.append(RunRecord.load(path))
    runs = [files, *folders] if files else folders

    traced = []
    for run in runs:
        record = record_of_traces(run, ranks=options.ranks, comm_patterns=options.comm_patterns, progress=progress)
        traced.append(record)
    _name_apart(traced)
    return loaded + traced


def _name_apart(traced: Sequence[RunRecord]) -> None:
    """Runs of one name, such as worker0, which every job calls its first rank, are called as their folders are."""
    names = [record.spec["strategy"] for record in traced]
    for record, name in zip(traced, names):
        # `names` are those from before, so that each of two equal ones changes
        if names.count(name) > 1:
            record.spec["strategy"] = record.path.resolve().name


def _its_record(path: Path) -> Path:
    """For the folder `traces` of a record that record, which knows what its traces lack; else the path itself."""
    if not path.is_dir():  # also links that lead back to themselves, which cannot be resolved
        return path
    real = path.resolve()
    is_part_of_record = real.name == "traces" and (real.parent / "run.json").exists()
    return real.parent if is_part_of_record else path


def _records_below(path: Path) -> list[Path]:
    """The records in a folder that is none itself, as `compare --keep` writes them: 0-no_shard-lab, 1-zero1-lab, ..."""
    if not path.is_dir() or (path / "run.json").exists():
        return []
    records = [file.parent for file in path.glob("*/run.json")]
    # by the length of the number first, so that 9-... comes before 10-...
    return sorted(records, key=lambda record: (len(record.name.partition("-")[0]), record.name))

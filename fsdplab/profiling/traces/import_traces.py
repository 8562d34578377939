"""A record made from traces of PyTorch's profiler, from any machine; and loading what a command is given.

A trace has less than a run: no losses, no memory by category, no ledger. Its steps, overlap and exposed communication
become the same tables, so every figure and finding that needs only those works on it. What the tables leave out (device
work of no step, ranks that were not given) is kept as notes, so that it can be said beside them.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from fsdplab.common.rows import grouped
from fsdplab.common.words import plural
from fsdplab.profiling.step_summary import exposure
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.profiling.traces.clocks import in_words
from fsdplab.profiling.traces.groups import ONE_OF_SEVERAL
from fsdplab.profiling.traces.overlap import TraceAnalysis
from fsdplab.profiling.traces.side_by_side import Progress, read_all
from fsdplab.profiling.traces.skew import clocks_explain, sent_per_step, with_peers
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
    given: Sequence[int | None] = [None] * len(files) if ranks is None else ranks
    told = [
        {"rank": rank, "default_rank": by_name or 0, "comm_patterns": comm_patterns}
        for rank, by_name in zip(given, ranks_by_name(files))
    ]
    analyses, chosen = of_one_job(_by_device(read_all(list(zip(files, told)), progress), comm_patterns))
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
        summary=_summary(analyses, comm_patterns, tables, chosen),
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


def _sources(
    analyses: Sequence[TraceAnalysis], comm_patterns: Sequence[str], tables: Mapping[str, Sequence[Row]],
    chosen: Sequence[str],
) -> Traces:  # fmt: skip
    """What the record was read from and how: each rank's file, and what its tables leave out. `chosen`: what of the
    files was taken.
    """
    work = [each.no_step for each in analyses]
    said: dict[str, list[int]] = defaultdict(list)
    for each in analyses:
        for sentence in (*each.no_step.sentences(), *each.odd):
            said[sentence].append(each.rank)
    notes = [f"{_ranks(ranks, len(analyses))}: {sentence}" for sentence, ranks in said.items()]
    clocks = {each.rank: each.clock for each in analyses}
    notes += [*filter(None, (in_words(clocks), _unsaid(tables["collectives"]))), *chosen]
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


def _unsaid(collectives: Sequence[Row]) -> str:
    """What to say where the bytes of some collectives are not known; "" where all are, or none."""
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
    return "every rank" if len(ranks) == of else f"ranks {', '.join(map(str, ranks))}"


def _summary(
    analyses: Sequence[TraceAnalysis], comm_patterns: Sequence[str], tables: dict[str, list[Row]],
    chosen: Sequence[str],
) -> Summary:  # fmt: skip
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
        traces=_sources(analyses, comm_patterns, tables, chosen),
        link=None if link is None else Link(link),
    )


# ---- which files are the traces of one job, and of which ranks
#
# An engineer gives a folder, or files whose `distributedInfo` is missing because an older profiler wrote them. Then the
# names tell the ranks, or an option does. What is not one job (two runs mixed, a rank twice, a rank whose trace was cut
# short) would give figures of nothing, so it is refused.


_ENDINGS = (".json", ".json.gz")
_RANK = re.compile(r"(?:^|[^a-z])(?:rank|worker)[-_.=]?(\d{1,6})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_CLOCKS_NS = 1_000_000_000  # clocks of several machines differ by less
_SMALL = 1_000_000  # bytes of a file that is looked into before it is taken for a trace
_CUT_SHORT = 0.5  # part of the collectives of the other ranks below which a trace without step ranges was cut short


def traces_in(folder: Path) -> list[Path]:
    """The traces in a folder, in the order of the numbers in their names; [] where it holds none. Small JSON files of
    another kind (settings, results) may lie beside them; a damaged trace is kept, so that reading it says so.
    """
    found = [path for path in folder.iterdir() if path.name.endswith(_ENDINGS) and path.is_file()]
    found = [path for path in found if not _is_other_json(path)]
    parts = {path: re.split(r"(\d+)", path.name) for path in found}  # text and numbers in turn
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in parts[path]])


def _is_other_json(path: Path) -> bool:
    """Whether it is whole JSON, small and no trace: settings have no list of events."""
    if path.suffix != ".json" or not 0 < path.stat().st_size <= _SMALL:
        return False
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    if isinstance(content, list):  # a trace's other form: nothing but its events
        return not any(isinstance(each, dict) and "ph" in each for each in content)
    return isinstance(content, dict) and "traceEvents" not in content


def ranks_by_name(paths: Sequence[Path]) -> list[int | None]:
    """The rank in each file's name; None where the names do not tell.

    `rank3.json` is rank 3. Of names that differ in one number only, that number is the rank if they count from 0.

    >>> ranks_by_name([Path("run_7_0.json"), Path("run_7_1.json")])
    [0, 1]
    """
    told = [_RANK.search(path.name) for path in paths]
    if all(told):
        return [int(match.group(1)) for match in told if match]
    numbers = [_NUMBER.findall(path.name) for path in paths]
    if len({_NUMBER.sub("#", path.name) for path in paths}) == 1 and len(paths) > 1:
        columns = [column for column in zip(*numbers) if len(set(column)) > 1]
        if len(columns) == 1 and sorted(map(int, columns[0])) == list(range(len(paths))):
            return [int(number) for number in columns[0]]
    return [None] * len(paths)


def _by_device(analyses: list[TraceAnalysis], comm_patterns: Sequence[str]) -> list[TraceAnalysis]:
    """Of processes that drive several devices one analysis a device: what one of them does says nothing of another.

    Devices are numbered through, rank after rank; those at the same place meet in collectives.
    """
    if all(len(each.devices) < 2 for each in analyses):
        return analyses
    most = max(len(each.devices) for each in analyses)
    told = {"comm_patterns": comm_patterns}
    places = [(each, place) for each in analyses for place in range(max(1, len(each.devices)))]
    of_devices = read_all(
        [
            (each.path, {**told, "rank": each.rank * most + place, "device": _device_at(each, place)})
            for each, place in places
        ]
    )
    several = len(analyses) > 1 or (analyses[0].world_size or 1) > 1
    said = "one process drives several devices: each is shown as the rank of its number"
    if several:
        said = f"each process drives several devices: device D of rank R is shown as rank {most} x R + D"
    ranks = None if analyses[0].world_size is None or not several else most * analyses[0].world_size
    return [
        _said(replace(_at_place(found, place) if several else found, world_size=ranks), said)
        for found, (_, place) in zip(of_devices, places)
    ]


def _device_at(analysis: TraceAnalysis, place: int) -> int | None:
    return analysis.devices[place] if analysis.devices else None


def _at_place(analysis: TraceAnalysis, place: int) -> TraceAnalysis:
    """The analysis of one device of each process: its collectives meet those of the devices at the same place."""
    steps = tuple(
        replace(step, collectives=tuple(_row_at_place(row, place) for row in step.collectives))
        for step in analysis.steps
    )
    return replace(analysis, steps=steps)


def _row_at_place(row: Row, place: int) -> Row:
    members, device = row["members"], f"device {place}"
    if members and members != ONE_OF_SEVERAL:
        members = f"{members} {device}" if " #" in members else f"{members} #{device}"
    return {**row, "group": f"{row['group']} {device}".strip(), "members": members}


def _said(analysis: TraceAnalysis, sentence: str) -> TraceAnalysis:
    """The analysis with one more sentence, where it is of a process that drives several devices."""
    return replace(analysis, odd=(*analysis.odd, sentence)) if len(analysis.devices) > 1 else analysis


def of_one_job(analyses: Sequence[TraceAnalysis]) -> tuple[list[TraceAnalysis], list[str]]:
    """The analyses of one job, and sentences on what was chosen of the files: of the cycles of a profiler's schedule
    the last one, and the steps that all ranks have.

    Raises TraceError where the traces are not of one job: each rank once, the same job, the same time.
    """
    analyses, chosen = _of_last_cycle(analyses)
    _check_ranks(analyses)
    _check_sizes(analyses)
    _check_times(analyses)
    analyses, without = _of_common_steps(analyses)
    _check_whole(analyses)
    return analyses, [*chosen, *without]


def _of_last_cycle(analyses: Sequence[TraceAnalysis]) -> tuple[list[TraceAnalysis], list[str]]:
    """Where each process left one trace a cycle of its schedule (`repeat=2`), the last of each rank."""
    of_rank = grouped(analyses, lambda each: each.rank)
    cycles = {len(each) for each in of_rank.values()}
    if cycles == {1} or len(cycles) > 1 or not all(map(_are_cycles, of_rank.values())):
        return list(analyses), []
    last = [max(each, key=_span) for each in of_rank.values()]
    steps = _listed({step.step for step in last[0].steps})
    many = cycles.pop()
    return last, [
        f"each rank left {many} traces, one a cycle of its profiler's schedule: the last, steps {steps}, is shown"
    ]


def _are_cycles(analyses: Sequence[TraceAnalysis]) -> bool:
    """Whether these traces of one rank are of one process, one after the other."""
    spans = sorted(map(_span, analyses))
    return len({each.process for each in analyses}) == 1 and all(
        before[1] <= after[0] for before, after in pairwise(spans)
    )


def _span(analysis: TraceAnalysis) -> tuple[int, int]:
    """When the first step of a trace begins, and its last one ends, by its own clock."""
    first, last = (analysis.steps[at].timeline[0] for at in (0, -1))
    return first["start_ns"], last["end_ns"]


def _check_ranks(analyses: Sequence[TraceAnalysis]) -> None:
    seen: dict[int, Path] = {}
    for each in analyses:
        if each.rank in seen:
            raise TraceError(
                f"{seen[each.rank]} and {each.path} are both of rank {each.rank}; give the traces of one run, one a"
                " rank; where the files do not name their ranks, --ranks 0,1,... does, in the files' order."
            )
        seen[each.rank] = each.path


def _check_sizes(analyses: Sequence[TraceAnalysis]) -> None:
    told = [each for each in analyses if each.world_size is not None]
    for each in told:
        if each.world_size != told[0].world_size:
            job = f"a job of {told[0].world_size} ranks"
            raise _mixed(f"{told[0].path} is of {job}, {each.path} of one of {each.world_size}", "")
        if each.rank >= (each.world_size or 0):
            raise TraceError(
                f"{each.path} is of rank {each.rank} of {each.world_size}, which cannot be; expected a rank below"
                f" {each.world_size}: give its right number with --ranks."
            )
    devices = ["a GPU" if each.device == "cuda" else "a CPU" for each in analyses]
    for each, device in zip(analyses, devices):
        if device != devices[0]:
            both = f"{analyses[0].path} is of {devices[0]}, {each.path} of {device}"
            raise _mixed(both, ", all profiled alike")


def _check_times(analyses: Sequence[TraceAnalysis]) -> None:
    """Traces that share no instant, on one clock, are of two runs (or of two parts of one)."""
    spans = [_span(each) for each in analyses]
    latest = max(range(len(spans)), key=lambda index: spans[index][0])
    earliest = min(range(len(spans)), key=lambda index: spans[index][1])
    apart = spans[latest][0] - spans[earliest][1]
    if apart > max(_CLOCKS_NS, *(end - start for start, end in spans)) and not clocks_explain(analyses):
        late = f"{analyses[latest].path} begins {apart / 1e9:.3g} s after {analyses[earliest].path} has ended"
        raise _mixed(f"{late}, so these ranks never met")


def _of_common_steps(analyses: Sequence[TraceAnalysis]) -> tuple[list[TraceAnalysis], list[str]]:
    """The analyses with the steps that all ranks have: a rank that ended early lacks some."""
    steps = {each.rank: {step.step for step in each.steps} for each in analyses}
    usual = Counter(map(frozenset, steps.values())).most_common(1)[0][0]
    common = set(usual).intersection(*steps.values())
    if not common:
        other = next(each for each in analyses if not steps[each.rank] & usual or steps[each.rank] != usual)
        own = _listed(steps[other.rank])
        raise _mixed(f"{other.path} holds the steps {own}, another rank's trace {_listed(usual)}")
    if all(own == common for own in steps.values()):
        return list(analyses), []
    fewest = min(steps, key=lambda rank: len(steps[rank]))
    kept = [replace(each, steps=tuple(step for step in each.steps if step.step in common)) for each in analyses]
    return kept, [
        f"the ranks' traces hold different steps (rank {fewest}'s {_listed(steps[fewest])}, another's"
        f" {_listed(usual)}): the {plural(len(common), 'step')} that all of them hold, {_listed(common)}, are shown"
    ]


def _mixed(what: str, alike: str = ", taken at the same steps") -> TraceError:
    return TraceError(f"two runs are mixed: {what}; give the traces of one run{alike}.")


def _listed(steps: set[int] | frozenset[int]) -> str:
    ordered = sorted(steps)
    return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]} ({len(ordered)})"


def _check_whole(analyses: Sequence[TraceAnalysis]) -> None:
    """Without step ranges only the number of collectives tells; stages of a pipeline send differently often."""
    if any(len(each.steps) > 1 for each in analyses):
        return
    counts = [sum(row["kind"] != "send_recv" for row in each.rows("collectives")) for each in analyses]
    for each, count in zip(analyses, counts):
        if count < _CUT_SHORT * max(counts):
            raise TraceError(
                f"{each.path} shows {count} collectives, another rank's trace {max(counts)}: it was cut short, or is of"
                " another run; export it again."
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
    for path in map(_its_record, paths):
        if path.exists() and not path.is_dir():
            files.append(path)
        elif below := _records_below(path):
            loaded += map(RunRecord.load, below)
        elif path.is_dir() and not (path / "run.json").exists() and (traces := traces_in(path)):
            folders.append(traces)
        else:
            loaded.append(RunRecord.load(path))
    traced = [
        record_of_traces(run, ranks=options.ranks, comm_patterns=options.comm_patterns, progress=progress)
        for run in [*([files] if files else []), *folders]
    ]
    _name_apart(traced)
    return loaded + traced


def _name_apart(traced: Sequence[RunRecord]) -> None:
    """Runs of one name, such as worker0, which every job calls its first rank, are called as their folders are."""
    names = [record.spec["strategy"] for record in traced]
    for record, name in zip(traced, names):
        if names.count(name) > 1:
            record.spec["strategy"] = record.path.resolve().name


def _its_record(path: Path) -> Path:
    """For the folder `traces` of a record that record, which knows what its traces lack; else the path itself."""
    record = path.resolve().parent
    return record if path.is_dir() and path.resolve().name == "traces" and (record / "run.json").exists() else path


def _records_below(path: Path) -> list[Path]:
    """The records in a folder that is none itself, as `compare --keep` writes them: 0-no_shard-lab, 1-zero1-lab, ..."""
    if not path.is_dir() or (path / "run.json").exists():
        return []
    found = [own.parent for own in path.glob("*/run.json")]
    return sorted(found, key=lambda own: (len(own.name.partition("-")[0]), own.name))

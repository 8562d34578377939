"""Lesson 08 in the notebook's process: one recorded trace, and tables of its content.

All learners read the same trace, so that each question has one answer: it was recorded once and lies in
`data/`. Times in tables are ms since the step began on the rank that is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdplab.figures.profile_data import COLLECTIVES
from fsdplab.profiling.exports import traces_of
from fsdplab.profiling.findings import findings
from fsdplab.profiling.intervals import clip, length
from fsdplab.profiling.step_summary import exposed_cells
from fsdplab.profiling.traces.chrome import ChromeTrace, nanoseconds
from fsdplab.profiling.traces.overlap import TraceAnalysis, analyse_trace
from fsdplab.records import RunRecord, known
from fsdplab.sessions.steady_card import GIGAFLOPS, steady  # noqa: F401 (the notebook calls it)
from fsdplab.teaching.core.course_state import current
from fsdplab.teaching.core.display import Note, Table, table
from fsdplab.teaching.core.recorded import recorded as recorded_run

PARTS = ("compute_only", "overlapped", "exposed", "other")
WAITS = ("peer", "queue", "link")
MS = 1e6
Row = dict[str, Any]


def recorded() -> RunRecord:
    """Load the record of lesson 08; RecordError says what to do where it is missing."""
    return recorded_run("traces-08")


def exports() -> Path:
    """Return a folder for exported traces, in the learner's own; it is made where it is not there."""
    folder = current().workspace.path / "exports"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ---- what is in the file


def ranges(trace: Path, first: int = 12) -> Table:
    """Return the first named ranges of a trace, and how many events there are of which kind."""
    complete = [event for event in ChromeTrace(trace) if event.get("ph") == "X"]
    engine_ranges, step_starts, operators = [], [], 0
    for event in complete:
        if event["name"].startswith("FSDP::"):
            engine_ranges.append(event)
        elif event["name"].startswith("ProfilerStep#"):
            step_starts.append(nanoseconds(event["ts"]))
        elif event["name"].startswith("aten::"):
            operators += 1
    engine_ranges.sort(key=lambda event: event["ts"])
    rows = []
    for event in engine_ranges[:first]:
        begins = nanoseconds(event["ts"]) - step_starts[0]
        rows.append([event["name"], _ms(begins), _ms(nanoseconds(event["dur"]))])
    caption = (
        f"Measured: the first {len(rows)} of {len(engine_ranges)} ranges of the engine;"
        f" the file holds {len(complete):,} events, {operators:,} of them operators."
    )
    return table(["name", "begins, ms", "takes, ms"], rows, caption)


# ---- the account


def sets(record: RunRecord, rank: int = 0) -> tuple[int, list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (length of the step, computing, communicating) of a rank's profiled step.

    Times are in ns since the step began; intervals may overlap.
    """
    rows = timeline(record, rank)
    step = next(row for row in rows if row["lane"] == "step")
    begin, end = step["start_ns"], step["end_ns"]

    def pairs(*lanes: str) -> list[tuple[int, int]]:
        intervals = []
        for row in rows:
            if row["lane"] not in lanes:
                continue
            for start, stop in clip([(row["start_ns"], row["end_ns"])], begin, end) - begin:
                intervals.append((int(start), int(stop)))
        return intervals

    return end - begin, pairs("compute"), pairs(*COLLECTIVES)


def timeline(record: RunRecord, rank: int) -> list[Row]:
    """Return the timeline of a rank's profiled step: the last one, since the memory step has a timeline as well."""
    step = max(row["step"] for row in record.table("breakdown"))
    return [row for row in record.table("timeline") if (row["rank"], row["step"]) == (rank, step)]


def breakdown(record: RunRecord, rank: int = 0) -> Row:
    """Return the four parts of a rank's profiled step, as the lab accounts for them."""
    steps = [row for row in record.table("breakdown") if row["rank"] == rank]
    return max(steps, key=lambda row: row["step"])


def parts_table(record: RunRecord, rank: int = 0) -> Table:
    """Return three of the four parts of a rank's step, and the step; the fourth is left for the reader."""
    row = breakdown(record, rank)
    rows = []
    for name in PARTS[:-1]:
        rows.append([name.replace("_", " "), _ms(row[f"{name}_ns"])])
    rows.append(["other", "?"])
    rows.append(["the step", _ms(row["step_ns"])])
    caption = f"Rank {rank}; computing is measured, communication is on the emulated link's clock."
    return table(["part of the step", "ms"], rows, caption)


# ---- gaps and causes


def gaps(record: RunRecord, rank: int = 0) -> list[Row]:
    """Return the exposed rows of a rank's profiled step, the most exposed first."""
    step = breakdown(record, rank)["step"]
    rows = [row for row in record.table("exposed") if (row["rank"], row["step"]) == (rank, step)]
    return sorted(rows, key=lambda row: -row["exposed_ns"])


def worst(record: RunRecord, rank: int = 0) -> Row:
    """Return the most exposed collective."""
    return gaps(record, rank)[0]


def transfers(record: RunRecord, rank: int = 0) -> Table:
    """Return when each collective was issued, taken up by the link and delivered.

    The causes are left for the reader to find.
    """
    events = _analysed(record, rank).rows("timeline")
    begin = next(event["start_ns"] for event in events if event["lane"] == "step")
    computing = [(event["start_ns"], event["end_ns"]) for event in events if event["lane"] == "compute"]
    messages = _messages(record, rank)
    rows = []
    for row in messages:
        times = [_ms(row[name] - begin) for name in ("issue_ns", "start_ns", "end_ns")]
        computed_before = length(clip(computing, begin, row["issue_ns"]))
        rows.append([*_message(row), *times, _ms(row["exposed_ns"]), _ms(computed_before)])
    header = ["unit", "phase", "collective", "issued", "link takes it", "delivered", "exposed, ms"]
    caption = f"Rank {rank}, ms since the step began. Issued and computing: measured; the link's times: emulated."
    clocks_apart = max(row["issue_ns"] - row["start_ns"] for row in messages)  # > 0: taken up before it was issued
    if clocks_apart > 0:
        caption = f"{caption} The profiler's clock and the link's differ by up to {clocks_apart / MS:.2f} ms."
    return table([*header, "computing before, ms"], rows, caption)


def _analysed(record: RunRecord, rank: int) -> TraceAnalysis:
    """Read a rank's trace, with what the run's own record adds to it."""
    return analyse_trace(traces_of(record)[rank], ledger=record.table("ledger"), life=record.table("life"), rank=rank)


def at(record: RunRecord, percent_of_step: int) -> Table:
    """Return the activity of every rank at one instant, for a slider."""
    ranks = sorted({row["rank"] for row in record.table("breakdown")})
    timelines = {rank: timeline(record, rank) for rank in ranks}
    starts = []
    for events in timelines.values():
        starts += [event["start_ns"] for event in events if event["lane"] == "step"]
    since_begin = round(percent_of_step / 100 * breakdown(record)["step_ns"])
    instant = min(starts) + since_begin
    rows = [[str(rank), *_doing(events, instant)] for rank, events in timelines.items()]
    header = ["rank", "computing", "communicating", "so this instant is"]
    return table(header, rows, f"{_ms(since_begin)} ms into the step.")


def _doing(rows: Sequence[Row], instant: int) -> list[str]:
    """Return what a rank computes and communicates at an instant, and which part of the step that makes it."""
    computing: list[str] = []
    communicating: set[str] = set()
    for row in rows:
        if not row["start_ns"] <= instant < row["end_ns"]:
            continue
        unit = row["unit"] or "root"
        if row["lane"] == "compute":
            computing.append(f"{unit} {row['phase']}".strip())
        elif row["lane"] in COLLECTIVES:
            communicating.add(f"{row['lane']} of {unit}")
    # (computes, communicates) -> the part of the step
    part = {
        (True, True): "overlapped",
        (True, False): "compute only",
        (False, True): "exposed",
        (False, False): "other",
    }[bool(computing), bool(communicating)]
    return [", ".join(computing) or "-", ", ".join(sorted(communicating)) or "-", part]


def key(record: RunRecord, rank: int = 0) -> Table:
    """Return the answer key: every exposed collective of a rank with its cause."""
    rows = []
    for cell in exposed_cells(gaps(record, rank), steps=1):
        cause = cell.shown_cause.replace("_", " ")
        takes, exposed = _ms(cell.communication_ns), _ms(cell.exposed_ns)
        rows.append([cell.unit or "root", cell.phase, cell.kind, takes, exposed, cause])
    header = ["unit", "phase", "collective", "takes, ms", "exposed, ms", "cause"]
    return table(header, rows, f"Rank {rank}, most exposed first; computing and copies measured, the link emulated.")


def diagnosis(record: RunRecord) -> Note:
    """Return the findings as text, the costliest first."""
    lines = []
    for number, finding in enumerate(findings(record), 1):
        lines.append(f"{number}. {finding.title}. {finding.text} {finding.remedy}")
    return Note(tuple(lines))


def waits_table(record: RunRecord, waited: Callable[..., Mapping[str, float]], rank: int = 0) -> Table:
    """Return the learner's split of every exposed message of a rank, beside the record's time and cause."""
    issued_by_peer = {_message(row): row["issue_ns"] for row in _messages(record, 1 - rank)}
    causes = {}
    for cell in exposed_cells(gaps(record, rank), 1):
        causes[cell.unit or "root", cell.phase, cell.kind] = cell.shown_cause.replace("_", " ")
    rows = []
    for row in _messages(record, rank):
        if not row["exposed_ns"]:
            continue
        message = _message(row)
        # the exposed time of a message ends when it is delivered, or copied
        needed = row["end_ns"] - row["exposed_ns"]
        split = waited(row["issue_ns"], issued_by_peer[message], row["start_ns"], row["end_ns"], needed)
        parts = [_ms(split[name]) for name in WAITS]
        rows.append([*message, *parts, _ms(row["exposed_ns"]), causes[message]])
    header = ["unit", "phase", "collective", *WAITS, "exposed, ms", "the lab's cause"]
    return table(header, rows, f"Rank {rank}, ms. Issued: measured; taken and delivered: the emulated link's clock.")


def _messages(record: RunRecord, rank: int) -> list[Row]:
    """Return the collectives of a rank's trace, in the order of issue."""
    return sorted(_analysed(record, rank).rows("collectives"), key=lambda row: row["issue_ns"])


def _message(row: Row) -> tuple[str, str, str]:
    """Return what names a message of a step on every rank: unit, phase, and kind of collective."""
    return row["unit"] or "root", row["phase"], row["kind"]


# ---- the remedy


def clock_table(runs: Sequence[RunRecord], on_card: Sequence[RunRecord]) -> Table:
    """Return what each run sent, and its exposed time: of the same job on the steady card, and of the run here."""
    rows = []
    for run, card in zip(runs, on_card, strict=True):
        nbytes = known(run.summary.comm.bytes_per_step)
        exposed = []
        for comm in (card.summary.comm, run.summary.comm):
            exposed.append(f"{1e3 * known(comm.exposed_s):.1f} ({known(comm.overlap):.0%} hidden)")
        rows.append([str(run.spec["prefetch"]), f"{nbytes / 1e3:.0f}", *exposed])
    caption = (
        f"Bytes measured. The card computes {GIGAFLOPS:g} GFLOP/s in fp32 and is simulated; measured here: the profiled"
        " step of the rank exposed longest."
    )
    header = ["prefetch", "kB sent a step", "exposed on the steady card, ms", "exposed, measured here, ms"]
    return table(header, rows, caption)


def _ms(nanoseconds_: float) -> str:
    """Return nanoseconds as milliseconds, with one decimal."""
    return f"{nanoseconds_ / MS:.1f}"

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
    """The record of lesson 08; RecordError says what to do where it is missing."""
    return recorded_run("traces-08")


def exports() -> Path:
    """A folder for exported traces, in the learner's own."""
    folder = current().workspace.path / "exports"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ---- what is in the file


def ranges(trace: Path, first: int = 12) -> Table:
    """The first named ranges of a trace, and how many events there are of which kind."""
    complete = [event for event in ChromeTrace(trace) if event.get("ph") == "X"]
    named = sorted((event for event in complete if event["name"].startswith("FSDP::")), key=lambda event: event["ts"])
    begin = next(nanoseconds(event["ts"]) for event in complete if event["name"].startswith("ProfilerStep#"))
    rows = [
        [event["name"], _ms(nanoseconds(event["ts"]) - begin), _ms(nanoseconds(event["dur"]))]
        for event in named[:first]
    ]
    operators = sum(event["name"].startswith("aten::") for event in complete)
    caption = f"Measured: the first {len(rows)} of {len(named)} ranges of the engine; "
    caption += f"the file holds {len(complete):,} events, {operators:,} of them operators."
    return table(["name", "begins, ms", "takes, ms"], rows, caption)


# ---- the account


def sets(record: RunRecord, rank: int = 0) -> tuple[int, list[tuple[int, int]], list[tuple[int, int]]]:
    """(length of the step, computing, communicating) of a rank's profiled step, in ns since the step began; intervals
    may overlap.
    """
    rows = timeline(record, rank)
    begin, end = next((row["start_ns"], row["end_ns"]) for row in rows if row["lane"] == "step")

    def pairs(*lanes: str) -> list[tuple[int, int]]:
        inside = [clip([(row["start_ns"], row["end_ns"])], begin, end) - begin for row in rows if row["lane"] in lanes]
        return [(int(start), int(stop)) for each in inside for start, stop in each]

    return end - begin, pairs("compute"), pairs(*COLLECTIVES)


def timeline(record: RunRecord, rank: int) -> list[Row]:
    """The timeline of a rank's profiled step: the last one, since the memory step has a timeline as well."""
    step = max(row["step"] for row in record.table("breakdown"))
    return [row for row in record.table("timeline") if row["rank"] == rank and row["step"] == step]


def breakdown(record: RunRecord, rank: int = 0) -> Row:
    """The four parts of a rank's profiled step, as the lab accounts for them."""
    return max((row for row in record.table("breakdown") if row["rank"] == rank), key=lambda row: row["step"])


def parts_table(record: RunRecord, rank: int = 0) -> Table:
    """Three of the four parts of a rank's step, and the step; the fourth is left for the reader."""
    row = breakdown(record, rank)
    rows = [[name.replace("_", " "), _ms(row[f"{name}_ns"])] for name in PARTS[:-1]]
    caption = f"Rank {rank}; computing is measured, communication is on the emulated link's clock."
    return table(["part of the step", "ms"], [*rows, ["other", "?"], ["the step", _ms(row["step_ns"])]], caption)


# ---- gaps and causes


def gaps(record: RunRecord, rank: int = 0) -> list[Row]:
    """The exposed rows of a rank's profiled step, the most exposed first."""
    step = breakdown(record, rank)["step"]
    rows = [row for row in record.table("exposed") if row["rank"] == rank and row["step"] == step]
    return sorted(rows, key=lambda row: -row["exposed_ns"])


def worst(record: RunRecord, rank: int = 0) -> Row:
    """The most exposed collective."""
    return gaps(record, rank)[0]


def transfers(record: RunRecord, rank: int = 0) -> Table:
    """When each collective was issued, taken up by the link and delivered;
    the causes are left for the reader to find.
    """
    analysis = _analysed(record, rank)
    begin = next(row["start_ns"] for row in analysis.rows("timeline") if row["lane"] == "step")
    computing = [(row["start_ns"], row["end_ns"]) for row in analysis.rows("timeline") if row["lane"] == "compute"]
    rows, messages = [], _messages(record, rank)
    for row in messages:
        times = [_ms(row[name] - begin) for name in ("issue_ns", "start_ns", "end_ns")]
        before = length(clip(computing, begin, row["issue_ns"]))
        rows.append([row["unit"] or "root", row["phase"], row["kind"], *times, _ms(row["exposed_ns"]), _ms(before)])
    apart = max(row["issue_ns"] - row["start_ns"] for row in messages)
    header = ["unit", "phase", "collective", "issued", "link takes it", "delivered", "exposed, ms"]
    caption = f"Rank {rank}, ms since the step began. Issued and computing: measured; the link's times: emulated."
    if apart > 0:
        caption += f" The profiler's clock and the link's differ by up to {apart / MS:.2f} ms."
    return table([*header, "computing before, ms"], rows, caption)


def _analysed(record: RunRecord, rank: int) -> TraceAnalysis:
    return analyse_trace(traces_of(record)[rank], ledger=record.table("ledger"), life=record.table("life"), rank=rank)


def at(record: RunRecord, percent_of_step: int) -> Table:
    """The activity of every rank at one instant, for a slider."""
    ranks = sorted({row["rank"] for row in record.table("breakdown")})
    begin = min(row["start_ns"] for rank in ranks for row in timeline(record, rank) if row["lane"] == "step")
    instant = begin + round(percent_of_step / 100 * breakdown(record)["step_ns"])
    rows = [[str(rank), *_doing(timeline(record, rank), instant)] for rank in ranks]
    header = ["rank", "computing", "communicating", "so this instant is"]
    return table(header, rows, f"{_ms(instant - begin)} ms into the step.")


def _doing(rows: Sequence[Row], instant: int) -> list[str]:
    now = [row for row in rows if row["start_ns"] <= instant < row["end_ns"]]
    work = [f"{row['unit'] or 'root'} {row['phase']}".strip() for row in now if row["lane"] == "compute"]
    talk = sorted({f"{row['lane']} of {row['unit'] or 'root'}" for row in now if row["lane"] in COLLECTIVES})
    kind = ("overlapped" if talk else "compute only") if work else "exposed" if talk else "other"
    return [", ".join(work) or "-", ", ".join(talk) or "-", kind]


def key(record: RunRecord, rank: int = 0) -> Table:
    """The answer key: every exposed collective of a rank with its cause."""
    rows = []
    for cell in exposed_cells(gaps(record, rank), steps=1):
        times = [_ms(cell.communication_ns), _ms(cell.exposed_ns)]
        rows.append([cell.unit or "root", cell.phase, cell.kind, *times, cell.shown_cause.replace("_", " ")])
    header = ["unit", "phase", "collective", "takes, ms", "exposed, ms", "cause"]
    return table(header, rows, f"Rank {rank}, most exposed first; computing and copies measured, the link emulated.")


def diagnosis(record: RunRecord) -> Note:
    """The findings as text, the costliest first."""
    found = enumerate(findings(record), 1)
    return Note(tuple(f"{number}. {each.title}. {each.text} {each.remedy}" for number, each in found))


def waits_table(record: RunRecord, waited: Callable[..., Mapping[str, float]], rank: int = 0) -> Table:
    """The learner's split of every exposed message of a rank, beside the exposed time and the cause in the record."""
    issued = {_identity(row): row["issue_ns"] for row in _messages(record, 1 - rank)}
    cells = exposed_cells(gaps(record, rank), 1)
    causes = {(cell.unit or "root", cell.phase, cell.kind): cell.shown_cause for cell in cells}
    rows = []
    for row in _messages(record, rank):
        if not row["exposed_ns"]:
            continue
        # the exposed time of a message ends when it is delivered, or copied
        needed = row["end_ns"] - row["exposed_ns"]
        split = waited(row["issue_ns"], issued[_identity(row)], row["start_ns"], row["end_ns"], needed)
        place = (row["unit"] or "root", row["phase"], row["kind"])
        parts = [_ms(split[name]) for name in WAITS]
        rows.append([*place, *parts, _ms(row["exposed_ns"]), causes[place].replace("_", " ")])
    header = ["unit", "phase", "collective", *WAITS, "exposed, ms", "the lab's cause"]
    return table(header, rows, f"Rank {rank}, ms. Issued: measured; taken and delivered: the emulated link's clock.")


def _messages(record: RunRecord, rank: int) -> list[Row]:
    return sorted(_analysed(record, rank).rows("collectives"), key=lambda row: row["issue_ns"])


def _identity(row: Row) -> tuple[str, str, str]:
    return row["unit"], row["phase"], row["kind"]


# ---- the remedy


def clock_table(runs: Sequence[RunRecord], on_card: Sequence[RunRecord]) -> Table:
    """What each run sent, and its exposed time: of the same job on the steady card, and of the run on this machine."""
    rows = []
    for run, card in zip(runs, on_card, strict=True):
        here, there = run.summary.comm, card.summary.comm
        exposed = [f"{1e3 * known(comm.exposed_s):.1f} ({known(comm.overlap):.0%} hidden)" for comm in (there, here)]
        rows.append([str(run.spec["prefetch"]), f"{known(here.bytes_per_step) / 1e3:.0f}", *exposed])
    caption = (
        f"Bytes measured. The card computes {GIGAFLOPS:g} GFLOP/s in fp32 and is simulated; measured here: the profiled"
        " step of the rank exposed longest."
    )
    header = ["prefetch", "kB sent a step", "exposed on the steady card, ms", "exposed, measured here, ms"]
    return table(header, rows, caption)


def _ms(nanoseconds_: float) -> str:
    return f"{nanoseconds_ / MS:.1f}"

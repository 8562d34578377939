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
from fsdplab.profiling.intervals import clip, length
from fsdplab.profiling.step_summary import exposed_cells
from fsdplab.profiling.traces.overlap import TraceAnalysis, analyse_trace
from fsdplab.records import RunRecord
from fsdplab.sessions.steady_card import GIGAFLOPS, steady  # noqa: F401 (the notebook calls it)
from fsdplab.teaching.core.course_state import current
from fsdplab.teaching.core.display import Table, table

PARTS = ("compute_only", "overlapped", "exposed", "other")
WAITS = ("peer", "queue", "link")
MS = 1e6
Row = dict[str, Any]


def exports() -> Path:
    """Return a folder for exported traces, in the learner's own; it is made where it is not there."""
    folder = current().workspace.path / "exports"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ---- the account


def timeline(record: RunRecord, rank: int) -> list[Row]:
    """Return the timeline of a rank's profiled step: the last one, since the memory step has a timeline as well.

    A row has `lane` ("step", "compute" or a kind of collective), `unit`, `phase`, `start_ns` and `end_ns`.
    """
    step = max(row["step"] for row in record.table("breakdown"))
    return [row for row in record.table("timeline") if (row["rank"], row["step"]) == (rank, step)]


def breakdown(record: RunRecord, rank: int = 0) -> Row:
    """Return the four parts of a rank's profiled step, as the lab accounts for them.

    The row has ns: `step_ns` is the sum of the parts, which are named in `PARTS`, as `exposed_ns`.
    """
    steps = [row for row in record.table("breakdown") if row["rank"] == rank]
    return max(steps, key=lambda row: row["step"])


# ---- gaps and causes


def gaps(record: RunRecord, rank: int = 0) -> list[Row]:
    """Return the exposed rows of a rank's profiled step, the most exposed first.

    A row has a message's `unit`, `phase`, `kind` and `cause`, and of its `communication_ns` the `exposed_ns`.
    """
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
        issued = row["issue_ns"]
        # computing that an earlier issue could have run beside
        computed_before = length(clip(computing, begin, issued))
        rows.append(
            [
                *_message(row),
                _ms(issued - begin),
                _ms(row["start_ns"] - begin),
                _ms(row["end_ns"] - begin),
                _ms(row["exposed_ns"]),
                _ms(computed_before),
            ]
        )
    header = ["unit", "phase", "collective", "issued", "link takes it", "delivered", "exposed, ms"]
    header.append("computing before, ms")
    caption = f"Rank {rank}, ms since the step began. Issued and computing: measured; the link's times: emulated."
    clocks_apart = max(row["issue_ns"] - row["start_ns"] for row in messages)  # > 0: taken up before it was issued
    if clocks_apart > 0:
        caption = f"{caption} The profiler's clock and the link's differ by up to {clocks_apart / MS:.2f} ms."
    return table(header, rows, caption)


def _analysed(record: RunRecord, rank: int) -> TraceAnalysis:
    """Read a rank's trace, with what the run's own record adds to it."""
    return analyse_trace(traces_of(record)[rank], ledger=record.table("ledger"), life=record.table("life"), rank=rank)


def at(record: RunRecord, percent_of_step: int) -> Table:
    """Return the activity of every rank at one instant, for a slider."""
    ranks = sorted({row["rank"] for row in record.table("breakdown")})
    timelines = {rank: timeline(record, rank) for rank in ranks}
    starts = []
    for events in timelines.values():
        # ranks begin a step at slightly different instants; it begins with the first of them
        starts += [event["start_ns"] for event in events if event["lane"] == "step"]
    step_ns = breakdown(record)["step_ns"]
    since_begin = round(percent_of_step / 100 * step_ns)
    instant = min(starts) + since_begin
    rows = []
    for rank, events in timelines.items():
        rows.append([str(rank), *_doing(events, instant)])
    header = ["rank", "computing", "communicating", "so this instant is"]
    return table(header, rows, f"{_ms(since_begin)} ms into the step.")


def _doing(rows: Sequence[Row], instant: int) -> list[str]:
    """Return what a rank computes and communicates at an instant, and which part of the step that makes it."""
    computing: list[str] = []
    communicating: set[str] = set()
    for row in rows:
        # what is not under way at this instant
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


def waits_table(record: RunRecord, waited: Callable[..., Mapping[str, float]], rank: int = 0) -> Table:
    """Return the learner's split of every exposed message of a rank, beside the record's time and cause.

    `waited` takes five times of a message, in ns: issued here, issued by the peer, taken by the link, delivered, and
    needed. It returns ns by `WAITS`.
    """
    issued_by_peer = {}
    for row in _messages(record, 1 - rank):
        # on 2 ranks the peer is the other one; unit, phase and kind tell which message is the same
        issued_by_peer[_message(row)] = row["issue_ns"]
    causes = {}
    for cell in exposed_cells(gaps(record, rank), 1):
        message = (cell.unit or "root", cell.phase, cell.kind)
        causes[message] = cell.shown_cause.replace("_", " ")
    rows = []
    for row in _messages(record, rank):
        exposed = row["exposed_ns"]
        if not exposed:
            continue
        message = _message(row)
        needed = row["end_ns"] - exposed  # the exposed time of a message ends when it is delivered, or copied
        split = waited(row["issue_ns"], issued_by_peer[message], row["start_ns"], row["end_ns"], needed)
        parts = [_ms(split[name]) for name in WAITS]
        rows.append([*message, *parts, _ms(exposed), causes[message]])
    header = ["unit", "phase", "collective", *WAITS, "exposed, ms", "the lab's cause"]
    return table(header, rows, f"Rank {rank}, ms. Issued: measured; taken and delivered: the emulated link's clock.")


def _messages(record: RunRecord, rank: int) -> list[Row]:
    """Return the collectives of a rank's trace, in the order of issue.

    A row has when a message was issued (`issue_ns`), when the link took it up and delivered it (`start_ns`, `end_ns`),
    and how long the rank was exposed to it (`exposed_ns`).
    """
    return sorted(_analysed(record, rank).rows("collectives"), key=lambda row: row["issue_ns"])


def _message(row: Row) -> tuple[str, str, str]:
    """Return what names a message of a step on every rank: unit, phase, and kind of collective."""
    return row["unit"] or "root", row["phase"], row["kind"]


def _ms(nanoseconds_: float) -> str:
    """Return nanoseconds as milliseconds, with one decimal."""
    return f"{nanoseconds_ / MS:.1f}"

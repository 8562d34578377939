"""A step's time: computing alone, overlapped with communication, exposed communication, and the rest; and the parts of
what is exposed.

The four parts sum to the step, because they are one partition of it, and on the link, copying and waiting for a peer
sum to what is exposed. A high overlap alone gains nothing on a busy CPU, so compute inflation is shown too if a run of
the same work without communication is among the runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import (
    MS,
    Row,
    breakdown_of,
    conditions,
    duration,
    listed,
    percent,
    rows_of,
    slower_words,
)
from fsdplab.figures.style import EXPOSED_COLOURS, STEP_COLOURS, titled
from fsdplab.figures.view import views
from fsdplab.records import PARTS_OF_EXPOSED, RunRecord

PART_COLUMN = dict(zip(EXPOSED_COLOURS, PARTS_OF_EXPOSED))
COLUMN = {name: f"{name.replace(' ', '_')}_ns" for name in STEP_COLOURS}
_SAME_WORK = (
    "model", "batch_size", "sequence_length", "micro_batches", "precision", "checkpoint", "engine", "optimizer",
)  # fmt: skip


def step_bar(records: RunRecord | Iterable[RunRecord]) -> go.Figure:
    """Stacked bars, one a run: compute only, overlapped, exposed, other, in ms; they sum to the step of the rank that
    is exposed longest.

    `records`: one record or several with a `breakdown` table; ValueError with the remedy if none has one. 10 + 6 + 3 +
    1 ms is a step of 20 ms.
    """
    runs = listed(records)
    shown = _with_breakdown(runs)
    splits, inflation = _splits(shown), compute_inflation(shown)
    ends = {name: _total(split, inflation.get(name)) for name, split in splits.items()}
    left_out = len(runs) - len(shown)
    where = conditions(
        list(shown.values()),
        "mean of the profiled steps",
        f"{left_out} not profiled" if left_out else "",
        "without the time between steps" if any(run.device != "cpu" for run in views(list(shown.values()))) else "",
        _slower(shown),
    )
    figure = _stacked(ends, splits, COLUMN, STEP_COLOURS, "time of one step (ms)")
    return titled(figure, _finding(splits), where, _alt(splits, COLUMN, "the step", "step_ns"), 78 + 60 * len(shown))


def exposed_bar(records: RunRecord | Iterable[RunRecord]) -> go.Figure:
    """Stacked bars, one a run: exposed time on the link, copying, and waiting for a peer, in ms a step; they sum to
    what the run's table calls exposed.

    ValueError with the remedy if no record has these parts. 6 + 3 + 1 ms are 10 ms exposed.
    """
    runs = listed(records)
    found = _splits(_with_breakdown(runs))
    splits = {name: split for name, split in found.items() if split["on_link_ns"] is not None}
    if not splits:
        raise ValueError(
            f"{next(iter(found))} does not say what its exposed time was spent on: it was recorded with an earlier"
            " version; run it again with --profile 2"
        )
    ends = {name: f"<b>{duration(split['exposed_ns'])}</b> exposed" for name, split in splits.items()}
    figure = _stacked(ends, splits, PART_COLUMN, EXPOSED_COLOURS, "exposed time of one step (ms)")
    where = conditions(runs, "mean of the profiled steps of the rank exposed longest")
    alt = _alt(splits, PART_COLUMN, "exposed time", "exposed_ns")
    return titled(figure, _largest_part(runs, splits), where, alt, 78 + 60 * len(splits))


def _with_breakdown(runs: list[RunRecord]) -> dict[str, RunRecord]:
    """The runs that have a breakdown, by label; ValueError with the remedy where none has one."""
    shown = {view.label: run for view, run in zip(views(runs), runs) if run.table("breakdown")}
    if not shown:
        rows_of(runs[0], "breakdown")
    return shown


def _slower(shown: dict[str, RunRecord]) -> str:
    """How much slower profiled steps were than timed ones, of each run where they were; named where several are
    shown.
    """
    found = {name: words for name, run in shown.items() if (words := slower_words(run))}
    return "; ".join(f"{name}: {words}" if len(shown) > 1 else words for name, words in found.items())


def _stacked(
    ends: Mapping[str, str], splits: Mapping[str, Row], columns: dict[str, str], colours: dict[str, str], axis: str
) -> go.Figure:
    """A bar a run of the parts in `columns`, each with its duration where it fits."""
    parts = [Part(name, colours[name], [split[columns[name]] / MS for split in splits.values()]) for name in columns]
    figure = stacked_bars(ends, parts, axis, "%{x:.3f} ms", lambda ms: duration(ms * MS))
    return figure.update_layout(uniformtext=dict(minsize=13, mode="hide"))


def compute_inflation(shown: dict[str, RunRecord]) -> dict[str, float]:
    """Compute time of each run over that of the same work without communication; runs that have no such partner are
    left out.

    `{"full_shard": 1.25}` says that its compute took a quarter longer than on a rank that sends nothing.
    """
    splits = _splits(shown)
    idle = [name for name, split in splits.items() if not split["overlapped_ns"] + split["exposed_ns"]]
    partner = {
        name: next((other for other in idle if other != name and _work(shown[other]) == _work(run)), None)
        for name, run in shown.items()
    }
    return {
        name: splits[name]["compute_ns"] / splits[other]["compute_ns"]
        for name, other in partner.items()
        if other and name not in idle
    }


def _splits(shown: dict[str, RunRecord]) -> dict[str, Row]:
    """The breakdown of each run; all of them have one."""
    return {name: split for name, run in shown.items() if (split := breakdown_of(run)) is not None}


def _work(run: RunRecord) -> list[Any]:
    return [run.spec.get(name) for name in _SAME_WORK]


def _total(split: Row, inflation: float | None) -> str:
    """At the bar's end: the step, the overlap, and the compute inflation."""
    communication = split["overlapped_ns"] + split["exposed_ns"]
    words = f"{percent(split['overlapped_ns'], communication)} hidden" if communication else "no communication"
    words += f", compute ×{inflation:.2f}" if inflation else ""
    return f"<b>{duration(split['step_ns'])}</b> · {words}"


def _largest_part(runs: list[RunRecord], splits: dict[str, Row]) -> str:
    """The title: the run that is exposed longest, and what most of this time is."""
    most = max(splits, key=lambda name: splits[name]["exposed_ns"])
    if not splits[most]["exposed_ns"]:
        return "No run has exposed communication"
    largest = max(PART_COLUMN, key=lambda part: splits[most][PART_COLUMN[part]])
    run = next(view for view in views(runs) if view.label == most)
    if largest == "on the link" and run.traced is not None and run.traced.ranks < run.world_size:
        largest += " or waiting for ranks whose traces were not given"
    return f"{most}: {duration(splits[most]['exposed_ns'])} a step are exposed, most of it {largest}"


def _finding(parts: dict[str, Row]) -> str:
    talking = [name for name, split in parts.items() if split["overlapped_ns"] + split["exposed_ns"]]
    if not talking:
        return "No run sends anything: there is nothing to hide"
    least, most = (pick(talking, key=lambda name: parts[name]["exposed_ns"]) for pick in (min, max))
    share = f"{percent(parts[most]['exposed_ns'], parts[most]['step_ns'])} of its step"
    if least == most:
        return f"{most}: {duration(parts[most]['exposed_ns'])} of communication is exposed, {share}"
    return (
        f"{most} is exposed longest, {duration(parts[most]['exposed_ns'])} a step; least: {least},"
        f" {duration(parts[least]['exposed_ns'])}"
    )


def _alt(splits: dict[str, Row], columns: dict[str, str], of: str, whole: str) -> str:
    runs = []
    for name, split in splits.items():
        inside = ", ".join(f"{part} {duration(split[column])}" for part, column in columns.items())
        runs.append(f"{name} {inside} of {duration(split[whole])}")
    return f"Stacked bars of {of}: {'; '.join(runs)}."

"""A step's time: computing alone, overlapped with communication, exposed communication, and the rest; and the parts of
what is exposed.

The four parts sum to the step, because they are one partition of it, and on the link, copying and waiting for a peer
sum to what is exposed. A high overlap alone gains nothing on a busy CPU, so compute inflation is shown too if a run of
the same work without communication is among the runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
from fsdplab.figures.style import EDGE, EXPOSED_COLOURS, STEP_COLOURS, ink_on, titled
from fsdplab.figures.view import views
from fsdplab.records import PARTS_OF_EXPOSED, RunRecord

PART_COLUMN = dict(zip(EXPOSED_COLOURS, PARTS_OF_EXPOSED))
COLUMN = {name: f"{name.replace(' ', '_')}_ns" for name in STEP_COLOURS}
_SAME_WORK = (
    "model",
    "batch_size",
    "sequence_length",
    "micro_batches",
    "precision",
    "checkpoint",
    "engine",
    "optimizer",
)


def step_bar(records: RunRecord | Iterable[RunRecord]) -> go.Figure:
    """Stacked bars, one a run: compute only, overlapped, exposed, other, in ms; they sum to the step of the rank that
    is exposed longest.

    `records`: one record or several with a `breakdown` table; ValueError with the remedy if none has one. 10 + 6 + 3 +
    1 ms is a step of 20 ms.
    """
    runs = listed(records)
    shown = {view.label: run for view, run in zip(views(runs), runs) if run.table("breakdown")}
    if not shown:
        rows_of(runs[0], "breakdown")
    parts = _splits(shown)
    figure = _stacked(parts, COLUMN, STEP_COLOURS, "step_ns", "time of one step (ms)")
    inflation = compute_inflation(shown)
    for name, split in parts.items():
        _total(figure, name, split, inflation.get(name))
    left_out = len(runs) - len(shown)
    where = conditions(
        list(shown.values()),
        "mean of the profiled steps",
        f"{left_out} not profiled" if left_out else "",
        "without the time between steps" if any(run.device != "cpu" for run in views(list(shown.values()))) else "",
        _slower(shown),
    )
    return titled(figure, _finding(parts), where, _alt(parts), height=200 + 60 * len(shown), top=122)


def exposed_bar(records: RunRecord | Iterable[RunRecord]) -> go.Figure:
    """Stacked bars, one a run: exposed time on the link, copying, and waiting for a peer, in ms a step; they sum to
    what the run's table calls exposed.

    ValueError with the remedy if no record has these parts. 6 + 3 + 1 ms are 10 ms exposed.
    """
    runs = listed(records)
    splits = _splits({view.label: run for view, run in zip(views(runs), runs) if run.table("breakdown")})
    if not splits:
        rows_of(runs[0], "breakdown")
    parts = {name: split for name, split in splits.items() if split["on_link_ns"] is not None}
    if not parts:
        raise ValueError(
            f"{next(iter(splits))} does not say what its exposed time was spent on: it was recorded with an earlier"
            " version; run it again with --profile 2"
        )
    figure = _stacked(parts, PART_COLUMN, EXPOSED_COLOURS, "exposed_ns", "exposed time of one step (ms)")
    for name, split in parts.items():
        _end(figure, name, split["exposed_ns"], f"{duration(split['exposed_ns'])}</b> exposed")
    most = max(parts, key=lambda name: parts[name]["exposed_ns"])
    largest = max(PART_COLUMN, key=lambda part: parts[most][PART_COLUMN[part]])
    run = next(view for view in views(runs) if view.label == most)
    if largest == "on the link" and run.traced is not None and run.traced.ranks < run.world_size:
        largest += " or waiting for ranks whose traces were not given"
    title = f"{most}: {duration(parts[most]['exposed_ns'])} a step are exposed, most of it {largest}"
    if not parts[most]["exposed_ns"]:
        title = "No run has exposed communication"
    where = conditions(runs, "mean of the profiled steps of the rank exposed longest")
    return titled(figure, title, where, _alt(parts, PART_COLUMN, "exposed_ns"), 200 + 60 * len(parts), top=122)


def _slower(shown: dict[str, RunRecord]) -> str:
    """How much slower profiled steps were than timed ones, of each run where they were; named where several are
    shown.
    """
    found = {name: words for name, run in shown.items() if (words := slower_words(run))}
    return "; ".join(f"{name}: {words}" if len(shown) > 1 else words for name, words in found.items())


def _stacked(
    parts: dict[str, Row], columns: dict[str, str], colours: dict[str, str], whole: str, axis: str
) -> go.Figure:
    """Bars of the parts, one a run, with space for the words at their ends."""
    longest = max(split[whole] for split in parts.values())
    figure = go.Figure([_segment(part, columns[part], colours[part], parts, longest) for part in columns])
    figure.update_layout(barmode="stack", xaxis_title=axis, uniformtext=dict(minsize=13, mode="hide"))
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(range=[0, 1.7 * longest / MS or 1])
    return figure


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


def _segment(part: str, column: str, colour: str, parts: dict[str, Row], longest: float) -> go.Bar:
    """One part of every run's bar, with its number where it fits."""
    spans = [split[column] for split in parts.values()]
    return go.Bar(
        name=part, orientation="h", y=list(parts), x=[span / MS for span in spans],
        marker=dict(color=colour, line=dict(color=EDGE, width=1)),
        text=[duration(span) if span > 0.1 * longest else "" for span in spans],
        textposition="inside", insidetextanchor="middle", textangle=0, constraintext="none",
        textfont=dict(size=13, color=ink_on(colour)),
        hovertemplate="%{y}<br>" + part + ": %{x:.3f} ms<extra></extra>",
    )  # fmt: skip


def _total(figure: go.Figure, name: str, split: Row, inflation: float | None) -> None:
    """At the bar's end: the step, the overlap, and the compute inflation."""
    communication = split["overlapped_ns"] + split["exposed_ns"]
    words = f"{percent(split['overlapped_ns'], communication)} hidden" if communication else "no communication"
    words += f", compute ×{inflation:.2f}" if inflation else ""
    _end(figure, name, split["step_ns"], f"{duration(split['step_ns'])}</b> · {words}")


def _end(figure: go.Figure, name: str, length_ns: float, words: str) -> None:
    """Words at the end of a run's bar, bold until `</b>`."""
    figure.add_annotation(x=length_ns / MS, y=name, text=f"<b>{words}", showarrow=False, xanchor="left", xshift=6)


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


def _alt(parts: dict[str, Row], columns: dict[str, str] = COLUMN, whole: str = "step_ns") -> str:
    runs = []
    for name, split in parts.items():
        inside = ", ".join(f"{part} {duration(split[column])}" for part, column in columns.items())
        runs.append(f"{name} {inside} of {duration(split[whole])}")
    of = "the step" if whole == "step_ns" else "exposed time"
    return f"Stacked bars of {of}: {'; '.join(runs)}."

"""Horizontal stacked bars, the form of half of the figures: parts beside each other, and words at a bar's end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import ALARM, EDGE, ink_on, mark_level, plot_width, words_width
from fsdplab.figures.view import RunView

_LONG_NAME = 16  # characters
INSIDE = dict(textposition="inside", insidetextanchor="middle", textangle=0, constraintext="none")


@dataclass(frozen=True)
class Part:
    """One part of every bar: its name in the legend, its colour, and its length in each row, in the axis's unit."""

    name: str
    colour: str
    lengths: Sequence[float]


def stacked_bars(
    ends: Mapping[str, str],
    parts: Sequence[Part],
    axis: str,
    hover: str = "%{x:.1f} MB",
    number: Callable[[float], str] | None = None,
    levels: Mapping[str, float] | None = None,
    alarming: Collection[str] = (),
    marked: Sequence[float] = (),
) -> go.Figure:
    """One bar a row; `ends` has each row's name and the words at its bar's end, `axis` the axis's title.

    `number(length)` is written inside of each part that is long enough, `levels` are lines by their names, the words
    of rows in `alarming` are red, and `marked` says how far marks over each bar reach.
    `stacked_bars({"zero1": "3 MB"}, [Part("activations", "#cc7fa8", [3.0])], "peak (MB)")`.
    """
    rows, levels = list(ends), levels or {}
    totals = {row: sum(part.lengths[place] for part in parts) for place, row in enumerate(rows)}
    reached = {row: max(totals[row], mark) for row, mark in zip(rows, marked)} if marked else totals
    whole = _axis_end(reached, ends, levels)
    pixels = plot_width(map(_broken, rows)) / whole  # a unit of the axis
    figure = go.Figure([_segment(part, rows, hover, number, pixels) for part in parts])
    figure.update_layout(barmode="stack", xaxis_title=axis)
    names = dict(tickmode="array", tickvals=rows, ticktext=list(map(_broken, rows)))
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False, **names)
    figure.update_xaxes(range=[0, whole])
    for row, words in ends.items():
        near = [at for at in levels.values() if 0 <= at - reached[row] < (words_width(words) + 24) / pixels]
        at, font = max(near, default=reached[row]), dict(color=ALARM) if row in alarming else None
        figure.add_annotation(x=at, y=row, text=words, showarrow=False, xanchor="left", xshift=6, font=font)
    for words, at in levels.items():
        mark_level(figure, at, words)
    return figure


def _broken(row: str) -> str:
    """A row's name in two lines of about one length where it is long: `full_shard,<br>prefetch 0`."""
    parts = row.split(", ")
    if len(row) <= _LONG_NAME or len(parts) == 1:
        return row
    lines = [(", ".join(parts[:at]), ", ".join(parts[at:])) for at in range(1, len(parts))]
    return ",<br>".join(min(lines, key=lambda pair: max(map(len, pair))))


def _axis_end(reached: Mapping[str, float], ends: Mapping[str, str], levels: Mapping[str, float]) -> float:
    """Where the axis ends, so that the words of every bar and the name of every line fit."""
    width = plot_width(map(_broken, reached))
    shares = {row: max(0.2, 1 - (words_width(words) + 12) / width) for row, words in ends.items()}
    return max([end / shares[row] for row, end in reached.items()] + [1.15 * at for at in levels.values()]) or 1.0


def _segment(
    part: Part, rows: Sequence[str], hover: str, number: Callable[[float], str] | None, pixels: float
) -> go.Bar:
    texts = [number(length) for length in part.lengths] if number else []  # each where it fits
    texts = [text if words_width(text, 13) + 6 < length * pixels else "" for text, length in zip(texts, part.lengths)]
    look = dict(text=texts, textfont=dict(size=13, color=ink_on(part.colour))) if texts else {}
    return go.Bar(
        name=part.name, orientation="h", y=rows, x=part.lengths,
        marker=dict(color=part.colour, line=dict(color=EDGE, width=1)),
        hovertemplate=f"%{{y}}<br>{part.name}: {hover}<extra></extra>", **INSIDE, **look,
    )  # fmt: skip


def whiskers(runs: Sequence[RunView], unit_s: float = 1.0) -> dict[str, Any] | None:
    """Error bars from the quartiles around the median step, in units of `unit_s` seconds; None where none are known."""
    known: list[tuple[Any, Any, Any]] = [
        (run.summary.step_time_s.q1, run.step_median, run.summary.step_time_s.q3) for run in runs
    ]
    if not any(map(all, known)):
        return None
    below, above = ([abs(each[1] - each[end]) / unit_s if all(each) else 0.0 for each in known] for end in (0, 2))
    return dict(type="data", array=above, arrayminus=below, symmetric=False, color="#808488", thickness=2, width=7)

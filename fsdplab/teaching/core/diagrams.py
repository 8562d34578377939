"""Diagrams that lessons draw without a record: cells in rows over time, and ranks on a mesh.

Cells in time have a button that plays them in order, where the order is the point: a ring's steps, the life of a
sharded layer, a pipeline's schedule. The picture without the button is complete; playing hides what is still to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdplab.figures.bars import CLOCK, Span, lane
from fsdplab.figures.lines import heat_map
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import titled

MILLISECONDS = 900  # a moment of the animation, at most
LONGEST = 12_000  # a whole animation, in ms
_WIDE = 0.94  # of a moment's width: a gap shows that the next is another moment


@dataclass(frozen=True)
class HeldCell:
    """One cell: its `row`, the number of its `moment`, its kind, a short label, and how many moments it takes."""

    row: str
    moment: int
    kind: str
    label: str = ""
    lasts: int = 1


def cells_in_time(
    cells: Sequence[HeldCell],
    rows: Sequence[str],
    moments: Sequence[str],
    colours: dict[str, str],
    title: str,
    subtitle: str,
    alt: str,
) -> go.Figure:
    """Return a figure of the cells with a play button: a trace for each kind in `colours`, in that order.

    ValueError for a cell whose row, kind or moments the figure does not have.
    """
    _check(cells, rows, moments, colours)
    used_kinds = {cell.kind for cell in cells}
    kinds = [kind for kind in colours if kind in used_kinds]
    # rows are numbers, not names: an animation loses the places of names that a frame does not have
    places = {row: len(rows) - 1 - index for index, row in enumerate(rows)}

    def traces(shown_moments: int) -> list[go.Bar]:
        return [_trace(cells, kind, colours[kind], shown_moments, places) for kind in kinds]

    figure = go.Figure(traces(len(moments)))
    frames = []
    for number, moment in enumerate(moments):
        # plotly plays frames by name: of two frames of one name it would show the last one twice
        frames.append(go.Frame(name=f"{number} {moment}", data=traces(number + 1)))
    figure.frames = frames

    middles = [number + _WIDE / 2 for number in range(len(moments))]
    figure.update_xaxes(range=[-0.03, len(moments)], tickvals=middles, ticktext=list(moments), **CLOCK)
    figure.update_yaxes(range=[-0.5, len(rows) - 0.5], tickvals=list(places.values()), ticktext=list(places), **CLOCK)
    figure.update_layout(barmode="overlay", updatemenus=[_buttons(min(MILLISECONDS, LONGEST // len(moments)))])
    return titled(figure, title, subtitle, alt, 90 + 30 * len(rows))


def _check(cells: Sequence[HeldCell], rows: Sequence[str], moments: Sequence[str], colours: dict[str, str]) -> None:
    """Raise ValueError for the first cell that has no place in the figure."""
    for cell in cells:
        for what, value, known in (("row", cell.row, rows), ("kind", cell.kind, list(colours))):
            if value not in known:
                raise ValueError(f"{cell} is in a {what} that the figure does not have; expected one of {list(known)}")
        if cell.lasts < 1 or not 0 <= cell.moment <= len(moments) - cell.lasts:
            raise ValueError(
                f"{cell} is at a moment that the figure does not have; it has moments 0 to {len(moments) - 1}"
            )


def _trace(cells: Sequence[HeldCell], kind: str, colour: str, moments: int, places: dict[str, int]) -> go.Bar:
    """Return all cells of a kind as they are after the first `moments` moments: one that lasts longer grows."""
    spans = []
    for cell in cells:
        if cell.kind != kind or cell.moment >= moments:
            continue
        length = min(cell.lasts, moments - cell.moment) - 1 + _WIDE
        spans.append(Span(places[cell.row], float(cell.moment), length, cell.label, f"{cell.row}: {kind}"))
    return lane(kind, colour, spans, textfont_size=14, hovertemplate="%{hovertext}<br>%{text}<extra></extra>")


def _buttons(milliseconds: int) -> dict[str, object]:
    """Return plotly's menu with a button to play, `milliseconds` a moment, and one to pause."""
    frame = dict(duration=milliseconds, redraw=True)
    play = dict(frame=frame, transition=dict(duration=0), fromcurrent=False, mode="immediate")
    all_at_once = dict(frame=dict(duration=0, redraw=True), mode="immediate", transition=dict(duration=0))
    return dict(
        type="buttons",
        direction="left",
        x=1,
        xanchor="right",
        y=1.02,
        yanchor="bottom",
        showactive=False,
        buttons=[
            dict(label="▶ Play", method="animate", args=[None, play]),
            dict(label="Pause", method="animate", args=[[None], all_at_once]),
        ],
    )


def mesh(
    columns: Sequence[str],
    rows: Sequence[str],
    owners: Sequence[Sequence[int]],
    texts: Sequence[Sequence[str]],
    colours: Sequence[str],
) -> go.Figure:
    """Return a figure of ranks in rows and columns, each with its text, in the colour of its owner: a node, a row."""
    parts = len(colours)
    colorscale = []
    for index, colour in enumerate(colours):  # two equal edges make a step, where plotly would blend two colours
        colorscale += [(index / parts, colour), ((index + 1) / parts, colour)]
    values = [[owner + 0.5 for owner in row] for row in owners]
    return heat_map(columns, rows, values, texts, "%{text}<br>%{x}, %{y}", most=parts, colorscale=colorscale)

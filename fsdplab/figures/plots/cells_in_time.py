"""Who holds what, moment by moment: cells in rows over time, with a button that plays them in order.

For diagrams where the order is the point: a ring's steps, the life of a sharded layer. The picture without the button
is complete, so a printed page shows everything; playing hides what is still to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import EDGE, titled

MILLISECONDS = 900  # a moment of the animation
_WIDE = 0.94  # of a moment's width: a gap shows that the next is another moment


@dataclass(frozen=True)
class HeldCell:
    """One cell: its `row`, the number of its `moment`, what kind of thing is there, and a short label."""

    row: str
    moment: int
    kind: str
    label: str = ""


def cells_in_time(
    cells: Sequence[HeldCell],
    rows: Sequence[str],
    moments: Sequence[str],
    colours: dict[str, str],
    title: str,
    subtitle: str,
    alt: str,
) -> go.Figure:
    """The cells as a figure with a play button: a trace for each kind in `colours`, in that order."""
    kinds = [kind for kind in colours if any(cell.kind == kind for cell in cells)]
    # rows are numbers, not names: an animation loses the places of names that a frame does not have
    places = {row: len(rows) - 1 - index for index, row in enumerate(rows)}
    figure = go.Figure([_trace(cells, kind, colours[kind], len(moments), places) for kind in kinds])
    figure.frames = [
        go.Frame(name=moment, data=[_trace(cells, kind, colours[kind], number + 1, places) for kind in kinds])
        for number, moment in enumerate(moments)
    ]
    middles = [number + _WIDE / 2 for number in range(len(moments))]
    figure.update_xaxes(
        range=[-0.03, len(moments)], zeroline=False, tickvals=middles, ticktext=list(moments), showgrid=False
    )
    figure.update_yaxes(
        range=[-0.5, len(rows) - 0.5], tickvals=list(places.values()), ticktext=list(places), showgrid=False,
        zeroline=False,
    )  # fmt: skip
    figure.update_layout(barmode="overlay", updatemenus=[_buttons()])
    return titled(figure, title, subtitle, alt, height=250 + 30 * len(rows))


def _trace(cells: Sequence[HeldCell], kind: str, colour: str, moments: int, places: dict[str, int]) -> go.Bar:
    """All cells of a kind in the first `moments` moments."""
    shown = [cell for cell in cells if cell.kind == kind and cell.moment < moments]
    return go.Bar(
        name=kind, orientation="h", y=[places[cell.row] for cell in shown], base=[float(cell.moment) for cell in shown],
        x=[_WIDE] * len(shown), text=[cell.label for cell in shown], textposition="inside", insidetextanchor="middle",
        constraintext="none", textangle=0, width=0.86, marker=dict(color=colour, line=dict(color=EDGE, width=1)),
        hovertext=[f"{cell.row}: {kind}" for cell in shown], hovertemplate="%{hovertext}<br>%{text}<extra></extra>",
    )  # fmt: skip


def _buttons() -> dict[str, object]:
    frame = dict(duration=MILLISECONDS, redraw=True)
    play = dict(frame=frame, transition=dict(duration=0), fromcurrent=False, mode="immediate")
    all_at_once = dict(frame=dict(duration=0, redraw=True), mode="immediate", transition=dict(duration=0))
    return dict(
        type="buttons", direction="left", x=1, xanchor="right", y=1.02, yanchor="bottom", showactive=False,
        buttons=[
            dict(label="▶ Play", method="animate", args=[None, play]),
            dict(label="Pause", method="animate", args=[[None], all_at_once]),
        ],
    )  # fmt: skip

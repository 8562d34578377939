"""Lines and points over an axis, and heat maps, in the look that all figures share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdplab.figures.axis_units import AxisUnit
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import ALARM, DARK_INK, EDGE, HEAT

Places = Sequence[float] | Sequence[str]


def line(
    name: str, colour: str, x: Places, y: Sequence[float], width: float = 3, dash: str = "solid", **more: Any
) -> go.Scatter:
    """Draw a line by its name in the legend; `line_shape="hv"` holds each level until the next point."""
    stroke = dict(color=colour, width=width, dash=dash)
    marker = dict(color=colour, size=9)
    return go.Scatter(name=name, x=x, y=y, mode="lines", line=stroke, marker=marker).update(more)


def points(name: str, colour: str, x: Sequence[float], y: Places, size: float = 13, **more: Any) -> go.Scatter:
    """Draw points with a thin edge."""
    marker = dict(color=colour, size=size, line=dict(color=EDGE, width=1))
    return go.Scatter(name=name, x=x, y=y, mode="markers", marker=marker).update(more)


def peak(at: float, nbytes: float, unit: AxisUnit, **more: Any) -> go.Scatter:
    """Draw the dot at the highest memory, on an axis of this unit."""
    edge = dict(color="white", width=1.5)
    hover = f"peak {unit.hover('y')}<extra></extra>"
    height = unit.of(nbytes)
    return points("peak", ALARM, [at], [height], 12, showlegend=False, marker_line=edge, hovertemplate=hover, **more)


# ---- heat maps: a cell for each pair of a row and a column, with its value as text


def heat_map(
    columns: Sequence[str],
    rows: Sequence[str],
    values: Sequence[Sequence[float | None]],
    texts: Sequence[Sequence[str]],
    hover: str,
    scale_title: str = "",
    most: float | None = None,
    **more: Any,
) -> go.Figure:
    """Draw a figure of cells, the first row on top; a cell of None is empty.

    `most` is the value of the strongest colour (the highest value by default), `scale_title` names the colours' scale.
    """
    known = [value for row in values for value in row if value is not None]
    scale = dict(
        title=dict(text=scale_title, font=dict(size=14)),
        thickness=16,
        tickfont=dict(size=14),
        outlinewidth=0,
        nticks=4 if len(rows) < 4 else 8,
    )
    cells = go.Heatmap(
        x=columns,
        y=rows,
        z=values,
        text=texts,
        texttemplate="%{text}",
        textfont=dict(size=13, color=DARK_INK),
        hovertemplate=f"{hover}<extra></extra>",
        hoverongaps=False,
        xgap=3,
        ygap=3,
        zmin=0,
        zmax=most or max(known, default=0) or 1,
        colorscale=HEAT,
        colorbar=scale,
        showscale=bool(scale_title),
    )
    figure = go.Figure(cells.update(more))
    # plotly puts the first row at the bottom unless the axis is reversed
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    return figure.update_xaxes(type="category", showgrid=False)

"""Lines and points over an axis, in the look that all figures share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import ALARM, EDGE

Places = Sequence[float] | Sequence[str]


def line(
    name: str, colour: str, x: Places, y: Sequence[float], width: float = 3, dash: str = "solid", **more: Any
) -> go.Scatter:
    """A line by its name in the legend; `line_shape="hv"` holds each level until the next point."""
    look = dict(mode="lines", line=dict(color=colour, width=width, dash=dash), marker=dict(color=colour, size=9))
    return go.Scatter(name=name, x=x, y=y, **look).update(more)


def points(name: str, colour: str, x: Sequence[float], y: Places, size: float = 13, **more: Any) -> go.Scatter:
    """Points with a thin edge."""
    marker = dict(color=colour, size=size, line=dict(color=EDGE, width=1))
    return go.Scatter(name=name, x=x, y=y, mode="markers", marker=marker).update(more)


def peak(at: float, height: float, **more: Any) -> go.Scatter:
    """The dot at a highest value, in MB."""
    look = dict(marker_line=dict(color="white", width=1.5), hovertemplate="peak %{y:.1f} MB<extra></extra>")
    return points("peak", ALARM, [at], [height], 12, showlegend=False, **look, **more)

"""One look for every figure: a colour per category and per strategy, type that reads from the back of a room.

Colours are told apart with every common colour vision (a test simulates them). Backgrounds are transparent, segments
have edges, and text takes its colour from the layout's font, which the HTML page switches: one figure serves a
notebook, a printed page and a dark lecture room.
"""

from __future__ import annotations

import plotly.graph_objects as go

CATEGORY_COLOURS = {
    "parameter_slices": "#0064c8",
    "gathered_parameters": "#6cc4f0",
    "gradient_slices": "#b84a0a",
    "whole_gradients": "#f09a1a",
    "optimizer_state": "#0aa06c",
    "activations": "#cc7fa8",
    "communication_buffers": "#ebdf6a",
    "other": "#555b65",
}
STRATEGY_COLOURS = {
    "no_shard": "#7f868f",
    "zero1": "#d3c1ee",
    "zero2": "#ae8fdc",
    "shard_grad_op": "#8a5fcb",
    "full_shard": "#6435b0",
    "hybrid_shard": "#c2366f",
    "twin": "#d9b84a",
}
COLLECTIVE_COLOURS = {"all_gather": "#6cc4f0", "all_gather in backward": "#0064c8", "reduce_scatter": "#b84a0a", "all_reduce": "#0aa06c"}
ALARM = "#e5383b"  # the card line, what exceeds it, exposed time
GRID = "rgba(128,132,136,0.28)"
EDGE = "rgba(20,22,26,0.65)"  # thin edge of a bar segment
FONT = "Inter, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"
TEXT = "#1b1e23"
DARK_TEXT = "#eceff3"

_AXIS = dict(
    gridcolor=GRID, zerolinecolor=GRID, linecolor=GRID, automargin=True, ticks="outside", ticklen=4, tickcolor=GRID,
    title=dict(standoff=12, font=dict(size=16)), tickfont=dict(size=15),
)  # fmt: skip
TEMPLATE = go.layout.Template(
    layout=dict(
        font=dict(family=FONT, size=15, color=TEXT),
        title=dict(x=0, xref="container", xanchor="left", yref="container", font=dict(size=20), pad=dict(l=16)),
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        xaxis=_AXIS,
        yaxis=_AXIS,
        legend=dict(orientation="h", x=0, xanchor="left", yref="container", yanchor="top", font=dict(size=14), traceorder="normal"),
        bargap=0.32,
        hoverlabel=dict(font=dict(family=FONT, size=14)),
    )
)


def titled(figure: go.Figure, title: str, subtitle: str, alt: str, height: int = 420) -> go.Figure:
    """Give a figure its finding (title), its conditions (subtitle), its alternative text and the house's look."""
    figure.update_layout(
        template=TEMPLATE,
        title=dict(text=f"<b>{title}</b>", subtitle=dict(text=subtitle, font=dict(size=15)), y=1, yanchor="top", pad=dict(t=16)),
        margin=dict(l=16, r=28, t=160, b=16),
        legend=dict(y=1 - 82 / height),
        height=height,
        meta=dict(alt=alt),
    )
    return figure


def alt_text(figure: go.Figure) -> str:
    """What the figure shows, in words, for readers who do not see it; kept in the figure's `layout.meta`."""
    return (figure.layout.meta or {}).get("alt", "")


def strategy_colour(strategy: str, engine: str) -> str:
    """The strategy's colour; the twin has its own."""
    return STRATEGY_COLOURS["twin"] if engine == "twin" else STRATEGY_COLOURS.get(strategy, STRATEGY_COLOURS["no_shard"])

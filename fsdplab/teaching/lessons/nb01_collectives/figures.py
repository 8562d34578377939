"""Bandwidth over message size: where a collective stops paying for its start and begins paying for its bytes."""

from __future__ import annotations

from fsdplab.common.sizes import size, three_digits
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import COLLECTIVE_COLOURS, STRATEGY_COLOURS, titled

from .timings import Bandwidth, Timing

GB = 1e9


def bandwidth_figure(measured: Bandwidth) -> go.Figure:
    """Lines of busbw over the payload's size, one a collective."""
    kinds = list(dict.fromkeys(timing.kind for timing in measured.timings))
    figure = go.Figure([_line(kind, [t for t in measured.timings if t.kind == kind]) for kind in kinds])
    figure.update_xaxes(title="payload P", type="category")
    figure.update_yaxes(title="busbw (GB/s)", range=[0, 1.15 * max(t.busbw for t in measured.timings) / GB])
    ranks = measured.timings[0].ranks
    subtitle = f"Measured on {ranks} CPU ranks, gloo over this machine's loopback: no network is involved"
    return titled(figure, _finding(measured, kinds), subtitle, _alt(measured, kinds), height=440)


def _line(kind: str, timings: list[Timing]) -> go.Scatter:
    colour = COLLECTIVE_COLOURS.get(kind, STRATEGY_COLOURS["no_shard"])
    return go.Scatter(
        name=kind, mode="lines+markers", x=[size(t.nbytes) for t in timings], y=[t.busbw / GB for t in timings],
        line=dict(color=colour, width=3), marker=dict(color=colour, size=9),
        hovertemplate=f"{kind}, %{{x}}: %{{y:.2f}} GB/s<extra></extra>",
    )  # fmt: skip


def _finding(measured: Bandwidth, kinds: list[str]) -> str:
    best = max((measured.at(kind, measured.largest) for kind in kinds), key=lambda timing: timing.busbw)
    smallest = measured.at(best.kind, min(timing.nbytes for timing in measured.timings))
    ends = [f"{three_digits(timing.busbw / GB)} GB/s at {size(timing.nbytes)}" for timing in (best, smallest)]
    return f"{best.kind}: {ends[0]}, {ends[1]}"


def _alt(measured: Bandwidth, kinds: list[str]) -> str:
    at = size(measured.largest)
    ends = "; ".join(f"{kind} {three_digits(measured.at(kind, measured.largest).busbw / GB)} GB/s" for kind in kinds)
    return f"Lines of bus bandwidth over payload size. At {at}: {ends}."

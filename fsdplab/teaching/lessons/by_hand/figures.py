"""Backward seen gradient by gradient: what is ready and what was sent (03), and how many bytes of gradients are held
(04).
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.common.sizes import size
from fsdplab.common.words import plural
from fsdplab.figures.lines import line
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import STRATEGY_COLOURS, mark_level, titled

from .runs import Run

KB = 1e3
READY, HOOK, BUCKETS = "#d0d4d9", "#6cc4f0", "#0064c8"
HELD = (STRATEGY_COLOURS["no_shard"], "#f09a1a", "#b84a0a")


def bucket_figure(runs: Sequence[Run]) -> go.Figure:
    """Bytes of gradients ready, and bytes sent by each run, after every gradient of one backward."""
    one, many = runs[0], [run for run in runs if run.sent]
    sent = [_steps(f"sent: {run.name}", (*run.sent, run.payload), colour) for run, colour in zip(many, (HOOK, BUCKETS))]
    figure = go.Figure([_area("ready", (*one.ready, one.ready[-1])), *sent])
    figure.add_annotation(
        x=len(one.ready) + 1, y=0, text="after backward", showarrow=False, xanchor="right", yanchor="bottom", xshift=-4
    )
    figure.update_xaxes(title="gradients ready so far, from the head to the embeddings", range=[0, len(one.ready) + 2])
    figure.update_yaxes(title="kB", range=[0, 1.12 * one.ready[-1] / KB])
    words = "; ".join(f"{run.name} {plural(run.collectives, 'message')}" for run in many)
    last = many[-1]
    left = last.payload - last.sent[-1]
    rest = size(left) if left else "nothing"
    title = f"{last.collectives} messages instead of {many[0].collectives}; {rest} left after backward"
    subtitle = f"Measured on {one.ranks} CPU ranks, one backward; {size(one.payload)} of gradients"
    alt = f"Staircases of bytes over the gradients of one backward. {words}. {title}."
    return titled(figure, title, subtitle, alt, height=310)


def gradient_figure(runs: Sequence[Run]) -> go.Figure:
    """Bytes of gradients that one rank holds, before and after the hooks of every gradient in one backward."""
    figure = go.Figure([_steps(run.name, run.held, colour, 0.5) for run, colour in zip(runs, HELD[1:])])
    whole = runs[0].payload
    mark_level(figure, whole / KB, f"all gradients whole: {size(whole)}", "y", colour=HELD[0])
    figure.update_xaxes(
        title="gradients ready so far, from the head to the embeddings", range=[0, len(runs[0].held) / 2 + 0.5]
    )
    figure.update_yaxes(title="gradients held by one rank (kB)", range=[0, 1.18 * whole / KB])
    peaks = [f"{run.name} {size(max(run.held))}" for run in runs]
    title = f"Most gradients held: {', '.join(peaks)}"
    subtitle = f"Measured on {runs[0].ranks} CPU ranks, one backward; each tooth is a gradient before it is cut"
    return titled(figure, title, subtitle, f"Gradient bytes held through one backward. {title}.", height=310)


def _area(name: str, levels: Sequence[int]) -> go.Scatter:
    """A filled staircase, to stand behind the others."""
    return _steps(name, levels, READY).update(stackgroup=name, fillcolor=READY, line=dict(width=0))


def _steps(name: str, levels: Sequence[int], colour: str, width: float = 1.0) -> go.Scatter:
    """A staircase over the gradients; `width` 0.5 where there are two levels a gradient."""
    places = [0, *(width * (index + 1) for index in range(len(levels)))]
    heights = [0, *(level / KB for level in levels)]
    hover = f"{name}: %{{y:.0f}} kB<extra></extra>"
    return line(name, colour, places, heights, line_shape="hv", hovertemplate=hover)

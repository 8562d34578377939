"""Lesson 07's own figure: the same step on links of several speeds, how much of its communication is hidden and how
much shows.
"""

from __future__ import annotations

from collections.abc import Mapping

from fsdplab.common.sizes import seconds
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import percent
from fsdplab.figures.style import EDGE, STEP_COLOURS, ink_on, titled

Split = Mapping[str, tuple[float, float, float]]


def communication_bars(split: Split) -> go.Figure:
    """Communication of a step on each network, hidden and not, stacked, in ms.

    `split` holds (not hidden, communication, step) in seconds by the network's name: `{"1 GB/s": (0.02, 0.1, 0.3)}` is
    80 % hidden.
    """
    longest = max(moved for _, moved, _ in split.values())
    figure = go.Figure([_segment(part, split, longest) for part in ("overlapped", "exposed")])
    figure.update_layout(barmode="stack", xaxis_title="communication in one step (ms)")
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(range=[0, 1.75e3 * longest])
    for name, (shown, moved, step) in split.items():
        words = f"<b>{percent(moved - shown, moved)} hidden</b> · step {seconds(step)}"
        figure.add_annotation(x=1e3 * moved, y=name, text=words, showarrow=False, xanchor="left", xshift=6)
    summary = "; ".join(
        f"{name}: {seconds(shown)} of {seconds(moved)} not hidden, step {seconds(step)}"
        for name, (shown, moved, step) in split.items()
    )
    where = "Measured on 2 CPU ranks; all links are emulated, the raw transport is not"
    return titled(
        figure,
        finding(split),
        where,
        f"Stacked bars of communication: {summary}.",
        height=180 + 70 * len(split),
        top=130,
    )


def finding(split: Split) -> str:
    """The slowest and the fastest network in one line."""
    slow, fast = (pick(split, key=lambda name: split[name][1]) for pick in (max, min))
    if slow == fast:
        return f"{slow}: {seconds(split[slow][0])} of {seconds(split[slow][1])} of communication is not hidden"
    return f"{slow}: {seconds(split[slow][0])} of communication shows; {fast}: {seconds(split[fast][0])}"


def _segment(part: str, split: Split, longest: float) -> go.Bar:
    spans = [shown if part == "exposed" else moved - shown for shown, moved, _ in split.values()]
    return go.Bar(
        name="hidden under compute" if part == "overlapped" else "not hidden", orientation="h", y=list(split),
        x=[1e3 * span for span in spans],
        marker=dict(color=STEP_COLOURS[part], line=dict(color=EDGE, width=1)),
        text=[seconds(span) if span > 0.1 * longest else "" for span in spans],
        textposition="inside", insidetextanchor="middle", textangle=0, constraintext="none",
        textfont=dict(size=13, color=ink_on(STEP_COLOURS[part])),
        hovertemplate="%{y}<br>" + part + ": %{x:.1f} ms<extra></extra>",
    )  # fmt: skip

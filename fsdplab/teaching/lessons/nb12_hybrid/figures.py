"""Figures of lesson 12: time on both links by run and collective, and the peak of each run."""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.common.sizes import seconds, size
from fsdplab.figures import memory_by_category
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import COLLECTIVE_COLOURS, EDGE, ink_on, titled
from fsdplab.records import RunRecord

from .network import ACROSS, WITHIN, by_collective, sent, slow


def link_figure(runs: Sequence[RunRecord]) -> go.Figure:
    """Time that each run's collectives take on the emulated links, stacked, in ms of one rank's step; bytes and link in
    the bars' names.
    """
    split = {record.spec["strategy"]: by_collective(record) for record in runs}
    kinds = [kind for kind in COLLECTIVE_COLOURS if any(kind in found for found in split.values())]
    longest = max(sum(spent for _, spent in found.values()) for found in split.values())
    figure = go.Figure([_segment(kind, split, longest) for kind in kinds])
    figure.update_layout(barmode="stack", xaxis_title="time on the links in one step (ms)")
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(range=[0, 1.8e3 * longest])
    for record in runs:
        name, s = record.spec["strategy"], sent(record)
        words = f"<b>{seconds(_total(split[name]))}</b> · {size(slow(record))} at the slow link's pace"
        words += f", {size(s['within'])} at the fast one's" if s["across"] else ""
        figure.add_annotation(
            x=1e3 * _total(split[name]), y=name, text=words, showarrow=False, xanchor="left", xshift=6
        )
    summary = "; ".join(
        f"{name}: " + ", ".join(f"{kind} {size(nbytes)} in {seconds(spent)}" for kind, (nbytes, spent) in found.items())
        for name, found in split.items()
    )
    first, last = runs[0].spec["strategy"], runs[-1].spec["strategy"]
    title = (
        f"{first} keeps the links busy for {seconds(_total(split[first]))} a step, {last} for"
        f" {seconds(_total(split[last]))}"
    )
    return titled(
        figure,
        title,
        f"Counted on 4 CPU ranks; both links are emulated ({WITHIN} within a node, {ACROSS} between)",
        f"Stacked bars: {summary}.",
        height=320,
        top=130,
    )


def _total(found: dict[str, tuple[int, float]]) -> float:
    return sum(spent for _, spent in found.values())


def _segment(kind: str, split: dict[str, dict[str, tuple[int, float]]], longest: float) -> go.Bar:
    spans = [found.get(kind, (0, 0.0))[1] for found in split.values()]
    return go.Bar(
        name=kind.replace("_", "-"), orientation="h", y=list(split), x=[1e3 * span for span in spans],
        marker=dict(color=COLLECTIVE_COLOURS[kind], line=dict(color=EDGE, width=1)),
        text=[seconds(span) if span > 0.08 * longest else "" for span in spans],
        textposition="inside", insidetextanchor="middle", textangle=0, constraintext="none",
        textfont=dict(size=13, color=ink_on(COLLECTIVE_COLOURS[kind])),
        hovertemplate="%{y}<br>" + kind + ": %{x:.1f} ms<extra></extra>",
    )  # fmt: skip


def memory_figure(runs: Sequence[RunRecord]) -> go.Figure:
    """The peak of each run by category."""
    return memory_by_category(list(runs))

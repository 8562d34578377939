"""The figure of lesson 10: one block's compute above its messages, with what is exposed in red."""

from __future__ import annotations

from fsdplab.common.sizes import seconds
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import EDGE, STEP_COLOURS, ink_on, titled
from fsdplab.planning.overlap import PHASES, Overlap

_NAMES = {"compute": "#6b7380", "hidden": STEP_COLOURS["overlapped"], "exposed": STEP_COLOURS["exposed"]}


def block_figure(found: Overlap, link: str, batch: str) -> go.Figure:
    """Bars of a block's compute and messages in forward and backward; a message hides as far as compute reaches."""
    spans = {phase: _split(found, phase) for phase in PHASES}
    lines = [f"{phase}: {what}" for phase in PHASES for what in ("compute", "messages")]
    figure = go.Figure([_bars(name, lines, spans) for name in _NAMES])
    figure.update_layout(barmode="stack", xaxis_title="one block (ms)")
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    exposed = {phase: split["exposed"] for phase, split in spans.items()}
    where = ", ".join(f"{phase} {seconds(span)}" for phase, span in exposed.items() if span)
    title = f"{link}, {batch}: {f'exposed a block: {where}' if where else 'everything hides'}"
    said = "; ".join(
        f"{phase} computes {seconds(found.compute_s[phase])}, its messages take {seconds(found.communication_s[phase])}"
        for phase in PHASES
    )
    subtitle = "Predicted for Llama 3.1 8B on 8 H100 behind this link, full_shard, gathering one block ahead"
    return titled(figure, title, subtitle, f"Bars of one block: {said}. {title}.", height=400, top=130)


def _split(found: Overlap, phase: str) -> dict[str, float]:
    compute, sent = found.compute_s[phase], found.communication_s[phase]
    return {"compute": compute, "hidden": min(sent, compute), "exposed": max(0.0, sent - compute)}


def _bars(name: str, lines: list[str], spans: dict[str, dict[str, float]]) -> go.Bar:
    row = "compute" if name == "compute" else "messages"
    values = [1e3 * spans[line.partition(":")[0]][name] if line.endswith(row) else 0.0 for line in lines]
    label = name if name == "compute" else f"messages, {name}"
    widest = 1e3 * max(max(split["compute"], split["hidden"] + split["exposed"]) for split in spans.values())
    return go.Bar(
        name=label, orientation="h", y=lines, x=values, marker=dict(color=_NAMES[name], line=dict(color=EDGE, width=1)),
        text=[seconds(value / 1e3) if value > 0.08 * widest else "" for value in values],
        textposition="inside", insidetextanchor="middle", textangle=0, constraintext="none",
        textfont=dict(size=13, color=ink_on(_NAMES[name])),
        hovertemplate="%{y}<br>" + label + ": %{x:.2f} ms<extra></extra>",
    )  # fmt: skip

"""The figure of lesson 10: one block's compute above its messages, with what is exposed in red."""

from __future__ import annotations

from fsdplab.common.sizes import seconds
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import STEP_COLOURS, titled
from fsdplab.planning.overlap import PHASES, Overlap

_NAMES = {"compute": "#6b7380", "hidden": STEP_COLOURS["overlapped"], "exposed": STEP_COLOURS["exposed"]}


def block_figure(found: Overlap, link: str, batch: str) -> go.Figure:
    """Bars of a block's compute and messages in forward and backward; a message hides as far as compute reaches."""
    spans = {phase: _split(found, phase) for phase in PHASES}
    lines = [f"{phase}: {what}" for phase in PHASES for what in ("compute", "messages")]
    parts = [_part(name, lines, spans) for name in _NAMES]
    figure = stacked_bars(
        dict.fromkeys(lines, ""), parts, "one block (ms)", "%{x:.2f} ms", lambda ms: seconds(ms / 1e3)
    )
    exposed = {phase: split["exposed"] for phase, split in spans.items()}
    where = ", ".join(f"{phase} {seconds(span)}" for phase, span in exposed.items() if span)
    title = f"{link}, {batch}: {f'exposed a block: {where}' if where else 'everything hides'}"
    said = "; ".join(
        f"{phase} computes {seconds(found.compute_s[phase])}, its messages take {seconds(found.communication_s[phase])}"
        for phase in PHASES
    )
    subtitle = "Predicted for Llama 3.1 8B on 8 H100 behind this link, full_shard, gathering one block ahead"
    return titled(figure, title, subtitle, f"Bars of one block: {said}. {title}.", 270)


def _split(found: Overlap, phase: str) -> dict[str, float]:
    compute, sent = found.compute_s[phase], found.communication_s[phase]
    return {"compute": compute, "hidden": min(sent, compute), "exposed": max(0.0, sent - compute)}


def _part(name: str, lines: list[str], spans: dict[str, dict[str, float]]) -> Part:
    row = "compute" if name == "compute" else "messages"
    lengths = [1e3 * spans[line.partition(":")[0]][name] if line.endswith(row) else 0.0 for line in lines]
    return Part(name if name == "compute" else f"messages, {name}", _NAMES[name], lengths)

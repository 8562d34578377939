"""The figure of a planner's answer: what its panels name of its table, as bars or lines, under the card's line."""

from __future__ import annotations

from typing import Any

from fsdplab.common.sizes import size
from fsdplab.figures.lines import line
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import ALARM, COLLECTIVE_COLOURS, EDGE, LANE_COLOURS, mark_level, titled
from fsdplab.planning.questions import Answer, Panel

_SCALES = {"bytes": ("GB", 1e9), "rate": ("GB/s", 1e9), "seconds": ("ms", 1e-3), "share": ("%", 0.01)}
_COLOURS = (COLLECTIVE_COLOURS["all_gather in backward"], COLLECTIVE_COLOURS["reduce_scatter"])
_SPANS = {1: [(0.0, 1.0)], 2: [(0.0, 0.46), (0.56, 1.0)]}
_ABOVE = 1.15  # of the highest value, for the limit's name
_MOST_LETTERS = 70  # of labels beside each other over the whole width


def answer_figure(answer: Answer) -> go.Figure:
    """The sentence as title, and each panel over the table's first column; bars that break a limit are red."""
    figure = go.Figure()
    for place, panel in enumerate(answer.panels):
        _add_panel(figure, answer, panel, place)
    figure.update_layout(barmode="group", showlegend=any(len(panel.columns) > 1 for panel in answer.panels))
    over = answer.columns[0].name
    drawn = "; ".join(f"{panel.kind} of {', '.join(panel.columns)} over {over}" for panel in answer.panels)
    alt = f"{answer.asked} {answer.sentence}. {drawn}."
    return titled(figure, answer.sentence, _conditions(answer), alt, 310)


def _add_panel(figure: go.Figure, answer: Answer, panel: Panel, place: int) -> None:
    number = "" if place == 0 else str(place + 1)
    columns = [each for each in answer.columns if each.name in panel.columns]
    values = {each.name: [float(value or 0) for value in answer.column(each.name)] for each in columns}
    highest, kind = max(value for found in values.values() for value in found), columns[0].kind
    unit, scale = ("s", 1.0) if kind == "seconds" and highest >= 1 else _SCALES.get(kind, ("", 1.0))
    limit = panel.limit[0] / scale if panel.limit else None
    labels = [row[0] for row in answer.texts()]
    for (name, found), colour in zip(values.items(), _COLOURS):
        colour = LANE_COLOURS["all_reduce"] if place else colour
        heights, axes = [value / scale for value in found], {"xaxis": f"x{number}", "yaxis": f"y{number}"}
        if panel.kind == "lines":
            figure.add_trace(line(name, colour, labels, heights, mode="lines+markers").update(axes))
        else:
            colours = [ALARM if limit is not None and height > limit else colour for height in heights]
            marker = dict(color=colours, line=dict(color=EDGE, width=1))
            figure.add_trace(go.Bar(name=name, x=labels, y=heights, marker=marker, **axes))
    title = f"{panel.title or columns[0].name}{f' ({unit})' if unit else ''}"
    up = dict(title=title, anchor=f"x{number}", range=[0, _ABOVE * max(highest / scale, limit or 0.0) or 1])
    span = _SPANS[len(answer.panels)][place]
    across = dict(
        title=answer.columns[0].name, domain=span, anchor=f"y{number}", type="category", showgrid=False,
        tickangle=-45 if sum(map(len, labels)) * len(answer.panels) > _MOST_LETTERS else None,
    )  # fmt: skip
    figure.update_layout({f"xaxis{number}": across, f"yaxis{number}": up})
    if panel.limit and limit is not None:
        rises = values[columns[0].name][-1] > values[columns[0].name][0]
        end: dict[str, Any] = dict(x=0, xanchor="left") if rises else dict(x=1, xanchor="right", xshift=-6)
        mark_level(figure, limit, panel.limit[1], "y", number, **end)


def _conditions(answer: Answer) -> str:
    spec, said = answer.spec, f"{answer.provenance[0].upper()}{answer.provenance[1:]}"
    said += f"; {spec.model.name}, {spec.strategy}, {spec.gpus:,} x {spec.gpu.name} ({size(spec.gpu.memory_bytes)})"
    said += f", {spec.micro_batch} x {spec.seq:,} tokens a micro-batch, checkpointing {spec.checkpointing}"
    return f"{said}; {answer.note}" if answer.note else said

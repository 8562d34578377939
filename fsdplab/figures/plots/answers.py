"""The figure of a planner's answer: what its panels name of its table, as bars or lines, under the card's line."""

from __future__ import annotations

from fsdplab.common.sizes import size
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import ALARM, COLLECTIVE_COLOURS, EDGE, LANE_COLOURS, titled
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.questions import Answer, Column, Panel

_SCALES = {"bytes": ("GB", 1e9), "rate": ("GB/s", 1e9), "seconds": ("ms", 1e-3), "share": ("%", 0.01)}
_COLOURS = (COLLECTIVE_COLOURS["all_gather in backward"], COLLECTIVE_COLOURS["reduce_scatter"])
_SPANS = {1: [(0.0, 1.0)], 2: [(0.0, 0.46), (0.56, 1.0)]}
_ABOVE = 1.15  # of the highest value, for the limit's name


def answer_figure(answer: Answer) -> go.Figure:
    """The sentence as title, and each panel over the table's first column; bars that break a limit are red."""
    figure = go.Figure()
    for place, panel in enumerate(answer.panels):
        _add_panel(figure, answer, panel, place)
    figure.update_layout(barmode="group", showlegend=any(len(panel.columns) > 1 for panel in answer.panels))
    alt = f"{answer.asked} {answer.sentence}. {_drawn(answer)}."
    return titled(figure, answer.sentence, _conditions(answer), alt, height=460, top=150)


def _drawn(answer: Answer) -> str:
    first = answer.columns[0].name
    return "; ".join(f"{panel.kind} of {', '.join(panel.columns)} over {first}" for panel in answer.panels)


def _add_panel(figure: go.Figure, answer: Answer, panel: Panel, place: int) -> None:
    number = "" if place == 0 else str(place + 1)
    columns = [each for each in answer.columns if each.name in panel.columns]
    highest = max([float(value or 0) for each in columns for value in answer.column(each.name)])
    unit, scale = (
        ("s", 1.0) if columns[0].kind == "seconds" and highest >= 1 else _SCALES.get(columns[0].kind, ("", 1.0))
    )
    labels = [row[0] for row in answer.texts()]
    axes = dict(xaxis=f"x{number}", yaxis=f"y{number}")
    for column, colour in zip(columns, _COLOURS):
        heights = [float(value or 0) / scale for value in answer.column(column.name)]
        figure.add_trace(
            _trace(column, panel, labels, heights, colour if place == 0 else _of_place(place), axes, scale)
        )
    top = _ABOVE * max(highest, panel.limit[0] if panel.limit else 0.0) / scale
    title = panel.title or columns[0].name
    up = dict(title=f"{title} ({unit})".strip() if unit else title, anchor=f"x{number}", range=[0, top or 1])
    across = dict(
        title=answer.columns[0].name, domain=_SPANS[len(answer.panels)][place], anchor=f"y{number}", type="category",
        showgrid=False, tickangle=-45 if sum(map(len, labels)) * len(answer.panels) > _MOST_LETTERS else None,
    )  # fmt: skip
    figure.update_layout({f"xaxis{number}": across, f"yaxis{number}": up})
    if panel.limit:
        first, last = (float(answer.column(columns[0].name)[end] or 0) for end in (0, -1))
        _add_limit(figure, panel.limit, scale, number, _SPANS[len(answer.panels)][place], last > first)


_MOST_LETTERS = 70  # of labels beside each other over the whole width


def _of_place(place: int) -> str:
    return LANE_COLOURS["all_reduce"] if place else _COLOURS[0]


def _trace(
    column: Column, panel: Panel, labels: list[str], heights: list[float], colour: str, axes: dict[str, str],
    scale: float,
) -> go.Bar | go.Scatter:  # fmt: skip
    shown = dict(name=column.name, x=labels, y=heights, **axes)
    if panel.kind == "lines":
        return go.Scatter(
            mode="lines+markers", line=dict(color=colour, width=3), marker=dict(size=9, color=colour), **shown
        )
    most = panel.limit[0] / scale if panel.limit else float("inf")
    colours = [ALARM if height > most else colour for height in heights]
    return go.Bar(marker=dict(color=colours, line=dict(color=EDGE, width=1)), **shown)


def _add_limit(
    figure: go.Figure, limit: tuple[float, str], scale: float, number: str, span: tuple[float, float], rises: bool
) -> None:
    """A dashed line over the panel, and its name above it, where bars are lower."""
    left, right = span
    height = limit[0] / scale
    figure.add_shape(
        type="line", x0=left, x1=right, xref="paper", y0=height, y1=height, yref=f"y{number}",
        line=dict(color=ALARM, width=2, dash="dash"),
    )  # fmt: skip
    figure.add_annotation(
        x=left if rises else right, xref="paper", y=height, yref=f"y{number}", text=limit[1], showarrow=False,
        xanchor="left" if rises else "right", yanchor="bottom", font=dict(size=14, color=ALARM),
    )  # fmt: skip


def _conditions(answer: Answer) -> str:
    provenance = answer.provenance
    said = f"{provenance[0].upper()}{provenance[1:]}; {setting(answer.spec)}"
    return f"{said}; {answer.note}" if answer.note else said


def setting(spec: PlanSpec) -> str:
    """The plan that was asked about: `llama-3.1-8b, full_shard, 8 x H100 SXM 80GB (85.9 GB), 1 x 4,096 tokens`."""
    return (
        f"{spec.model.name}, {spec.strategy}, {spec.gpus:,} x {spec.gpu.name} ({size(spec.gpu.memory_bytes)}),"
        f" {spec.micro_batch} x {spec.seq:,} tokens a micro-batch, checkpointing {spec.checkpointing}"
    )

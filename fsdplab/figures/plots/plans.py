"""Figures of plans: a sweep's memory, predictions against published figures, answers, and the roofline of overlap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import size, three_digits
from fsdplab.figures.lines import line, points
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import conditions, listed
from fsdplab.figures.style import (
    ALARM,
    CAMERA,
    CATEGORY_COLOURS,
    COLLECTIVE_COLOURS,
    EDGE,
    GRID,
    LANE_COLOURS,
    mark_level,
    titled,
)
from fsdplab.figures.view import RunView, views
from fsdplab.planning.overlap import PHASES, Overlap, OverlapPoint, overlap_of, overlap_point
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.planner import Plan
from fsdplab.planning.questions import Answer, Panel
from fsdplab.records import RunRecord


def page_of(figure: go.Figure) -> str:
    """A page of its own that shows one figure."""
    return str(figure.to_html(include_plotlyjs="cdn", config=CAMERA))


def sweep_figure(name: str, values: Sequence[int], plans: Sequence[Plan]) -> go.Figure:
    """Peak memory by category as stacked bars, a bar a value, under the line of the card."""
    labels = [f"{value:,}" for value in values]
    figure = go.Figure(
        [
            go.Bar(
                name=row.title, x=labels, y=[each.memory.peak.by_category[category] / 1e9 for each in plans],
                marker=dict(color=CATEGORY_COLOURS[category]),
            )
            for category, row in CATEGORY_ROWS.items()
        ]
    )  # fmt: skip
    card = plans[0].spec.gpu.memory_bytes
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text=name.replace("_", " "), type="category")
    figure.update_yaxes(title_text="memory of a rank at its peak (GB)")
    mark_level(figure, card / 1e9, f"card {size(card)}", "y", x=1, xanchor="right", xshift=-6)
    spec, fits = plans[0].spec, [label for label, each in zip(labels, plans) if each.fits]
    speeds = [f"{label}: {three_digits(each.tokens_per_s_per_gpu or 0)}" for label, each in zip(labels, plans)]
    title = f"{spec.model.name} fits with {name.replace('_', ' ')} {', '.join(fits) or 'of none of these'}"
    subtitle = f"Predicted; {spec.strategy}, card {size(card)}; tokens/s a GPU: {', '.join(speeds)}"
    return titled(figure, title, subtitle, f"Stacked bars of peak memory by category. {title}. {subtitle}")


def validation_figure(rows: Sequence[tuple[str, str, float, float]], title: str) -> go.Figure:
    """Predicted against published, log-log, a panel for memory and one for throughput; rows are (quantity, source,
    published, predicted) in units of their own. A source has one colour in both.
    """
    figure = go.Figure()
    colours = dict(zip(sorted({row[1] for row in rows}), cycle(_COLOURS)))
    for place, quantity in enumerate(dict.fromkeys(row[0] for row in rows)):
        _add_panel(figure, place, quantity, [row for row in rows if row[0] == quantity], colours)
    subtitle = f"{len(rows)} figures; both axes logarithmic; on the line a prediction equals what was published"
    return titled(figure, title, subtitle, f"Scatter of predicted against published. {title}.", 340)


def _add_panel(
    figure: go.Figure, place: int, quantity: str, rows: Sequence[tuple[str, str, float, float]],
    colours: Mapping[str, str],
) -> None:  # fmt: skip
    """Points of one quantity and the diagonal, on logarithmic axes with labels of round values."""
    number = "" if place == 0 else str(place + 1)
    axes = dict(xaxis=f"x{number}", yaxis=f"y{number}")
    found = [value for row in rows for value in row[2:]]
    ends = [0.8 * min(found), 1.25 * max(found)]
    figure.add_trace(line("", "#808488", ends, ends, 2, "dot", showlegend=False, **axes))
    for source, colour in colours.items():
        own = [row for row in rows if row[1] == source]
        look = dict(legendgroup=source, showlegend=place == 0, **axes)
        figure.add_trace(points(source, colour, [row[2] for row in own], [row[3] for row in own], 10, **look))
    ticks = [tick for tick in _ROUND if ends[0] <= tick <= ends[1]]
    axis = dict(type="log", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks])
    axis |= dict(range=[math.log10(end) for end in ends])
    span = [0.0, 0.44] if place == 0 else [0.56, 1.0]
    up = axis | dict(title="predicted" if place == 0 else "", anchor=f"x{number}")
    across = axis | dict(domain=span, title=f"published {quantity}", anchor=f"y{number}")
    figure.update_layout({f"xaxis{number}": across, f"yaxis{number}": up})


_COLOURS = ("#0064c8", "#b84a0a", "#0aa06c", "#cc7fa8", "#6435b0", "#8a4a9e")
_ROUND = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)


# ---- the planner's answers: what their panels name of their tables, as bars or lines, under the card's line


_SCALES = {"bytes": ("GB", 1e9), "rate": ("GB/s", 1e9), "seconds": ("ms", 1e-3), "share": ("%", 0.01)}
_OF_COLUMNS = (COLLECTIVE_COLOURS["all_gather in backward"], COLLECTIVE_COLOURS["reduce_scatter"])
_SPANS = {1: [(0.0, 1.0)], 2: [(0.0, 0.46), (0.56, 1.0)]}
_ABOVE = 1.15  # of the highest value, for the limit's name
_MOST_LETTERS = 70  # of labels beside each other over the whole width


def answer_figure(answer: Answer) -> go.Figure:
    """The sentence as title, and each panel over the table's first column; bars that break a limit are red."""
    figure = go.Figure()
    for place, panel in enumerate(answer.panels):
        _add_answer(figure, answer, panel, place)
    figure.update_layout(barmode="group", showlegend=any(len(panel.columns) > 1 for panel in answer.panels))
    over = answer.columns[0].name
    drawn = "; ".join(f"{panel.kind} of {', '.join(panel.columns)} over {over}" for panel in answer.panels)
    alt = f"{answer.asked} {answer.sentence}. {drawn}."
    return titled(figure, answer.sentence, _conditions(answer), alt, 310)


def _add_answer(figure: go.Figure, answer: Answer, panel: Panel, place: int) -> None:
    number = "" if place == 0 else str(place + 1)
    columns = [each for each in answer.columns if each.name in panel.columns]
    values = {each.name: [float(value or 0) for value in answer.column(each.name)] for each in columns}
    highest, kind = max(value for found in values.values() for value in found), columns[0].kind
    unit, scale = ("s", 1.0) if kind == "seconds" and highest >= 1 else _SCALES.get(kind, ("", 1.0))
    limit = panel.limit[0] / scale if panel.limit else None
    labels = [row[0] for row in answer.texts()]
    for (name, found), colour in zip(values.items(), _OF_COLUMNS):
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


# ---- the roofline of overlap: T_comm / T_compute of a block against the tokens of a rank, and where it crosses 1


_OF_PLANS = ("#0064c8", "#b84a0a", "#0aa06c", "#8a4a9e", "#d9b84a", "#6b7380")
_PHASE_COLOURS = {"forward": COLLECTIVE_COLOURS["all_gather"], "backward": COLLECTIVE_COLOURS["all_gather in backward"]}


def overlap_roofline(
    specs: PlanSpec | Mapping[str, PlanSpec], measured: RunRecord | Sequence[RunRecord] = ()
) -> go.Figure:
    """One plan: a line each for its forward and its backward. Several by name: each one's phase that hides last.

    Both axes are logarithmic. A diamond marks the crossover: right of it communication is hidden. `measured`: profiled
    runs, each a point of its own and, where its link was emulated, the line that the link's formula gives.
    ValueError for no or more than six plans, and for a run without a profile.
    """
    plans = {"": specs} if isinstance(specs, PlanSpec) else dict(specs)
    if not 1 <= len(plans) <= len(_OF_PLANS):
        raise ValueError(f"a roofline draws 1 to {len(_OF_PLANS)} plans, got {len(plans)}; leave some out, or add one")
    records = listed(measured)
    found = {name: overlap_of(spec) for name, spec in plans.items()}
    runs = [(view, overlap_point(record)) for view, record in zip(views(records), records)] if records else []
    crossings = [each.crossover(phase) for each in found.values() for phase in PHASES if each.crossover(phase)]
    tokens = [*(point.tokens for _, point in runs), *(crossings or [each.tokens for each in found.values()])]
    low, high = max(1.0, min(tokens) / 10), 10 * max(tokens)  # from a tenth of the first crossover
    figure = go.Figure()
    for name, each in found.items():
        for label, phase, colour in _lines(name, each, list(found)):
            at = each.crossover(phase)
            named = f"{label}: hidden from {three_digits(at)} tokens on"
            figure.add_trace(_falling(named, colour, each.ratio(phase, low), low, high))
            hover = f"{three_digits(at)} tokens<extra></extra>"
            crossover = points("", colour, [at], [1.0], hovertemplate=hover, showlegend=False)
            figure.add_trace(crossover.update(marker_symbol="diamond"))
    for view, point in runs:
        figure.add_traces(_of_a_run(view, point, low, high))
    _axes(figure, low, high)
    title = _finding(plans, found)
    alt = f"Lines of communication over compute against tokens, falling to the right. {title}."
    models = ", ".join(dict.fromkeys(spec.model.name for spec in plans.values()))
    strategies = ", ".join(dict.fromkeys(spec.strategy for spec in plans.values()))
    said = f"Predicted for {models}, {strategies}, prefetching one block"
    return titled(figure, title, f"{said}. {conditions(records)}" if records else said, alt, 390)


def _lines(name: str, overlap: Overlap, names: Sequence[str]) -> list[tuple[str, str, str]]:
    """(label, phase, colour) of a plan's lines that are above zero."""
    if not name:
        return [(phase, phase, _PHASE_COLOURS[phase]) for phase in PHASES if overlap.crossover(phase)]
    last = max(PHASES, key=overlap.crossover)
    return [(f"{name}, {last}", last, _OF_PLANS[names.index(name)])] if overlap.crossover(last) else []


def _falling(name: str, colour: str, at_low: float, low: float, high: float, dash: str = "solid") -> go.Scatter:
    """From the ratio at the fewest tokens: twice the tokens, half the ratio."""
    return line(name, colour, [low, high], [at_low, at_low * low / high], dash=dash)


def _of_a_run(view: RunView, point: OverlapPoint, low: float, high: float) -> list[go.Scatter]:
    """The run's own point, and the line through what its link's formula predicts at its tokens."""
    hover = f"{view.label}<br>{point.tokens:,} tokens, {point.measured:.3f}<extra></extra>"
    name = f"{view.label}, {'simulated' if view.simulated else 'measured'}"
    own = points(name, ALARM, [point.tokens], [point.measured], hovertemplate=hover)
    if not point.predicted:
        return [own]
    at_low = point.predicted * point.tokens / low
    return [_falling(f"{view.label}: {point.source}", ALARM, at_low, low, high, "dot"), own]


def _axes(figure: go.Figure, low: float, high: float) -> None:
    """Both axes in powers of ten; what is below the line of 1 is hidden."""
    across = [math.log10(low), math.log10(high)]
    figure.update_xaxes(type="log", dtick=1, tickformat=",", range=across, title_text="tokens of a rank's micro-batch")
    figure.update_yaxes(type="log", dtick=1, title_text="communication / compute of a block")
    figure.add_hline(1.0, line=dict(color=GRID, width=3))
    for text, anchor in (("exposed", "bottom"), ("hidden", "top")):
        figure.add_annotation(
            x=0.01, xref="paper", y=0, text=text, showarrow=False, xanchor="left", yanchor=anchor, font=dict(size=14)
        )


def _finding(plans: Mapping[str, PlanSpec], found: Mapping[str, Overlap]) -> str:
    if len(plans) == 1:
        (name, spec), (each,) = next(iter(plans.items())), found.values()
        where = name or f"{spec.model.name} on {spec.gpus} {spec.gpu.name}"
        tokens = each.crossover_tokens
        return f"{where}: hidden from {three_digits(tokens)} tokens a rank on" if tokens else f"{where} sends nothing"
    ranked = sorted(found, key=lambda name: found[name].crossover_tokens)
    first, last = (f"{name} ({three_digits(found[name].crossover_tokens)} tokens)" for name in (ranked[0], ranked[-1]))
    return f"Communication hides soonest on {first}, and last on {last}"

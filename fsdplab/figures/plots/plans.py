"""Figures of plans: a sweep's memory, and the roofline of overlap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import size, three_digits
from fsdplab.figures.lines import line, points
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import conditions, listed
from fsdplab.figures.style import ALARM, CAMERA, CATEGORY_COLOURS, COLLECTIVE_COLOURS, GRID, mark_level, titled
from fsdplab.figures.view import RunView, views
from fsdplab.planning.overlap import PHASES, Overlap, OverlapPoint, overlap_of, overlap_point
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.planner import Plan, Value
from fsdplab.records import RunRecord


def page_of(figure: go.Figure) -> str:
    """A page of its own that shows one figure."""
    return str(figure.to_html(include_plotlyjs="cdn", config=CAMERA))


def sweep_figure(name: str, values: Sequence[Value], plans: Sequence[Plan]) -> go.Figure:
    """Peak memory by category as stacked bars, a bar a value, under the line of the card."""
    labels = [f"{value:,}" if isinstance(value, int) else value for value in values]
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
    if all(plan.spec.gpu.memory_bytes == card for plan in plans):
        mark_level(figure, card / 1e9, f"card {size(card)}", "y", x=1, xanchor="right", xshift=-6)
    spec, fits = plans[0].spec, [label for label, each in zip(labels, plans) if each.fits]
    speeds = [f"{label}: {three_digits(each.tokens_per_s_per_gpu or 0)}" for label, each in zip(labels, plans)]
    what = spec.model.name if name != "model" else f"On {spec.gpus} {spec.gpu.name} it"
    title = f"{what} fits with {name.replace('_', ' ')} {', '.join(fits) or 'of none of these'}"
    subtitle = f"Predicted; {spec.strategy}, card {size(card)}; tokens/s a GPU: {', '.join(speeds)}"
    return titled(figure, title, subtitle, f"Stacked bars of peak memory by category. {title}. {subtitle}")


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

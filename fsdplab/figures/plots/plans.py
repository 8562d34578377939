"""Figures of plans: a sweep's memory, and the roofline of overlap."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import size, three_digits
from fsdplab.figures.lines import line, points
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import conditions, listed
from fsdplab.figures.style import ALARM, CATEGORY_COLOURS, COLLECTIVE_COLOURS, GRID, mark_level, titled
from fsdplab.figures.view import RunView, views
from fsdplab.planning.overlap import PHASES, Overlap, OverlapPoint, overlap_of, overlap_point
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.planner import Plan, Value, swept_axis, swept_name
from fsdplab.records import RunRecord

GB = 1e9


def sweep_figure(name: str, values: Sequence[Value], plans: Sequence[Plan]) -> go.Figure:
    """Draw peak memory by category as stacked bars, a bar a value, under the line of the card."""
    labels = [_label(value) for value in values]
    figure = go.Figure()
    for category, row in CATEGORY_ROWS.items():
        # each bar is split at its own peak, so a category may shrink where another instant becomes the highest
        peaks = [plan.memory.peak.by_category[category] / GB for plan in plans]
        marker = dict(color=CATEGORY_COLOURS[category])
        figure.add_trace(go.Bar(name=row.title, x=labels, y=peaks, marker=marker))
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text=swept_axis(name), type="category")
    figure.update_yaxes(title_text="memory of a rank at its peak (GB)")
    card = plans[0].spec.gpu.memory_bytes
    # a sweep over GPUs has a card for each bar, and no one line for all
    has_one_card = all(plan.spec.gpu.memory_bytes == card for plan in plans)
    if has_one_card:
        mark_level(figure, card / GB, f"card {size(card)}", "y", x=1, xanchor="right", xshift=-6)
    title, subtitle = _sweep_words(name, labels, plans)
    alt = f"Stacked bars of peak memory by category. {title}. {subtitle}"
    return titled(figure, title, subtitle, alt, 360)


def _label(value: Value) -> str:
    """Write a value as the axis shows it: a number with commas, a name as it is."""
    if isinstance(value, int):
        return f"{value:,}"
    return value


def _sweep_words(name: str, labels: Sequence[str], plans: Sequence[Plan]) -> tuple[str, str]:
    """Return (title, subtitle): with which values it fits, and how fast each is."""
    spec = plans[0].spec
    fitting, speeds = [], []
    for label, plan in zip(labels, plans):
        if plan.fits:
            fitting.append(label)
        speed = three_digits(plan.tokens_per_s_per_gpu or 0)
        speeds.append(f"{label}: {speed}")
    # "llama-3.1-8b fits with batch size 1, 2", or "On 8 H100 SXM 80GB it fits with model ..."
    what = spec.model.name
    if name == "model":  # where models are compared, no single one has a place in the title
        what = f"On {spec.gpus} {spec.gpu.name} it"
    title = f"{what} fits with no {swept_name(name)} of these"
    if fitting:
        title = f"{what} fits with {swept_name(name)} {', '.join(fitting)}"
    card = size(spec.gpu.memory_bytes)
    return title, f"Predicted; {spec.strategy}, card {card}; tokens/s a GPU: {', '.join(speeds)}"


# ---- the roofline of overlap: T_comm / T_compute of a block against the tokens of a rank, and where it crosses 1


PLAN_COLOURS = ("#0064c8", "#b84a0a", "#0aa06c", "#5c1776", "#d9b84a", "#6b7380")
_PHASE_COLOURS = {"forward": COLLECTIVE_COLOURS["all_gather"], "backward": COLLECTIVE_COLOURS["all_gather in backward"]}


@dataclass(frozen=True)
class _Roof:
    """A line of the roofline: of one phase of one plan, which hides its communication from `crossover` tokens on."""

    label: str
    colour: str
    phase: str
    overlap: Overlap

    @property
    def crossover(self) -> float:
        return self.overlap.crossover(self.phase)


@dataclass(frozen=True)
class _Clip:
    """The tokens between which the figure is drawn."""

    low: float
    high: float


def overlap_roofline(
    specs: PlanSpec | Mapping[str, PlanSpec], measured: RunRecord | Sequence[RunRecord] = ()
) -> go.Figure:
    """Draw the roofline of one plan: a line each for its forward and its backward; of several by name, each one's phase
    that hides last.

    Both axes are logarithmic. A diamond marks the crossover: right of it communication is hidden. `measured`: profiled
    runs, each a point of its own and, where its link was emulated, the line that the link's formula gives.
    ValueError for no or more than six plans, and for a run without a profile.
    """
    # a single plan has no name: its lines are called by their phases alone
    plans = {"": specs} if isinstance(specs, PlanSpec) else dict(specs)
    if not 1 <= len(plans) <= len(PLAN_COLOURS):
        raise ValueError(
            f"a roofline draws 1 to {len(PLAN_COLOURS)} plans, got {len(plans)}; leave some out, or add one"
        )
    records = listed(measured)
    overlaps = {name: overlap_of(spec) for name, spec in plans.items()}
    runs = []
    if records:
        for view, record in zip(views(records), records):
            runs.append((view, overlap_point(record)))
    clip = _clip(overlaps, [point for _, point in runs])
    figure = go.Figure()
    for roof in _roofs(overlaps):
        figure.add_traces(_roof_traces(roof, clip))
    for view, point in runs:
        figure.add_traces(_of_a_run(view, point, clip))
    _axes(figure, clip)
    title = _finding(plans, overlaps)
    alt = f"Lines of communication over compute against tokens, falling to the right. {title}."
    return titled(figure, title, _conditions(plans, records), alt, 390)


def _clip(overlaps: Mapping[str, Overlap], measured: Sequence[OverlapPoint]) -> _Clip:
    """Return the tokens from a tenth of the first crossover or run to ten times the last."""
    tokens: list[float] = []
    for overlap in overlaps.values():
        for phase in PHASES:
            crossover = overlap.crossover(phase)
            # 0 for a phase that sends nothing: it has no line
            if crossover:
                tokens.append(crossover)
    if not tokens:  # no plan sends anything
        for overlap in overlaps.values():
            tokens.append(overlap.tokens)
    for point in measured:
        tokens.append(point.tokens)
    # a decade on each side, so that both regions, exposed and hidden, are seen
    low = max(1.0, min(tokens) / 10)
    return _Clip(low, 10 * max(tokens))


def _roofs(overlaps: Mapping[str, Overlap]) -> Iterator[_Roof]:
    """Yield the lines of all plans that are above zero: of a single plan both phases, else the one that hides last."""
    for (name, overlap), colour in zip(overlaps.items(), PLAN_COLOURS):
        # two lines a plan would be too many; where the later phase hides, all does
        if name:
            last = max(PHASES, key=overlap.crossover)
            roofs = [_Roof(f"{name}, {last}", colour, last, overlap)]
        else:
            roofs = [_Roof(phase, _PHASE_COLOURS[phase], phase, overlap) for phase in PHASES]
        for roof in roofs:
            if roof.crossover:
                yield roof


def _roof_traces(roof: _Roof, clip: _Clip) -> list[go.Scatter]:
    """Draw the line of a phase, and a diamond where it crosses 1."""
    tokens = three_digits(roof.crossover)
    name = f"{roof.label}: hidden from {tokens} tokens on"
    # two points make the line: the ratio goes as 1 / tokens, which is straight on logarithmic axes
    at_low = roof.overlap.ratio(roof.phase, clip.low)
    falling = _falling(name, roof.colour, at_low, clip)
    hover = f"{tokens} tokens<extra></extra>"
    # without a name, as the line has the legend's entry
    crossover = points("", roof.colour, [roof.crossover], [1.0], hovertemplate=hover, showlegend=False)
    crossover.update(marker_symbol="diamond")
    return [falling, crossover]


def _falling(name: str, colour: str, at_low: float, clip: _Clip, dash: str = "solid") -> go.Scatter:
    """Draw a line from the ratio at the fewest tokens: twice the tokens, half the ratio."""
    # 4 at 100 tokens are 0.04 at 10,000
    at_high = at_low * clip.low / clip.high
    return line(name, colour, [clip.low, clip.high], [at_low, at_high], dash=dash)


def _of_a_run(view: RunView, point: OverlapPoint, clip: _Clip) -> list[go.Scatter]:
    """Draw the run's own point, and the line through what its link's formula predicts at its tokens."""
    hover = f"{view.label}<br>{point.tokens:,} tokens, {point.measured:.3f}<extra></extra>"
    how = "simulated" if view.simulated else "measured"
    name = f"{view.label}, {how}"
    measured = points(name, ALARM, [point.tokens], [point.measured], hovertemplate=hover)
    # no link was emulated, so there is no formula to compare with
    if not point.predicted:
        return [measured]
    # from the run's tokens back to the left edge, along 1 / tokens
    at_low = point.predicted * point.tokens / clip.low
    predicted = _falling(f"{view.label}: {point.source}", ALARM, at_low, clip, "dot")
    return [predicted, measured]


def _axes(figure: go.Figure, clip: _Clip) -> None:
    """Set both axes in powers of ten; what is below the line of 1 is hidden."""
    decades = dict(type="log", dtick=1)  # a tick at each power of ten
    # a logarithmic axis has its range in powers of ten
    across = [math.log10(clip.low), math.log10(clip.high)]
    figure.update_xaxes(decades, tickformat=",", range=across, title_text="tokens of a rank's micro-batch")
    figure.update_yaxes(decades, title_text="communication / compute of a block")
    # shapes are placed by value, annotations by power of ten: both 1.0 here and y=0 below are the ratio 1
    figure.add_hline(1.0, line=dict(color=GRID, width=3))
    for text, anchor in (("exposed", "bottom"), ("hidden", "top")):
        figure.add_annotation(
            x=0.01, xref="paper", y=0, text=text, showarrow=False, xanchor="left", yanchor=anchor, font=dict(size=14)
        )


def _conditions(plans: Mapping[str, PlanSpec], records: Sequence[RunRecord]) -> str:
    models = ", ".join(dict.fromkeys(spec.model.name for spec in plans.values()))
    strategies = ", ".join(dict.fromkeys(spec.strategy for spec in plans.values()))
    predicted = f"Predicted for {models}, {strategies}, prefetching one block"
    return f"{predicted}. {conditions(records)}" if records else predicted


def _finding(plans: Mapping[str, PlanSpec], overlaps: Mapping[str, Overlap]) -> str:
    """Return the title: from how many tokens on communication hides, of several plans the first and the last."""
    if len(plans) == 1:
        ((name, spec),) = plans.items()
        where = name
        if not name:
            where = f"{spec.model.name} on {spec.gpus} {spec.gpu.name}"
        tokens = overlaps[name].crossover_tokens
        if not tokens:
            return f"{where} sends nothing"
        return f"{where}: hidden from {three_digits(tokens)} tokens a rank on"
    # fewest tokens first: who needs the smallest batch hides soonest
    by_tokens = sorted(overlaps, key=lambda name: overlaps[name].crossover_tokens)
    first = _with_tokens(by_tokens[0], overlaps)
    last = _with_tokens(by_tokens[-1], overlaps)
    return f"Communication hides soonest on {first}, and last on {last}"


def _with_tokens(name: str, overlaps: Mapping[str, Overlap]) -> str:
    return f"{name} ({three_digits(overlaps[name].crossover_tokens)} tokens)"

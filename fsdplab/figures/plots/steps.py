"""Step times: on the steady card's clock, which is the same everywhere, and as measured on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.common.sizes import percent, seconds, three_digits
from fsdplab.figures.axis_units import AxisUnit, time_unit
from fsdplab.figures.bars import Part, stacked_bars, whiskers
from fsdplab.figures.conclusion import baseline, most_sharded, steady_step_beside
from fsdplab.figures.fastest import listed, step_words
from fsdplab.figures.lines import points
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import DARK_INK, STEP_COLOURS, STRATEGY_COLOURS, strategy_colour, titled
from fsdplab.figures.table import OVER
from fsdplab.figures.view import Runs, RunView, emulated_links, how_and_where, ranks_and_device, views
from fsdplab.records import known

_ROUNDING = 1.001  # simulated steps within so many times of each other are equal


def step_time(runs: Runs) -> go.Figure:
    """Draw bars of the median step, whiskers at its quartiles, a tick at the fastest step; or say why a run has none.

    `runs`: records, or a comparison dict. Example: `step_time(compare(specs))`.
    """
    shown = views(runs)
    timed = [run for run in shown if run.step_median]
    if not timed:
        raise ValueError("no run has a timed step to draw: every run ended before its first timed step")
    # runs without a timed step keep their row, with the reason instead of a bar
    # 0 draws no bar; whiskers and words at bars' ends are on the axis too
    unit = time_unit(_reached_s(run) for run in timed)
    figure = _median_bars(shown, unit)
    figure.add_trace(_fastest_ticks(timed, unit))
    figure.update_layout(showlegend=False)
    compared = [run for run in timed if run.engine != "twin"]  # which only replays what the others do
    title = step_words(compared or timed)
    marks = "bar: median, tick: fastest"
    if whiskers(shown):
        marks += ", whiskers: quartiles"
    steps = []
    for run in shown:
        step = seconds(run.step_median) if run.step_median else _why_untimed(run)
        steps.append(f"{run.label} {step}")
    alt = f"Bars of the median step time: {'; '.join(steps)}."
    where = f"{_conditions(shown)}; {marks}"
    return titled(figure, title, where, alt, 86 + 43 * len(shown))


def _median_bars(shown: Sequence[RunView], unit: AxisUnit) -> go.Figure:
    ends, untimed = {}, []
    medians, colours, reached, tokens_per_s = [], [], [], []  # one of each a bar
    for run in shown:
        if run.step_median:
            ends[run.label] = _measured_words(run)
        else:
            ends[run.label] = f"<b>{_why_untimed(run)}</b>"
            untimed.append(run.label)
        # 0 draws no bar; the words begin at the axis
        medians.append(unit.of(run.step_median or 0))
        colours.append(strategy_colour(run.strategy, run.engine))
        # words at a bar's end begin behind its upper whisker
        reached.append(unit.of(_reached_s(run)))
        tokens_per_s.append(run.summary.tokens_per_s)
    bars = Part("median step", STRATEGY_COLOURS["no_shard"], medians)
    hover = f"{unit.hover('x')}<br>%{{customdata:,.0f}} tokens/s"
    axis = f"one step ({unit.symbol})"
    figure = stacked_bars(ends, [bars], axis, hover, alarming=untimed, marked=reached)
    # one trace has the bars of all runs, so its error bars are a list, too
    figure.data[-1].error_x = whiskers(shown, unit.size)
    return figure.update_traces(customdata=tokens_per_s, marker_color=colours)


def _fastest_ticks(timed: Sequence[RunView], unit: AxisUnit) -> go.Scatter:
    # records without the fastest step have the tick at their median
    fastest = [unit.of(run.summary.step_time_s.min or run.step_median or 0) for run in timed]
    labels = [run.label for run in timed]
    upright = dict(symbol="line-ns", line=dict(color=DARK_INK, width=3))
    hover = f"%{{y}}<br>fastest {unit.hover('x')}<extra></extra>"
    return points("fastest step", DARK_INK, fastest, labels, 26, marker=upright, hovertemplate=hover)


def _why_untimed(run: RunView) -> str:
    return "out of memory" if run.over_card else run.status.replace("_", " ")


def _reached_s(run: RunView) -> float:
    """Return the seconds at which the mark of the measured step ends: at the upper quartile, where it is known."""
    return max(run.summary.step_time_s.q3 or 0.0, run.step_median or 0.0)


def _measured_words(run: RunView) -> str:
    """Say at the bar's end what the median step is, and how many tokens or samples a second, where that is known."""
    words = f"<b>{seconds(run.step_median)}</b>"
    if run.traced:
        return f"{words} · tokens are not in a trace"
    if run.summary.tokens_per_s:
        return f"{words} · {three_digits(run.summary.tokens_per_s)} tokens/s"
    if run.summary.samples_per_s:
        return f"{words} · {three_digits(run.summary.samples_per_s)} samples/s"
    return words


def _conditions(shown: list[RunView]) -> str:
    """Return the subtitle: on what the steps were measured, and what is between the ranks."""
    links = emulated_links(shown)
    # a real network may be between traced ranks: nothing is said of it unless it was emulated
    if any(run.traced for run in shown):
        where = f"Measured by PyTorch's profiler on {ranks_and_device(shown)}"
        if links:
            where += f"; the link is emulated ({links})"
        return where
    if any(run.simulated for run in shown):
        return how_and_where(shown)
    between = f"the link between them is emulated ({links})" if links else "no network between them"
    return f"{how_and_where(shown)} of one machine: {between}"


# ---- on the steady card


_CLOCK = (
    ("computing alone", STEP_COLOURS["compute only"]),
    ("communication hidden under computing", STEP_COLOURS["overlapped"]),
    ("exposed communication", STEP_COLOURS["exposed"]),
)  # the parts of a step on the steady card, which has no other work


def steady_steps(runs: Runs) -> go.Figure:
    """Draw bars of the step as simulated on the steady card: computing, communication hidden under it, and exposed; a
    diamond with whiskers is the measured step. The measured steps alone where no run has steady times.

    `runs`: records, or a comparison dict. 919 ms with 300 ms exposed and 65 % hidden: 60 + 559 + 300 ms. Measured steps
    of ranks that were short of cores are left out: they are the machine's.
    """
    shown = views(runs)
    simulated = [run for run in shown if run.steady.step_time_s]
    if not simulated:
        return step_time(runs)
    # ranks that waited for a core measured this machine's load
    timed = [run for run in shown if run.step_median and not run.summary.short_of_cores]
    unit = _unit_of(simulated, timed)
    ends, over, reached = {}, [], []
    for run in shown:
        ends[run.label] = _steady_end(run)
        if run.over_card:
            over.append(run.label)
        # how far the diamond over its bar reaches
        reached.append(unit.of(_reached_s(run)) if run in timed else 0.0)
    parts = _steady_parts(shown, unit)
    axis = f"one step ({unit.symbol})"
    figure = stacked_bars(ends, parts, axis, unit.hover("x"), alarming=over, marked=reached)
    if timed:
        figure.add_trace(_measured(timed, unit))
    some_left_out = any(run.summary.short_of_cores for run in shown)
    where = _steady_conditions(simulated, timed, some_left_out)
    alt = _steady_alt(simulated, timed)
    return titled(figure, _steady_words(shown), where, alt, 86 + 43 * len(shown))


def _unit_of(simulated: Sequence[RunView], timed: Sequence[RunView]) -> AxisUnit:
    """Return the unit in which the simulated and the measured steps are drawn on one axis."""
    lengths = [known(run.steady.step_time_s) for run in simulated]
    lengths += [_reached_s(run) for run in timed]
    return time_unit(lengths)


def _steady_parts(shown: Sequence[RunView], unit: AxisUnit) -> list[Part]:
    splits = [_split(run) for run in shown]
    parts = []
    for place, (name, colour) in enumerate(_CLOCK):
        lengths = [unit.of(split[place]) for split in splits]
        parts.append(Part(name, colour, lengths))
    return parts


def _split(run: RunView) -> tuple[float, float, float]:
    """Return the seconds of the parts of a step on the steady card, in the order of _CLOCK."""
    # a run that was not simulated has a row without a bar: three zeros
    step = run.steady.step_time_s or 0.0
    exposed = run.steady.exposed_s or 0.0
    overlap = run.steady.overlap or 0.0
    hidden = run.steady.hidden_s
    if hidden is None:
        # a record of before: overlap = hidden / (hidden + exposed), of which the exposed part is known; where all is
        # hidden, nothing exposed tells how much that is
        hidden = exposed * overlap / (1 - overlap) if overlap < 1 else 0.0
    # what is left of the step: the steady card is never idle
    computing = max(0.0, step - exposed - hidden)
    return computing, hidden, exposed


def _measured(timed: list[RunView], unit: AxisUnit) -> go.Scatter:
    """Draw a diamond at each measured median, with whiskers at its quartiles."""
    look = dict(symbol="diamond", color="white", size=11, line=dict(color=DARK_INK, width=1.5))
    medians = [unit.of(known(run.step_median)) for run in timed]
    labels = [run.label for run in timed]
    hover = f"%{{y}}<br>measured {unit.hover('x')}<extra></extra>"
    mark = points("measured step", "white", medians, labels, marker=look, hovertemplate=hover)
    return mark.update(error_x=whiskers(timed, unit.size))


def _steady_end(run: RunView) -> str:
    """Say at the bar's end, where a measured mark may be: the simulated step, and what is hidden of its communication;
    then whether the run is over the card, or failed.
    """
    # a run that the steady card cannot simulate has its measured step, or why it has none
    if not run.steady.step_time_s:
        return f"measured {seconds(run.step_median)}" if run.step_median else run.status.replace("_", " ")
    words = f"<b>{seconds(run.steady.step_time_s)}</b>, {_hidden(run)}"
    if run.over_card:
        return f"{words}<br>{OVER}"
    if run.status == "failed":
        return f"{words}<br>its run failed"
    return words


def _hidden(run: RunView) -> str:
    return "sends nothing" if run.steady.overlap is None else f"{percent(run.steady.overlap)} hidden"


def _steady_conditions(simulated: list[RunView], timed: list[RunView], some_left_out: bool) -> str:
    """Return the subtitle: behind which link, where the diamonds were measured, and whether some are left out."""
    words = "Simulated on the steady card"
    links = emulated_links(simulated)
    if links:
        words += f" behind the emulated link ({links})"
    if timed:
        words += f"; diamonds: {how_and_where(timed)}, with quartiles".replace("Measured", "measured", 1)
    if some_left_out:
        words += "; measured steps of ranks that lacked a core are left out"
    return words


def _steady_alt(simulated: list[RunView], timed: list[RunView]) -> str:
    words = []
    for run in simulated:
        words.append(f"{run.label} {seconds(run.steady.step_time_s)}, {_hidden(run)}")
    for run in timed:
        words.append(f"{run.label} measured {seconds(run.step_median)}")
    return f"Bars of the step on the steady card, and diamonds of the measured one: {'; '.join(words)}."


def _steady_words(shown: Sequence[RunView]) -> str:
    """Return the title: the fully sharded run's step on the steady card, beside the baseline's as in the conclusion;
    where one of them has no simulated step, whose is least, and the longest.
    """
    base, sharded = baseline(shown), most_sharded(shown)
    simulated = [run for run in shown if run.steady.step_time_s]
    if base and sharded and base is not sharded and base in simulated and sharded in simulated:
        step = seconds(sharded.steady.step_time_s)
        return f"{sharded.label} takes {step} a step, {steady_step_beside(sharded, base)}"
    steps = [known(run.steady.step_time_s) for run in simulated]
    least = min(steps)
    best = [run for run, step in zip(simulated, steps) if step <= _ROUNDING * least]
    names = listed(best)
    if len(best) == len(simulated):
        return f"{names}: {seconds(least)} a step"
    slowest = max(simulated, key=lambda run: known(run.steady.step_time_s))
    take = "takes" if len(best) == 1 else "take"
    return f"{names} {take} least, {seconds(least)} a step; {slowest.label} takes {seconds(max(steps))}"

"""Step times: on the steady card's clock, which is the same everywhere, and as measured on this machine."""

from __future__ import annotations

from fsdplab.common.sizes import percent, seconds, three_digits
from fsdplab.figures.bars import Part, stacked_bars, whiskers
from fsdplab.figures.conclusion import most_sharded
from fsdplab.figures.fastest import listed, step_words
from fsdplab.figures.lines import points
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import DARK_INK, STEP_COLOURS, STRATEGY_COLOURS, strategy_colour, titled
from fsdplab.figures.table import OVER
from fsdplab.figures.view import Runs, RunView, emulated_links, how_and_where, ranks_and_device, views
from fsdplab.records import known


def step_time(runs: Runs) -> go.Figure:
    """Bars of the median step, whiskers at its quartiles, a tick at the fastest step; or why a run has no step.

    `runs`: records, or a comparison dict. Example: `step_time(compare(specs))`.
    """
    shown = views(runs)
    timed = [run for run in shown if run.step_median]
    if not timed:
        raise ValueError("no run has a timed step to draw: every run ended before its first timed step")
    spread = whiskers(shown)
    marks = "bar: median, tick: fastest" + (", whiskers: quartiles" if spread else "")
    medians = Part("median step", STRATEGY_COLOURS["no_shard"], [run.step_median or 0 for run in shown])
    why = {run.label: "out of memory" if run.over_card else run.status.replace("_", " ") for run in shown}
    untimed = [run.label for run in shown if not run.step_median]
    ends = {run.label: _measured_words(run) if run.step_median else f"<b>{why[run.label]}</b>" for run in shown}
    hover = "%{x:.3f} s<br>%{customdata:,.0f} tokens/s"
    figure = stacked_bars(
        ends, [medians], "seconds per step", hover, alarming=untimed, marked=[_reaches(run) for run in shown]
    )
    figure.data[-1].error_x = spread
    colours = [strategy_colour(run.strategy, run.engine) for run in shown]
    figure.update_traces(customdata=[run.summary.tokens_per_s for run in shown], marker_color=colours)
    fastest = points(
        "fastest step", DARK_INK, [run.summary.step_time_s.min or run.step_median or 0 for run in timed],
        [run.label for run in timed], 26, marker=dict(symbol="line-ns", line=dict(color=DARK_INK, width=3)),
        hovertemplate="%{y}<br>fastest %{x:.3f} s<extra></extra>",
    )  # fmt: skip
    figure.add_trace(fastest).update_layout(showlegend=False)
    title = step_words([run for run in timed if run.engine != "twin"] or timed)
    steps = [f"{run.label} {seconds(run.step_median) if run.step_median else why[run.label]}" for run in shown]
    alt = f"Bars of the median step time: {'; '.join(steps)}."
    return titled(figure, title, f"{_conditions(shown)}; {marks}", alt, 86 + 43 * len(shown))


def _reaches(run: RunView) -> float:
    """Seconds at which the mark of the measured step ends: at the upper quartile, where it is known."""
    return max(run.summary.step_time_s.q3 or 0.0, run.step_median or 0.0)


def steady_steps(runs: Runs) -> go.Figure:
    """Bars of the step as simulated on the steady card: computing, communication hidden under it, and exposed; a
    diamond with whiskers is the measured step. The measured steps alone where no run has steady times.

    `runs`: records, or a comparison dict. 919 ms with 300 ms exposed and 65 % hidden: 60 + 559 + 300 ms. Measured steps
    of ranks that were short of cores are left out: they are the machine's.
    """
    shown = views(runs)
    simulated = [run for run in shown if run.steady.step_time_s]
    if not simulated:
        return step_time(runs)
    splits = [_split(run) for run in shown]
    parts = [Part(name, colour, [split[place] for split in splits]) for place, (name, colour) in enumerate(_CLOCK)]
    ends = {run.label: _words(run) for run in shown}
    over = [run.label for run in shown if run.over_card]
    timed = [run for run in shown if run.step_median and not run.summary.short_of_cores]
    reaches = [_reaches(run) * 1e3 if run in timed else 0.0 for run in shown]
    figure = stacked_bars(ends, parts, "one step (ms)", "%{x:.0f} ms", alarming=over, marked=reaches)
    if timed:
        figure.add_trace(_measured(timed))
    told = [f"{run.label} {seconds(run.steady.step_time_s)}, {_hidden(run)}" for run in simulated]
    told += [f"{run.label} measured {seconds(run.step_median)}" for run in timed]
    alt = f"Bars of the step on the steady card, and diamonds of the measured one: {'; '.join(told)}."
    where = _steady_conditions(simulated, timed, any(run.summary.short_of_cores for run in shown))
    return titled(figure, _steady_words(simulated), where, alt, 86 + 43 * len(shown))


_CLOCK = (
    ("computing alone", STEP_COLOURS["compute only"]),
    ("communication hidden under computing", STEP_COLOURS["overlapped"]),
    ("exposed communication", STEP_COLOURS["exposed"]),
)  # the parts of a step on the steady card, which has no other work


def _split(run: RunView) -> tuple[float, float, float]:
    """ms of the parts of a step on the steady card, in the order of _CLOCK."""
    step, exposed, overlap = run.steady.step_time_s or 0.0, run.steady.exposed_s or 0.0, run.steady.overlap or 0.0
    hidden = exposed * overlap / (1 - overlap) if overlap < 1 else 0.0
    return 1e3 * max(0.0, step - exposed - hidden), 1e3 * hidden, 1e3 * exposed


def _measured(timed: list[RunView]) -> go.Scatter:
    """A diamond at each measured median, with whiskers at its quartiles."""
    look = dict(symbol="diamond", color="white", size=11, line=dict(color=DARK_INK, width=1.5))
    at = [1e3 * known(run.step_median) for run in timed]
    hover = "%{y}<br>measured %{x:.0f} ms<extra></extra>"
    mark = points("measured step", "white", at, [run.label for run in timed], marker=look, hovertemplate=hover)
    return mark.update(error_x=whiskers(timed, 1e-3))


def _words(run: RunView) -> str:
    """At the bar's end, where a measured mark may be: the simulated step, and what is hidden of its communication; then
    whether the run is over the card, or failed.
    """
    if not run.steady.step_time_s:
        return f"measured {seconds(run.step_median)}" if run.step_median else run.status.replace("_", " ")
    below = OVER if run.over_card else "its run failed" if run.status == "failed" else ""
    told = f"<b>{seconds(run.steady.step_time_s)}</b>, {_hidden(run)}"
    return f"{told}<br>{below}" if below else told


def _hidden(run: RunView) -> str:
    return "sends nothing" if run.steady.overlap is None else f"{percent(run.steady.overlap)} hidden"


def _steady_conditions(simulated: list[RunView], timed: list[RunView], short: bool) -> str:
    """The subtitle: behind which link, where the diamonds were measured, and whether some are left out."""
    links = emulated_links(simulated)
    said = [f"Simulated on the steady card{f' behind the emulated link ({links})' if links else ''}"]
    said += [f"diamonds: {how_and_where(timed)}, with quartiles"] if timed else []
    said += ["measured steps of ranks that lacked a core are left out"] if short else []
    return "; ".join(said).replace("diamonds: Measured", "diamonds: measured")


def _steady_words(simulated: list[RunView]) -> str:
    """The title: the fully sharded run's step on the steady card, and whose is least; else least and longest."""
    steps = [known(run.steady.step_time_s) for run in simulated]
    best = [run for run, step in zip(simulated, steps) if step <= 1.001 * min(steps)]  # less is rounding
    told = f"{listed(best)} {'takes' if len(best) == 1 else 'take'} least, {seconds(min(steps))} a step"
    slow = max(simulated, key=lambda run: known(run.steady.step_time_s))
    if len(best) == len(steps):
        return f"{listed(best)}: {seconds(min(steps))} a step"
    sharded = most_sharded(simulated)
    if sharded is not None and sharded not in best:
        step = known(sharded.steady.step_time_s)
        return f"{sharded.label} takes {seconds(step)} a step, {step / min(steps):.2f} times as long as {listed(best)}"
    return f"{told}; {slow.label} takes {max(steps) / min(steps):.2f} times that"


def _measured_words(run: RunView) -> str:
    """At the bar's end: the median step, and how many tokens or samples a second that is, where it is known."""
    if run.traced:
        speed = "tokens are not in a trace"
    elif run.summary.tokens_per_s:
        speed = f"{three_digits(run.summary.tokens_per_s)} tokens/s"
    else:
        speed = f"{three_digits(run.summary.samples_per_s)} samples/s" if run.summary.samples_per_s else ""
    return " · ".join(filter(None, [f"<b>{seconds(run.step_median)}</b>", speed]))


def _conditions(shown: list[RunView]) -> str:
    links = emulated_links(shown)
    if any(run.traced for run in shown):
        linked = f"; the link is emulated ({links})" if links else ""
        return f"Measured by PyTorch's profiler on {ranks_and_device(shown)}{linked}"
    if any(run.simulated for run in shown):
        return how_and_where(shown)
    between = f"the link between them is emulated ({links})" if links else "no network between them"
    return f"{how_and_where(shown)} of one machine: {between}"

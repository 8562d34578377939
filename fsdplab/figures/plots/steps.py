"""Step times: the median of every run, its fastest step, and tokens per second."""

from __future__ import annotations

from fsdplab.common.sizes import seconds, three_digits
from fsdplab.figures.bars import Part, stacked_bars, whiskers
from fsdplab.figures.fastest import step_words
from fsdplab.figures.lines import points
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import DARK_INK, STRATEGY_COLOURS, strategy_colour, titled
from fsdplab.figures.view import Runs, RunView, emulated_links, how_and_where, ranks_and_device, views


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
    untimed = [run.label for run in shown if not run.step_median]
    ends = {run.label: _end(run) for run in shown}
    hover = "%{x:.3f} s<br>%{customdata:,.0f} tokens/s"
    figure = stacked_bars(ends, [medians], f"seconds per step ({marks})", hover, alarming=untimed, spread=spread)
    colours = [strategy_colour(run.strategy, run.engine) for run in shown]
    figure.update_traces(customdata=[run.tokens_per_s for run in shown], marker_color=colours)
    figure.add_trace(_fastest(timed)).update_layout(showlegend=False)
    return titled(figure, _finding(timed), _conditions(shown), _alt(shown), 90 + 52 * len(shown))


def _fastest(timed: list[RunView]) -> go.Scatter:
    """A tick at each run's fastest step."""
    rows, steps = [run.label for run in timed], [run.summary.step_time_s.min or run.known_step for run in timed]
    tick = dict(symbol="line-ns", line=dict(color=DARK_INK, width=3))
    hover = "%{y}<br>fastest %{x:.3f} s<extra></extra>"
    return points("fastest step", DARK_INK, steps, rows, 26, marker=tick, hovertemplate=hover)


def _end(run: RunView) -> str:
    """The words at a bar's end: duration and throughput, or why there is none."""
    return f"<b>{seconds(run.step_median)}</b> · {_tokens(run)}" if run.step_median else f"<b>{_why_untimed(run)}</b>"


def _tokens(run: RunView) -> str:
    if run.traced is not None:
        return "tokens are not in a trace"
    return f"{three_digits(run.tokens_per_s)} tokens/s" if run.tokens_per_s else "no throughput"


def _why_untimed(run: RunView) -> str:
    return "out of memory" if run.over_card else run.status.replace("_", " ")


def _finding(timed: list[RunView]) -> str:
    """The title: who is fastest, the twin aside, and how many times longer the slowest takes."""
    racers = [run for run in timed if run.engine != "twin"] or timed
    return step_words(racers)


def _conditions(shown: list[RunView]) -> str:
    links = emulated_links(shown)
    if any(run.traced is not None for run in shown):
        linked = f"; the link is emulated ({', '.join(links)})" if links else ""
        return f"Measured by PyTorch's profiler on {ranks_and_device(shown)}{linked}"
    between = f"the link between them is emulated ({', '.join(links)})" if links else "no network between them"
    if any(run.simulated for run in shown):
        return how_and_where(shown)
    return f"{how_and_where(shown)} of one machine: {between}"


def _alt(shown: list[RunView]) -> str:
    parts = [f"{run.label} {seconds(run.step_median) if run.step_median else _why_untimed(run)}" for run in shown]
    return f"Bars of the median step time: {'; '.join(parts)}."

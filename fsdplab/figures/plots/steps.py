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
    why = {run.label: "out of memory" if run.over_card else run.status.replace("_", " ") for run in shown}
    untimed = [run.label for run in shown if not run.step_median]
    ends = {
        run.label: f"<b>{seconds(run.step_median)}</b> · {_tokens(run)}"
        if run.step_median
        else f"<b>{why[run.label]}</b>"
        for run in shown
    }
    hover = "%{x:.3f} s<br>%{customdata:,.0f} tokens/s"
    figure = stacked_bars(ends, [medians], f"seconds per step ({marks})", hover, alarming=untimed, spread=spread)
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
    return titled(figure, title, _conditions(shown), alt, 90 + 52 * len(shown))


def _tokens(run: RunView) -> str:
    if run.traced:
        return "tokens are not in a trace"
    tokens_per_s = run.summary.tokens_per_s
    return f"{three_digits(tokens_per_s)} tokens/s" if tokens_per_s else "no throughput"


def _conditions(shown: list[RunView]) -> str:
    links = emulated_links(shown)
    if any(run.traced for run in shown):
        linked = f"; the link is emulated ({links})" if links else ""
        return f"Measured by PyTorch's profiler on {ranks_and_device(shown)}{linked}"
    if any(run.simulated for run in shown):
        return how_and_where(shown)
    between = f"the link between them is emulated ({links})" if links else "no network between them"
    return f"{how_and_where(shown)} of one machine: {between}"

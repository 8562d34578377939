"""Step times: the median of every run, its fastest step, and tokens per second."""

from __future__ import annotations

from fsdplab.common.sizes import seconds, three_digits
from fsdplab.figures.fastest import step_words
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import ALARM, EDGE, strategy_colour, titled
from fsdplab.figures.view import Runs, RunView, emulated_links, how_and_where, ranks_and_device, views


def step_time(runs: Runs) -> go.Figure:
    """Bars of the median step, a tick at the fastest one; runs that ran out of memory say so.

    `runs`: records, or a comparison dict. Example: `step_time(compare(specs))`.
    """
    shown = views(runs)
    timed = [run for run in shown if run.step_median]
    if not timed:
        raise ValueError("no run has a timed step to draw: every run ended before its first timed step")
    figure = go.Figure([_bars(shown), _fastest(timed)])
    figure.update_layout(showlegend=False, xaxis_title="seconds per step (bar: median, tick: fastest)")
    figure.update_yaxes(
        autorange="reversed",
        type="category",
        showgrid=False,
        categoryorder="array",
        categoryarray=[run.label for run in shown],
    )
    figure.update_xaxes(range=[0, 1.45 * max(run.known_step for run in timed)])
    for run in shown:
        _label(figure, run)
    return titled(figure, _finding(timed), _conditions(shown), _alt(shown), height=190 + 52 * len(shown), top=100)


def _bars(shown: list[RunView]) -> go.Bar:
    return go.Bar(
        name="median step",
        orientation="h",
        y=[run.label for run in shown],
        x=[run.step_median or 0 for run in shown],
        marker=dict(color=[strategy_colour(run.strategy, run.engine) for run in shown], line=dict(color=EDGE, width=1)),
        customdata=[run.tokens_per_s for run in shown],
        hovertemplate="%{y}<br>median %{x:.3f} s<br>%{customdata:,.0f} tokens/s<extra></extra>",
    )


def _fastest(timed: list[RunView]) -> go.Scatter:
    return go.Scatter(
        name="fastest step",
        mode="markers",
        y=[run.label for run in timed],
        x=[run.summary.step_time_s.min for run in timed],
        marker=dict(symbol="line-ns", size=26, line=dict(color="#14171c", width=3)),
        hovertemplate="%{y}<br>fastest %{x:.3f} s<extra></extra>",
    )


def _label(figure: go.Figure, run: RunView) -> None:
    """The number at the bar's end: duration and throughput, or why there is none."""
    text = f"<b>{seconds(run.step_median)}</b> · {_tokens(run)}" if run.step_median else f"<b>{_why_untimed(run)}</b>"
    figure.add_annotation(
        x=run.step_median or 0, y=run.label, text=text, showarrow=False, xanchor="left", xshift=6,
        font=None if run.step_median else dict(color=ALARM),
    )  # fmt: skip


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

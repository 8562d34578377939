"""Peak memory as predicted beside what was measured: two bars a run, in the same colours."""

from __future__ import annotations

from fsdplab.common.sizes import size
from fsdplab.figures.plotly_go import go
from fsdplab.figures.plots.memory import MB
from fsdplab.figures.predicted import verdict
from fsdplab.figures.style import CATEGORY_COLOURS, EDGE, titled
from fsdplab.figures.view import CATEGORY_NAMES, Runs, RunView, how_and_where, views
from fsdplab.records import CATEGORIES

_PALE = 0.55  # opacity of what is predicted


def predicted_memory(runs: Runs) -> go.Figure:
    """Stacked bars of each run's peak by category, the measured one above the predicted one, which is paler.

    `runs`: records, or a comparison dict. ValueError where no run has both.
    """
    shown = [run for run in views(runs) if run.peak and run.predicted_peak]
    if not shown:
        raise ValueError(
            "no run has both a measured and a predicted peak; memory is predicted for the lab's engine on CPU ranks"
        )
    names = [name for name in CATEGORIES if any(run.split.get(name) or run.predicted_split.get(name) for run in shown)]
    figure = go.Figure([_segment(shown, name) for name in names])
    figure.update_layout(barmode="stack", xaxis_title="peak memory of the worst rank (MB)", bargap=0.18)
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(range=[0, 1.25 * max(max(run.known_peak, run.predicted_peak or 0) for run in shown) / MB])
    for run in shown:
        _labels(figure, run)
    what = f"{how_and_where(shown)}; predicted by playing the engine's allocations, before the run"
    return titled(figure, verdict(shown), what, _alt(shown), height=240 + 76 * len(shown))


def _row(run: RunView) -> str:
    return f"{run.label}, predicted"


def _segment(shown: list[RunView], name: str) -> go.Bar:
    """One category's segment in every bar."""
    label = CATEGORY_NAMES[name]
    rows = [(run.label, run.split.get(name, 0), 1.0) for run in shown]
    rows += [(_row(run), run.predicted_split.get(name, 0), _PALE) for run in shown]
    rows = [rows[index + half] for index in range(len(shown)) for half in (0, len(shown))]  # a run's two together
    return go.Bar(
        name=label,
        orientation="h",
        y=[row[0] for row in rows],
        x=[row[1] / MB for row in rows],
        marker=dict(color=CATEGORY_COLOURS[name], opacity=[row[2] for row in rows], line=dict(color=EDGE, width=1)),
        hovertemplate="%{y}<br>" + label + ": %{x:.1f} MB<extra></extra>",
    )


def _labels(figure: go.Figure, run: RunView) -> None:
    predicted = run.predicted_peak or 0
    for row, nbytes, text in (
        (run.label, run.known_peak, f"<b>{size(run.peak)}</b>"),
        (_row(run), predicted, f"{size(predicted)}, {predicted / run.known_peak:.2f} of it"),
    ):
        figure.add_annotation(x=nbytes / MB, y=row, text=text, showarrow=False, xanchor="left", xshift=6)


def _alt(shown: list[RunView]) -> str:
    parts = [f"{run.label} {size(run.peak)}, predicted {size(run.predicted_peak)}" for run in shown]
    return f"Bars of measured and predicted peak memory: {'; '.join(parts)}."

"""Peak memory as predicted beside what was measured: two bars a run, in the same colours."""

from __future__ import annotations

from fsdplab.common.sizes import size
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.plots.memory import MB
from fsdplab.figures.predicted import verdict
from fsdplab.figures.style import CATEGORY_COLOURS, titled
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
    ends = {row: words for run in shown for row, words in _rows(run).items()}
    splits = [split for run in shown for split in (run.split, run.predicted_split)]  # a run's two together
    names = [name for name in CATEGORIES if any(split.get(name) for split in splits)]
    parts = [
        Part(CATEGORY_NAMES[name], CATEGORY_COLOURS[name], [split.get(name, 0) / MB for split in splits])
        for name in names
    ]
    figure = stacked_bars(ends, parts, "peak memory of the worst rank (MB)")
    figure.update_traces(marker_opacity=[1.0, _PALE] * len(shown)).update_layout(bargap=0.18)
    what = f"{how_and_where(shown)}; predicted by playing the engine's allocations, before the run"
    return titled(figure, verdict(shown), what, _alt(shown), 80 + 76 * len(shown))


def _rows(run: RunView) -> dict[str, str]:
    """The names of a run's two bars, and the words at their ends."""
    predicted = run.predicted_peak or 0
    return {
        run.label: f"<b>{size(run.peak)}</b>",
        f"{run.label}, predicted": f"{size(predicted)}, {predicted / run.known_peak:.2f} of it",
    }


def _alt(shown: list[RunView]) -> str:
    parts = [f"{run.label} {size(run.peak)}, predicted {size(run.predicted_peak)}" for run in shown]
    return f"Bars of measured and predicted peak memory: {'; '.join(parts)}."

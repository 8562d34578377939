"""Record -> figure: pure functions that return a plotly Figure and never show it.

The names load when first used, and plotly when a figure is first drawn, so that everything else works where plotly is
not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdplab.common.lazy import names_of

if TYPE_CHECKING:
    from fsdplab.figures.plots.answers import answer_figure as answer_figure
    from fsdplab.figures.plots.breakdown import exposed_bar as exposed_bar
    from fsdplab.figures.plots.breakdown import step_bar as step_bar
    from fsdplab.figures.plots.exposed import exposed_heatmap as exposed_heatmap
    from fsdplab.figures.plots.linked import linked_at as linked_at
    from fsdplab.figures.plots.linked import linked_view as linked_view
    from fsdplab.figures.plots.memory import memory_by_category as memory_by_category
    from fsdplab.figures.plots.memory import memory_timeline as memory_timeline
    from fsdplab.figures.plots.memory import predicted_memory as predicted_memory
    from fsdplab.figures.plots.pareto import pareto as pareto
    from fsdplab.figures.plots.roofline import overlap_roofline as overlap_roofline
    from fsdplab.figures.plots.run_diff import difference as difference
    from fsdplab.figures.plots.shard_map import slice_map as slice_map
    from fsdplab.figures.plots.steps import steady_steps as steady_steps
    from fsdplab.figures.plots.steps import step_time as step_time
    from fsdplab.figures.plots.stragglers import straggler_map as straggler_map
    from fsdplab.figures.plots.timeline import rank_timeline as rank_timeline
    from fsdplab.figures.plots.traffic import ledger_against_formula as ledger_against_formula
    from fsdplab.figures.report.linked import linked_html as linked_html
    from fsdplab.figures.report.page import comparison_page as comparison_page
    from fsdplab.figures.style import CATEGORY_COLOURS as CATEGORY_COLOURS
    from fsdplab.figures.style import STRATEGY_COLOURS as STRATEGY_COLOURS
    from fsdplab.figures.style import alt_text as alt_text

_NAMES = {
    "plots.answers": ("answer_figure",),
    "plots.breakdown": ("exposed_bar", "step_bar"),
    "plots.exposed": ("exposed_heatmap",),
    "plots.linked": ("linked_at", "linked_view"),
    "plots.memory": ("memory_by_category", "memory_timeline", "predicted_memory"),
    "plots.pareto": ("pareto",),
    "plots.roofline": ("overlap_roofline",),
    "plots.run_diff": ("difference",),
    "plots.shard_map": ("slice_map",),
    "plots.steps": ("steady_steps", "step_time"),
    "plots.stragglers": ("straggler_map",),
    "plots.timeline": ("rank_timeline",),
    "plots.traffic": ("ledger_against_formula",),
    "report.linked": ("linked_html",),
    "report.page": ("comparison_page",),
    "style": ("alt_text", "CATEGORY_COLOURS", "STRATEGY_COLOURS"),
}
_MODULES = {name: f"fsdplab.figures.{module}" for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULES)

__getattr__, __dir__ = names_of(__name__, _MODULES)

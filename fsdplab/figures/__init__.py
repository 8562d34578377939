"""Record -> figure: pure functions that return a plotly Figure and never show it.

The names load when first used, and plotly when a figure is first drawn, so that everything else works where plotly is
not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdplab.common.lazy import names_of

if TYPE_CHECKING:
    from fsdplab.figures.breakdown import step_bar as step_bar
    from fsdplab.figures.differences import difference as difference
    from fsdplab.figures.exposed import exposed_heatmap as exposed_heatmap
    from fsdplab.figures.findings import findings_of as findings_of
    from fsdplab.figures.html import comparison_page as comparison_page
    from fsdplab.figures.lanes import rank_timeline as rank_timeline
    from fsdplab.figures.linked import linked_at as linked_at
    from fsdplab.figures.linked import linked_view as linked_view
    from fsdplab.figures.linked_page import linked_html as linked_html
    from fsdplab.figures.memory import memory_by_category as memory_by_category
    from fsdplab.figures.memory import memory_timeline as memory_timeline
    from fsdplab.figures.slices import slice_map as slice_map
    from fsdplab.figures.static import svg as svg
    from fsdplab.figures.steps import step_time as step_time
    from fsdplab.figures.stragglers import straggler_map as straggler_map
    from fsdplab.figures.style import CATEGORY_COLOURS as CATEGORY_COLOURS
    from fsdplab.figures.style import STRATEGY_COLOURS as STRATEGY_COLOURS
    from fsdplab.figures.style import alt_text as alt_text
    from fsdplab.figures.tradeoff import pareto as pareto
    from fsdplab.figures.traffic import ledger_against_formula as ledger_against_formula

_MODULES = {
    "memory_by_category": "memory",
    "memory_timeline": "memory",
    "step_time": "steps",
    "ledger_against_formula": "traffic",
    "rank_timeline": "lanes",
    "step_bar": "breakdown",
    "pareto": "tradeoff",
    "exposed_heatmap": "exposed",
    "straggler_map": "stragglers",
    "difference": "differences",
    "slice_map": "slices",
    "linked_view": "linked",
    "linked_at": "linked",
    "linked_html": "linked_page",
    "comparison_page": "html",
    "findings_of": "findings",
    "svg": "static",
    "alt_text": "style",
    "CATEGORY_COLOURS": "style",
    "STRATEGY_COLOURS": "style",
}

__all__ = sorted(_MODULES)

__getattr__, __dir__ = names_of(__name__, {name: f"fsdplab.figures.{module}" for name, module in _MODULES.items()})

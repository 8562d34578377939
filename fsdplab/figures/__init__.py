"""Record -> figure: pure functions that return a plotly Figure and never show it.

The names load when first used, and plotly when a figure is first drawn, so that everything else works where plotly is
not installed.
"""

from __future__ import annotations

from importlib import import_module

_HOME = {
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

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    """Load the figure's module the first time its name is used."""
    if name not in _HOME:
        raise AttributeError(f"module 'fsdplab.figures' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"fsdplab.figures.{_HOME[name]}"), name)

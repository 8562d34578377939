"""The figure of lesson 02: stacks of memory by category, one bar a strategy or a source, with the card's line."""

from __future__ import annotations

from collections.abc import Mapping

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import size
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import titled


def stacked(bars: Mapping[str, Mapping[str, float]], card: float | None, title: str, subtitle: str) -> go.Figure:
    """Stacked bars of bytes by category; what exceeds the card is named in the alarm colour."""
    totals = {name: sum(split.values()) for name, split in bars.items()}
    widest = max(*totals.values(), card or 0)
    scale, unit = (1e9, "GB") if widest >= 1e9 else (1e6, "MB")
    present = [row for row in CATEGORY_ROWS.values() if any(split[row.name] > widest / 1000 for split in bars.values())]
    parts = [Part(row.words, row.colour, [split[row.name] / scale for split in bars.values()]) for row in present]
    over = [name for name, total in totals.items() if card and total > card]
    ends = {name: f"<b>{size(total)}</b>{' · over the card' if name in over else ''}" for name, total in totals.items()}
    levels = {f"card {size(card)}": card / scale} if card else {}
    axis = f"peak memory of a rank ({unit})"
    figure = stacked_bars(ends, parts, axis, f"%{{x:.1f}} {unit}", levels=levels, alarming=over)
    said = "; ".join(f"{name} {size(total)}" for name, total in totals.items())
    alt = f"Bars of memory by category: {said}.{f' The card holds {size(card)}.' if card else ''}"
    return titled(figure, title, subtitle, alt, 100 + 48 * len(bars))

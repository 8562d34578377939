"""The figure of lesson 02: stacks of memory by category, one bar a strategy or a source, with the card's line."""

from __future__ import annotations

from collections.abc import Mapping

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import size
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import ALARM, CATEGORY_COLOURS, EDGE, titled


def stacked(bars: Mapping[str, Mapping[str, float]], card: float | None, title: str, subtitle: str) -> go.Figure:
    """Stacked bars of bytes by category; what exceeds the card is named in the alarm colour."""
    totals = {name: sum(split.values()) for name, split in bars.items()}
    widest = max(*totals.values(), card or 0)
    scale, unit = (1e9, "GB") if widest >= 1e9 else (1e6, "MB")
    present = [name for name in CATEGORY_ROWS if any(split[name] > widest / 1000 for split in bars.values())]
    figure = go.Figure([_segment(name, bars, scale, unit) for name in present])
    figure.update_layout(barmode="stack", xaxis_title=f"peak memory of a rank ({unit})")
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(range=[0, 1.3 * widest / scale])
    for name, total in totals.items():
        _total(figure, name, total / scale, card and card / scale, size(total))
    if card:
        _card_line(figure, card / scale, size(card))
    said = "; ".join(f"{name} {size(total)}" for name, total in totals.items())
    alt = f"Bars of memory by category: {said}.{f' The card holds {size(card)}.' if card else ''}"
    return titled(figure, title, subtitle, alt, height=260 + 48 * len(bars))


def _segment(name: str, bars: Mapping[str, Mapping[str, float]], scale: float, unit: str) -> go.Bar:
    words = CATEGORY_ROWS[name].words
    return go.Bar(
        name=words, orientation="h", y=list(bars), x=[split[name] / scale for split in bars.values()],
        marker=dict(color=CATEGORY_COLOURS[name], line=dict(color=EDGE, width=1)),
        hovertemplate="%{y}<br>" + words + ": %{x:.1f} " + unit + "<extra></extra>",
    )  # fmt: skip


def _total(figure: go.Figure, name: str, end: float, card: float | None, words: str) -> None:
    over = card is not None and end > card
    at = card if card is not None and 0 <= card - end < 0.1 * card else end  # keep the number off the card's line
    figure.add_annotation(
        x=at, y=name, text=f"<b>{words}</b>{' · over the card' if over else ''}", showarrow=False, xanchor="left",
        xshift=6, font=dict(color=ALARM) if over else None,
    )  # fmt: skip


def _card_line(figure: go.Figure, card: float, words: str) -> None:
    line = dict(color=ALARM, width=2.5, dash="dash")
    figure.add_shape(type="line", x0=card, x1=card, y0=0, y1=1, yref="paper", line=line)
    figure.add_annotation(
        x=card, y=1, yref="paper", text=f"card {words}", showarrow=False, xanchor="center", yanchor="bottom",
        font=dict(color=ALARM, size=14),
    )  # fmt: skip

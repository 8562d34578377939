"""Figures of plans: a sweep's memory and throughput, and predictions against published measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import size, three_digits
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import ALARM, CATEGORY_COLOURS, titled
from fsdplab.planning.planner import Plan


def sweep_figure(name: str, values: Sequence[int], plans: Sequence[Plan]) -> go.Figure:
    """Peak memory by category as stacked bars, a bar a value, under the line of the card."""
    labels = [f"{value:,}" for value in values]
    figure = go.Figure(
        [
            go.Bar(
                name=row.words, x=labels, y=[each.memory.peak.by_category[category] / 1e9 for each in plans],
                marker=dict(color=CATEGORY_COLOURS[category]),
            )
            for category, row in CATEGORY_ROWS.items()
        ]
    )  # fmt: skip
    card = plans[0].spec.gpu.memory_bytes
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text=name.replace("_", " "), type="category")
    figure.update_yaxes(title_text="memory of a rank at its peak (GB)")
    figure.add_shape(
        type="line",
        x0=0,
        x1=1,
        xref="paper",
        y0=card / 1e9,
        y1=card / 1e9,
        line=dict(color=ALARM, width=2, dash="dash"),
    )
    figure.add_annotation(
        x=1, xref="paper", y=card / 1e9, text=f"card {size(card)}", showarrow=False, xanchor="right", yanchor="bottom",
        font=dict(color=ALARM, size=14),
    )  # fmt: skip
    spec, fits = plans[0].spec, [label for label, each in zip(labels, plans) if each.fits]
    speeds = [f"{label}: {three_digits(each.tokens_per_s_per_gpu or 0)}" for label, each in zip(labels, plans)]
    title = f"{spec.model.name} fits with {name.replace('_', ' ')} {', '.join(fits) or 'of none of these'}"
    subtitle = f"Predicted; {spec.strategy}, card {size(card)}; tokens/s a GPU: {', '.join(speeds)}"
    return titled(figure, title, subtitle, f"Stacked bars of peak memory by category. {title}. {subtitle}")


def validation_figure(rows: Sequence[tuple[str, str, float, float]], title: str) -> go.Figure:
    """Predicted against published, log-log, a panel for memory and one for throughput; rows are (quantity, source,
    published, predicted) in units of their own.
    """
    figure = go.Figure()
    for place, quantity in enumerate(dict.fromkeys(row[0] for row in rows)):
        _add_panel(figure, place, quantity, [row for row in rows if row[0] == quantity])
    subtitle = f"{len(rows)} figures; both axes logarithmic; on the line a prediction equals what was published"
    return titled(figure, title, subtitle, f"Scatter of predicted against published. {title}.", height=520)


def _add_panel(figure: go.Figure, place: int, quantity: str, rows: Sequence[tuple[str, str, float, float]]) -> None:
    """Points of one quantity and the diagonal; logarithms on a linear axis, with labels of round values."""
    suffix, number = ("", "") if place == 0 else (str(place + 1), str(place + 1))
    found = [value for row in rows for value in row[2:]]
    low, high = math.log10(min(found)) - 0.1, math.log10(max(found)) + 0.1
    figure.add_trace(
        go.Scatter(
            x=[low, high], y=[low, high], mode="lines", line=dict(color="#808488", dash="dot"), showlegend=False,
            xaxis=f"x{suffix}", yaxis=f"y{suffix}",
        )
    )  # fmt: skip
    for index, source in enumerate(dict.fromkeys(row[1] for row in rows)):
        points = [row for row in rows if row[1] == source]
        figure.add_trace(
            go.Scatter(
                x=[math.log10(row[2]) for row in points], y=[math.log10(row[3]) for row in points], mode="markers",
                name=f"{quantity}: {source}", xaxis=f"x{suffix}", yaxis=f"y{suffix}",
                marker=dict(size=10, color=_COLOURS[index % len(_COLOURS)]),
            )
        )  # fmt: skip
    ticks = [tick for tick in _ROUND if low <= math.log10(tick) <= high]
    axis = dict(tickvals=[math.log10(tick) for tick in ticks], ticktext=[f"{tick:,}" for tick in ticks])
    axis |= dict(range=[low, high])
    span = [0.0, 0.44] if place == 0 else [0.56, 1.0]
    up = axis | dict(title="predicted" if place == 0 else "", anchor=f"x{suffix}")
    across = axis | dict(domain=span, title=f"published {quantity}", anchor=f"y{suffix}")
    figure.update_layout({f"xaxis{number}": across, f"yaxis{number}": up})


_COLOURS = ("#0064c8", "#b84a0a", "#0aa06c", "#cc7fa8", "#6435b0", "#8a4a9e")
_ROUND = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)

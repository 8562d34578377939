"""Figures of lesson 19: days and bill over the number of GPUs, and predicted over published throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdplab.figures.lines import points
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import EDGE, GRID, mark_level, titled
from fsdplab.planning.validate import FITTED, Row

_PLAIN, _CHOSEN = "#9fb4cc", "#0064c8"
_SEEN, _UNSEEN = "#b3bac4", "#b84a0a"


def bill_figure(
    ladder: Mapping[int, tuple[float, float]], gpus: int, gpu: str, billions: int, chosen: str
) -> go.Figure:
    """Two panels of bars, days and thousands of dollars, over the number of GPUs; the chosen number stands out."""
    names = [f"{count:,}" for count in ladder]
    spans, bills = ([pair[place] for pair in ladder.values()] for place in (0, 1))
    figure = go.Figure()
    _panel(figure, "", names, spans, [f"{span:.3g}" for span in spans], f"{gpus:,}", "days", [0.0, 0.46])
    _panel(figure, "2", names, [each / 1e3 for each in bills], [f"{each / 1e3:,.0f}" for each in bills], f"{gpus:,}",
           "bill, in 1,000 $", [0.54, 1.0])  # fmt: skip
    if gpus in ladder:
        span, cost = ladder[gpus]
        title = f"{gpus} {gpu}: {span:.3g} days for ${cost:,.0f}"
    else:
        title = f"{gpus} {gpu} cannot hold the model; {names[0]} can"
    subtitle = f"Predicted: Llama 3.1 70B, {billions} billion tokens, the cheapest plan at each number; here: {chosen}"
    said = "; ".join(f"{count} GPUs {span:.3g} days, ${cost:,.0f}" for count, (span, cost) in ladder.items())
    return titled(figure, title, subtitle, f"Bars over the number of GPUs: {said}.", 310)


def _panel(
    figure: go.Figure, number: str, names: list[str], values: list[float], texts: list[str], chosen: str, words: str,
    span: list[float],
) -> None:  # fmt: skip
    """One panel; the bar of the chosen number in the strong colour, each with its value above."""
    colours = [_CHOSEN if name == chosen else _PLAIN for name in names]
    figure.add_trace(
        go.Bar(
            x=names, y=values, xaxis=f"x{number}", yaxis=f"y{number}", showlegend=False, text=texts,
            textposition="outside", cliponaxis=False, marker=dict(color=colours, line=dict(color=EDGE, width=1)),
            hovertemplate="%{x} GPUs: %{y:.3g}<extra></extra>",
        )
    )  # fmt: skip
    figure.add_annotation(
        x=span[0], y=1, xref="paper", yref="paper", text=f"<b>{words}</b>", showarrow=False, xanchor="left",
        yanchor="bottom", yshift=6,
    )  # fmt: skip
    figure.update_layout(
        {
            f"xaxis{number}": dict(domain=span, anchor=f"y{number}", type="category", title="GPUs", showgrid=False),
            f"yaxis{number}": dict(anchor=f"x{number}", range=[0, 1.15 * max(values)]),
        }
    )


def ratio_figure(rows: Sequence[Row], error: float) -> go.Figure:
    """A point a published row: predicted over published throughput, on a line for each GPU; 1 is right."""
    gpus = list(dict.fromkeys(row.gpu for row in rows))
    figure = go.Figure()
    for name, seen, colour in (("the fit has seen it", True, _SEEN), ("held out", False, _UNSEEN)):
        shown = [row for row in rows if (row.part == FITTED) == seen]
        places = [gpus.index(row.gpu) + (0.15 if seen else -0.15) for row in shown]
        dots = points(name, colour, [row.ratio for row in shown], places, text=[row.id for row in shown])
        figure.add_trace(dots.update(hovertemplate="%{text}: %{x:.2f}<extra></extra>"))
    mark_level(figure, 1, "")
    figure.update_xaxes(title_text="predicted / published tokens a second", range=[0.7, 1.6])
    figure.update_yaxes(
        tickvals=list(range(len(gpus))), ticktext=gpus, range=[len(gpus) - 0.5, -0.5], gridcolor=GRID
    )  # fmt: skip
    title = f"Throughput of published runs: median error {error:.1f} % where held out"
    subtitle = f"{len(rows)} rows of data/published.csv; one efficiency a GPU type is fitted, on every other row"
    low, high = min(row.ratio for row in rows), max(row.ratio for row in rows)
    alt = f"Points of predicted over published throughput by GPU, from {low:.2f} to {high:.2f}. {title}."
    return titled(figure, title, subtitle, alt, 300)

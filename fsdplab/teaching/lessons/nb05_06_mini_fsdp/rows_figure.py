"""Which rows each rank keeps, as a picture: what the sliders of lesson 05 draw."""

from __future__ import annotations

from fsdplab.common.words import plural
from fsdplab.figures.lanes import Span, lane
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import CATEGORY_COLOURS, titled

_OWN, _PADDING = CATEGORY_COLOURS["parameter_slices"], "#d0d4d9"


def rows_figure(rows: int, ranks: int) -> go.Figure:
    """Every rank's c = ceil(rows / n) places: rows of the tensor, as torch.chunk cuts them, then padding."""
    c = -(-rows // ranks)
    places = [(rank, place, rank * c + place) for rank in range(ranks) for place in range(c)]
    own = [Span(f"rank {rank}", place, 1, str(row)) for rank, place, row in places if row < rows]
    padding = [Span(f"rank {rank}", place, 1, "0") for rank, place, row in places if row >= rows]
    kinds = (("row of the tensor", _OWN, own), ("padding", _PADDING, padding))
    hover = "%{{y}}, {} %{{text}}<extra></extra>"
    figure = go.Figure([lane(name, colour, cells, hovertemplate=hover.format(name)) for name, colour, cells in kinds])
    shown = range(0, c, max(1, c // 16))
    figure.update_xaxes(
        title="place in the slice", range=[0, c], tickvals=[place + 0.5 for place in shown],
        ticktext=[str(place) for place in shown], showgrid=False, zeroline=False,
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_layout(barmode="overlay")
    empty = sum(rank * c >= rows for rank in range(ranks))
    title = f"{rows} rows on {ranks} ranks: c = {c}, {plural(len(padding), 'padding row')}"
    title += f", {plural(empty, 'rank')} without a row" if empty else ""
    held = "; ".join(
        f"rank {rank} " + (f"rows {rank * c} to {min(rows, (rank + 1) * c) - 1}" if rank * c < rows else "no row")
        for rank in range(ranks)
    )
    alt = f"Cells of {c} places for each rank. {held}. {title}."
    return titled(figure, title, "Computed: every rank sends c rows", alt, 110 + 34 * ranks)

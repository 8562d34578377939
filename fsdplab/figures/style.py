"""One look for every figure: a colour per category and per strategy, type that reads from the back of a room.

Colours are distinct with every common colour vision (a test simulates them). Backgrounds are transparent, segments
have edges, and text takes its colour from the layout's font, which the HTML page switches: one figure serves a
notebook, a printed page and a dark lecture room.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

from fsdplab.common.names import CATEGORY_ROWS, STRATEGY_ROWS
from fsdplab.common.sizes import size
from fsdplab.figures.plotly_go import go

CATEGORY_COLOURS = {row.name: row.colour for row in CATEGORY_ROWS.values()}
STRATEGY_COLOURS = {row.name: row.colour for row in STRATEGY_ROWS.values()} | {"twin": "#d9b84a"}
COLLECTIVE_COLOURS = {
    "all_gather": "#6cc4f0",
    "all_gather in backward": "#0064c8",
    "reduce_scatter": "#b84a0a",
    "all_reduce": "#0aa06c",
}
LANE_COLOURS = {
    "compute in forward": "#b3bac4",
    "compute in backward": "#6b7380",
    "optimizer": "#d9b84a",
    "all_gather": "#6cc4f0",
    "reduce_scatter": "#b84a0a",
    "all_reduce": "#0aa06c",
    "other_communication": "#8a4a9e",
    "exposed": "#e01f3d",
}
# the four parts of a step
STEP_COLOURS = {"compute only": "#6b7380", "overlapped": "#4aa3e0", "exposed": "#e01f3d", "other": "#cfd3d9"}
# the three parts of exposed time
EXPOSED_COLOURS = {"on the link": "#e01f3d", "copying": "#f6a582", "waiting for a peer": "#8a4a9e"}
PHASE_COLOURS = {"forward": "#4aa3e0", "backward": "#8a4a9e", "optimizer": "#d9b84a"}
# of exposed time and of lateness; dark text reads on all of it
HEAT = ((0.0, "#fdeee6"), (0.5, "#f6a582"), (1.0, "#e5484b"))
DARK_INK = "#14171c"  # text on light fills
ALARM = "#e5383b"  # the card line, what exceeds it, exposed time
GRID = "rgba(128,132,136,0.28)"
EDGE = "rgba(20,22,26,0.65)"  # thin edge of a bar segment
FONT = "Inter, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"
_TITLE_CHARACTERS, _SUBTITLE_CHARACTERS = 74, 118  # what a notebook's width holds at 1280 px, in a wide font
_LINE, _SUBLINE = 25, 20  # pixels that each further line of a title and of a subtitle takes
_PLOT, _GLYPH = 880, 8.2  # pixels of a plot's width on a page of 1280 px, and of a letter of a label beside a point
_LEGEND_LINE, _LEGEND_SIGN, _NUMBER = 21, 45, 52  # pixels of a legend's row and sign, and of a number inside a bar
TEXT = "#1b1e23"
DARK_TEXT = "#eceff3"

_AXIS = dict(
    gridcolor=GRID, zerolinecolor=GRID, linecolor=GRID, automargin=True, ticks="outside", ticklen=4, tickcolor=GRID,
    title=dict(standoff=12, font=dict(size=16)), tickfont=dict(size=15),
)  # fmt: skip


@lru_cache
def template() -> go.layout.Template:
    """The layout that every figure starts from."""
    return go.layout.Template(
        layout=dict(
            font=dict(family=FONT, size=15, color=TEXT),
            title=dict(x=0, xref="container", xanchor="left", yref="container", font=dict(size=20), pad=dict(l=16)),
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            xaxis=_AXIS,
            yaxis=_AXIS,
            legend=dict(
                orientation="h",
                x=0,
                xanchor="left",
                yref="container",
                yanchor="top",
                font=dict(size=14),
                traceorder="normal",
            ),
            bargap=0.32,
            hoverlabel=dict(font=dict(family=FONT, size=14)),
        )
    )


def titled(figure: go.Figure, title: str, subtitle: str, alt: str, height: int = 420, top: int = 160) -> go.Figure:
    """Give a figure its finding (title), its conditions (subtitle), its alternative text and the common look.

    Long titles and subtitles take further lines, for which the figure grows; `height` and `top` (the margin above the
    plot) are without them.
    """
    titles, subtitles = wrapped(title, _TITLE_CHARACTERS), wrapped(subtitle, _SUBTITLE_CHARACTERS)
    more = _LINE * titles.count("<br>") + _SUBLINE * subtitles.count("<br>")
    # plotly hangs a title by its last lines: without it, the first would leave the picture
    lift = 16 + 14 * titles.count("<br>")
    figure.update_layout(
        template=template(),
        title=dict(
            text=f"<b>{titles}</b>",
            subtitle=dict(text=subtitles, font=dict(size=15)),
            y=1,
            yanchor="top",
            pad=dict(t=lift),
        ),
        margin=dict(l=16, r=28, t=top + more, b=16),
        legend=dict(y=1 - (82 + more) / (height + more)),
        height=height + more,
        meta=dict(alt=alt),
    )
    return figure


def enlarged(figure: go.Figure, scale: float, wider: float = 1.0) -> go.Figure:
    """The figure in type that is `scale` times as large, for a projector: taller by as much, its titles broken anew for
    a page that is `wider` times as wide as a notebook's at 1280 px.
    """
    title, old = figure.layout.title, figure.layout
    titles = wrapped(re.sub(r"<br>|</?b>", " ", title.text).strip(), int(_TITLE_CHARACTERS * wider / scale))
    subtitles = wrapped(title.subtitle.text.replace("<br>", " "), int(_SUBTITLE_CHARACTERS * wider / scale))
    before = _LINE * title.text.count("<br>") + _SUBLINE * title.subtitle.text.count("<br>")
    more = scale * (_LINE * titles.count("<br>") + _SUBLINE * subtitles.count("<br>") - before)
    rows = scale * _LEGEND_LINE * max(0, _legend_rows(figure, scale, wider) - _legend_rows(figure))
    height = scale * old.height + more + rows
    larger = go.Figure(_in_larger_type(figure.to_plotly_json(), scale))
    larger.layout.title.update(text=f"<b>{titles}</b>", subtitle_text=subtitles)
    larger.layout.title.pad.t = scale * (16 + 14 * titles.count("<br>"))
    if scale > wider:
        _keep_words_apart(larger, figure, scale, scale / wider)
    above_legend = scale * (1 - old.legend.y) * old.height + more
    margin = scale * old.margin.t + more + rows
    return larger.update_layout(height=height, margin_t=margin, legend_y=1 - above_legend / height)


def _legend_rows(figure: go.Figure, scale: float = 1.0, wider: float = 1.0) -> int:
    """Rows that a figure's legend takes: one, or columns as wide as its longest name."""
    names = [each.name for each in figure.data if each.name and each.showlegend is not False]
    if not names or figure.layout.showlegend is False:
        return 0
    widths = [0.56 * 14 * scale * len(name) + _LEGEND_SIGN for name in names]
    columns = len(names) if sum(widths) <= _PLOT * wider else max(1, int(_PLOT * wider // max(widths)))
    return -(-len(names) // columns)


def _keep_words_apart(larger: go.Figure, figure: go.Figure, scale: float, growth: float) -> None:
    """Type that has grown by more than the page is wide needs room: bars become shorter for the words at their ends,
    lose the numbers that are too long for them, and points keep their names only.
    """
    old = figure.layout
    if any(note.xshift and isinstance(note.y, str) for note in old.annotations) and old.xaxis.range:
        larger.layout.xaxis.range = (old.xaxis.range[0], old.xaxis.range[1] * growth)
        for bar in larger.data:
            if isinstance(bar, go.Bar) and bar.constraintext == "none" and bar.text is not None:
                least = larger.layout.xaxis.range[1] * growth * _NUMBER / _PLOT
                bar.text = [words if span > least else "" for words, span in zip(bar.text, bar.x)]
    for note, before in zip(larger.layout.annotations, old.annotations):
        name, _, rest = before.text.partition(" · ")
        if rest and not isinstance(before.y, str) and before.xref != "paper":
            letters = [len(re.sub(r"<[^>]+>", "", words)) for words in (before.text, name)]
            nearer = _GLYPH * (letters[0] - letters[1] * scale) / 2
            shift = before.xshift or 0
            note.update(text=name, xshift=shift - math.copysign(nearer, shift) if shift else 0, yshift=before.yshift)


def _in_larger_type(part: Any, scale: float, name: str = "") -> Any:
    """A figure's description with every font size, and what is set in pixels beside text, times `scale`."""
    if isinstance(part, dict):
        return {key: _in_larger_type(each, scale, f"{name}.{key}") for key, each in part.items()}
    if isinstance(part, (list, tuple)):
        return [_in_larger_type(each, scale, name) for each in part]
    return part * scale if re.search(r"font\.size$|\.standoff$|entrywidth$|\.[xy]shift$", name) else part


def wrapped(text: str, characters: int) -> str:
    """The text in lines of at most so many characters, broken at spaces: `wrapped("a bc", 3) == "a<br>bc"`."""
    lines = [""]
    for word in text.split(" "):
        fits = len(re.sub(r"<[^>]+>", "", f"{lines[-1]} {word}")) <= characters
        lines[-1:] = [f"{lines[-1]} {word}".strip()] if fits or not lines[-1] else [lines[-1], word]
    return "<br>".join(lines)


def alt_text(figure: go.Figure) -> str:
    """What the figure shows, as text for readers who do not see it; kept in the figure's `layout.meta`."""
    return (figure.layout.meta or {}).get("alt", "")


def strategy_colour(strategy: str, engine: str) -> str:
    """The strategy's colour; the twin has its own."""
    return (
        STRATEGY_COLOURS["twin"] if engine == "twin" else STRATEGY_COLOURS.get(strategy, STRATEGY_COLOURS["no_shard"])
    )


def ink_on(colour: str) -> str:
    """The text colour that reads on a fill: `ink_on("#b84a0a") == "#ffffff"`, `ink_on("#6cc4f0") == DARK_INK`."""
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else DARK_INK


def card_line(figure: go.Figure, card: int, emulated: bool) -> None:
    """The card's capacity as a line over the whole height of a figure whose x axis is in MB."""
    figure.add_shape(
        type="line",
        x0=card / 1e6,
        x1=card / 1e6,
        y0=0,
        y1=1,
        yref="paper",
        line=dict(color=ALARM, width=2.5, dash="dash"),
    )
    figure.add_annotation(
        x=card / 1e6, y=1, yref="paper", text=f"card {size(card)}{' (emulated)' if emulated else ''}", showarrow=False,
        xanchor="center", yanchor="bottom", font=dict(color=ALARM, size=14),
    )  # fmt: skip

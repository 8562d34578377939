"""One look for every figure: a colour per category and per strategy, type that reads from the back of a room.

Colours are distinct with every common colour vision (tests/test_colours.py simulates them). Backgrounds are
transparent, segments have edges, and text takes its colour from the layout's font, which the HTML page switches: one
figure serves a notebook, a printed page and a dark lecture room.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from fsdplab.common.collectives import COLLECTIVE_ROWS, OTHER_LANE
from fsdplab.common.names import CATEGORY_ROWS, STRATEGY_ROWS
from fsdplab.common.page_colours import TEXT
from fsdplab.common.sizes import size
from fsdplab.figures.plotly_go import go

CATEGORY_COLOURS = {row.name: row.colour for row in CATEGORY_ROWS.values()}
STRATEGY_COLOURS = {row.name: row.colour for row in STRATEGY_ROWS.values()} | {"twin": "#d9b84a"}
COLLECTIVE_COLOURS = {row.name: row.colour for row in COLLECTIVE_ROWS.values() if row.colour} | {
    "all_gather in backward": "#0064c8"
}
LANE_COLOURS = {
    "compute in forward": "#b3bac4",
    "compute in backward": "#6b7380",
    "optimizer": "#d9b84a",
    **{row.name: row.colour for row in COLLECTIVE_ROWS.values() if row.colour},
    OTHER_LANE: "#8a4a9e",
    "exposed": "#fd024c",  # a red that is lighter and bluer than a reduce-scatter for eyes that see no red or no green
}
# the four parts of a step
STEP_COLOURS = {"compute only": "#6b7380", "overlapped": "#4aa3e0", "exposed": "#fd024c", "other": "#cfd3d9"}
# the parts of exposed time
EXPOSED_COLOURS = {
    "on the link": "#fd024c",
    "copying": "#fcd8cd",
    "waiting for a peer": "#8a4a9e",
    "waiting for a core": "#33185c",
}
PHASE_COLOURS = {"forward": "#4aa3e0", "backward": "#8a4a9e", "optimizer": "#d9b84a"}
# of exposed time and of lateness; dark text reads on all of it
HEAT = ((0.0, "#fdeee6"), (0.5, "#f6a582"), (1.0, "#e5484b"))
DARK_INK = "#14171c"  # text on light fills
ALARM = "#e5383b"  # the card line, what exceeds it, exposed time
DARK_ALARM = "#c01f25"  # alarming text on a light ground of its own
GRID = "rgba(128,132,136,0.28)"
EDGE = "rgba(20,22,26,0.65)"  # thin edge of a bar segment
FONT = "Inter, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"
_LINE, _SUBLINE, _LEGEND_LINE = 26, 20, 21  # pixels that a line of the title, the subtitle and the legend takes
_LEGEND_SIGN = 45  # pixels of a legend's sign and the gaps around it
_ABOVE = 24  # pixels of words that stand above the plot, or of a button
_PIXELS = re.compile(r"(font|marker)\.size$|\.(standoff|entrywidth|height|[xy]shift|a[xy])$|\.(margin|pad)\.[lrtb]$")
PAGE = 848  # pixels that an output has in JupyterLab with its files at the side, in a window of 1280
_page = float(PAGE)  # the notebook's, once a widget has told it
_ON_PAGE: ContextVar[float | None] = ContextVar("on_page", default=None)
# plotly's toolbar lies over the title: of its buttons the camera alone stays
_NO_BUTTONS = ["sendChartToCloud", "zoom", "pan", "select", "lasso", "zoomIn", "zoomOut", "autoScale", "resetScale"]
DARK_TEXT = "#eceff3"

_AXIS = dict(
    gridcolor=GRID,
    zerolinecolor=GRID,
    linecolor=GRID,
    automargin=True,
    ticks="outside",
    ticklen=4,
    tickcolor=GRID,
    exponentformat="none",  # 10,000 ms; plotly writes 10k
    separatethousands=True,
    title=dict(standoff=12, font=dict(size=16)),
    tickfont=dict(size=15),
)
_LEGEND = dict(
    orientation="h", x=0, xanchor="left", yref="container", yanchor="top", font=dict(size=14), traceorder="normal"
)
_TITLE = dict(x=0, xref="container", xanchor="left", yref="container", font=dict(size=20), pad=dict(l=16))
_CLEAR = "rgba(0,0,0,0)"


@lru_cache
def template() -> go.layout.Template:
    """Return the layout that every figure starts from."""
    layout = dict(
        font=dict(family=FONT, size=15, color=TEXT),
        title=_TITLE,
        paper_bgcolor=_CLEAR,
        plot_bgcolor=_CLEAR,
        xaxis=_AXIS,
        yaxis=_AXIS,
        legend=_LEGEND,
        bargap=0.32,
        modebar=dict(remove=_NO_BUTTONS, bgcolor=_CLEAR),
        hoverlabel=dict(font=dict(family=FONT, size=14)),
    )
    return go.layout.Template(layout=layout)


@contextmanager
def on_page(pixels: float) -> Iterator[None]:
    """Draw figures for a page of this width instead of a notebook's: titles break, and words have room, accordingly."""
    before = _ON_PAGE.set(pixels)
    try:
        yield
    finally:
        _ON_PAGE.reset(before)


def page_is(pixels: float) -> None:
    """Draw later figures for a notebook's page of this width, at most `PAGE`."""
    global _page
    _page = min(float(PAGE), pixels)


def page() -> float:
    """Return pixels of the width for which figures are drawn."""
    return _ON_PAGE.get() or _page


def words_width(words: str, size: int = 15) -> float:
    """Return about how many pixels the longest line of a text takes in letters of `size` pixels, without its tags."""
    # tags such as <b> take no room
    lines = [re.sub(r"<[^>]+>", "", line) for line in words.split("<br>")]
    # a letter is about half as wide as it is high
    return 0.52 * size * max(map(len, lines))


def plot_width(labels: Iterable[str] = ()) -> float:
    """Return pixels of a plot's width on the page beside the labels of its rows."""
    longest = max(map(words_width, labels), default=60)
    # 54: both margins (44) and the ticks
    return max(100.0, page() - 54 - longest)


# ---- title, conditions and legend


def titled(figure: go.Figure, title: str, subtitle: str, alt: str, height: int = 260) -> go.Figure:
    """Give a figure its finding (title), its conditions (subtitle), its alternative text and the common look.

    `height` is the plot's, with its axis below it. The figure is as much taller as title, subtitle, legend and words
    above the plot need.
    """
    room = page() - 24
    # pixels that a letter takes: 12.6 of the bold title (size 20), 8.4 of the subtitle (size 15)
    titles = wrapped(title, int(room / 12.6))
    subtitles = wrapped(subtitle, int(room / 8.4))
    # from the top: 82 pixels hold title and subtitle of a line each, then come the legend and the plot
    legend = 82 + _LINE * titles.count("<br>") + _SUBLINE * subtitles.count("<br>")
    top = legend + 18 + _LEGEND_LINE * _legend_rows(figure)
    if _words_above(figure):
        top += _ABOVE
    # plotly hangs a title of several lines higher: without more space, the first would leave the picture
    lift = 30 if "<br>" in titles else 16
    figure.update_layout(
        template=template(),
        title=dict(
            text=f"<b>{titles}</b>",
            subtitle=dict(text=subtitles, font=dict(size=15)),
            y=1,
            yanchor="top",
            pad=dict(t=lift),
        ),
        margin=dict(l=16, r=28, t=top, b=16),
        # as a part of the whole height, from the bottom
        legend=dict(y=1 - legend / (height + top)),
        height=height + top,
        meta=dict(alt=alt),
    )
    return figure


def said_further(figure: go.Figure, words: str) -> go.Figure:
    """Return the figure with words added to its subtitle, which is broken into lines anew and gets the room that they
    need.
    """
    title = figure.layout.title.text.replace("<br>", " ").removeprefix("<b>").removesuffix("</b>")
    subtitle = figure.layout.title.subtitle.text.replace("<br>", " ")
    height = figure.layout.height - figure.layout.margin.t
    return titled(figure, title, subtitle + words, alt_text(figure), height)


def _legend_rows(figure: go.Figure) -> int:
    """Count the rows of a figure's legend: one, or columns as wide as its longest name, beside the rows' labels."""
    names = legend_of(figure)
    if not names:
        return 0
    labels = list(figure.layout.yaxis.ticktext or ())
    # without ticks of its own an axis has the bars' rows as labels
    for trace in figure.data:
        if trace.type == "bar":
            labels += [row for row in trace.y or () if isinstance(row, str)]
    width = plot_width(labels)
    widths = [words_width(name, 14) + _LEGEND_SIGN for name in names]
    if sum(widths) <= width:
        return 1
    # plotly gives all columns the width of the longest name
    columns = max(1, int(width // max(widths)))
    # rounded up
    return -(-len(names) // columns)


def legend_of(figure: go.Figure) -> dict[str, str]:
    """Return the names in a figure's legend and their colours; {} where it has none."""
    # plotly shows no legend of a single trace
    if figure.layout.showlegend is False or len(figure.data) < 2:
        return {}
    colours = {}
    for trace in figure.data:
        if trace.name and trace.showlegend is not False:
            colours[trace.name] = trace.marker.color
    return colours


def bare(figure: go.Figure) -> dict[str, Any]:
    """Return the figure's description without title, subtitle and legend, and without their room: a page sets these as
    text that wraps.
    """
    described = figure.to_plotly_json()
    top = _ABOVE + 8 if _words_above(figure) else 10
    layout = dict(described["layout"])
    # the page sets title, subtitle and legend in HTML, so the plot begins just below its upper edge
    layout["title"] = None
    layout["showlegend"] = False
    layout["margin"] = {**layout.get("margin", {}), "t": top}
    layout["height"] = (figure.layout.height or 420) - (figure.layout.margin.t or 0) + top
    return described | {"layout": layout}


def _words_above(figure: go.Figure) -> bool:
    """Whether something stands above the plot: the name of a line, a phase, a button, the labels of an axis."""
    if figure.layout.updatemenus or figure.layout.xaxis.side == "top":
        return True
    # where notes on the upper edge of the plot are: reference, y and anchor
    above = [("paper", 1, "bottom"), ("y domain", 1, "bottom")]
    return any((note.yref, note.y, note.yanchor) in above for note in figure.layout.annotations)


def enlarged(figure: go.Figure, scale: float) -> go.Figure:
    """Return the figure with everything that is set in pixels times `scale`, for a projector.

    Draw it for a page that is narrower by as much: `with on_page(PAGE / scale)`.
    """
    return go.Figure(_in_pixels(figure.to_plotly_json(), scale))


def _in_pixels(part: Any, scale: float, name: str = "") -> Any:
    """Return a figure's description with every number of pixels times `scale`."""
    if isinstance(part, dict):
        return {key: _in_pixels(value, scale, f"{name}.{key}") for key, value in part.items()}
    if isinstance(part, (list, tuple)):
        return [_in_pixels(value, scale, name) for value in part]
    # `name` is the path to the number, such as `.layout.title.font.size`
    if isinstance(part, (int, float)) and _PIXELS.search(name):
        return part * scale
    return part


def wrapped(text: str, characters: int) -> str:
    """Break a text at spaces into lines of at most so many characters: `wrapped("a bc", 3) == "a<br>bc"`."""
    return "<br>".join(textwrap.wrap(text, characters, break_long_words=False, break_on_hyphens=False))


def alt_text(figure: go.Figure) -> str:
    """Say what the figure shows, for readers who do not see it; the text is kept in the figure's `layout.meta`."""
    return (figure.layout.meta or {}).get("alt", "")


# ---- colours and lines


def strategy_colour(strategy: str, engine: str) -> str:
    """Return the strategy's colour; the twin has its own."""
    name = "twin" if engine == "twin" else strategy
    return STRATEGY_COLOURS.get(name, STRATEGY_COLOURS["no_shard"])


def ink_on(colour: str) -> str:
    """Return the text colour with more contrast: `ink_on("#b84a0a") == "#ffffff"`, `ink_on("#6cc4f0") == DARK_INK`."""
    return max("#ffffff", DARK_INK, key=lambda ink: contrast(ink, colour))


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours by WCAG, 1 to 21: `round(contrast("#ffffff", "#000000")) == 21`."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    # 0.05 is the light that a screen reflects, by WCAG
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb` by WCAG 2."""
    red, green, blue = (_linear(int(colour[start : start + 2], 16) / 255) for start in (1, 3, 5))
    # how much each contributes to the lightness that eyes see
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(part: float) -> float:
    """Return the light of a part of sRGB, which is coded so that equal steps look alike."""
    # sRGB is linear near black
    if part <= 0.04045:
        return part / 12.92
    return ((part + 0.055) / 1.055) ** 2.4


def mark_level(
    figure: go.Figure,
    at: float,
    words: str,
    axis: str = "x",
    panel: str = "",
    colour: str = ALARM,
    gaps: Sequence[tuple[float, float]] = (),
    **place: Any,
) -> None:
    """Draw a dashed line across the plot at a value of an axis, such as a card's capacity, with its name at the line's
    end.

    `panel` is the number of the axes ("" for the first); `gaps` are parts of the line, 0 to 1 from its lower or left
    end, that are not drawn; `place` sets more of the name's annotation.
    """
    x, y = f"x{panel}", f"y{panel}"
    if axis == "x":
        # an upright line, named above the plot's upper edge
        refs = dict(xref=x, yref=f"{y} domain")
        level, along = dict(x0=at, x1=at), "y"
        beside = dict(x=at, y=1, xanchor="center")
    else:
        # a level line, named at its left end
        refs = dict(xref=f"{x} domain", yref=y)
        level, along = dict(y0=at, y1=at), "x"
        beside = dict(x=0, y=at, xanchor="left", xshift=6)
    look = dict(type="line", line=dict(color=colour, width=2.5, dash="dash"))
    # without gaps one piece, from 0 to 1
    starts = [0.0, *(end for _, end in sorted(gaps))]
    stops = [*(start for start, _ in sorted(gaps)), 1.0]
    for start, stop in zip(starts, stops):
        figure.add_shape(look | refs | level | {f"{along}0": start, f"{along}1": stop})
    note = dict(text=words, showarrow=False, yanchor="bottom", font=dict(color=colour, size=14))
    figure.add_annotation(note | refs | beside | place)


def card_words(card: int, emulated: bool) -> str:
    """Return the name of a card's line: `card 80.0 MB (emulated)`."""
    words = f"card {size(card)}"
    if emulated:
        words += " (emulated)"
    return words

"""Gives a figure's text the colour of the page's text, also when the page changes its theme while the figure is shown.

plotly takes fixed colours only, and draws on a transparent ground: dark text is lost on a dark page. Text in plotly may
hold `<span style="...">`, though, whose style reaches the SVG unchanged. So each text on the ground is put into a span
whose colour is a variable of the page: JupyterLab, VS Code and Colab set one for each theme. A saved notebook keeps the
span; no script or style sheet is needed. Text on a bar has a colour that is chosen for the bar, and stays.

Outside of such a page, as in the PNG that JupyterLab saves beside a figure and shows when the notebook is opened again,
text is dark and stands on a white card, which can be read on a page of any theme. On the page the card has the colour
of the ground, so that it is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from fsdplab.common.page_colours import INK, readable

Part: TypeAlias = dict[str, Any]  # a part of a figure's description, as plotly's JSON has it

GROUND = "var(--jp-layout-color0, var(--vscode-editor-background, var(--colab-primary-surface-color, #fff)))"
# The edge has the colour of the ground: it keeps lines out of the letters, and is seen only where no ground is known.
_EDGE = f"stroke:{GROUND};stroke-width:3px;stroke-linejoin:round;paint-order:stroke"
_SPAN, _END = "<span style='fill:{};" + _EDGE + "'>", "</span>"
# plotly has no ground whose colour is a variable, but a shape below everything may have words: a dot whose edge is so
# wide that it fills the figure. Chromium draws none at all where it is much wider.
_CARD_PX = 4000
_DOT = f"<span style='fill:{GROUND};stroke:{GROUND};stroke-width:{_CARD_PX}px;stroke-linejoin:round'>.</span>"
_CARD = {
    "type": "rect",
    "layer": "below",
    "xref": "paper",
    "yref": "paper",
    "x0": 0,
    "x1": 1,
    "y0": 0,
    "y1": 1,
    "line": {"width": 0},
    "label": {"text": _DOT},
}
_AXIS = re.compile(r"[xy]axis\d*")
_OUTSIDE = ("outside", "auto")


def following(figure: Mapping[str, Any]) -> Part:
    """Return a figure's description with text that follows the page; the given one stays unchanged."""
    made = _copied(figure)
    layout = made.setdefault("layout", {})
    for name in ("xaxis", "yaxis"):  # plotly draws both, also where the description leaves them out
        layout.setdefault(name, {})
    layout["shapes"] = [_copied(_CARD), *layout.get("shapes", ())]
    for holder in _titles(layout):
        _ink(holder, "text")
    for axis in _axes(layout):
        _ink_ticks(axis)
    for note in layout.get("annotations", ()):
        # a note on a ground of its own keeps its colour
        if "bgcolor" not in note:
            _ink(note, "text")
    traces = list(made.get("data", ()))
    for frame in made.get("frames") or ():  # of a figure that moves
        traces += frame.get("data", ())
    for trace in traces:
        _ink_trace(trace)
    return made


def in_ink(words: str, colour: str | None = None) -> str:
    """Return a text in the page's ink, or in a colour that the ink makes readable: `in_ink("card", "#e5383b")`."""
    fill = readable(colour) if colour else INK
    return f"{_SPAN.format(fill)}{words}{_END}"


def _copied(part: Any) -> Any:
    """Return a copy whose dictionaries and lists can be changed; arrays are shared, as nothing here changes them."""
    if isinstance(part, Mapping):
        return {name: _copied(value) for name, value in part.items()}
    if isinstance(part, (list, tuple)):
        return [_copied(value) for value in part]
    return part


def _titles(layout: Part) -> Iterator[Part]:
    """Yield what has a title's text: the figure, its axes, and the scale of its colours."""
    title = layout.get("title") or {}
    yield title
    yield title.get("subtitle") or {}
    for axis in _axes(layout):
        yield axis.get("title") or {}


def _axes(layout: Part) -> Iterator[Part]:
    for name, axis in layout.items():
        if _AXIS.fullmatch(name):
            yield axis


def _ink(holder: Part, name: str) -> None:
    """Put the text of that name into ink, in the colour that its font has."""
    words = holder.get(name)
    if isinstance(words, str) and words:
        holder[name] = in_ink(words, (holder.get("font") or {}).get("color"))


def _ink_ticks(axis: Part) -> None:
    """Put the words or numbers along an axis or a scale of colours into ink.

    plotly puts its numbers between prefix and suffix.
    """
    words = axis.get("ticktext")
    if words is not None:
        axis["ticktext"] = [in_ink(str(word)) for word in words]
        return
    # the span opens before plotly's number and closes behind it
    axis["tickprefix"] = _SPAN.format(INK) + axis.get("tickprefix", "")
    axis["ticksuffix"] = axis.get("ticksuffix", "") + _END


def _ink_trace(trace: Part) -> None:
    """Put the name in the legend, numbers at the ends of bars, and the scale of colours into ink."""
    _ink(trace, "name")
    words = trace.get("text")
    # text inside of a bar has the colour that suits the bar
    if trace.get("textposition") in _OUTSIDE and isinstance(words, list):
        trace["text"] = [in_ink(word) if word else word for word in words]
    scale = trace.get("colorbar")
    if scale and trace.get("showscale") is not False:
        _ink(scale.get("title") or {}, "text")
        _ink_ticks(scale)

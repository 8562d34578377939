"""Outputs of executed cells as HTML: the richest form that a page without a kernel can show.

A figure is drawn by the site's one copy of plotly.js; readers without scripts get its alternative text. What only a
kernel can answer (sliders, buttons) leaves one sentence.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape
from nbconvert.filters.ansi import strip_ansi

from fsdplab.figures.plotly_go import PLOTLY
from fsdplab.figures.report.parts import PIECES, in_script
from fsdplab.teaching.site.foreign_html import without_scripts

WIDGET = "application/vnd.jupyter.widget-view+json"
WITHOUT_A_KERNEL = "In the notebook, controls stand here; this page shows where they begin."
_DRAWN = ("data", "layout", "frames")
_TALL_AS_PLOTLY, _TALLEST = 450, 10_000  # px: what plotly.js takes where a figure says nothing; a page's patience


def shown(outputs: Sequence[Mapping[str, Any]]) -> Markup:
    """All outputs of one cell, in order."""
    return Markup("\n").join(piece for output in outputs if (piece := _of(output)))


def _of(output: Mapping[str, Any]) -> Markup:
    if output["output_type"] == "stream":
        return _preformatted(output["text"], "stream")
    if output["output_type"] == "error":
        lines = output.get("traceback") or [f"{output.get('ename')}: {output.get('evalue')}"]
        return _preformatted("\n".join(lines), "error")
    return _richest(output.get("data") or {})


def _richest(data: Mapping[str, Any]) -> Markup:
    """The first form of a bundle that this page can show."""
    words = data.get("text/plain", "")
    for kind, form in _FORMS.items():
        if kind in data and (made := form(data[kind], words)):
            return made
    return Markup()


def _figure(figure: Any, words: str) -> Markup:
    if not isinstance(figure, dict) or not isinstance(figure.get("layout", {}), dict):
        return Markup()
    figure, words = {"layout": {}, **figure}, words.removeprefix("[figure] ")
    height = figure["layout"].get("height")
    return Markup(
        '<figure role="img" aria-label="{}"><div class="plot" style="height:{}px"></div>'
        '<script type="application/json">{}</script><noscript>{}</noscript></figure>'
    ).format(
        words,
        int(height) if isinstance(height, (int, float)) and 0 < height < _TALLEST else _TALL_AS_PLOTLY,
        in_script(json.dumps({name: figure[name] for name in _DRAWN if name in figure}, separators=(",", ":"))),
        words,
    )


def _picture(kind: str) -> Callable[[str, str], Markup]:
    def form(content: str, words: str) -> Markup:
        encoded = base64.b64encode(content.encode()).decode() if kind == "image/svg+xml" else "".join(content.split())
        return Markup('<p><img src="data:{};base64,{}" alt="{}"></p>').format(kind, encoded, words or "a picture")

    return form


_FORMS: dict[str, Callable[[Any, str], Markup]] = {
    PLOTLY: _figure,
    PIECES: lambda pieces, _: Markup("\n").join(map(_richest, pieces)),
    # as the cell made it, without scripts: no page carries a second copy of a library
    "text/html": lambda text, _: Markup('<div class="rich">{}</div>').format(without_scripts(text)),
    WIDGET: lambda *_: Markup('<p class="no-kernel">{}</p>').format(WITHOUT_A_KERNEL),
    **{kind: _picture(kind) for kind in ("image/svg+xml", "image/png", "image/jpeg")},
    "text/markdown": lambda text, _: Markup("<p>{}</p>").format(text),
    "text/plain": lambda text, _: _preformatted(text, "result") if text.strip() else Markup(),
}


def plain(markup: str) -> str:
    """The words of a piece of HTML, for the search: tags, scripts and pictures gone, spaces single."""
    without = re.sub(r"<(script|style|noscript)\b.*?</\1\s*>", " ", markup, flags=re.DOTALL | re.IGNORECASE)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", without)).split())


def _preformatted(text: str, kind: str) -> Markup:
    return Markup('<pre class="{}">{}</pre>').format(kind, escape(strip_ansi(text).replace("\r\n", "\n").rstrip()))

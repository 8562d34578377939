"""Draws a picture of each plotly figure of executed notebooks, for pages without scripts: an SVG beside plotly's form.

A browser of Chromium's family draws them, without a window and without a network: all figures of a notebook on one page
with plotly's own code. Where there is none, a figure has its alternative text alone. A notebook that JupyterLab has
shown and saved holds a PNG of each figure already.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from fsdplab.figures.plotly_go import PLOTLY
from fsdplab.figures.report.parts import in_script
from fsdplab.figures.style import DARK_TEXT, PAGE, TEXT

SVG, PNG = "image/svg+xml", "image/png"
WITHOUT_BROWSER = "no Chromium or Chrome was found, which draws the pictures of figures: pages show their words instead"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
_OF_MACOS = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
_TIME_LIMIT_S = 120
_MADE = re.compile(r'<pre id="made">(.*?)</pre>', re.DOTALL)
_USUAL = re.compile(r"(?<![-\w])(?:vector-effect: none|(?:fill-|stroke-)?opacity: 1);\s?")  # what SVG has without it
# The colours that the spans of figures name (figures/page_ink.py): an image takes its scheme from the page around it.
_STYLE = f"""<style>svg {{ --jp-content-font-color1: {TEXT}; --jp-layout-color0: #fff }}
@media (prefers-color-scheme: dark) {{
svg {{ --jp-content-font-color1: {DARK_TEXT}; --jp-layout-color0: #111 }}
}}</style>"""
_PAGE = """<!doctype html><meta charset="utf-8"><body><div id="place"></div><pre id="made"></pre>
<script type="application/json" id="figures">{figures}</script><script src="plotly.js"></script><script>
(async () => {{
  const made = [];
  for (const {{data, layout}} of JSON.parse(document.getElementById("figures").textContent)) {{
    const height = layout.height > 0 && layout.height < 10000 ? layout.height : 450;  // plotly's own is 450
    const size = {{width: {width}, height}};
    const still = {{...layout, ...size, updatemenus: []}};  // nothing plays in a picture
    try {{
      const address = await Plotly.toImage({{data, layout: still}}, {{format: "svg", ...size}});
      made.push(decodeURIComponent(address.slice(address.indexOf(",") + 1)));
    }} catch (error) {{ made.push(null); }}  // no figure of plotly's: its words remain
  }}
  document.getElementById("made").textContent = JSON.stringify(made);
}})();
</script>"""


def browser() -> str | None:
    """Return the path of a browser that can draw pictures, or None."""
    named = next(filter(None, map(shutil.which, _BROWSERS)), None)
    return named or (str(_OF_MACOS) if _OF_MACOS.exists() else None)


def add_stills(notebook: NotebookNode) -> int:
    """Add a picture to each figure of a notebook that has none; returns how many figures remain without one."""
    figures = list(_without_picture(notebook))
    program = browser()
    if not figures or program is None:
        return len(figures)
    pictures = _drawn(program, [figure[PLOTLY] for figure in figures])
    for figure, svg in zip(figures, pictures):
        if svg is not None:
            figure[SVG] = with_words(svg, figure.get("text/plain", ""))
    return pictures.count(None)


def add_stills_to_files(folder: Path) -> None:
    """Add pictures to the figures of every notebook in a folder."""
    for path in sorted(folder.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        add_stills(notebook)
        nbformat.write(notebook, path)


def _without_picture(notebook: NotebookNode) -> Iterator[Any]:
    """The bundles of the notebook's figures that hold no picture."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            bundle = output.get("data", {})
            if isinstance(bundle.get(PLOTLY), dict) and not {SVG, PNG} & set(bundle):
                yield bundle


def _drawn(program: str, figures: list[Any]) -> list[str | None]:
    """The SVG of each figure; None for one that plotly cannot draw, and for all where the browser fails."""
    from plotly.offline import get_plotlyjs

    described = [{"data": figure.get("data", []), "layout": figure.get("layout", {})} for figure in figures]
    with tempfile.TemporaryDirectory(prefix="fsdplab-stills-") as scratch:
        folder = Path(scratch)
        (folder / "plotly.js").write_text(get_plotlyjs(), encoding="utf-8")
        page = folder / "figures.html"
        page.write_text(_PAGE.format(figures=in_script(json.dumps(described)), width=PAGE), encoding="utf-8")
        flags = ["--headless", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=60000"]
        if os.name == "posix" and os.geteuid() == 0:
            flags.append("--no-sandbox")  # Chromium's sandbox refuses root, who runs containers
        command = [program, *flags, "--dump-dom", page.as_uri()]
        try:
            ran = subprocess.run(command, capture_output=True, timeout=_TIME_LIMIT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return [None] * len(figures)
    found = _MADE.search(ran.stdout.decode("utf-8", "replace"))
    made = json.loads(html.unescape(found.group(1)) or "[]") if found else []
    return made if len(made) == len(figures) else [None] * len(figures)


def with_words(svg: str, words: str) -> str:
    """Give an SVG of plotly's its colours for light and dark pages, and its alternative text."""
    alt = escape(words.removeprefix("[figure] "), quote=True)
    start, end = _USUAL.sub("", svg).split(">", 1)
    return f'{start} role="img" aria-label="{alt}">{_STYLE}{end}'

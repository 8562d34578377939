"""Figures as SVG pictures, drawn by plotly.js in a headless Chromium: how the pictures of `data/figures` are made.

`python -m tests.pictures timeline.html data/figures/timeline.svg` takes a page that `fsdplab plan sweep --figure` or a
figure's `write_html` wrote. Neither a network nor a package beside those of the tests is needed.
"""

from __future__ import annotations

import html
import sys
import urllib.parse
from pathlib import Path
from typing import Any

from tests.browser import CHROMIUM, patient

WIDTH = 1000
_PICTURE = """width => {
  // a page of one figure keeps the title and the legend as text, and the whole figure beside it
  const whole = document.getElementById("whole");
  const plot = whole ? JSON.parse(whole.textContent) : document.querySelector(".js-plotly-plot");
  return Plotly.toImage(plot, {format: "svg", width, height: plot.layout.height || 450});
}"""


def svg_of(page_html: str, width: int = WIDTH) -> str:
    """The SVG of the first figure of a page, with its alternative text; the page's plotly.js is the installed one."""
    from playwright.sync_api import sync_playwright
    from plotly.offline import get_plotlyjs

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = patient(browser.new_page(viewport={"width": width, "height": 900}))
        page.route("https://cdn.plot.ly/**", lambda route: _answer(route, get_plotlyjs()))
        page.set_content(page_html)
        page.wait_for_selector(".js-plotly-plot .main-svg")
        address = page.evaluate(_PICTURE, width)
        alt = page.evaluate("() => (document.querySelector('.js-plotly-plot').layout.meta || {}).alt || ''")
        browser.close()
    picture = urllib.parse.unquote(address.partition(",")[2])
    begins = picture.index(">", picture.index("<svg")) + 1
    # the words are dark, and a reader's page may be dark too
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return f"{picture[:begins]}<title>{html.escape(alt)}</title>{ground}{picture[begins:]}"


def _answer(route: Any, script: str) -> None:
    """Give plotly.js; the page may check that its origin allows that."""
    route.fulfill(body=script, content_type="text/javascript", headers={"Access-Control-Allow-Origin": "*"})


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(svg_of(source.read_text(encoding="utf-8")), encoding="utf-8")

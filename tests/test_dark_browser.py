"""A notebook in JupyterLab's dark and light themes, changed while it is open: the contrast of all words of its figures
is measured (WCAG AA, 4.5 to 1), and pictures of lessons have the paper of the theme. Opened again, a saved notebook
shows its figures as pictures until the pointer is over them: these bring their own white card.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Cells, needs_chromium, pixel

CELLS = [
    'from fsdplab import figures, teaching\nfrom fsdplab.teaching import collectives, show\nteaching.picture("05")',
    'run = teaching.recorded("wind-tunnel-8b")\nfigures.memory_timeline(run)',
    "show(collectives.ring_figure(4))",
    "show(figures.rank_timeline(run))",
    "figures.exposed_bar(run)",
    "figures.exposed_heatmap(run)",
    "figures.linked_view(run)",
    'figures.pareto([teaching.recorded(f"lesson-11/{name}") for name in ("no_shard", "zero1", "full_shard")])',
]
FIGURES = len(CELLS) - 1
DRAWN = f"() => document.querySelectorAll('.js-plotly-plot > .plot-container').length >= {FIGURES}"
# Words of figures whose contrast with what is behind them is less than 4.5, as [words, contrast]: a bar's words stand
# on the bar, all others on the page. A canvas mixes colours that are half transparent.
PALE = """() => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const mixed = (...colours) => {
    pen.clearRect(0, 0, 1, 1);
    for (const [fillStyle, globalAlpha] of colours) {
      Object.assign(pen, {fillStyle, globalAlpha});
      pen.fillRect(0, 0, 1, 1);
    }
    return [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const light = colour => {
    const [r, g, b] = colour.map(part => part / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const page = getComputedStyle(document.querySelector(".jp-Notebook")).backgroundColor;
  const words = document.querySelectorAll(".js-plotly-plot text:not(.heatmaplayer *, .shape-label *)");
  const texts = [...words].filter(text => text.textContent.trim());
  window.measured = texts.length;
  return texts.map(text => {
    const leaf = [...text.querySelectorAll("tspan")].filter(part => !part.children.length)[0] ?? text;
    const bar = text.classList.contains("bartext-inside") && text.parentElement.querySelector("path");
    const own = text.closest(".annotation, .updatemenu-button")?.querySelector("rect.bg, rect.updatemenu-item-rect");
    const fill = part => { const look = getComputedStyle(part); return [look.fill, look.fillOpacity]; };
    const behind = [[page, 1], ...[bar, own].filter(Boolean).map(fill)];
    const seen = [mixed(...behind), mixed(...behind, fill(leaf))];
    const [one, other] = seen.map(light).sort((a, b) => b - a);
    return [text.textContent, (one + 0.05) / (other + 0.05)];
  }).filter(([, contrast]) => contrast < 4.5);
}"""

# Red, green, blue and alpha of the first pixel of an image's own.
CORNER = """async image => {
  await image.decode();
  const pen = new OffscreenCanvas(1, 1).getContext("2d");
  pen.drawImage(image, 0, 0);
  return [...pen.getImageData(0, 0, 1, 1).data];
}"""


def choose_theme(page: Any, name: str) -> None:
    """Change JupyterLab's theme by its menu."""
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Theme$")).hover()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{name}$")).click()
    dark = "false" if "Dark" in name else "true"
    page.wait_for_function(f"() => document.body.dataset.jpThemeLight === '{dark}'")


@needs_chromium
@pytest.mark.timeout(600)
@pytest.mark.full("a browser; test_page_ink.py has what the figures hold")
def test_words_of_figures_can_be_read_in_the_dark_also_when_the_theme_changes(lab_cells: Cells, tmp_path: Path) -> None:
    with lab_cells.run(CELLS) as page:
        page.wait_for_function(DRAWN, timeout=180_000)
        for theme, paper in (("JupyterLab Dark", (17, 17, 17)), ("JupyterLab Light", (255, 255, 255))):
            choose_theme(page, theme)
            pale = page.evaluate(PALE)
            assert pale == [], f"{theme}: {pale}"
            assert page.evaluate("window.measured") > 150
            picture = page.locator(".jp-OutputArea-output img").first
            assert pixel(picture.screenshot()) == paper
            picture.screenshot(path=str(tmp_path / f"{theme} picture.png"))
            for number, figure in enumerate(page.locator(".js-plotly-plot").all()):
                figure.screenshot(path=str(tmp_path / f"{theme} {number}.png"))


@needs_chromium
@pytest.mark.timeout(600)
@pytest.mark.full("a browser; test_page_ink.py has what the figures hold")
def test_figures_of_a_saved_notebook_are_pictures_on_a_white_card_in_the_dark(lab_cells: Cells, tmp_path: Path) -> None:
    source = "from fsdplab import figures, teaching\n" + CELLS[1]
    with lab_cells.run([source]) as page:
        page.locator(".js-plotly-plot > .plot-container").first.wait_for(timeout=180_000)
        choose_theme(page, "JupyterLab Dark")
        saved = lab_cells.folder / "cells.ipynb"
        while "image/png" not in saved.read_text():  # JupyterLab makes it when it has drawn the figure
            page.keyboard.press("Control+s")
            page.wait_for_timeout(500)
        page.reload()
        picture = page.locator("img.plot-img")
        picture.wait_for()
        assert page.evaluate("document.body.dataset.jpThemeLight") == "false"
        picture.screenshot(path=str(tmp_path / "saved.png"))
        assert picture.evaluate(CORNER) == [255, 255, 255, 255]
        choose_theme(page, "JupyterLab Light")  # which JupyterLab keeps for the tests that follow

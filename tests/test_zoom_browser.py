"""The course at a zoom of 150 %: in a window of 1,280 px the page has 853, and nothing may leave it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import Cells, needs_chromium
from tests.test_sliders_browser import WHOLE

CELLS = [
    'from fsdplab import teaching\nteaching.picture("05")',
    "from fsdplab.teaching import collectives, explore\n"
    'explore(collectives.ring_figure, start={"ranks": 3}, ranks=[2, 3, 4, 8])',
    "from fsdplab.figures import rank_timeline\nfrom fsdplab.teaching import show\n"
    "from fsdplab.sessions import RunSpec\nfrom fsdplab.sessions.steady_card import steady\n"
    'card = steady(RunSpec(model="gpt-20m", sequence_length=64, link="400MB/s"))\n'
    "show(rank_timeline(card))",
    'teaching.beside({"steady card": card, "this machine": teaching.recorded("lesson-07/early")})',
    'teaching.start()\nteaching.predict("00.full_shard_peak", unit="MB")',
]
# Outputs whose picture, figure or field is wider than they are, by the beginning of their text.
WIDER = """() => [...document.querySelectorAll(".jp-OutputArea-output")]
  .filter(out => [...out.querySelectorAll("img, .js-plotly-plot, .jupyter-widgets")]
    .some(each => each.getBoundingClientRect().right > out.getBoundingClientRect().right + 2))
  .map(out => out.innerText.slice(0, 60))"""
SIDEWAYS = "() => document.documentElement.scrollWidth > document.documentElement.clientWidth + 1"


@needs_chromium
@pytest.mark.timeout(400)
def test_at_150_percent_pictures_figures_and_fields_stay_on_the_page(lab_cells: Cells, tmp_path: Path) -> None:
    with lab_cells.run(CELLS, width=853) as page:
        field = page.locator(".jp-CodeCell").nth(4).locator("input").first
        field.wait_for(timeout=180_000)
        page.keyboard.press("Escape")
        page.keyboard.press("Control+b")  # the list of files away
        page.get_by_role("menuitem", name="Run", exact=True).click()  # a slider has told how wide the page is by now
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        page.wait_for_function(WHOLE, timeout=120_000)
        field.wait_for(timeout=60_000)
        assert page.locator(".jp-OutputArea-output img").first.get_attribute("alt").startswith("A unit is whole only")
        assert page.evaluate(WIDER) == [] and not page.evaluate(SIDEWAYS)
        page.screenshot(path=str(tmp_path / "zoomed.png"))

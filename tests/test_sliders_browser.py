"""Every slider of the course, moved in JupyterLab in a real browser: the picture below it must change on the screen.

A saved notebook is no proof: plotly's renderer for JupyterLab once kept the first figure on the screen, while the
notebook's file had the new one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import on_page, titled
from tests.browser import Cells, needs_chromium, patient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
FEWEST_SLIDERS = 35  # of the course; fewer means that this test no longer finds them
SETUP = {  # what the notebook's own cells leave behind, in short
    "07_overlap": """
job = RunSpec(strategy="full_shard", model="gpt-20m", world_size=2, batch_size=2, sequence_length=64, link="400MB/s",
              warmup=1, steps=1, profile=1, memory=False)
ahead = lambda order, position, depth: order[position + 1 : position + 1 + depth]""",
    "08_reading_a_trace": 'record = teaching.recorded("traces-08")',
    "11_strategy_shoot_out": """
runs = compare([RunSpec(strategy=name, model="gpt-20m", world_size=2, batch_size=2, sequence_length=64, link="400MB/s",
                        steps=1, warmup=2, device="cpu") for name in shoot_out.STRATEGIES[:2]])""",
}

# No word of a figure is outside of it.
WHOLE = """() => [...document.querySelectorAll(".js-plotly-plot")].every(plot => {
  const edge = plot.getBoundingClientRect(), texts = [...plot.querySelectorAll("text")];
  const boxes = texts.filter(each => each.textContent.trim()).map(each => each.getBoundingClientRect());
  return boxes.length && boxes.every(box => !box.width || (box.left >= edge.left - 1 && box.right <= edge.right + 1));
})"""
# Pixels above the title of each figure, and between its subtitle and its legend.
GAPS = """() => [...document.querySelectorAll(".js-plotly-plot")].map(plot => {
  const box = name => plot.querySelector(name).getBoundingClientRect();
  return [box(".gtitle").top - plot.getBoundingClientRect().top, box(".legend").top - box(".gtitle-subtitle").bottom];
})"""
# The lines of the first figure's title; 0 while plotly has not drawn it.
LINES = "() => document.querySelector('.gtitle')?.querySelectorAll('tspan.line').length ?? 0"


def course() -> list[tuple[str, str]]:
    """(name of the notebook, source that shows its sliders), one a cell."""
    found = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        sources = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if is_code(cell)]
        imports = "\n".join(
            re.findall(r"^(?:from fsdplab|import torch|from dataclasses)[^\n(]*$", "\n".join(sources), re.M)
        )
        for source in sources:
            if re.search(r"^explore\(", source, re.M):
                alone = re.sub(r"^ask\(.*$", "", source, flags=re.M)  # so that the picture is the cell's last output
                found.append((path.stem, f"{imports}\n{SETUP.get(path.stem, '')}\n{alone}"))
    return found


def is_code(cell: dict[str, Any]) -> bool:
    return cell["cell_type"] == "code"


@needs_chromium
@pytest.mark.full("every slider of the course")
@pytest.mark.timeout(600)
def test_every_slider_of_the_course_changes_the_picture_on_the_screen(lab_cells: Cells, tmp_path: Path) -> None:
    with lab_cells.run([source for _, source in course()]) as page:
        names = [name for name, _ in course()]
        cells = list(zip(names, page.locator(".jp-Notebook .jp-CodeCell").all(), strict=True))
        for _, cell in cells:  # all of them first: what runs above moves what is below
            cell.locator(".noUi-handle, .jp-OutputArea-output[data-mime-type*=stderr]").first.wait_for(timeout=180_000)
        dead, moved = [], 0
        for name, cell in cells:
            for slider in range(cell.locator(".noUi-handle").count()):
                moved += 1
                dead += [] if changes(page, cell, slider) else [f"{name}, {label(cell, slider)}"]
                assert len(dead) < 3, f"the picture stayed as it was: {dead}"
        page.screenshot(path=str(tmp_path / "sliders.png"))
    assert not dead, f"the picture stayed as it was: {dead}"
    assert moved >= FEWEST_SLIDERS


@needs_chromium
@pytest.mark.timeout(600)
def test_a_figure_is_whole_at_every_width_of_its_output(lab_cells: Cells, tmp_path: Path) -> None:
    """A window of 900 px with JupyterLab's files beside the notebook leaves 468 px to an output."""
    source = next(source for name, source in course() if name == "00_setup_and_tour")
    later = "from fsdplab.teaching import show, tour\nshow(tour.state_figure(125, 8))"
    with lab_cells.run([source, later], width=900) as page:
        first, second = page.locator(".jp-Notebook .jp-CodeCell").all()
        first.locator(".noUi-handle").first.wait_for(timeout=180_000)
        page.wait_for_function(f"({LINES})() === 3", timeout=60_000)
        second.locator(".jp-InputArea-editor").click()  # again: the width is known now
        page.keyboard.press("Control+Enter")
        page.wait_for_function(WHOLE, timeout=60_000)
        assert changes(page, first, 0)
        first.screenshot(path=str(tmp_path / "narrow.png"))
        page.set_viewport_size({"width": 1280, "height": 900})
        page.wait_for_function(f"[1, 2].includes(({LINES})()) && ({WHOLE})()", timeout=60_000)
        first.screenshot(path=str(tmp_path / "wide.png"))


@needs_chromium
def test_no_line_of_a_title_touches_the_legend(chromium: Any, tmp_path: Path) -> None:
    words = "as long as it takes " * 8
    pages = []
    for pixels in (300, 468, 848):
        with on_page(pixels):
            figure = titled(go.Figure([go.Bar(x=[1], y=[1], name=name) for name in "ab"]), words, "as measured", words)
        pages.append(figure.to_html(full_html=False, include_plotlyjs=not pages, default_width=f"{pixels}px"))
    (tmp_path / "page.html").write_text("".join(pages), encoding="utf-8")
    page = patient(chromium.new_page())
    page.goto(f"file://{tmp_path / 'page.html'}")
    page.wait_for_function("document.querySelectorAll('.legend').length === 3", timeout=60_000)
    gaps = page.evaluate(GAPS)
    page.close()
    assert all(above >= 4 and below >= 4 for above, below in gaps), (
        f"pixels above the title, below the subtitle: {gaps}"
    )


def label(cell: Any, slider: int) -> str:
    return str(cell.locator(".widget-label").nth(slider).inner_text())


def changes(page: Any, cell: Any, slider: int) -> bool:
    """Whether one step of the slider changes what is seen below it, within 20 s."""
    below = cell.locator(".jp-OutputArea-child").last
    handle = cell.locator(".noUi-handle").nth(slider)
    below.locator(".main-svg, table, div").first.wait_for(timeout=60_000)
    before = settled(page, below)
    at_end = handle.get_attribute("aria-valuenow") == handle.get_attribute("aria-valuemax")
    handle.focus()
    page.keyboard.press("ArrowLeft" if at_end else "ArrowRight")
    for _ in range(40):
        page.wait_for_timeout(500)
        if seen(below) not in (None, before):
            return True
    return False


def settled(page: Any, below: Any) -> bytes:
    """The picture when it no longer changes by itself."""
    last = seen(below)
    for _ in range(40):
        page.wait_for_timeout(250)
        now = seen(below)
        if now is not None and now == last:
            return now
        last = now
    raise AssertionError("the picture keeps changing")


def seen(output: Any) -> bytes | None:
    """Its pixels; None while it is being replaced."""
    from playwright.sync_api import Error

    try:
        return bytes(output.screenshot(timeout=10_000))
    except Error as error:
        if "not attached" not in str(error):
            raise
        return None

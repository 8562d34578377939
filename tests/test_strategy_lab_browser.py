"""Notebook 11 in a real JupyterLab: its strategy lab predicts, runs, shows the figure, runs again, is cancelled, and can
still be used; it fits two sizes of screen, answers while the kernel is busy, and has its runs again in a new kernel.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.browser import CHROMIUM, needs_chromium

NOTEBOOK_11 = "11_strategy_shoot_out.ipynb"
# The tab that is looked at has something in it, its plots have arrived, and its last words are not "drawing".
DRAWN = """() => {
  const tab = [...document.querySelectorAll(".fsdplab-lab .widget-tab-contents > *")].find(e => e.offsetParent !== null);
  const plots = tab ? [...tab.querySelectorAll(".jp-RenderedPlotly, .js-plotly-plot")] : [];
  const filled = tab && tab.querySelector(".jp-OutputArea-child") && !tab.innerText.includes("drawing …");
  return filled && plots.every(e => e.querySelector("svg"));
}"""
# What is laid out wrongly: wider than the lab, or a figure that shrank to nothing.
MISFITS = """() => {
  const right = document.querySelector(".fsdplab-lab").getBoundingClientRect().right;
  const parts = [...document.querySelectorAll(".fsdplab-lab .js-plotly-plot, .fsdplab-lab .fsdplab-grid > *, .fsdplab-lab table")].filter(e => e.offsetParent !== null);
  const boxes = parts.map(e => [e.matches(".js-plotly-plot"), e.getBoundingClientRect()]);
  return boxes.filter(([plot, r]) => r.right > right + 2 || r.width < 100 || (plot && r.height < 150)).map(([plot, r]) => [plot, r.width, r.height]);
}"""
# Text of a figure that leaves it, and tables wider than their place.
CUT = """() => {
  const seen = [...document.querySelectorAll(".fsdplab-lab .js-plotly-plot")].filter(e => e.offsetParent !== null);
  const out = seen.flatMap(plot => {
    const box = plot.getBoundingClientRect();
    const texts = [...plot.querySelectorAll("text")].filter(t => t.getBoundingClientRect().width);
    return texts.filter(t => { const r = t.getBoundingClientRect(); return r.right > box.right + 1 || r.left < box.left - 1 || r.top < box.top - 1 || r.bottom > box.bottom + 1; }).map(t => t.textContent);
  });
  const tables = [...document.querySelectorAll(".fsdplab-lab table")].filter(e => e.offsetParent !== null);
  return [...out, ...tables.filter(t => t.parentElement.scrollWidth > t.parentElement.clientWidth + 1).map(t => t.innerText)];
}"""
# Words of a figure's legend that cover other words of it.
COVERED = """() => {
  const texts = [...document.querySelectorAll(".fsdplab-lab .js-plotly-plot text")].filter(t => t.textContent.trim() && t.getBoundingClientRect().width);
  return texts.filter(t => t.matches(".legendtext")).flatMap(one => {
    const r = one.getBoundingClientRect();
    const others = texts.filter(t => t !== one && t.closest(".js-plotly-plot") === one.closest(".js-plotly-plot"));
    const met = others.filter(t => { const s = t.getBoundingClientRect(); return Math.min(r.right, s.right) - Math.max(r.left, s.left) > 3 && Math.min(r.bottom, s.bottom) - Math.max(r.top, s.top) > 3; });
    return met.map(t => [one.textContent, t.textContent]);
  });
}"""
# The figures' titles have the larger type of a wide page.
LARGER = """() => {
  const titles = [...document.querySelectorAll(".fsdplab-lab .gtitle")].filter(e => e.getBoundingClientRect().width);
  return titles.length && titles.every(e => parseFloat(getComputedStyle(e).fontSize) > 23);
}"""
# The kernel knows that the page is narrow again.
NARROW = """() => document.querySelector(".fsdplab-wide input").value === "" """
BUSY = "import pathlib, time\nwhile not pathlib.Path('go on').exists():\n    time.sleep(0.05)"
RUN_MS, SHORT_MS = 100_000, 30_000


def cell_of_the_lab(notebook: Path) -> int:
    """Which cell of notebook 11 shows the lab: it brings its own import, so that it can be run before all others."""
    cells = ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"]]
    return next(index for index, source in enumerate(cells) if "StrategyLab(" in source)


def picture(page: Any, path: Path) -> None:
    """A screenshot, with what was laid out wrongly in it as a failure: something wider than the lab, a plot of no
    size, words that are cut or covered.
    """
    page.wait_for_function(DRAWN, timeout=RUN_MS)
    page.wait_for_timeout(500)
    page.screenshot(path=str(path))
    misfits = page.evaluate(MISFITS) + page.evaluate(CUT) + page.evaluate(COVERED)
    assert misfits == [], f"parts of the lab do not fit: {misfits}; see {path}"


def run_a_cell(page: Any, source: str) -> None:
    """Run a new cell below the lab's."""
    page.locator(".jp-CodeCell", has_text="lab = StrategyLab(").first.locator(".jp-InputArea-editor").click()
    page.keyboard.press("Escape")
    page.keyboard.press("b")
    page.keyboard.press("Enter")
    page.keyboard.insert_text(source)
    page.keyboard.press("Control+Enter")


@pytest.mark.timeout(900)
@needs_chromium
def test_run_shows_the_figure_and_cancel_leaves_the_lab_usable(jupyter_lab: str, tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 1100})
        page.goto(jupyter_lab.replace("/lab?", f"/doc/tree/{NOTEBOOK_11}?"))
        # a kernel that is still starting would not hear it
        page.get_by_text("(ipykernel) | Idle").wait_for(timeout=RUN_MS)
        page.locator(".jp-Notebook .jp-Cell").first.click(timeout=60_000)
        page.keyboard.press("Escape")
        for _ in range(cell_of_the_lab(tmp_path / "course-learner" / NOTEBOOK_11)):
            page.keyboard.press("ArrowDown")
        page.locator(".jp-Cell.jp-mod-active", has_text="StrategyLab(").wait_for(timeout=SHORT_MS)
        page.keyboard.press("Control+Enter")
        button = {name: page.get_by_role("button", name=name, exact=True) for name in ("Run", "Cancel", "Export HTML")}
        button["Run"].wait_for(timeout=RUN_MS)
        page.add_style_tag(content=".Toastify { display: none }")  # JupyterLab's question whether it may send news
        message, lab_box = page.locator(".fsdplab-message"), page.locator(".fsdplab-lab")
        lab_box.evaluate("e => e.scrollIntoView()")
        assert not button["Cancel"].is_enabled()

        page.get_by_label("Model", exact=True).select_option("gpt-tiny")
        page.get_by_label("Timed steps").fill("0")
        page.get_by_label("Timed steps").press("Enter")
        page.locator(".widget-html .fsdplab-error", has_text="whole number from 1 to 200").wait_for(timeout=SHORT_MS)
        picture(page, tmp_path / "1-wrong.png")
        page.get_by_label("Timed steps").fill("40")
        page.get_by_label("Timed steps").press("Enter")
        message.get_by_text("ready: 2 runs").wait_for(timeout=SHORT_MS)
        lab_box.get_by_text(re.compile(r"predicted 3\.\d+ MB, sends 564 kB")).wait_for(timeout=SHORT_MS)
        page.get_by_label("Card (emulated)").fill("3.5MB")
        page.get_by_label("Card (emulated)").press("Enter")
        lab_box.get_by_text("does not fit the card: 3.").wait_for(timeout=SHORT_MS)
        page.get_by_label("Card (emulated)").fill("")
        page.get_by_label("Card (emulated)").press("Enter")
        message.get_by_text("ready: 2 runs").wait_for(timeout=SHORT_MS)

        button["Run"].click()
        message.get_by_text("run 2 of 2").wait_for(timeout=RUN_MS)
        picture(page, tmp_path / "2-running.png")
        message.get_by_text("done: 2 records of 2 runs kept").wait_for(timeout=RUN_MS)
        lab_box.locator(".js-plotly-plot .barlayer").first.wait_for(timeout=SHORT_MS)
        picture(page, tmp_path / "3-table.png")
        assert lab_box.locator(".fsdplab-live svg").count() == 2
        for number, tab in enumerate(("Timeline", "Memory", "Pareto", "Ledger", "Findings"), start=4):
            page.get_by_role("tab", name=tab, exact=True).click()
            picture(page, tmp_path / f"{number}-{tab.lower()}.png")
        page.get_by_role("tab", name="Memory", exact=True).click()
        picture(page, tmp_path / "5-memory.png")
        narrow = lab_box.evaluate("e => e.clientWidth")
        page.set_viewport_size({"width": 1920, "height": 1080})
        page.wait_for_function(LARGER, timeout=RUN_MS)
        picture(page, tmp_path / "5-memory-wide.png")
        assert lab_box.evaluate("e => e.clientWidth") > narrow + 500, "a wide window is used"
        run_a_cell(page, "lab.present()")
        page.locator(".fsdplab-present").wait_for(timeout=SHORT_MS)
        picture(page, tmp_path / "5-memory-wide-presented.png")
        page.set_viewport_size({"width": 1280, "height": 1100})
        page.wait_for_function(NARROW, timeout=RUN_MS)
        for tab in ("Memory", "Table", "Timeline", "Pareto"):
            page.get_by_role("tab", name=tab, exact=True).click()
            picture(page, tmp_path / f"5-{tab.lower()}-presented.png")
        run_a_cell(page, "lab.present(False)")
        page.locator(".fsdplab-present").wait_for(state="detached", timeout=SHORT_MS)
        assert "could not be drawn" not in lab_box.inner_text()
        button["Export HTML"].click()
        lab_box.get_by_text("strategy-lab-1.html").wait_for(timeout=SHORT_MS)
        assert "<html" in (tmp_path / "course-learner" / "strategy-lab-1.html").read_text(encoding="utf-8")[:200]

        button["Run"].click()
        message.get_by_text("run 1 of 2").wait_for(timeout=SHORT_MS)
        button["Cancel"].click()
        message.get_by_text("cancelled by you").wait_for(timeout=RUN_MS)
        page.get_by_role("tab", name="Table", exact=True).click()
        lab_box.locator(".js-plotly-plot .barlayer").first.wait_for(timeout=SHORT_MS)
        picture(page, tmp_path / "9-cancelled.png")
        assert button["Run"].is_enabled() and not button["Cancel"].is_enabled()
        assert lab_box.locator("td", has_text="full_shard").count() >= 1, "what the first batch recorded is still shown"

        run_a_cell(page, BUSY)
        page.locator(".jp-InputPrompt", has_text="[*]").wait_for(timeout=SHORT_MS)
        page.get_by_label("Timed steps").fill("0")
        page.locator(".fsdplab-at-once", has_text="whole number from 1 to 200").wait_for(timeout=SHORT_MS)
        page.get_by_label("Timed steps").press("Enter")
        page.get_by_label("Timed steps").fill("3")
        page.get_by_label("Timed steps").press("Enter")
        button["Run"].click()
        message.get_by_text("waiting for the kernel").wait_for(timeout=SHORT_MS)
        page.screenshot(path=str(tmp_path / "10-waiting.png"))
        (tmp_path / "course-learner" / "go on").touch()
        message.get_by_text("done: 2 records of 2 runs kept").wait_for(timeout=RUN_MS)
        assert lab_box.locator("svg text", has_text="3 timed").count() == 1, "run with the steps that the page showed"
        kept = tmp_path / "course-learner" / "lab-runs"
        assert len(list(kept.glob("batch-*/*/run.json"))) >= 4
        run_a_cell(page, "StrategyLab({'device': 'cpu'}).state.message")
        page.get_by_text("batches of earlier runs below").wait_for(timeout=SHORT_MS)
        browser.close()

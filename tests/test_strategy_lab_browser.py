"""Notebook 11 in a real JupyterLab: the instrument answers every control, measures, is cancelled and has its runs again;
it lies on one screen of 1280 x 720.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Cells, Server, needs_chromium, patient

NOTEBOOK_11 = "11_strategy_shoot_out.ipynb"
# The tab that is looked at has something in it, its plots have arrived, and its last words are not "drawing".
DRAWN = """() => {
  const tab = [...document.querySelectorAll(".fsdplab-lab .widget-tab-contents > *")].find(e => e.offsetParent !== null);
  const plots = tab ? [...tab.querySelectorAll(".jp-RenderedPlotly, .js-plotly-plot")] : [];
  const filled = tab && tab.querySelector(".jp-OutputArea-child") && !tab.innerText.includes("drawing …");
  return filled && plots.every(e => e.querySelector("svg"));
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
# What of the instrument lies outside the part of the notebook that is seen, and texts of it that others cover.
OUTSIDE = """() => {
  const place = document.querySelector(".jp-WindowedPanel-outer").getBoundingClientRect();
  const parts = [...document.querySelectorAll(".fl-instrument, .fl-instrument button, .fl-instrument input, .fl-instrument text, .fl-instrument p")].filter(e => e.checkVisibility());
  return parts.map(e => [e.textContent, e.getBoundingClientRect()]).filter(([, r]) => r.width && (r.left < place.left || r.right > place.right + 1 || r.top < place.top - 1 || r.bottom > place.bottom + 1)).map(([t, r]) => [t.slice(0, 40), r.left, r.top, r.right, r.bottom]);
}"""
MET = """() => {
  const texts = [...document.querySelectorAll(".fl-figure text")].filter(t => t.textContent.trim() && t.getBoundingClientRect().width).map(t => [t.textContent, t.getBoundingClientRect()]);
  return texts.flatMap(([one, r], i) => texts.slice(i + 1).filter(([, s]) => Math.min(r.right, s.right) - Math.max(r.left, s.left) > 2 && Math.min(r.bottom, s.bottom) - Math.max(r.top, s.top) > 5).map(([other]) => [one, other]));
}"""
BUSY = "import pathlib, time\nwhile not pathlib.Path('go on').exists():\n    time.sleep(0.05)"
RUN_MS, SHORT_MS = 200_000, 60_000


def cell_of_the_lab(notebook: Path) -> int:
    """Which cell of notebook 11 shows the lab: it brings its own import, so that it can be run before all others."""
    cells = ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"]]
    return next(index for index, source in enumerate(cells) if "StrategyLab(" in source)


def run_a_cell(page: Any, source: str) -> None:
    """Run a new cell below the lab's."""
    page.locator(".jp-CodeCell", has_text="lab = StrategyLab(").first.locator(".jp-InputArea-editor").click()
    page.keyboard.press("Escape")
    page.keyboard.press("b")
    page.keyboard.press("Enter")
    page.keyboard.insert_text(source)
    page.keyboard.press("Control+Enter")


@contextmanager
def shown(server: Server, chromium: Any, width: int = 1280, height: int = 720) -> Iterator[Any]:
    """The page with the lab of notebook 11 at the top of what is seen."""
    page = patient(chromium.new_page(viewport={"width": width, "height": height}))
    page.goto(server.page_of(NOTEBOOK_11))
    # a kernel that is still starting would not hear it
    page.get_by_text("(ipykernel) | Idle").wait_for(timeout=RUN_MS)
    page.locator(".jp-Notebook .jp-Cell").first.click(timeout=SHORT_MS)
    page.keyboard.press("Escape")
    for _ in range(cell_of_the_lab(server.folder / NOTEBOOK_11)):
        page.keyboard.press("ArrowDown")
    page.locator(".jp-Cell.jp-mod-active", has_text="StrategyLab(").wait_for(timeout=SHORT_MS)
    page.keyboard.press("Control+Enter")
    page.locator(".fl-figure svg").wait_for(timeout=RUN_MS)
    page.add_style_tag(content=".Toastify { display: none }")  # JupyterLab's question whether it may send news
    page.locator(".fsdplab-lab").evaluate("e => e.scrollIntoView()")
    yield page
    page.close()


class Lab:
    """The instrument on a page: its buttons, and what it says."""

    def __init__(self, page: Any) -> None:
        self.page, self.root = page, page.locator(".fl-instrument")

    def press(self, name: str) -> None:
        self.root.get_by_role("button", name=name, exact=True).first.click()

    def answered(self, act: Any) -> None:
        """Do it, and wait until the kernel has answered it."""
        before = int(self.root.get_attribute("data-answered") or 0)
        act()
        self.page.wait_for_function(
            f"() => document.querySelector('.fl-instrument').dataset.answered > {before}", timeout=SHORT_MS
        )

    def says(self, words: str) -> None:
        self.root.get_by_text(words).first.wait_for(timeout=SHORT_MS)

    @property
    def figure(self) -> bytes:
        return bytes(self.root.locator(".fl-figure").screenshot())

    @property
    def alt(self) -> str:
        return str(self.root.locator(".fl-figure svg").get_attribute("aria-label"))


@pytest.mark.timeout(900)
@needs_chromium
def test_every_control_of_the_instrument_is_answered_on_one_screen(
    course_lab: Server, chromium: Any, tmp_path: Path
) -> None:
    with shown(course_lab, chromium) as page:
        lab = Lab(page)
        assert page.evaluate(OUTSIDE) == [] and page.evaluate(MET) == []
        page.screenshot(path=str(tmp_path / "1-begun.png"))
        assert page.locator(".fl-many[aria-label=Strategies] button").count() == 6, "choices of many have a box each"
        assert "full_shard: memory 199 MB, step 369 ms, 83 % hidden" in lab.alt
        assert "simulated on the steady card" in lab.alt

        link, before, alt = page.get_by_label("Link between the ranks", exact=True), lab.figure, lab.alt
        lab.answered(lambda: link.press("ArrowLeft"))
        for _ in range(9):
            link.press("ArrowLeft")
        lab.says("Shortest step: 3 of 5 are equal")
        page.wait_for_function(
            "was => document.querySelector('.fl-figure svg').ariaLabel !== was", arg=alt, timeout=SHORT_MS
        )
        assert lab.figure != before and link.get_attribute("aria-valuetext") != "400MB/s", "pixels and words follow"
        lab.says("A from 399 MB/s")
        tokens = page.get_by_label("Tokens a rank and step", exact=True)
        lab.answered(lambda: tokens.press("ArrowRight"))
        assert tokens.get_attribute("aria-valuetext") == "256"
        lab.answered(lambda: tokens.press("ArrowLeft"))
        sequence = page.get_by_label("Sequence length", exact=True)
        assert sequence.is_hidden(), "the notebook's runs have one of their own"

        card, box = page.get_by_role("slider", name="Card"), page.get_by_role("slider", name="Card").bounding_box()
        page.mouse.move(box["x"] + 8, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] - 42, box["y"] + 40, steps=6)
        page.mouse.up()
        lab.says("of 5 are over the card of 2")
        saved = page.get_by_text(re.compile("for the saved notebook: Memory: . of 5 are over the card of 2"))
        saved.first.wait_for(timeout=SHORT_MS)
        assert page.locator(".fl-over").count() >= 3 and "MB over" in lab.alt
        card.focus()
        lab.answered(lambda: page.keyboard.press("ArrowLeft"))
        page.screenshot(path=str(tmp_path / "2-card.png"))
        assert page.evaluate(MET) == []

        page.locator(".fl-block").nth(60).hover()
        page.locator(".fl-tip").wait_for(timeout=SHORT_MS)
        lab.answered(lambda: page.get_by_role("button", name="A is full_shard", exact=True).click())
        lab.answered(lambda: lab.press("Pin A"))
        lab.answered(lambda: lab.press("prefetch 0"))
        lab.says("B waits at every speed")
        assert "full_shard (A): memory 199 MB" in lab.alt and page.evaluate(OUTSIDE) == []
        page.screenshot(path=str(tmp_path / "3-pinned.png"))
        lab.answered(lambda: lab.press("Pin A"))

        lab.answered(lambda: lab.press("two nodes"))
        assert "hybrid_shard" in lab.alt and "simulated on H100 GPUs" in lab.alt
        assert page.get_by_role("button", name="Simulated only").is_disabled()
        assert "known runs like this" in lab.alt and page.locator(".fl-band").count() == 6, "bands of memory and step"
        assert page.evaluate(MET) == []
        page.screenshot(path=str(tmp_path / "4-two-nodes.png"))
        alt, before = lab.alt, lab.figure
        lab.answered(lambda: sequence.press("ArrowLeft"))
        assert sequence.get_attribute("aria-valuetext") == "2048"
        assert lab.alt != alt and lab.figure != before, "shorter sequences have less attention"
        lab.answered(lambda: lab.press("laptop"))

        lab.answered(lambda: lab.press("Guess first"))
        assert page.locator(".fl-figure").is_hidden() and page.locator(".fl-sentence").is_hidden()
        lab.answered(lambda: lab.press("Show the answer"))
        lacking = page.locator(".fl-lacking")
        assert lacking.inner_text().startswith("First choose A, B or equal")
        button = page.get_by_role("button", name="Show the answer").bounding_box()
        assert abs(lacking.bounding_box()["y"] - button["y"]) < 2 * button["height"], "it is said at the button"
        lab.press("Measure 5 runs")
        assert lacking.inner_text().startswith("Measuring would show the answer: make your guess, then measure.")
        assert page.evaluate("document.activeElement.textContent") == "A", "the guess is what to do next"
        assert page.get_by_role("button", name="Cancel").is_disabled(), "nothing was started"
        lab.answered(lambda: page.locator(".fl-asks").get_by_role("button", name="A", exact=True).click())
        page.get_by_label("Guess of B's memory").fill("200MB")
        lab.answered(lambda: lab.press("Show the answer"))
        lab.says("You said 200 MB for B")
        page.screenshot(path=str(tmp_path / "5-guessed.png"))
        page.get_by_text("What would change if").click()
        page.locator(".fl-changes td").first.wait_for(timeout=SHORT_MS)
        lab.says("You said 200 MB for B")
        page.get_by_text("What would change if").click()
        lab.answered(lambda: lab.press("Guess first"))

        page.get_by_label("Link between the ranks, typed").fill("fast")
        lab.answered(lambda: page.keyboard.press("Enter"))
        lab.says("unknown link 'fast'")
        assert page.locator(".fl-wrong").count() == 2 and page.locator(".fl-stale").count() == 1
        page.set_viewport_size({"width": 1920, "height": 1080})
        page.get_by_label("Link between the ranks, typed").fill("150MB/s")
        lab.answered(lambda: page.keyboard.press("Enter"))
        page.wait_for_timeout(500)
        assert page.evaluate(MET) == []
        page.screenshot(path=str(tmp_path / "6-wide.png"))


@pytest.mark.timeout(900)
@needs_chromium
def test_measured_runs_lie_over_the_bars_and_their_details_below(
    course_lab: Server, chromium: Any, tmp_path: Path
) -> None:
    course = course_lab.folder
    with shown(course_lab, chromium) as page:
        lab = Lab(page)
        lab.answered(lambda: page.get_by_label("Model", exact=True).select_option("gpt-tiny"))
        for name in ("no_shard", "zero1", "shard_grad_op"):
            lab.answered(lambda name=name: lab.press(name))
        lab.press("Measure 2 runs")
        lab.says("run 1 of 2")
        lab.says("done: 2 records of 2 runs kept")
        page.wait_for_function(
            "() => document.querySelectorAll('.fl-figure .fl-measured').length >= 5", timeout=SHORT_MS
        )
        assert "measured" in lab.alt and page.evaluate(MET) == []
        page.screenshot(path=str(tmp_path / "1-measured.png"))

        page.get_by_text("Details of the measured runs").click()
        for number, tab in enumerate(("Table", "Timeline", "Memory", "Pareto", "Ledger", "Findings"), start=2):
            page.get_by_role("tab", name=tab, exact=True).click()
            page.wait_for_function(DRAWN, timeout=RUN_MS)
            page.wait_for_timeout(500)
            page.screenshot(path=str(tmp_path / f"{number}-{tab.lower()}.png"))
            wrong = page.evaluate(CUT) + page.evaluate(COVERED)
            assert wrong == [], f"words of {tab} are cut or covered: {wrong}"
        assert "could not be drawn" not in page.locator(".fsdplab-lab").inner_text()
        page.get_by_role("button", name="Export HTML").click()
        page.get_by_text("strategy-lab-1.html").first.wait_for(timeout=SHORT_MS)
        assert "<html" in (course / "strategy-lab-1.html").read_text(encoding="utf-8")[:200]

        page.get_by_text("More", exact=True).click()
        page.get_by_label("Timed steps").fill("200")
        lab.answered(lambda: page.keyboard.press("Enter"))
        page.get_by_text("More", exact=True).click()
        lab.press("Measure 2 runs")
        lab.says("run 1 of 2")
        lab.press("Cancel")
        lab.says("cancelled by you")

        page.locator(".fsdplab-lab").evaluate("e => e.scrollIntoView()")
        run_a_cell(page, BUSY)
        page.locator(".jp-InputPrompt", has_text="[*]").wait_for(timeout=SHORT_MS)
        page.get_by_role("button", name="prefetch 2").click()
        lab.press("Measure 2 runs")
        lab.says("waiting for the kernel")
        (course / "go on").touch()
        lab.says("run 1 of 2")
        lab.press("Cancel")
        lab.says("cancelled by you")
        run_a_cell(page, "StrategyLab({'device': 'cpu'}).state.message")
        page.get_by_text("of earlier runs below").first.wait_for(timeout=SHORT_MS)


OWN = """
import torch, fsdplab
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(128, 128)

    def forward(self, x):
        return x + self.inner(x).relu()

def batch(at):
    return torch.randn(16, 128, generator=at.generator).to(at.device)

work = fsdplab.Workload(
    model=lambda: nn.Sequential(*(Block() for _ in range(4))), batch=batch,
    loss=lambda model, x: model(x).square().mean(), name="my tower",
)
fsdplab.widgets.StrategyLab(work, strategies=("no_shard", "full_shard"))
"""


@pytest.mark.timeout(600)
@needs_chromium
def test_a_model_of_a_cell_is_predicted_changed_and_copied(lab_cells: Cells, tmp_path: Path) -> None:
    with lab_cells.run(["import fsdplab.widgets" + OWN]) as page:
        page.locator(".fl-figure svg").wait_for(timeout=RUN_MS)
        page.locator(".fsdplab-lab").evaluate("e => e.scrollIntoView()")
        lab = Lab(page)
        assert page.get_by_label("Model", exact=True).input_value() == "my tower"
        assert "full_shard: memory" in lab.alt and "hidden" in lab.alt and page.evaluate(MET) == []
        assert not page.get_by_label("Tokens a rank and step", exact=True).is_visible()
        before = lab.alt
        page.get_by_text("What would change if").click()
        page.locator(".fl-changes td").first.wait_for(timeout=SHORT_MS)
        lab.answered(lambda: page.locator(".fl-changes").get_by_role("button", name="bf16").click())
        assert lab.alt != before and page.get_by_label("Precision", exact=True).input_value() == "bf16"
        page.get_by_text("Copy as").click()
        page.get_by_text("isinstance(module, Block)").wait_for(timeout=SHORT_MS)
        page.get_by_role("button", name="Accelerate", exact=True).click()
        page.get_by_text("fsdp_transformer_layer_cls_to_wrap: Block").wait_for(timeout=SHORT_MS)
        page.screenshot(path=str(tmp_path / "own.png"))

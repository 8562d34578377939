"""The strategy lab in a real JupyterLab as a reader meets it: in view after Shift+Enter, a reason where there is no
figure, titles apart, and every control by keyboard, with a focus ring and a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Cells, needs_chromium

LAB = """from fsdplab.widgets import StrategyLab

StrategyLab({"device": "cpu", "sequence_length": 64}, link="400MB/s")"""
LONG = "\n".join(f"# line {number} of a cell that fills the page" for number in range(30))
ANSWER_MS, SHOWN_MS = 60_000, 200_000
IN_VIEW = """() => {
  const view = document.querySelector(".jp-WindowedPanel-outer").getBoundingClientRect();
  const lab = document.querySelector(".fl-instrument").getBoundingClientRect();
  return lab.top >= view.top - 1 && lab.bottom <= view.bottom + 1;
}"""
# Titles in one line that are less than ten pixels apart, and titles at what stands behind them in a legend.
TOUCHED = """() => {
  const apart = 10, box = e => e.getBoundingClientRect();
  const titles = [...document.querySelectorAll(".fl-title")].filter(t => t.textContent && box(t).width);
  const others = [...document.querySelectorAll(".fl-figure text, .fl-figure rect")].filter(e => box(e).width);
  return titles.flatMap(title => others.filter(other => {
    const one = box(title), two = box(other);
    const inALine = Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top) > 3;
    return other !== title && inALine && two.left >= one.left && two.left < one.right + apart;
  }).map(other => [title.textContent, other.textContent || other.outerHTML]));
}"""
CONTROLS = """() => [...document.querySelectorAll(".fl-instrument :is(button, select, input, summary, [tabindex='0'])")]
  .filter(e => e.checkVisibility() && !e.disabled).map((e, at) => { e.dataset.at = at; return at; })"""
FOCUSED = """() => {
  const now = document.activeElement, style = getComputedStyle(now), ring = parseFloat(style.outlineWidth);
  const inside = now.closest(".fl-instrument");
  return inside && [Number(now.dataset.at), style.outlineStyle !== "none" && ring >= 2, now.outerHTML.slice(0, 90)];
}"""


class Lab:
    """The instrument on a page."""

    def __init__(self, page: Any) -> None:
        self.page, self.root = page, page.locator(".fl-instrument")

    def answered(self, act: Callable[[], Any]) -> None:
        """Do it, and wait until the kernel has answered it."""
        before = int(self.root.get_attribute("data-answered") or 0)
        act()
        self.page.wait_for_function(
            f"() => document.querySelector('.fl-instrument').dataset.answered > {before}", timeout=ANSWER_MS
        )

    def press(self, name: str) -> None:
        """Press a button, and wait for the answer."""
        self.answered(lambda: self.root.get_by_role("button", name=name, exact=True).first.click())

    def choose(self, label: str, value: str) -> None:
        """Choose a value of a menu, and wait for the answer."""
        self.answered(lambda: self.root.get_by_label(label, exact=True).select_option(value))

    @property
    def alt(self) -> str:
        """What a screen reader says of the figure."""
        return str(self.root.locator(".fl-figure svg").get_attribute("aria-label"))


@contextmanager
def shown(lab_cells: Cells, source: str = LAB) -> Iterator[Lab]:
    """The lab at the top of what is seen."""
    with lab_cells.run([source]) as page:
        page.locator(".fl-figure svg").wait_for(timeout=SHOWN_MS)
        page.locator(".fsdplab-lab").evaluate("e => e.scrollIntoView()")
        yield Lab(page)


@pytest.mark.timeout(600)
@needs_chromium
def test_shift_enter_leaves_the_lab_in_view(lab_cells: Cells) -> None:
    with lab_cells.open([LONG, LAB, LONG, LONG], height=800) as page:
        page.locator(".jp-Notebook .jp-Cell").first.click()
        page.keyboard.press("Escape")
        page.keyboard.press("Shift+Enter")
        page.locator(".jp-Cell.jp-mod-active", has_text="StrategyLab").wait_for()
        page.keyboard.press("Shift+Enter")
        page.locator(".fl-figure svg").wait_for(timeout=SHOWN_MS)
        page.wait_for_function(IN_VIEW, timeout=ANSWER_MS)
        assert "StrategyLab" not in page.locator(".jp-Cell.jp-mod-active").inner_text(), "the notebook has gone on"
        page.locator(".jp-WindowedPanel-outer").evaluate("e => e.scrollTo(0, 0)")
        page.set_viewport_size({"width": 1200, "height": 800})
        page.wait_for_timeout(1000)
        assert not page.evaluate(IN_VIEW), "a reader who has scrolled on is not brought back"


@pytest.mark.timeout(600)
@needs_chromium
def test_no_title_touches_another_and_what_has_no_figure_has_a_reason(lab_cells: Cells) -> None:
    with shown(lab_cells) as lab:
        assert lab.page.viewport_size["width"] == 1280 and lab.page.evaluate(TOUCHED) == []
        lab.press("Pin A")
        lab.press("no_shard")
        assert "Memory: no_shard (A) is 43.2 MB over the card" in lab.alt and lab.page.evaluate(TOUCHED) == []
        lab.press("no_shard")
        lab.press("Pin A")

        lab.page.get_by_text("More", exact=True).click()
        many = lab.page.locator(".fl-many")
        assert {group.get_attribute("aria-label") for group in many.all()} == {"Strategies", "Engines"}
        for units in ("linear", "model"):
            lab.choose("Units", units)
            reason = f"not simulated in units {units}, only in blocks"
            assert lab.root.get_by_text(reason).count() == 5 and "full_shard: memory" in lab.alt
            assert lab.alt.count(f"step {reason}") == 5 and lab.page.evaluate(TOUCHED) == []
        lab.choose("Units", "auto")
        assert "step 369 ms" in lab.alt

        lab.press("two nodes")
        assert lab.page.evaluate(TOUCHED) == []
        network = "Over the network, its nodes send 32.1 GB each, 26.1 GB (45 %) less."
        lab.root.get_by_text(network).wait_for()
        assert network in lab.alt
        lab.choose("Units", "linear")
        lab.root.get_by_text("plans of published models have blocks as units: expected auto or block").wait_for()
        assert lab.root.get_by_label("Units", exact=True).evaluate("e => e.classList.contains('fl-wrong')")


@pytest.mark.full("the lab of another test, with a guess")
@pytest.mark.timeout(600)
@needs_chromium
def test_measure_waits_for_an_open_guess_and_nothing_tells_the_answer(lab_cells: Cells, tmp_path: Path) -> None:
    """By keyboard, on a narrow page; then the kernel is restarted under the lab."""
    with shown(lab_cells) as lab:
        page, keys = lab.page, lab.page.keyboard
        lab.press("Guess first")
        page.set_viewport_size({"width": 700, "height": 900})
        page.locator(".fl-instrument.fl-narrow").wait_for()
        assert page.locator(".fl-said").count() == 0, "the marks of the link tell a part of the answer"
        page.get_by_role("button", name="Measure 5 runs").focus()
        keys.press("Enter")
        lab.root.get_by_text("Measuring would show the answer: make your guess, then measure.").wait_for()
        assert page.get_by_role("button", name="Cancel").is_disabled(), "nothing was started"
        page.screenshot(path=str(tmp_path / "guess.png"))
        assert page.evaluate("() => document.activeElement.textContent") == "A", "the guess is what to do next"
        lab.answered(lambda: keys.press("Enter"))
        page.get_by_label("Guess of B's memory").fill("200")
        lab.answered(lambda: keys.press("Enter"))
        lab.root.get_by_text("You said 200 MB for B").wait_for()

        page.set_viewport_size({"width": 1280, "height": 900})
        page.get_by_role("menuitem", name="Kernel", exact=True).click()
        page.locator(".lm-Menu-itemLabel", has_text="Restart Kernel…").first.click()
        page.get_by_role("button", name="Confirm Kernel Restart").click()
        page.locator(".fsdplab-lab.jupyter-widgets-disconnected").wait_for()
        lab.root.get_by_role("button", name="prefetch 0").click()
        lab.root.get_by_text("no answer: the kernel has ended").wait_for()
        assert page.locator(".fl-old").count() == 0, "it is dim already"


def tabbed_through(page: Any) -> list[Any]:
    """Each control that Tab reaches from the lab's first one on: its number, whether a ring shows it, and its HTML."""
    reached = []
    page.locator(".fl-instrument button").first.focus()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    while (focused := page.evaluate(FOCUSED)) and len(reached) < 100:
        reached.append(focused)
        page.keyboard.press("Tab")
    return reached


def named(page: Any) -> list[tuple[str, str]]:
    """Role and name of every control of the lab in Chromium's accessibility tree."""
    session = page.context.new_cdp_session(page)
    root = session.send("DOM.getDocument")["root"]["nodeId"]
    lab = session.send("DOM.querySelector", {"nodeId": root, "selector": ".fl-instrument"})["nodeId"]
    controls = []
    for node in session.send("Accessibility.queryAXTree", {"nodeId": lab})["nodes"]:
        properties = {each["name"]: each["value"].get("value") for each in node.get("properties", ())}
        if properties.get("focusable"):
            controls.append((node["role"]["value"], node.get("name", {}).get("value", "")))
    session.detach()
    return controls


@pytest.mark.timeout(600)
@needs_chromium
def test_every_control_by_keyboard_with_a_ring_and_a_name(lab_cells: Cells) -> None:
    with shown(lab_cells) as lab:
        page, keys = lab.page, lab.page.keyboard
        lab.root.get_by_text("More", exact=True).click()
        controls, reached = page.evaluate(CONTROLS), tabbed_through(page)
        assert len(controls) > 40 and [at for at, _, _ in reached] == controls
        assert [html for _, ring, html in reached if not ring] == []
        names = named(page)
        assert len(names) >= len(controls) and [role for role, name in names if not name.strip()] == []
        for slider in lab.root.get_by_role("slider").all():
            assert slider.get_attribute("aria-valuetext"), "a slider says its value with a unit"
        card = page.get_by_role("slider", name="Card")
        assert int(card.get_attribute("aria-valuemax")) >= int(card.get_attribute("aria-valuenow")) > 0

        keys.press("Escape")
        page.locator(".fl-more > summary").focus()
        keys.press("Escape")
        assert not page.get_by_label("Units", exact=True).is_visible(), "Escape closes what More has opened"

        page.get_by_role("button", name="A is zero1", exact=True).focus()
        lab.answered(lambda: keys.press("Enter"))
        assert page.evaluate("() => document.activeElement.ariaLabel") == "A is zero1" and "than A, zero1" in lab.alt
        page.get_by_role("button", name="Guess first").focus()
        lab.answered(lambda: keys.press("Space"))
        page.locator(".fl-asks").get_by_role("button", name="A", exact=True).focus()
        lab.answered(lambda: keys.press("Enter"))
        assert page.evaluate("() => document.activeElement.textContent") == "A", "the focus stays on what was chosen"
        page.get_by_label("Guess of B's memory").fill("200MB")
        page.get_by_role("button", name="Show the answer").focus()
        lab.answered(lambda: keys.press("Enter"))
        lab.root.get_by_text("You said 200 MB for B").wait_for()
        assert page.evaluate("() => document.activeElement.textContent") == "Guess first"
        lab.press("Guess first")  # another choice would ask for another guess, for which Measure waits
        for name in ("no_shard", "zero1", "zero2", "shard_grad_op"):
            lab.press(name)
        lab.choose("Model", "gpt-tiny")
        page.get_by_role("button", name="Measure 1 run").focus()
        keys.press("Enter")
        page.wait_for_function("() => document.activeElement.textContent === 'Cancel'", timeout=ANSWER_MS)
        keys.press("Enter")
        page.wait_for_function("() => document.activeElement.textContent === 'Measure 1 run'", timeout=ANSWER_MS)

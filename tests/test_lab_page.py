"""The strategy lab on the site's first page: it answers as the lab in Jupyter does, and runs under Pyodide.

The tests in a browser need Pyodide's files: `FSDPLAB_PYODIDE` names their folder, and .ci/run takes them from npm.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdplab.figures.lab.page import PageLab, first_values
from fsdplab.teaching.site.build import build_site
from fsdplab.teaching.site.live import LAB_SOURCES, pyodide
from fsdplab.widgets.lab_state import LabState
from fsdplab.widgets.strategy_lab import Instrument
from tests.browser import needs_chromium, patient
from tests.live_site import Host, needs_pyodide

MOVES: tuple[dict[str, Any], ...] = (
    {"n": 1, "choices": {"link": "400MB/s"}},
    {"n": 2, "choices": {"prefetch": 0, "tokens": 512}, "a": "zero2", "pin": True},
    {"n": 3, "choices": {"strategies": ["no_shard", "full_shard"]}, "b": "full_shard", "pin": True, "more": True},
    {"n": 4, "choices": {"preset": "8 x H100"}, "guess": {"on": True}},
    {"n": 5, "choices": {"preset": "8 x H100"}, "guess": {"on": True, "given": True, "faster": "A", "memory": "40"}},
    {"n": 6, "choices": {"preset": "two nodes"}},
    {"n": 7, "choices": {"link": "fast"}},
)
# What of the lab leaves the page; what is folded has no place.
CUT = """() => [...document.querySelectorAll("#lab :is(text, button, input, select, p, summary)")]
  .filter(e => !e.closest("details:not([open]) > :not(summary)"))
  .map(e => [e.textContent || e.ariaLabel, e.getBoundingClientRect()])
  .filter(([, r]) => r.width && (r.left < 0 || r.right > innerWidth + 0.5)).map(([t]) => t)"""
# Texts of the figure that cover each other.
COVERED = """() => {
  const seen = t => t.textContent.trim() && getComputedStyle(t).visibility === "visible";
  const texts = [...document.querySelectorAll(".fl-figure text")].filter(seen)
    .map(t => [t.textContent, t.getBoundingClientRect()]);
  const meet = (r, s) => Math.min(r.right, s.right) - Math.max(r.left, s.left) > 2
    && Math.min(r.bottom, s.bottom) - Math.max(r.top, s.top) > 5;
  const met = ([one, r], i) => texts.slice(i + 1).filter(([, s]) => meet(r, s)).map(([other]) => [one, other]);
  return texts.flatMap(met);
}"""
# Where the keyboard is: the element's place in the document, its name, whether a ring is seen, whether it is the lab's.
FOCUSED = """() => {
  const e = document.activeElement, style = getComputedStyle(e);
  const labels = [...(e.labels ?? [])].map(each => each.textContent).join(" ");
  const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
  const name = (e.ariaLabel || labels || e.textContent).trim();
  return [[...document.querySelectorAll("*")].indexOf(e), name, ring, Boolean(e.closest("#lab"))];
}"""
CONTROLS = """() => [...document.querySelectorAll("#lab :is(button, input, select, summary, [tabindex='0'])")]
  .filter(e => !e.disabled && e.getBoundingClientRect().width && !e.closest("details:not([open]) > :not(summary)"))
  .map(e => [...document.querySelectorAll("*")].indexOf(e))"""
ANSWERED = """before => {
  const { model } = document.getElementById("lab"), { n } = model.get("asked");
  return n > before && model.get("answer").n === n && document.body.dataset.rest === "yes";
}"""


# ---- the answers, in this Python


@pytest.mark.quick
def test_the_page_answers_as_the_lab_in_jupyter_does() -> None:
    """The same moves of the controls, one after the other, of both."""
    page, jupyter = PageLab(), Instrument(LabState({"device": "cpu"}), lambda: None)
    assert first_values()["answer"] == json.loads(json.dumps(jupyter.answer))
    for move in MOVES:
        jupyter.asked = move
        answer, afterwards = json.loads(page.answer(json.dumps(move))), json.loads(page.afterwards())
        assert answer["answer"] == json.loads(json.dumps(jupyter.answer)), move
        assert afterwards == json.loads(json.dumps({"marks": jupyter.marks, "more": jupyter.more})), move
    assert answer["answer"]["errors"].keys() == {"link"}, "the last one was wrong"


@pytest.mark.quick
def test_the_page_offers_all_but_what_measures() -> None:
    page, jupyter = first_values()["offers"], Instrument(LabState({"device": "cpu"}), lambda: None).offers
    differs = {name for name in page if json.dumps(page[name]) != json.dumps(jupyter[name])}
    assert differs == {"measures", "waiting"} and not page["measures"]


# ---- the site


def test_the_archive_answers_alone_and_equally(small_course: Path, tmp_path: Path) -> None:
    """Nothing but the archive and Python's own library: no torch, no numpy, no widgets."""
    build_site(small_course, tmp_path / "site", live=pyodide())
    with zipfile.ZipFile(tmp_path / "site" / LAB_SOURCES) as archive:
        archive.extractall(tmp_path / "sources")
    code = "import json, sys; sys.path.insert(0, sys.argv[1])"
    code += "\nfrom fsdplab.figures.lab.page import PageLab; lab = PageLab()"
    code += "\nfor move in json.loads(sys.argv[2]): print(json.dumps([lab.answer(json.dumps(move)), lab.afterwards()]))"
    asked = [sys.executable, "-I", "-S", "-c", code, str(tmp_path / "sources"), json.dumps(MOVES)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    here = PageLab()
    for move, line in zip(MOVES, done.stdout.splitlines(), strict=True):
        assert json.loads(line) == [here.answer(json.dumps(move)), here.afterwards()], move


def test_the_first_page_begins_with_the_lab_and_its_first_answer(small_course: Path, tmp_path: Path) -> None:
    site = build_site(small_course, tmp_path / "site", live=pyodide())
    page = (site.folder / "index.html").read_text(encoding="utf-8")
    lab, course = page.index('id="lab"'), page.index('<h2 id="fully-sharded-training')
    assert lab < page.index('id="measure"') < course < page.index('href="01_small.html"')
    (first,) = re.findall(r'<script type="application/json" id="first">(.*?)</script>', page, re.DOTALL)
    assert json.loads(first) == json.loads(json.dumps(first_values()))
    assert first_values()["answer"]["difference"] in page.split("<noscript>")[1].split("</noscript>")[0]
    for place in ("index.html", LAB_SOURCES, "lab-worker.js", "lab.css"):
        assert f'"{place}"' in (site.folder / "planner-cache.js").read_text(), "it is kept, too"


# ---- in a browser


class Page:
    """The lab on an open page: what it has asked, and what it was answered."""

    def __init__(self, context: Any, address: str) -> None:
        self.page, self.wrong = patient(context.new_page()), list[str]()
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.page.goto(address)
        self.page.wait_for_function("document.body.dataset.ready", timeout=240_000)

    def held(self, name: str) -> Any:
        return self.page.evaluate(f"document.getElementById('lab').model.get('{name}')")

    def answered(self, act: Any) -> dict[str, Any]:
        """Do it, wait for its answer and what follows, and return what was asked."""
        before = self.held("asked").get("n", 0)
        act()
        self.page.wait_for_function(ANSWERED, arg=before, timeout=60_000)
        return dict(self.held("asked"))

    def press(self, name: str) -> dict[str, Any]:
        return self.answered(self.page.get_by_role("button", name=name, exact=True).first.click)


def rounded(values: Any) -> Any:
    """Numbers to nine digits: from Python 3.12 on `sum` loses none, so that the last differ between versions."""
    return json.loads(json.dumps(values), parse_float=lambda digits: float(f"{float(digits):.9g}"))


def in_this_python(asked: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the lab answers to the last of these questions, in this Python."""
    lab = PageLab()
    for question in asked:
        found = json.loads(lab.answer(json.dumps(question))) | json.loads(lab.afterwards())
    return {name: rounded(found[name]) for name in ("answer", "marks", "more")}


@needs_chromium
@needs_pyodide
@pytest.mark.timeout(900)
def test_controls_are_answered_as_in_python_and_the_page_opens_offline(
    live_site: Path, browser: Any, tmp_path: Path
) -> None:
    host = Host(live_site)
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    lab = Page(context, f"{host.address}/")
    assert "Simulated" not in lab.page.locator(".fl-run").inner_text()
    link, asked = lab.page.get_by_label("Link between the ranks", exact=True), []
    figure = lab.page.locator(".fl-figure").inner_html()
    asked.append(lab.answered(lambda: link.press("ArrowRight")))
    assert lab.page.locator(".fl-figure").inner_html() != figure
    asked.append(lab.press("Pin A"))
    asked.append(lab.answered(lambda: link.press("PageUp")))
    assert asked[-1]["pin"] and lab.held("answer")["rows"][0]["pinned"], "A stays as it was"
    asked += [lab.press("prefetch 2"), lab.press("zero1")]
    asked.append(lab.answered(lambda: lab.page.get_by_label("Tokens a rank and step", exact=True).press("ArrowRight")))
    asked.append(lab.answered(lab.page.get_by_text("What would change if").click))
    held = {name: rounded(lab.held(name)) for name in ("answer", "marks", "more")}
    assert held == in_this_python(asked) and held["more"]["what_if"]
    lab.page.screenshot(path=str(tmp_path / "wide.png"))
    for preset in ("8 x H100", "two nodes"):
        asked.append(lab.press(preset))
        assert rounded(lab.held("answer")) == in_this_python(asked)["answer"]
        assert lab.page.evaluate(CUT) == [] and lab.page.evaluate(COVERED) == []
    lab.press("laptop")
    lab.page.get_by_role("button", name="Measure", exact=True).click()
    assert "fsdplab lab" in lab.page.evaluate("document.activeElement.textContent"), "it says where runs are measured"

    lab.page.wait_for_function("document.body.dataset.kept === 'yes'", timeout=120_000)
    host.stop()
    again = Page(context, f"{host.address}/")
    question = again.press("prefetch 0")
    assert rounded(again.held("answer")) == in_this_python([question])["answer"]
    assert not lab.wrong and not again.wrong


@needs_chromium
@needs_pyodide
@pytest.mark.timeout(900)
def test_a_phone_shows_all_of_it(live_site: Path, browser: Any, tmp_path: Path) -> None:
    host = Host(live_site)
    lab = Page(browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark"), f"{host.address}/")
    for preset in ("two nodes", "8 x H100", "laptop"):
        lab.press(preset)
        lab.press("Pin A")
        lab.press("prefetch 0")
        lab.page.screenshot(path=str(tmp_path / f"phone {preset}.png"), full_page=True)
        assert lab.page.evaluate("document.documentElement.scrollWidth") == 390
        assert lab.page.evaluate(CUT) == [] and lab.page.evaluate(COVERED) == []
        lab.press("Pin A")
    lab.page.locator("#lab summary", has_text="More").click()
    units = lab.page.get_by_label("Units", exact=True)
    lab.answered(lambda: units.select_option("linear"))
    assert "not simulated in units linear" in lab.page.locator(".fl-figure").inner_text()
    assert lab.page.evaluate(CUT) == [] and lab.page.evaluate(COVERED) == [], "reasons stand where bars would"
    lab.answered(lambda: units.select_option("auto"))
    lab.answered(lab.page.get_by_text("What would change if").click)
    lab.page.get_by_text("Copy as").click()
    assert lab.page.locator(".fl-changes tr").count() > 5
    assert lab.page.evaluate("document.documentElement.scrollWidth") == 390 and lab.page.evaluate(CUT) == []
    lab.page.screenshot(path=str(tmp_path / "phone unfolded.png"), full_page=True)
    assert not lab.wrong
    host.stop()


@needs_chromium
@needs_pyodide
@pytest.mark.timeout(900)
def test_every_control_is_reached_by_keyboard_with_a_ring_and_a_name(live_site: Path, browser: Any) -> None:
    host = Host(live_site)
    lab = Page(browser.new_context(viewport={"width": 1280, "height": 800}), f"{host.address}/")
    lab.page.locator("#lab summary", has_text="More").click()
    wanted = set(lab.page.evaluate(CONTROLS))
    lab.page.locator("#switch").focus()
    reached = {}
    for _ in range(len(wanted) + 5):
        lab.page.keyboard.press("Tab")
        where, name, ring, inside = lab.page.evaluate(FOCUSED)
        if inside:
            reached[where] = (name, ring)
    assert set(reached) == wanted and len(wanted) > 30
    assert all(name and ring for name, ring in reached.values()), reached
    # a strategy becomes B, and the card moves, by keys alone
    lab.page.locator('.fl-pick[aria-label="B is zero2"]').focus()
    assert lab.answered(lambda: lab.page.keyboard.press("Enter"))["b"] == "zero2"
    lab.page.get_by_role("slider", name="Card").focus()
    assert lab.answered(lambda: lab.page.keyboard.press("PageUp"))["choices"]["card"] == "363MB"
    host.stop()


@needs_chromium
@needs_pyodide
@pytest.mark.full("another start of Python in a page")
@pytest.mark.timeout(900)
def test_an_answer_that_is_waited_for_dims_the_old_one_and_the_bar_is_full_only_at_the_end(
    live_site: Path, browser: Any, tmp_path: Path
) -> None:
    host, held = Host(live_site), list[Any]()
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="dark")
    context.route("**/pyodide.asm.wasm", lambda route: held.append(route))
    page = patient(context.new_page())
    page.goto(f"{host.address}/")
    opacity = "getComputedStyle(document.querySelector('.fl-stage')).opacity"
    assert page.evaluate(opacity) == "1", "nothing was asked yet"
    page.get_by_label("Link between the ranks", exact=True).press("ArrowRight")
    page.locator(".fl-old").wait_for()
    assert page.evaluate(opacity) == "0.4"
    assert page.locator(".fl-message").inner_text().startswith("waiting for Python: it is being loaded")
    page.screenshot(path=str(tmp_path / "loading.png"))
    while not held:
        page.wait_for_timeout(50)
    assert float(page.locator("#loaded").get_attribute("value") or 0) < 100
    held[0].continue_()
    page.wait_for_function("document.getElementById('state').textContent.includes('is being started')")
    assert page.locator("#loaded").get_attribute("value") is None, "it runs on without an end"
    page.wait_for_function("document.body.dataset.ready && document.body.dataset.rest === 'yes'", timeout=240_000)
    assert page.locator(".fl-old").count() == 0 and page.evaluate(opacity) == "1"
    assert page.locator("#loaded").is_hidden()
    host.stop()


@needs_chromium
def test_the_first_pages_switch_holds_for_lessons_and_what_is_printed_is_light(
    small_course: Path, empty_pyodide: Path, browser: Any, tmp_path: Path
) -> None:
    build_site(small_course, tmp_path / "site", live=pyodide(str(empty_pyodide)))
    host = Host(tmp_path / "site")
    page = patient(browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="light").new_page())
    is_dark = "document.documentElement.classList.contains('dark')"
    page.goto(f"{host.address}/")
    page.get_by_role("button", name="dark page").click()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert not page.evaluate(is_dark)
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    for name in ("index.html", "planner.html", "01_small.html"):
        page.goto(f"{host.address}/{name}")
        assert page.evaluate(is_dark) and page.evaluate("document.documentElement.scrollWidth") == 390, name
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 17, 17)"
    host.stop()


@needs_chromium
def test_where_python_does_not_start_the_page_says_why_and_keeps_the_first_answer(
    small_course: Path, empty_pyodide: Path, browser: Any, tmp_path: Path
) -> None:
    build_site(small_course, tmp_path / "site", live=pyodide(str(empty_pyodide)))
    host, page = Host(tmp_path / "site"), patient(browser.new_page())
    for address in (f"{host.address}/", (tmp_path / "site" / "index.html").as_uri()):
        page.goto(address)
        page.locator("#state.bad").wait_for()
        assert page.locator("#state").inner_text().startswith("Python could not be started (")
        assert "no_shard: memory 373 MB" in page.locator(".fl-figure svg").get_attribute("aria-label")
        page.get_by_label("Link between the ranks", exact=True).press("ArrowRight")
        page.get_by_text("no answer: Python could not be started, as the line above the lab says").wait_for()
    assert "only from a server: python -m http.server" in page.locator("#state").inner_text()
    host.stop()

"""The page that plans a job in the browser: its figures are those of `fsdplab plan`, and it runs under Pyodide.

The tests in a browser need Pyodide's files: `FSDPLAB_PYODIDE` names their folder, and .ci/run takes them from npm.
"""

from __future__ import annotations

import html
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fsdplab import cli
from fsdplab.figures.live.answer import answer
from fsdplab.figures.live.controls import command_of, controls, offered, short_name
from fsdplab.planning.hardware import GPUS, find_gpu
from fsdplab.planning.simulation import simulate
from fsdplab.teaching.__main__ import main
from fsdplab.teaching.authoring.course import CourseError
from fsdplab.teaching.site.build import build_site
from fsdplab.teaching.site.live import CDN, NAMES, SOURCES, pyodide
from tests.browser import needs_chromium, patient
from tests.live_site import Host, needs_pyodide

CHOICES: tuple[dict[str, str], ...] = (
    {},
    {"model": "llama-3.1-70b", "gpus": "64", "checkpointing": "full"},
    {"model": "llama-3.1-70b", "gpus": "64", "strategy": "hybrid_shard", "reduce_dtype": "bf16"},
    {"model": "llama-3.1-70b", "gpus": "64", "network": "eth100", "checkpointing": "full"},
    {"model": "llama-3.1-70b", "gpus": "64", "pipeline_parallel": "4", "grad_accum": "8", "checkpointing": "full"},
    {"gpu": "a10g"},
    {"model": "llama-3b", "gpu": "4090", "strategy": "zero2", "loss": "fused"},
    {"model": "qwen2.5-7b", "gpu": "a100-80gb", "gpus": "32", "tensor_parallel": "4", "optimizer": "adamw-8bit"},
    {"gpu": "4090", "gpus": "8", "offload": "cpu", "checkpointing": "full"},
)


# ---- the answer, in this Python


@pytest.mark.quick
@pytest.mark.parametrize("choice", CHOICES)
def test_the_pages_figures_are_those_of_the_command(choice: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    shown = answer(choice, 700)
    assert html.unescape(shown["command"]) == command_of(choice)
    with pytest.raises(SystemExit) as end:
        cli.main([*command_of(choice).split()[1:], "--json", "-"])
    assert not end.value.code
    assert json.loads(html.unescape(shown["json"])) == json.loads(capsys.readouterr().out)
    assert f'<b class="{json.loads(html.unescape(shown["json"]))["fits"]}">' in shown["verdict"]


@pytest.mark.quick
def test_a_plan_that_cannot_be_made_is_one_sentence() -> None:
    assert answer({"gpu": "4090", "gpus": "64"}, 700)["error"].startswith("no network between nodes is known")
    assert answer({"model": "gpt2"}, 700).keys() == {"error"}
    assert answer({"strategy": "<b>"}, 700)["error"].startswith("--strategy is &#x27;&lt;b&gt;&#x27;")


@pytest.mark.quick
def test_every_gpu_of_the_table_is_offered() -> None:
    assert [find_gpu(short_name(name)).name for name in GPUS] == list(GPUS)


@pytest.mark.quick
@pytest.mark.parametrize("width", (360, 900))
@pytest.mark.parametrize("choice", CHOICES)
def test_drawings_are_whole_and_say_in_words_what_they_show(choice: dict[str, str], width: int) -> None:
    shown = answer(choice, width)
    plan = json.loads(html.unescape(shown["json"]))
    for name in ("memory", "step"):
        if name == "step" and (plan["step_time_s"] is None or "pipeline_parallel" in choice):
            assert shown["step"] == "" and shown["step-words"].startswith(("No bf16 FLOP/s are known", "A pipeline"))
            continue
        drawing = ET.fromstring(shown[name])
        assert drawing.get("role") == "img" and drawing.get("width") == str(width)
        assert len(drawing.get("aria-label", "")) > 40
        for part in drawing.iter("text"):
            assert 0 <= float(part.get("x", "")) <= width
    bars = ET.fromstring(shown["memory"]).findall("rect")
    at_the_peak = [float(bar.get("width", "")) for bar in bars if bar.get("y") == bars[0].get("y")]
    end = max(plan["card_bytes"], plan["memory_band_bytes"][1], plan["memory_bytes"]["total"]) * 1.04
    assert sum(at_the_peak) == pytest.approx((width - 2) * plan["memory_bytes"]["total"] / end, abs=1)


TOO_LARGE: tuple[dict[str, str], ...] = (
    {"model": "llama-3.1-70b", "gpu": "4090", "gpus": "4"},
    {"model": "llama-3.1-70b", "gpus": "16", "checkpointing": "full"},
    {"model": "llama-3.1-70b", "gpus": "8", "checkpointing": "full", "strategy": "no_shard"},
    {"micro_batch": "12", "seq": "8192"},
    {"seq": "131072", "gpus": "64", "checkpointing": "full"},
    {"model": "llama-3.1-70b", "gpus": "16", "checkpointing": "full", "optimizer": "adamw-8bit", "micro_batch": "8"},
)


class Buttons(HTMLParser):
    """The choices of the remedies' buttons."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.choices: list[dict[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "button":
            self.choices.append(json.loads(dict(attrs)["data-choice"] or ""))


@pytest.mark.quick
@pytest.mark.parametrize("choice", TOO_LARGE, ids=str)
def test_every_remedy_is_a_button_whose_choice_fits(choice: dict[str, str]) -> None:
    shown = answer(choice, 700)
    plan = json.loads(html.unescape(shown["json"]))
    chosen = Buttons(shown["remedies"]).choices
    assert plan["fits"] == "no" and len(chosen) == len(plan["remedies"]) > 0
    for remedy, values in zip(plan["remedies"], chosen):
        after = json.loads(html.unescape(answer(values, 700)["json"]))
        assert after["fits"] != "no" and set(values) <= {each.name for each in controls()}
        if after["gpus"] == plan["gpus"]:  # of GPUs the next number that is offered is taken
            assert after["memory_bytes"]["total"] == pytest.approx(remedy["peak_bytes"], abs=20)
            assert after["tokens_per_s_per_gpu"] == pytest.approx(remedy["tokens_per_s_per_gpu"])
    assert answer({}, 700)["remedies"] == "", "a plan that fits needs none"


@pytest.mark.quick
def test_a_step_of_too_many_micro_batches_is_planned_and_not_drawn() -> None:
    shown = answer({"grad_accum": "1024"}, 700)
    assert (
        not shown["error"] and not shown["step"] and shown["step-words"].startswith("A step of so many micro-batches")
    )


@pytest.mark.quick
def test_what_the_controls_do_not_offer_is_no_button() -> None:
    assert offered({}, {"micro_batch": 27}) is None and offered({}, {"masters": "separate"}) is None
    assert offered({"gpu": "4090"}, {"gpus": 17, "offload": True}) == {"gpu": "4090", "gpus": "24", "offload": "cpu"}
    assert offered({}, {"gpus": 10**6}) is None


@pytest.mark.quick
@pytest.mark.parametrize("choice", (*CHOICES, *TOO_LARGE), ids=str)
def test_the_cards_line_crosses_no_name(choice: dict[str, str]) -> None:
    drawing = ET.fromstring(answer(choice, 700)["memory"])
    (line,) = [part.get("d", "") for part in drawing.iter("path") if part.get("class") == "card"]
    spans = [part.split("v") for part in line.split("M")[1:]]
    marks = [(float(start.split()[1]), float(start.split()[1]) + float(length)) for start, length in spans]
    names = [float(text.get("y", "")) for text in drawing.iter("text") if ": " in (text.text or "")]
    assert len(marks) == len(names) == 2
    for start, end in marks:
        assert all(end < baseline - 9 or start > baseline for baseline in names), "letters are 9 pixels high"


@pytest.mark.quick
def test_red_marks_are_as_long_as_what_is_exposed() -> None:
    from fsdplab.figures.live.controls import spec_of
    from fsdplab.figures.live.drawings import step_drawing
    from fsdplab.figures.style import LANE_COLOURS

    choice = {"model": "llama-3.1-70b", "gpus": "64", "network": "eth100", "checkpointing": "full"}
    record = simulate(spec_of(choice))
    rows = [row for row in record.table("timeline") if row["rank"] == 0]
    exposed = sum(row["end_ns"] - row["start_ns"] for row in rows if row["lane"] == "exposed") / 1e9
    assert exposed == pytest.approx(record.summary.comm.exposed_s, rel=1e-6) and exposed > 0.01
    drawing = ET.fromstring(step_drawing(rows, 900))
    (marks,) = [part.get("d", "") for part in drawing.iter("path") if part.get("fill") == LANE_COLOURS["exposed"]]
    drawn = sum(float(mark.split("h")[1].split("v")[0]) for mark in marks.split("M")[1:])
    assert drawn == pytest.approx((900 - 106) * exposed / record.summary.step_time_s.median, rel=0.05, abs=1)


# ---- the site


def test_the_archive_answers_alone_and_equally(small_course: Path, tmp_path: Path) -> None:
    """Nothing but the archive and Python's own library: no torch, no numpy, no plotly."""
    build_site(small_course, tmp_path / "site", live=pyodide())
    with zipfile.ZipFile(tmp_path / "site" / SOURCES) as archive:
        archive.extractall(tmp_path / "sources")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from fsdplab.figures.live.answer import answered"
    for choice in CHOICES:
        asked = [sys.executable, "-I", "-S", "-c", f"{code}; print(answered(sys.argv[2], 700))", tmp_path / "sources"]
        done = subprocess.run([*map(str, asked), json.dumps(choice)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == answer(choice, 700)


def test_the_page_shows_the_first_plan_before_python_has_started(small_course: Path, tmp_path: Path) -> None:
    site = build_site(small_course, tmp_path / "site", live=pyodide())
    page = (site.folder / "planner.html").read_text(encoding="utf-8")
    assert answer({}, 760)["memory"] in page and answer({}, 760)["verdict"] in page
    assert f'"pyodide": "{CDN}"' in page and f"{CDN}pyodide.asm.wasm" in (site.folder / "planner-cache.js").read_text()
    assert 'href="planner.html"' in (site.folder / "index.html").read_text(encoding="utf-8")
    assert not (site.folder / "pyodide.mjs").exists()


def test_without_live_nothing_of_the_page_is_there(small_course: Path, tmp_path: Path) -> None:
    site = build_site(small_course, tmp_path / "site")
    assert not any((site.folder / name).exists() for name in NAMES)
    assert "planner" not in (site.folder / "index.html").read_text(encoding="utf-8")


def test_a_folder_of_pyodides_is_copied_and_leaves_with_the_page(
    small_course: Path, empty_pyodide: Path, tmp_path: Path
) -> None:
    out = tmp_path / "site"
    build_site(small_course, out, live=pyodide(str(empty_pyodide)))
    assert (out / "pyodide.asm.wasm").read_bytes() == b"\xffpyodide.asm.wasm"
    assert '"pyodide": "./"' in (out / "planner.html").read_text(encoding="utf-8")
    build_site(small_course, out)
    assert not any((out / name).exists() for name in NAMES)


def test_equal_sources_make_an_equal_page_and_others_a_cache_of_another_name(
    small_course: Path, empty_pyodide: Path, tmp_path: Path
) -> None:
    built = [build_site(small_course, tmp_path / name, live=pyodide(str(empty_pyodide))) for name in "ab"]
    one, two = ({each.name: each.read_bytes() for each in site.folder.iterdir()} for site in built)
    assert one == two
    (empty_pyodide / "pyodide.mjs").write_text("another")
    build_site(small_course, tmp_path / "b", live=pyodide(str(empty_pyodide)))
    assert (tmp_path / "b" / "planner-cache.js").read_bytes() != one["planner-cache.js"]


def test_what_is_no_pyodide_is_refused_in_a_sentence(
    small_course: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CourseError, match="--pyodide .*: pyodide.mjs is not there; give the folder of the npm package"):
        pyodide(str(tmp_path))
    given = ["site", str(tmp_path / "out"), "--source", str(small_course), "--executed", "--pyodide", str(tmp_path)]
    assert main(given) == 2 and "--pyodide is for the pages that --live makes" in capsys.readouterr().err
    assert main([*given, "--live"]) == 2 and "pyodide.mjs is not there" in capsys.readouterr().err


# ---- in a browser


def opened(context: Any, address: str) -> Any:
    page = patient(context.new_page())
    page.goto(address)
    page.wait_for_function("document.body.dataset.shown", timeout=240_000)
    return page


def chosen(page: Any) -> dict[str, str]:
    """What the controls say, by themselves."""
    found = {}
    for each in controls():
        control = page.locator(f"#{each.name}")
        value = control.input_value()
        found[each.name] = each.values[int(value)] if each.is_slider else value
    return found


def shown(page: Any) -> dict[str, Any]:
    return figures_of(page.locator("#json").text_content())


def figures_of(text: str) -> dict[str, Any]:
    """Numbers to nine digits: from Python 3.12 on `sum` loses none, so that the last differ between versions."""
    return json.loads(text, parse_float=lambda digits: float(f"{float(digits):.9g}"))


def moved(page: Any, name: str) -> None:
    """One step of a control by the keyboard, and until its picture is there."""
    before = page.evaluate("document.body.dataset.shown")
    control = page.locator(f"#{name}")
    if control.evaluate("each => each.tagName") == "SELECT":
        place, count = control.evaluate("each => [each.selectedIndex, each.options.length]")
        control.select_option(index=(place + 1) % count)
    else:
        control.focus()
        page.keyboard.press("ArrowRight")
    page.wait_for_function(f"document.body.dataset.shown !== '{before}'", timeout=30_000)


def picture(page: Any) -> str:
    return str(page.locator("#results").inner_html())


def parsed(choice: dict[str, str]) -> dict[str, Any]:
    return figures_of(html.unescape(answer(choice, 700)["json"]))


@needs_chromium
@needs_pyodide
@pytest.mark.timeout(600)
def test_every_control_changes_the_picture_and_the_figures_are_the_librarys(
    live_site: Path, browser: Any, tmp_path: Path
) -> None:
    server, wrong = Host(live_site), []
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = opened(context, f"{server.address}/planner.html")
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    assert shown(page) == parsed({})
    page.screenshot(path=str(tmp_path / "wide.png"))
    page.get_by_text("More choices").click()
    for each in controls():
        assert page.get_by_label(each.label, exact=True).count() == 1, each
        before = picture(page)
        moved(page, each.name)
        assert picture(page) != before, f"{each.name}: the picture stayed as it was"
        if not page.locator("#error").inner_text():
            assert shown(page) == parsed(chosen(page)), each
        page.get_by_role("button", name="Start again").click()
        page.wait_for_function(f"document.querySelector('#results').innerHTML === {json.dumps(before)}")

    # the address keeps the choice, and the page its place without a network
    for name in ("gpus", "seq", "loss"):
        moved(page, name)
    kept, figures = chosen(page), shown(page)
    assert page.url.endswith("#gpus=16&seq=8192&loss=fused") and figures == parsed(kept)
    page.get_by_role("button", name="Copy the link to this choice").click()
    assert page.evaluate("navigator.clipboard.readText()") == page.url
    page.wait_for_function("document.body.dataset.kept === 'yes'", timeout=120_000)
    server.stop()
    again = opened(context, page.url)
    assert (chosen(again), shown(again)) == (kept, figures)
    assert not wrong


@needs_chromium
@needs_pyodide
@pytest.mark.timeout(600)
def test_a_phone_shows_all_of_it_and_odd_addresses_are_told(live_site: Path, browser: Any, tmp_path: Path) -> None:
    server = Host(live_site)
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark")
    page = opened(context, f"{server.address}/planner.html#gpus=7&seq=8192&x=1")
    assert page.locator("#state").inner_text() == "The address names gpus=7, x=1, which this page does not offer."
    assert chosen(page)["gpus"] == "8" and shown(page)["seq"] == 8192
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for name in ("memory", "step"):
        box = page.locator(f"#{name} svg").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390
        assert page.locator(f"#{name} text").first.evaluate("each => each.getBoundingClientRect().height") > 10
    page.screenshot(path=str(tmp_path / "phone.png"), full_page=True)
    page.goto(f"{server.address}/planner.html#model=llama-3.1-70b&gpus=16&checkpointing=full")
    page.get_by_role("button", name="--reduce-dtype bf16").click()
    page.wait_for_function("document.querySelector('#verdict b').textContent === 'fits: likely'", timeout=30_000)
    assert page.url.endswith("#model=llama-3.1-70b&gpus=16&checkpointing=full&reduce_dtype=bf16")
    assert page.locator("#reduce_dtype").input_value() == "bf16" and page.locator("#reduce_dtype").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    server.stop()


@needs_chromium
def test_where_python_does_not_start_the_page_says_why_and_keeps_the_first_plan(
    small_course: Path, empty_pyodide: Path, browser: Any, tmp_path: Path
) -> None:
    build_site(small_course, tmp_path / "site", live=pyodide(str(empty_pyodide)))
    server = Host(tmp_path / "site")
    page = patient(browser.new_page())
    for address in (f"{server.address}/planner.html", (tmp_path / "site" / "planner.html").as_uri()):
        page.goto(address)
        page.locator("#state.bad").wait_for(timeout=60_000)
        said = page.locator("#state").inner_text()
        assert said.startswith("Python could not be started (") and "plan of the first choice" in said
        assert page.locator("#gpus").is_disabled() and page.locator("#memory svg").is_visible()
    assert "only from a server: python -m http.server" in said
    server.stop()

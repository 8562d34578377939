"""`fsdplab lab` in a real browser: JupyterLab comes up on the learner edition, a notebook opens in it, and a prediction
is locked while the cell runs that measures.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fsdplab.cli import lab
from tests.browser import Server, needs_chromium, patient

SHORT_MS = 60_000
PREDICT = """from fsdplab import teaching
teaching.start()
peak = teaching.predict("00.full_shard_peak", unit="MB")
other = teaching.predict("00.other", unit="MB")"""
MEASURE = """import pathlib, time
while not pathlib.Path("measured").exists():
    time.sleep(0.05)
peak.score(240)
other.score(240)"""


def run_a_cell(page: Any, source: str) -> None:
    """Run a new cell below the notebook's title."""
    page.locator(".jp-Notebook .jp-Cell").first.click()
    page.keyboard.press("Escape")
    page.keyboard.press("b")
    page.keyboard.press("Enter")
    page.keyboard.insert_text(source)
    page.keyboard.press("Control+Enter")


@needs_chromium
@pytest.mark.default
def test_fsdplab_lab_opens_the_learner_edition(course_lab: Server, chromium: Any, tmp_path: Path) -> None:
    assert sorted(path.name for path in course_lab.folder.glob("*.ipynb"))[0] == "00_setup_and_tour.ipynb"
    page = patient(chromium.new_page(viewport={"width": 1280, "height": 900}))
    page.goto(course_lab.page_of("00_setup_and_tour.ipynb"))
    page.wait_for_selector(".jp-Notebook .jp-MarkdownOutput h1", timeout=60_000)
    assert "Setup and tour" in page.inner_text(".jp-Notebook")
    page.screenshot(path=str(tmp_path / "lab.png"))
    predicts_measures_and_tries_again(page, course_lab.folder, tmp_path)
    page.close()
    assert (tmp_path / "lab.png").stat().st_size > 20_000


def predicts_measures_and_tries_again(page: Any, course: Path, tmp_path: Path) -> None:
    """One prediction is made, one is not; both are scored, and neither takes a number once its run has started."""
    page.get_by_text("(ipykernel) | Idle").wait_for(timeout=2 * SHORT_MS)
    page.add_style_tag(content=".Toastify { display: none }")  # JupyterLab's question whether it may send news
    run_a_cell(page, PREDICT)
    fields = page.get_by_placeholder("your number")
    fields.nth(1).wait_for(timeout=2 * SHORT_MS)
    peak, other = fields.nth(0), fields.nth(1)
    assert peak.input_value() == other.input_value() == ""
    peak.fill("many")
    peak.press("Enter")
    refused = page.get_by_role("alert").get_by_text("expected a number and a unit such as")
    refused.wait_for(timeout=SHORT_MS)
    assert refused.evaluate("e => e.scrollWidth <= e.parentElement.clientWidth"), "the whole message is seen"
    page.screenshot(path=str(tmp_path / "refused.png"))
    peak.fill("300")
    peak.press("Enter")
    page.get_by_text("300 MB (your own number; now run the next cell)").wait_for(timeout=SHORT_MS)

    run_a_cell(page, MEASURE)
    page.get_by_text("The field is still empty: ").wait_for(timeout=SHORT_MS)
    # a kernel drops what was asked of it while it answers with an error
    page.wait_for_function("() => !document.querySelector('.jp-Notebook').innerText.includes('[*]')")
    page.get_by_text("(ipykernel) | Idle").wait_for(timeout=SHORT_MS)
    page.keyboard.press("Control+Enter")  # once more, without a number
    page.wait_for_function("""() => document.querySelectorAll("[placeholder='your number']:disabled").length == 2""")
    peak.evaluate("e => { e.disabled = false; }")  # a page that has not heard of it yet
    peak.fill("240")
    peak.press("Enter")
    (course / "measured").touch()
    page.get_by_text("You predicted 300 MB, measured 240 MB: 1.25 times the measurement").wait_for(timeout=SHORT_MS)
    page.get_by_text("No prediction, measured 240 MB").wait_for(timeout=SHORT_MS)
    page.wait_for_function("""() => document.querySelector("[placeholder='your number']").value == "300" """)
    page.screenshot(path=str(tmp_path / "scored.png"))

    page.locator(".jp-CodeCell", has_text="teaching.predict(").first.locator(".jp-InputArea-editor").click()
    page.keyboard.press("Control+Enter")
    page.wait_for_function("""() => document.querySelectorAll("[placeholder='your number']:disabled").length == 1""")
    assert fields.nth(0).input_value() == "300" and fields.nth(0).is_disabled(), "it stays what it was"
    page.get_by_text("300 MB (locked, measured 240 MB)").wait_for(timeout=SHORT_MS)


def test_a_new_course_opens_on_its_first_notebook_and_a_later_visit_where_jupyter_likes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/theirs")

    def run_module(module: str, arguments: list[str], instead: object = None) -> int:
        if module == "fsdplab.teaching":
            out = Path(arguments[arguments.index("--out") + 1])
            out.mkdir()
            for name in ("01_second.ipynb", "00_first.ipynb"):
                (out / name).touch()
        else:
            started.append(arguments)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lab, "run_module", run_module)
    for _ in range(2):
        assert lab.open_lab(None, browser=False, port=None, edition="learner") == 0
    opens = "--LabApp.default_url=/lab/tree/00_first.ipynb"
    assert opens in started[0] and opens not in started[1]
    theirs, ours, *_ = os.environ["JUPYTER_CONFIG_PATH"].split(os.pathsep)
    settings = json.loads((Path(ours) / "labconfig" / "default_setting_overrides.json").read_text(encoding="utf-8"))
    assert theirs == "/theirs" and settings["@jupyterlab/apputils-extension:notification"] == {"fetchNews": "false"}
    assert capsys.readouterr().out.startswith("Your course: course-learner/, 2 notebooks")

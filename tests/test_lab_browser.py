"""`fsdplab lab` in a real browser: JupyterLab comes up on the learner edition and a notebook opens in it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fsdplab.cli import lab
from tests.browser import CHROMIUM, needs_chromium


@needs_chromium
def test_fsdplab_lab_opens_the_learner_edition(jupyter_lab: str, tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    assert sorted(path.name for path in (tmp_path / "course-learner").glob("*.ipynb"))[0] == "00_setup_and_tour.ipynb"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(jupyter_lab.replace("/lab?", "/lab/tree/00_setup_and_tour.ipynb?"))
        page.wait_for_selector(".jp-Notebook .jp-MarkdownOutput h1", timeout=60_000)
        assert "Setup and tour" in page.inner_text(".jp-Notebook")
        page.screenshot(path=str(tmp_path / "lab.png"))
        browser.close()
    assert (tmp_path / "lab.png").stat().st_size > 20_000


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

"""`fsdplab lab` in a real browser: JupyterLab comes up on the learner edition and a notebook opens in it."""

from __future__ import annotations

from pathlib import Path

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

"""A question of the course, answered in JupyterLab in a real browser: by a click, and by a number and Enter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import Cells, needs_chromium

CELLS = ['from fsdplab import teaching\n\nteaching.start(edition="learner")', 'teaching.ask("00.loop", "00.adam")']


@needs_chromium
@pytest.mark.timeout(300)
def test_a_click_and_a_number_are_judged_on_the_screen(lab_cells: Cells, tmp_path: Path) -> None:
    with lab_cells.run(CELLS) as page:
        cell = page.locator(".jp-Notebook .jp-CodeCell").nth(1)
        wrong, right = (cell.get_by_role("button", name=words) for words in ("nothing: backward()", "every step uses"))
        wrong.wait_for(timeout=120_000)
        cell.get_by_text("Not answered yet").nth(1).wait_for(timeout=60_000)  # each of the two questions says it
        wrong.click()
        cell.get_by_text("That is not it.").wait_for(timeout=60_000)
        cell.locator("button.mod-danger").wait_for(timeout=60_000)  # its colour comes after the words
        assert (
            "mod-danger" in wrong.get_attribute("class") and cell.get_by_text("micro-batches are accumulated").count()
        )
        right.click()
        cell.get_by_text("00.loop: passed.").wait_for(timeout=60_000)
        cell.locator("button.mod-success").wait_for(timeout=60_000)
        assert "mod-success" in right.get_attribute("class") and "mod-danger" not in wrong.get_attribute("class")
        assert right.bounding_box()["width"] < cell.bounding_box()["width"]
        field = cell.get_by_placeholder("your answer, then Enter")
        field.fill("16")
        field.press("Enter")
        cell.get_by_text("that is everything together").wait_for(timeout=60_000)
        field.fill("8 B")
        field.press("Enter")
        cell.get_by_text("00.adam: passed.").wait_for(timeout=60_000)
        page.screenshot(path=str(tmp_path / "answered.png"))
    assert '"answer": "b"' in (lab_cells.folder / "my_fsdp" / "progress.json").read_text()

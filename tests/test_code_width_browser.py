"""How many columns of code JupyterLab shows in a window of 1,280 px, the list of files open: enough for the course."""

from __future__ import annotations

import pytest

from tests.browser import Cells, needs_chromium
from tests.test_teaching_course import COLUMNS

# the columns of each code cell whose line goes on beyond its edge
CUT = """() => [...document.querySelectorAll(".jp-CodeCell .cm-scroller")]
  .filter(cell => cell.scrollWidth > cell.clientWidth)
  .map(cell => cell.querySelector(".cm-line").textContent.length)"""
WIDTHS = (80, COLUMNS, COLUMNS + 20)


@needs_chromium
@pytest.mark.timeout(400)
def test_the_courses_columns_fit_a_window_of_1280_px(lab_cells: Cells) -> None:
    with lab_cells.run(["#" * columns for columns in WIDTHS], width=1280) as page:
        page.get_by_role("tabpanel").first.wait_for()
        page.wait_for_function(f"({CUT})().length > 0")
        assert page.evaluate(CUT) == [COLUMNS + 20]

"""In JupyterLab an empty field is not passed by Shift+Enter alone, and Run All Cells goes through."""

from __future__ import annotations

import pytest

from tests.browser import Cells, needs_chromium

CELLS = [
    'from fsdplab import teaching\nteaching.start(edition="learner")',
    'peak = teaching.predict("00.peak", unit="MB")',
    "peak.score(100)",
]
SAYS = "() => document.querySelectorAll('.jp-CodeCell')[2].innerText"


@needs_chromium
@pytest.mark.timeout(400)
def test_shift_enter_does_not_pass_an_empty_field_unseen(lab_cells: Cells) -> None:
    with lab_cells.run(CELLS) as page:
        page.get_by_text("No prediction, measured 100 MB").wait_for()
        page.get_by_role("menuitem", name="Kernel", exact=True).click()
        page.get_by_role("menuitem", name="Restart Kernel and Clear Outputs of All Cells", exact=False).click()
        page.get_by_role("button", name="Confirm Kernel Restart").click()
        page.get_by_text("(ipykernel) | Idle").wait_for()
        cells = page.locator(".jp-CodeCell")
        cells.nth(0).locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        page.get_by_text("Learner edition: a failed check").wait_for()
        page.keyboard.press("Shift+Enter")
        field = cells.nth(1).locator("input").first
        field.wait_for()
        page.wait_for_timeout(1000)
        page.keyboard.press("Shift+Enter")
        page.get_by_text("The field is still empty: 00.peak").wait_for()
        assert "No prediction" not in page.evaluate(SAYS)
        field.fill("120")
        field.press("Enter")
        cells.nth(2).locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
        page.get_by_text("You predicted 120 MB").wait_for()

"""The account of what a step takes over the floor: its parts add up, and docs/speed.md says what its record says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.step_account import HEAPS, rows

ROOT = Path(__file__).parents[1]
RECORD = json.loads((ROOT / "data" / "step_account.json").read_text())


@pytest.mark.parametrize("heap", HEAPS)
def test_parts_add_up_to_what_a_step_takes_over_the_floor(heap: str) -> None:
    found = RECORD["heaps"][heap]
    assert sum(ms for ms, *_ in found["parts"].values()) == pytest.approx(found["step_ms"] - found["floor_ms"])


def test_the_page_has_the_table_of_the_record() -> None:
    assert "\n".join(rows(RECORD)) in (ROOT / "docs" / "speed.md").read_text()

"""Every exercise, question and choice of the course is complete, and a choice accepts its right letter only."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdplab.teaching.core import answers, registry
from fsdplab.teaching.core.exercise import Choice
from tests.solutions import must_be_complete

NOTEBOOKS = sorted(path.name[:2] for path in (Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
ITEMS = [item for notebook in NOTEBOOKS for item in registry.items_of(notebook)]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.id)
def test_every_item_is_complete(item):
    must_be_complete(item)


@pytest.mark.parametrize("item", [item for item in ITEMS if isinstance(item, Choice)], ids=lambda item: item.id)
def test_choices_accept_the_right_letter_only(course, item):
    assert [answers.grade_answer(item.id, letter).passed for letter in item.options] == [
        letter == item.right for letter in item.options
    ]

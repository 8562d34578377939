"""Parameters of a test of which a whole run tries some, and `pytest -m soak` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def others_soak(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """The values for `parametrize`: those that are not `kept` are marked soak; a tuple is one value for each name."""
    values = list(values)
    assert all(each in values for each in kept), f"{kept} are to be kept of {values}"
    return [each if each in kept else pytest.param(*_of_names(each), marks=pytest.mark.soak) for each in values]


def _of_names(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)

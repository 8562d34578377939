"""The part of lesson 08 that runs on the ranks: the driver that calls the learner's split of a wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def drive_waited(waited: Callable[..., Any], *instants: int) -> Any:
    """The split with plain numbers where they are numbers of numpy or torch; a float that is whole counts as one."""
    got = waited(*instants)
    return {name: _plain(value) for name, value in got.items()} if isinstance(got, dict) else got


def _plain(value: Any) -> Any:
    number = value.item() if hasattr(value, "item") else value
    return int(number) if isinstance(number, float) and number.is_integer() else number

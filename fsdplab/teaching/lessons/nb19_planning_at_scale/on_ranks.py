"""The part of lesson 19 that a check runs: the learner's order, and the planner's verdict on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdplab.teaching.lessons.nb19_planning_at_scale.order import verdict


def drive_order(function: Callable[[], Any]) -> str | None:
    """What the planner says of the order that the function returns; None where it returns nothing."""
    order = function()
    return None if order is None else verdict(order)

"""The categories of memory as records of earlier versions name them."""

from __future__ import annotations

from typing import Any

OLD_CATEGORIES = {
    "parameter_slices": "sharded_parameters",
    "gathered_parameters": "unsharded_parameters",
    "gradient_slices": "sharded_gradients",
    "whole_gradients": "unsharded_gradients",
}


def of_today(content: Any) -> Any:
    """What JSON holds, with today's keys at every depth.

    >>> of_today({"total": 3, "by_category": {"parameter_slices": 2, "other": 1}})
    {'total': 3, 'by_category': {'sharded_parameters': 2, 'other': 1}}
    """
    if isinstance(content, dict):
        return {OLD_CATEGORIES.get(name, name): of_today(part) for name, part in content.items()}
    return [of_today(part) for part in content] if isinstance(content, list) else content

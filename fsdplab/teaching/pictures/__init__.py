"""One picture a lesson that can stand on a slide: static SVG, drawn from the rule, with alternative text."""

from __future__ import annotations

from fsdplab.teaching.core.display import present

from . import costs, engine  # noqa: F401 (they draw the pictures)
from .sheet import PICTURES


def picture(notebook: str) -> None:
    """Show a lesson's picture: `picture("05")`; ValueError names the lessons that have one."""
    if notebook not in PICTURES:
        raise ValueError(f"no picture of {notebook!r}; expected one of {', '.join(sorted(PICTURES))}")
    present(PICTURES[notebook]())

"""What a long cell is doing: one line that is replaced while ranks start and train, or by the result.

Without it a reader waits in front of an empty cell and cannot tell slow from stuck.
"""

from __future__ import annotations

from collections.abc import Callable

from .display import Note, notebook_display, present, present_live


def follow(what: str = "training") -> Callable[[int, int, float], None]:
    """For `run(spec, on_progress=follow())`: says that ranks start, then how many steps are done."""
    update = present_live(Note((f"{what}: ranks are starting ...",)))

    def note(step: int, total: int, loss: float) -> None:
        done = "done" if step == total else "..."
        update(Note((f"{what}: step {step} of {total}, loss {loss:.2f} {done}",)))

    return note


def waiting(words: str) -> Callable[[object], None]:
    """Shows `words` and returns what puts the result in their place; outside a notebook only the result is printed."""
    return present_live(Note((words,))) if notebook_display() else present

"""A lesson's functions on ranks. They stand in a file beside the lesson, which imports little, so that ranks start
quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplab.sessions import call_on_ranks

from .course_state import current

TIME_LIMIT = 150.0  # seconds


@dataclass(frozen=True)
class LessonRanks:
    """The functions of a file beside a lesson's: `LessonRanks(__file__)("watch", 3, block=2)` is what `watch({"block":
    2, "workspace": ...})` of `on_ranks.py` gives on each of three ranks.
    """

    lesson: str

    def __call__(self, function: str, world_size: int = 2, **payload: Any) -> list[Any]:
        """Return the value of each rank; RanksFailed where one raises, dies or does not end."""
        return call_on_ranks(
            Path(self.lesson).with_name("on_ranks.py"),
            function,
            world_size=world_size,
            payload={"workspace": str(current().workspace.path), **payload},
            time_limit=TIME_LIMIT,
        )

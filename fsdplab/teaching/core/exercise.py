"""Numeric questions and choices, as frozen records with everything in one place; and what a check sees of a call.

A question holds its hints and the wrong numbers that known slips lead to, a choice says of each option why it is right
or wrong. They are read from a notebook's `questions.md` (questions_file.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .workspace import checked_id


@dataclass(frozen=True)
class Call:
    """One call of `torch.distributed` that a rank made: `send` of 40 bytes to `peer` 2, or `all_gather` of 40 bytes."""

    kind: str
    nbytes: int
    peer: int | None = None


@dataclass(frozen=True)
class Trial:
    """One rank's result of one case: the returned value, its output, and what it sent."""

    rank: int
    returned: Any
    printed: str
    calls: tuple[Call, ...]
    nothing: bool = False  # whether the function itself returned None


@dataclass(frozen=True)
class Slip:
    """A known wrong number, as a value in the question's unit or as a factor of the right one, and its cause."""

    cause: str
    value: float | Callable[[Any], float] | None = None
    factor: float | None = None


@dataclass(frozen=True)
class Question:
    """A number to compute or to read from a figure, in `unit`, right within `tolerance` (relative).

    `expected` is the number, or a function of the notebook's data (`answer(id, value, against=records)`).
    """

    id: str
    statement: str
    unit: str
    expected: float | Callable[[Any], float]
    slips: tuple[Slip, ...] = ()
    hints: tuple[str, str, str] = ("", "", "")
    tolerance: float = 0.01
    explanation: str = ""

    def __post_init__(self) -> None:
        checked_id(self.id)
        _three_hints(self.id, self.hints)

    def right(self, against: Any = None) -> float:
        """The right value in the question's unit."""
        return float(self.expected(against) if callable(self.expected) else self.expected)


@dataclass(frozen=True)
class Choice:
    """A question with lettered options; `because` explains every wrong letter and the right one."""

    id: str
    statement: str
    options: Mapping[str, str]
    right: str
    because: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked_id(self.id)
        missing = set(self.options) - set(self.because)
        if self.right not in self.options or missing:
            raise ValueError(f"{self.id}: the right letter must be an option, and every option needs a `because`")


def _three_hints(exercise: str, hints: Sequence[str]) -> None:
    if len(hints) != 3:
        raise ValueError(
            f"{exercise}: expected three hints (a nudge, a pointer, nearly the solution), got {len(hints)}"
        )

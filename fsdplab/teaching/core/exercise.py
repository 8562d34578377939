"""Code exercises, numeric questions and choices, as frozen records with everything in one place.

An `Exercise` holds its stub, its reference, its hints, the cases it is judged on and the wrong solutions it must
reject. The notebook shows the stub and the reference; the validator of the sources compares them with the ones here, so
they stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .verdicts import Difference, Feedback
from .workspace import checked_id, function_name


@dataclass(frozen=True)
class Case:
    """One call on every rank: `arguments[rank]` go in, `expected[rank]` must come out."""

    name: str
    arguments: tuple[tuple[Any, ...], ...]
    expected: tuple[Any, ...]


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
class Wrong:
    """A wrong solution that the check must reject with a report that contains `says`.

    `ends` tells how it ends on the ranks: it "returns", "raises" or "hangs" (the last two end the launch).
    """

    name: str
    source: str
    says: str
    ends: str = "returns"


Explain = Callable[[Case, Trial, Difference], tuple[str | None, str]]
Rules = Callable[[Case, Sequence[Trial]], Feedback | None]


def _no_explanation(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    return None, "compare what your function does on this rank with the statement, line by line"


def _no_rules(case: Case, trials: Sequence[Trial]) -> Feedback | None:
    return None


@dataclass(frozen=True)
class Exercise:
    """A function that the learner writes and that is checked on `world_size` real ranks.

    `explain(case, trial, difference)` turns the first difference into (step, likely cause). `rules(case, trials)`
    judges the counted calls, once all values are right. `time_limit` is for one case, in seconds from a common start of
    the ranks; `hung` is the likely cause where it passes. `driver` names a file and a function in it, `driver(function,
    *arguments)`, for exercises whose function is not simply called (a hook that must be attached to a model first).
    A `pure` function sends nothing and needs no rank of its own: it is called in the notebook's process, once for each
    of `world_size` tuples of arguments, and its verdict is there at once.
    """

    id: str
    title: str
    statement: str
    stub: str
    reference: str
    hints: tuple[str, str, str]
    cases: Callable[[], Sequence[Case]]
    explain: Explain = _no_explanation
    rules: Rules = _no_rules
    hung: str = "deadlock: the ranks wait for each other, because some rank receives what no rank sends"
    wrong: tuple[Wrong, ...] = ()
    world_size: int = 2
    tolerance: float = 0.0
    time_limit: float = 12.0
    driver: tuple[str, str] | None = None
    pure: bool = False

    def __post_init__(self) -> None:
        checked_id(self.id)
        _three_hints(self.id, self.hints)

    @property
    def function(self) -> str:
        """The name of the function to write: the id's last part."""
        return function_name(self.id)


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


def edited(source: str, *changes: tuple[str, str]) -> str:
    """The source with some parts replaced, for wrong solutions that are one edit away from the reference."""
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"expected exactly one {old!r} in the source, found {source.count(old)}")
        source = source.replace(old, new)
    return source

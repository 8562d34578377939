"""A statement about FSDP and how it is judged: from the planner's arithmetic, and from what small runs came to.

A verdict is never written down: it follows from the figures, so it changes where they do, and a test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

CONFIRMED, CONDITIONAL, REFUTED = "confirmed", "under conditions", "refuted"
VERDICTS = (CONFIRMED, CONDITIONAL, REFUTED)
Measured = Mapping[str, Any]  # data/claims.json, which tests/claims makes


@dataclass(frozen=True)
class Finding:
    """A verdict and the sentence with its figures."""

    verdict: str
    text: str


Find = Callable[[Measured], Finding]


@dataclass(frozen=True)
class Claim:
    """One statement; `origin` says where its figures are from, `seen_in` is the notebook that shows more."""

    id: str
    statement: str
    origin: str
    seen_in: str
    find: Find


class Subject(list[Claim]):
    """The statements of a subject, in the order in which the notebook asks them."""

    def claim(self, number: str, origin: str, seen_in: str) -> Callable[[Find], Find]:
        """Return a decorator that adds the statement in a function's docstring, which the function judges."""

        def add(find: Find) -> Find:
            # on one line, as tables show it
            statement = " ".join((find.__doc__ or "").split())
            self.append(Claim(number, statement, origin, seen_in, find))
            return find

        return add


def confirmed_if(holds: bool, text: str) -> Finding:
    """Return confirmed where the figures hold, refuted where they do not."""
    return Finding(CONFIRMED if holds else REFUTED, text)


def conditional_if(holds: bool, text: str) -> Finding:
    """Return that a statement holds under conditions, where the figures show that they decide; else refuted.

    The text names the conditions.
    """
    return Finding(CONDITIONAL if holds else REFUTED, text)


def in_mb(nbytes: float) -> str:
    """Return `0.56 MB`: of the small runs, which hold less than 10 MB."""
    return f"{nbytes / 1e6:.2f} MB"

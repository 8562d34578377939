"""Predictions without a widget: a number with a stored default, its score, and the learner's calibration.

Predicting before measuring is half of the course, so the record is kept: over many predictions a learner sees whether
they guess high or low, and how far. Only predictions that the learner changed count; a stored default is nobody's
guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean

from .quantities import kind_of, quantity, shown
from .workspace import Home

FILE = "predictions.json"


@dataclass
class Prediction:
    """One quantity to predict; `value` starts at what was stored earlier, else at the default."""

    name: str
    unit: str
    default: float
    home: Home = field(repr=False)
    value: float = field(init=False)
    by_learner: bool = field(init=False)

    def __post_init__(self) -> None:
        kind_of(self.unit)  # an unknown unit is an error here, not at the score
        self.default = quantity(self.default, self.unit)
        stored = self.home.read(FILE).get(self.name, {})
        self.by_learner = stored.get("unit") == self.unit and bool(stored.get("by_learner"))
        self.value = float(stored["predicted"]) if self.by_learner else self.default

    def set(self, value: float | str) -> None:
        """The learner's own number, stored at once; any earlier score no longer applies."""
        self.value = quantity(value, self.unit)
        self.by_learner = True
        self._store(measured=None)

    def score(self, measured: float | str) -> Score:
        """Compare with the measurement and keep the result."""
        reached = quantity(measured, self.unit)
        self._store(measured=reached)
        return Score(self.name, self.unit, self.value, reached, self.by_learner)

    def _store(self, measured: float | None) -> None:
        kept = self.home.read(FILE)
        kept[self.name] = {
            "unit": self.unit,
            "predicted": self.value,
            "measured": measured,
            "by_learner": self.by_learner,
        }
        self.home.write(FILE, kept)


@dataclass(frozen=True, repr=False)
class Score:
    """A prediction beside its measurement: `Score("peak", "MB", 300, 240, True).ratio == 1.25`."""

    name: str
    unit: str
    predicted: float
    measured: float
    by_learner: bool

    @property
    def ratio(self) -> float:
        """Predicted over measured; infinite where nothing was measured."""
        return self.predicted / self.measured if self.measured else math.inf

    def __str__(self) -> str:
        whose = "You predicted" if self.by_learner else "The stored default predicted"
        return (
            f"{whose} {shown(self.predicted, self.unit)}, measured {shown(self.measured, self.unit)}:"
            f" {compared(self.ratio)}."
        )

    __repr__ = __str__


def compared(ratio: float) -> str:
    """A ratio in words: `compared(1.25) == "1.25 times the measurement (25 % high)"`."""
    if abs(ratio - 1) < 0.01:
        return "right within 1 %"
    side = "high" if ratio > 1 else "low"
    return (
        f"{ratio:.2f} times the measurement ({abs(ratio - 1) * 100:.0f} % {side})"
        if 0.5 <= ratio <= 2
        else f"{ratio:.3g} times the measurement"
    )


@dataclass(frozen=True)
class Calibration:
    """How the learner predicts: scores so far, their mean ratio (geometric),
    and how many lie within a factor of two.
    """

    scores: tuple[Score, ...]

    @property
    def bias(self) -> float:
        """Geometric mean of predicted over measured: above 1 is guessing high."""
        ratios = [score.ratio for score in self.scores if 0 < score.ratio < math.inf]
        return math.exp(fmean(map(math.log, ratios))) if ratios else math.nan

    @property
    def within_two(self) -> int:
        """How many predictions were at least half and at most twice the measurement."""
        return sum(0.5 <= score.ratio <= 2 for score in self.scores)


def calibration_of(home: Home) -> Calibration:
    """Every scored prediction that the learner made, by name."""
    kept = sorted(home.read(FILE).items())
    scored = [(name, row) for name, row in kept if row["by_learner"] and row["measured"] is not None]
    return Calibration(tuple(Score(name, row["unit"], row["predicted"], row["measured"], True) for name, row in scored))

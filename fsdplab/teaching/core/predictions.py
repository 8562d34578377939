"""Predictions: a number with a stored default, its score, and the learner's calibration. With the default a notebook
also runs unattended.

Predicting before measuring is half of the course, so the record is kept: over many predictions a learner sees whether
they guess high or low, and how far. Only predictions that the learner changed count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from .course_state import current
from .display import Note, Table, present, present_live, present_widget, table
from .quantities import kind_of, quantity, shown
from .workspace import Workspace

if TYPE_CHECKING:
    import ipywidgets

FILE = "predictions.json"


@dataclass
class Prediction:
    """One quantity to predict; `value` starts at what was stored earlier, else at the default."""

    name: str
    unit: str
    default: float
    workspace: Workspace = field(repr=False)
    value: float = field(init=False)
    by_learner: bool = field(init=False)

    def __post_init__(self) -> None:
        kind_of(self.unit)  # an unknown unit is an error here, not at the score
        self.default = quantity(self.default, self.unit)
        stored = self.workspace.read(FILE).get(self.name, {})
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
        kept = self.workspace.read(FILE)
        kept[self.name] = {
            "unit": self.unit,
            "predicted": self.value,
            "measured": measured,
            "by_learner": self.by_learner,
        }
        self.workspace.write(FILE, kept)


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
        return self.told("measured")

    def told(self, origin: str) -> str:
        """The line under a prediction; `origin` says how the other number came about, "measured" or "computed"."""
        whose = "You predicted" if self.by_learner else "The stored default predicted"
        against = compared(self.ratio).replace("measurement", "measurement" if origin == "measured" else "right number")
        return f"{whose} {shown(self.predicted, self.unit)}, {origin} {shown(self.measured, self.unit)}: {against}."

    __repr__ = __str__


def compared(ratio: float) -> str:
    """A ratio as text: `compared(1.25) == "1.25 times the measurement (25 % high)"`."""
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
    """The learner's calibration: scores so far, their mean ratio (geometric), and how many lie within a factor of
    two.
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


def calibration_of(workspace: Workspace) -> Calibration:
    """Every scored prediction that the learner made, by name."""
    kept = sorted(workspace.read(FILE).items())
    scored = [(name, row) for name, row in kept if row["by_learner"] and row["measured"] is not None]
    return Calibration(tuple(Score(name, row["unit"], row["predicted"], row["measured"], True) for name, row in scored))


# ---- on the page


class Predicted:
    """A prediction on the page: call `.score(measured)` after the measurement."""

    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction

    @property
    def value(self) -> float:
        """The number in the field, in the prediction's unit."""
        return self.prediction.value

    def score(self, measured: float | str, origin: str = "measured") -> None:
        """Print the prediction beside the measurement (a number in the prediction's unit, or a text with its own).

        `origin="computed"` where the number was not measured but follows from a formula.
        """
        print(self.prediction.score(measured).told(origin))


def predict(name: str, unit: str, default: float, measured: float | str | None = None) -> Predicted:
    """Show a field for a number to predict and return it for scoring: `peak = predict("00.peak", unit="MB",
    default=500)`.

    With `measured`, the prediction is scored at once. A number entered earlier under this name comes back.
    """
    prediction = Prediction(name, unit, default, current().workspace)
    present_widget(lambda: number_field(prediction, lambda: update(standing(prediction))))
    update = present_live(standing(prediction))
    predicted = Predicted(prediction)
    if measured is not None:
        predicted.score(measured)
    return predicted


def number_field(prediction: Prediction, changed: Callable[[], None]) -> ipywidgets.HBox:
    """The field and its unit; a change goes to the prediction at once, then `changed` is called."""
    import ipywidgets

    entry = ipywidgets.FloatText(value=prediction.value, layout={"width": "9em"})

    def take(change: Any) -> None:
        prediction.set(change["new"])
        changed()

    entry.observe(take, names="value")
    return ipywidgets.HBox([ipywidgets.Label("Your prediction:"), entry, ipywidgets.Label(prediction.unit)])


def standing(prediction: Prediction) -> Note:
    """The state of a prediction, in one line that stays in the saved notebook."""
    source = "your own number: run on" if prediction.by_learner else "a stored default: put your own number first"
    return Note((f"Prediction {prediction.name}: {shown(prediction.value, prediction.unit)} ({source})",))


def calibration() -> None:
    """Show every scored prediction of this learner, and whether they tend high or low."""
    present(calibration_table(calibration_of(current().workspace)))


def calibration_table(found: Calibration) -> Table | Note:
    """The calibration as a table whose caption is the summary; a note where there is nothing to show yet."""
    rows = [[s.name, shown(s.predicted, s.unit), shown(s.measured, s.unit), f"{s.ratio:.2f}"] for s in found.scores]
    if not rows:
        return Note(("No prediction of your own yet: change a number field, then run on.",))
    caption = (
        f"{found.within_two} of {len(rows)} within a factor of two; on average {found.bias:.2f} times the measurement."
    )
    return table(["prediction", "predicted", "measured", "ratio"], rows, caption)

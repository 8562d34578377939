"""The view of a prediction: a number field with a default, so that a notebook also runs with nobody there to answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .course_state import current
from .display import Note, Table, present, present_live, table
from .predictions import Calibration, Prediction, calibration_of
from .quantities import shown
from .widget_view import present_widget

if TYPE_CHECKING:
    import ipywidgets


class Predicted:
    """What `predict` returns: call `.score(measured)` once the measurement is there."""

    def __init__(self, prediction: Prediction) -> None:
        self.prediction = prediction

    @property
    def value(self) -> float:
        """The number in the field, in the prediction's unit."""
        return self.prediction.value

    def score(self, measured: float | str) -> None:
        """Print the prediction beside the measurement (a number in the prediction's unit, or a text with its own)."""
        print(self.prediction.score(measured))


def predict(name: str, unit: str, default: float, measured: float | str | None = None) -> Predicted:
    """Show a field for a number to predict and return it for scoring: `peak = predict("00.peak", unit="MB",
    default=500)`.

    With `measured`, the prediction is scored at once. A number entered earlier under this name comes back.
    """
    prediction = Prediction(name, unit, default, current().home)
    present_widget(lambda: number_field(prediction, lambda: update(standing(prediction))))
    update = present_live(standing(prediction))
    predicted = Predicted(prediction)
    if measured is not None:
        predicted.score(measured)
    return predicted


def number_field(prediction: Prediction, changed: Callable[[], None]) -> ipywidgets.HBox:
    """The field and its unit; a change goes to the prediction at once, then `changed` is called."""
    import ipywidgets

    field = ipywidgets.FloatText(value=prediction.value, layout={"width": "9em"})

    def take(change: Any) -> None:
        prediction.set(change["new"])
        changed()

    field.observe(take, names="value")
    return ipywidgets.HBox([ipywidgets.Label("Your prediction:"), field, ipywidgets.Label(prediction.unit)])


def standing(prediction: Prediction) -> Note:
    """How a prediction stands, in one line that stays on the page where the field cannot."""
    told = "your own number: run on" if prediction.by_learner else "a stored default: put your own number first"
    return Note((f"Prediction {prediction.name}: {shown(prediction.value, prediction.unit)} ({told})",))


def calibration() -> None:
    """Show every scored prediction of this learner, and whether they tend high or low."""
    present(calibration_table(calibration_of(current().home)))


def calibration_table(found: Calibration) -> Table | Note:
    """The calibration as a table whose caption is the summary; a note where there is nothing to show yet."""
    rows = [[s.name, shown(s.predicted, s.unit), shown(s.measured, s.unit), f"{s.ratio:.2f}"] for s in found.scores]
    if not rows:
        return Note(("No prediction of your own yet: change a number field, then run on.",))
    caption = (
        f"{found.within_two} of {len(rows)} within a factor of two; on average {found.bias:.2f} times the measurement."
    )
    return table(["prediction", "predicted", "measured", "ratio"], rows, caption)

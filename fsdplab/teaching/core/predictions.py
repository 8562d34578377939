"""Predictions: a number that the learner writes before a run, locked when the run starts and scored after it.

Predicting before measuring is half of the course, so the record is kept: over many predictions a learner sees whether
they guess high or low, and how far. The field is empty at first, since any number in it would be a hint. Without a
number a notebook still runs, unattended too; the score then says that none was predicted. Where the field is on a page,
the cell that would score it empty stops once; cells below it that need its names say so in one sentence, until it runs.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fsdplab.common.page_colours import readable
from fsdplab.figures.style import ALARM

from .course_state import current, running_shell
from .display import Note, Table, present, present_live, present_widget, table
from .quantities import QuantityError, kind_of, quantity, shown
from .workspace import Workspace

if TYPE_CHECKING:
    import ipywidgets

FILE = "predictions.json"


class PredictionLocked(RuntimeError):
    """A number that comes after its run has started is no prediction."""


class Prediction:
    """One quantity to predict: call `.score(measured)` after the measurement.

    `value` is the learner's number in `unit`, also from an earlier day, or None. `watchers` are called after each
    change.
    """

    def __init__(self, name: str, unit: str, workspace: Workspace) -> None:
        kind_of(unit)  # an unknown unit is an error here, not at the score
        self.name, self.unit, self._workspace = name, unit, workspace
        self.value: float | None = None
        self.measured: float | None = None
        self.origin = "measured"  # of `measured`: it may be computed or simulated
        self.watchers: list[Callable[[], object]] = []
        self.is_on_page: Callable[[], bool] = lambda: False  # whether somebody has the field before them
        self.asked_again = False
        stored = workspace.read(FILE).get(name, {})
        # a number from an earlier day, unless the notebook asks for another unit by now
        if stored.get("unit") == unit and stored.get("by_learner"):
            self.value, self.measured = stored["predicted"], stored["measured"]
            self.origin = stored.get("origin", "measured")
        self.locked = self.measured is not None

    def set(self, value: float | str | None) -> None:
        """Store the learner's own number at once, or None.

        QuantityError where it is no number, PredictionLocked once the run has started.
        """
        if self.locked:
            raise PredictionLocked(f"prediction {self.name} is locked: its run has started")
        number = None if value is None else quantity(value, self.unit)
        if number is not None and not math.isfinite(number):
            raise QuantityError(f"expected a number that is not infinite, got {value!r}")
        if number != self.value:
            self.value = number
            self._store()
            self._changed()

    def lock(self) -> None:
        """Lock the number as the run starts: it stays as it is."""
        self.locked = True
        self._changed()

    def ask_again(self) -> bool:
        """Return whether a cell that uses the empty field should stop, which it does once.

        Shift+Enter twice would otherwise pass a field that nobody has read. Where all cells run at once, or unattended,
        no field has been on a page before the next cell begins.
        """
        # once: the learner who runs the cell again wants to go on without a number
        stops = self.value is None and not self.locked and not self.asked_again and self.is_on_page()
        self.asked_again = self.asked_again or stops
        return stops

    def scored(self, measured: float | str, origin: str = "measured") -> Score:
        """Compare with the measurement (a number in the prediction's unit, or a text with its own), or with what was
        computed or simulated, and keep the result.
        """
        self.measured, self.origin = quantity(measured, self.unit), origin
        self._store()
        self.lock()
        return Score(self.name, self.unit, self.value, self.measured, origin)

    def score(self, measured: float | str, origin: str = "measured") -> None:
        """Print the prediction beside the measurement; `origin="computed"` where the number was not measured but
        follows from a formula.
        """
        print(self.scored(measured, origin))

    @property
    def written(self) -> str:
        """Return what the field shows: the number that counts, or nothing."""
        return "" if self.value is None else f"{self.value:g}"

    @property
    def standing(self) -> Note:
        """Return the state in one line that stays in the saved notebook."""
        if self.value is None:
            state = "none was made" if self.locked else "write your own number, then run the next cell"
            return Note((f"Prediction {self.name}: {state}",))
        state = "locked" if self.locked else "your own number; now run the next cell"
        if self.measured is not None:
            state = f"{state}, {self.origin} {shown(self.measured, self.unit)}"
        return Note((f"Prediction {self.name}: {shown(self.value, self.unit)} ({state})",))

    def _changed(self) -> None:
        """Call the watchers."""
        for watcher in self.watchers:
            watcher()

    def _store(self) -> None:
        """Write the prediction to the learner's folder."""
        stored = self._workspace.read(FILE)
        stored[self.name] = {
            "unit": self.unit,
            "predicted": self.value,
            "measured": self.measured,
            "origin": self.origin,
            "by_learner": self.value is not None,
        }
        self._workspace.write(FILE, stored)


@dataclass(frozen=True, repr=False)
class Score:
    """A prediction beside its measurement: `Score("peak", "MB", 300, 240).ratio == 1.25`; `predicted` may be None.

    `origin` says how the other number came about: "measured", "computed" or "simulated".
    """

    name: str
    unit: str
    predicted: float | None
    measured: float
    origin: str = "measured"

    @property
    def ratio(self) -> float:
        """Return predicted over measured; infinite where the measurement is 0, NaN where nothing was predicted."""
        if self.predicted is None:
            return math.nan
        if self.predicted == self.measured:
            return 1.0
        if not self.measured:
            return math.inf
        return self.predicted / self.measured

    @property
    def reached(self) -> str:
        """Return the right number as text: `measured 240 MB`."""
        return f"{self.origin} {shown(self.measured, self.unit)}"

    def __str__(self) -> str:
        if self.predicted is None:
            return (
                f"No prediction, {self.reached}.\nNext time write a number into the field before you run the cell: a"
                " wrong guess teaches more than none."
            )
        other = "measurement" if self.origin == "measured" else "right number"
        against = compared(self.ratio).replace("measurement", other)
        return f"You predicted {shown(self.predicted, self.unit)}, {self.reached}: {against}."

    __repr__ = __str__


def compared(ratio: float) -> str:
    """Return a ratio as text: `compared(1.25) == "1.25 times the measurement (25 % high)"`."""
    if abs(ratio - 1) < 0.01:
        return "right within 1 %"
    if not math.isfinite(ratio):
        return "there is no ratio to a measurement of 0"
    if ratio < 0:
        return "the measurement has the other sign"
    # far off a percentage says less than a factor: 7.3 times, and not 630 % high
    if not 0.5 <= ratio <= 2:
        return f"{ratio:.3g} times the measurement"
    direction = "high" if ratio > 1 else "low"
    return f"{ratio:.2f} times the measurement ({abs(ratio - 1) * 100:.0f} % {direction})"


@dataclass(frozen=True)
class Calibration:
    """The learner's calibration: scores so far, their mean ratio (geometric), and how many lie within a factor of
    two.
    """

    scores: tuple[Score, ...]

    @property
    def bias(self) -> float:
        """Return the geometric mean of predicted over measured: above 1 is guessing high."""
        # in logarithms twice too high and twice too low cancel each other, as they should
        logarithms = [math.log(score.ratio) for score in self.scores if 0 < score.ratio < math.inf]
        if not logarithms:
            return math.nan
        return math.exp(fmean(logarithms))

    @property
    def within_two(self) -> int:
        """Return how many predictions were at least half and at most twice the measurement."""
        return sum(0.5 <= score.ratio <= 2 for score in self.scores)


def calibration_of(workspace: Workspace) -> Calibration:
    """Return every scored prediction that the learner made, by name."""
    scores = []
    for name, row in sorted(workspace.read(FILE).items()):
        if row.get("by_learner") and row["measured"] is not None:
            origin = row.get("origin", "measured")
            scores.append(Score(name, row["unit"], row["predicted"], row["measured"], origin))
    return Calibration(tuple(scores))


# ---- on the page


def predict(name: str, unit: str, measured: float | str | None = None) -> Prediction:
    """Show an empty field for a number to predict and return it for scoring: `peak = predict("00.peak", unit="MB")`.

    The field is locked when a cell that uses `peak` starts. With `measured`, the prediction is scored at once. A
    number entered earlier under this name comes back.
    """
    prediction = Prediction(name, unit, current().workspace)
    present_widget(lambda: number_field(prediction))
    update = present_live(prediction.standing)
    # after each change the line below the field is written anew
    prediction.watchers.append(lambda: update(prediction.standing))
    _lock_when_scored()
    if measured is not None:
        prediction.score(measured)
    return prediction


def _lock_when_scored() -> None:
    """Lock a prediction before a cell that uses it runs; without IPython its score does."""
    shell = running_shell()
    if shell is not None and not any(isinstance(one, _LocksWhatIsUsed) for one in shell.ast_transformers):
        shell.ast_transformers.append(_LocksWhatIsUsed())


class _LocksWhatIsUsed:
    """Sees each cell before it runs, as a transformer of IPython: the only place from which a cell can be stopped."""

    def __init__(self) -> None:
        # a name that a stopped cell would have made -> the prediction whose field was empty
        self._missing: dict[str, str] = {}

    def visit(self, cell: ast.AST) -> ast.AST:
        """Lock the predictions that a cell is about to use, whatever it does with them but reading their `value`.

        InputRejected, which stops the cell, where a field is empty and that was not said yet, and where the cell needs
        a name that only a stopped cell makes: without it there would be a NameError, or an earlier value.
        """
        used, made = names_used(cell), names_made(cell)
        for name in sorted(used - names_bound(cell)):
            if name in self._missing:
                unmade_by = self._missing[name]
                raise self._stop(made, unmade_by, _lacks(name, unmade_by))
        shell = running_shell()
        values = [shell.user_ns.get(name) for name in sorted(used)]
        predictions = [value for value in values if isinstance(value, Prediction)]
        empty = [prediction.name for prediction in predictions if prediction.ask_again()]
        if empty:
            raise self._stop(made, empty[0], _still_empty(empty))
        for name in made:
            self._missing.pop(name, None)
        for prediction in predictions:
            prediction.lock()
        return cell

    def _stop(self, made: set[str], prediction: str, why: str) -> Exception:
        """Note that what the cell makes will be missing, and return the error that stops it."""
        from IPython.core.error import InputRejected

        self._missing |= dict.fromkeys(made, prediction)
        error = InputRejected(why)
        # IPython prints these lines in place of a traceback
        error._render_traceback_ = lambda: [str(error)]
        return error


def _lacks(name: str, prediction: str) -> str:
    return (
        f"`{name}` is missing: the cell that makes it was stopped, since the field of {prediction} was empty. Run that"
        " cell once more, then this one."
    )


def _still_empty(empty: Sequence[str]) -> str:
    field = "The field is" if len(empty) == 1 else "The fields are"
    return (
        f"{field} still empty: {', '.join(empty)}. Write your number into it and press Enter, or run this cell once"
        " more to go on without a prediction."
    )


def names_used(cell: ast.AST) -> set[str]:
    """Return the names that a cell reads: `{"peak"}` of `peak.score(3)`.

    A name of which it reads `.value` only is left out.
    """
    nodes = list(ast.walk(cell))
    # `peak.value` reads the number, and is no use that would lock it
    only_valued = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr == "value"}
    names = set()
    for node in nodes:
        # a name that is assigned, as in `peak = predict(...)`, is not read
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in only_valued:
            names.add(node.id)
    return names


def names_bound(cell: ast.AST) -> set[str]:
    """Return the names that a cell assigns anywhere, also inside of functions: what it reads of these is its own."""
    names = set()
    for node in ast.walk(cell):
        if isinstance(node, ast.arg):
            names.add(node.arg)
    return names | _assigned(list(ast.walk(cell)))


def names_made(cell: ast.AST) -> set[str]:
    """Return the names that a cell leaves in the notebook: `{"a", "f"}` of `a = [x for x in b]` and `def f(y): ...`."""
    nodes, waiting = [], [cell]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        # what these assign inside stays inside
        if not isinstance(node, _SCOPES):
            waiting += ast.iter_child_nodes(node)
    return _assigned(nodes)


_SCOPES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
)


def _assigned(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names that these nodes assign, define or import."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return names


def number_field(prediction: Prediction) -> ipywidgets.HBox:
    """Return the field, its unit and what is wrong with it; a number goes to the prediction at once.

    The number is sent when the field is left, or on Enter: of the letters of a number that is being typed, a busy
    kernel would get the first one before the cell that locks it, and the others after.
    """
    import ipywidgets

    entry = ipywidgets.Text(
        value=prediction.written,
        placeholder="your number",
        continuous_update=False,
        disabled=prediction.locked,
        layout={"width": "9em", "flex": "0 0 auto"},
        _view_count=0,  # the page counts on from there
    )
    prediction.is_on_page = lambda: bool(entry._view_count)
    complaint = ipywidgets.HTML()

    def take(change: Any) -> None:
        if change["new"] == prediction.written:
            return  # what the field shows again
        words = escape(_refusal(prediction, change["new"]))
        complaint.value = f"<span role='alert' style='color:{readable(ALARM)}'>{words}</span>" if words else ""
        show()

    def show() -> None:
        """Show the number that counts, and take no other, once the prediction is locked."""
        entry.disabled = prediction.locked
        if prediction.locked:
            # what is still being typed is no prediction any more
            entry.value = prediction.written

    entry.observe(take, names="value")
    prediction.watchers.append(show)
    words = [ipywidgets.Label(text, layout={"flex": "0 0 auto"}) for text in ("Your prediction:", prediction.unit)]
    return ipywidgets.HBox([words[0], entry, words[1], complaint], layout={"flex_flow": "row wrap"})


def _refusal(prediction: Prediction, typed: str) -> str:
    """Hand what was typed to the prediction; return why it was refused, or nothing. A blank text predicts nothing."""
    try:
        prediction.set(typed if typed.strip() else None)
    except PredictionLocked as error:
        return str(error)
    except QuantityError as error:
        # what cannot be read takes an earlier number away, so that the field and the score agree
        prediction.set(None)
        return f"{error}; nothing is predicted yet"
    return ""


def calibration() -> None:
    """Show every scored prediction of this learner, and whether they tend high or low."""
    present(calibration_table(calibration_of(current().workspace)))


def calibration_table(scored: Calibration) -> Table | Note:
    """Return the calibration as a table whose caption is the summary; a note where there is nothing to show yet."""
    if not scored.scores:
        return Note(("No prediction of your own yet: write a number into a field, then run the next cell.",))
    rows = []
    for score in scored.scores:
        rows.append([score.name, shown(score.predicted or 0.0, score.unit), score.reached, f"{score.ratio:.2f}"])
    within = f"{scored.within_two} of {len(rows)} within a factor of two"
    caption = f"{within}; on average {scored.bias:.2f} times the right number."
    return table(["prediction", "predicted", "right number", "ratio"], rows, caption)

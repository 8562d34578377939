"""What runs will take, as HTML that is quick enough to follow the sliders of a notebook.

A prediction is arithmetic: no process is started, no model is built. The picture is a few coloured boxes, because a
figure takes longer to draw than a control to move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import seconds, size
from fsdplab.figures.report.parts import rendered
from fsdplab.figures.view import RunView
from fsdplab.sessions.calibration import calibration_file, find_calibration
from fsdplab.sessions.prediction import Prediction, predict
from fsdplab.sessions.spec import RunSpec


@dataclass(frozen=True)
class Outlook:
    """One run that could be started, and what it will take."""

    spec: RunSpec
    predicted: Prediction
    remark: str = ""  # where its step time comes from, or why there is none

    @property
    def label(self) -> str:
        """The run's name as the figures write it."""
        return RunView(self.spec.strategy, self.spec.engine, self.spec.world_size).label

    @property
    def misfit(self) -> str:
        """Why the run will not fit its card, with the bytes that are missing; empty where it fits or nobody knows."""
        needed, card = self.predicted.peak_bytes, self.spec.card
        # `fits` is None where the memory is not predicted
        if self.predicted.fits is not False or needed is None or card is None:
            return ""
        return f"does not fit the card: {size(needed)} needed, {size(card)} there, {size(needed - card)} too much"

    @property
    def split(self) -> Mapping[str, int]:
        """The predicted peak by category; {} where it is not predicted."""
        return self.predicted.by_category or {}

    @property
    def words(self) -> str:
        """Why it does not fit, else what it takes."""
        return self.misfit or in_words(self.predicted)


@dataclass(frozen=True, repr=False)
class OutlookTable:
    """Outlooks to be shown in a notebook."""

    rows: tuple[Outlook, ...]

    def __str__(self) -> str:
        return "\n".join(f"{row.label}: {row.words}" for row in self.rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return outlook_html(self.rows)


def predicted(spec: RunSpec) -> tuple[Prediction, str]:
    """Return the prediction of a run with this machine's calibration, if there is one, and the remark on its step time.

    Kept, so that a control that moves back shows it at once; a new calibration is used from then on.
    """
    path = calibration_file()
    # the file's time is part of the cache's key, so a new calibration is used at once
    return _predicted(spec, path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=256)
def _predicted(spec: RunSpec, calibrated_ns: int) -> tuple[Prediction, str]:
    found = find_calibration(spec.world_size)
    forecast = predict(spec, found.calibration)
    # the calibration's remark says it all, unless there is one that gives no step all the same
    if found.calibration is None or forecast.step_time_s is not None or not forecast.by_category:
        return forecast, found.remark
    return forecast, "no step time is predicted for a link or offloading"


def outlook_of(specs: Iterable[RunSpec]) -> tuple[Outlook, ...]:
    """Return what each run will take; not for the twin."""
    return tuple(Outlook(spec, *predicted(spec)) for spec in specs if spec.engine != "twin")


def in_words(prediction: Prediction) -> str:
    """Return `predicted 199 MB, sends 129 MB, step 425 ms`, or why the memory is not predicted."""
    words = f"predicted {size(prediction.peak_bytes)}" if prediction.peak_bytes else f"no peak: {prediction.why_not}"
    words += f", sends {size(prediction.bytes_per_step)}"
    if prediction.step_time_s is not None:
        words += f", step {seconds(prediction.step_time_s)}"
    return words


def outlook_html(rows: Sequence[Outlook]) -> str:
    """Draw a bar a run over one scale, with the card as a line; what does not fit is red."""
    if not rows:
        return ""
    longest = 1  # bytes of the longest bar, or of the card's line where that is farther right
    for row in rows:
        longest = max(longest, sum(row.split.values()), row.spec.card or 0)
    legend = []
    for category in CATEGORY_ROWS.values():
        if any(row.split.get(category.name) for row in rows):
            legend.append(category)
    # all rows are of one machine: the remark of a row that is drawn stands for all
    remark = next((row.remark for row in rows if row.split), rows[0].remark)
    # 8 % wider than the longest, so that the card's line is within the picture
    return str(rendered("outlook.html", rows=rows, scale=1.08 * longest, legend=legend, remark=remark))

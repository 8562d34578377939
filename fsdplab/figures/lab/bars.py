"""The rows of the instrument's bars, their titles, and the marks of the crossovers on the link's slider."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdplab.common.sizes import seconds, size
from fsdplab.figures.table import scattered
from fsdplab.planning.bands import memory_band, speed_band
from fsdplab.planning.links import LinkSpec
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.records import RunRecord
from fsdplab.sessions.spec import RunSpec
from fsdplab.workloads.own.sources import name_of

from .choices import CONTROL_OF, Run
from .messages import Band, Here, Mark, Measured, Row
from .outcomes import Outcome, crossover, outcome

_REMAINS = " of the passes: the first gathers, the gather between forward and backward, and the last reductions"
_EQUAL = 1e-3  # simulated steps that differ by less are equal
# Settings that change what a run takes: a measurement with other ones is not drawn over its simulation.
_NOT_IN_A_MEASUREMENT = ("card", "steps", "engine", "as_model")
_SETTINGS = ("micro_batches", *(name for name in CONTROL_OF if name not in _NOT_IN_A_MEASUREMENT))


def row_of(strategy: str, run: Run, card: int | None, records: Sequence[RunRecord]) -> Row:
    """Return one line of the bars: what is predicted, and the last run that was measured with the same settings."""
    predicted = outcome(run)
    step = predicted.step
    peak = predicted.peak
    over = 0
    if peak and card:
        over = max(0, peak - card)
    memory = predicted.memory or {}
    # what is known without a step; the rest follows
    row = Row(
        name=strategy,
        strategy=strategy,
        memory=[(category, nbytes) for category, nbytes in memory.items() if nbytes],
        peak=peak,
        over=over,
        peak_words=_peak_words(peak, over),
        why_no_memory=predicted.why_no_memory,
        why_no_step=predicted.why_no_step,
        step=None,
        step_s=None,
        step_words="",
        measured=None,
        here=None,
        bands=[None, None],
    )
    if step:
        row["step"] = (step.computing, step.hidden, step.exposed, step.optimizer)
        row["step_s"] = step.total
        row["step_words"] = step.words
    # runs of this machine can be measured
    if isinstance(run, RunSpec):
        row["measured"] = _measured(run, records)
        row["here"] = _here(run, records)
    elif type(run) is PlanSpec:  # known runs are of published models
        row["bands"] = _bands(run, predicted)
    return row


def _peak_words(peak: int | None, over: int) -> str:
    if not peak:
        return ""
    if over:
        return f"{size(peak)}: {size(over)} over"
    return size(peak)


def _bands(run: PlanSpec, predicted: Outcome) -> list[Band | None]:
    """Of memory and step on GPUs: the ends of the band of known runs, and the band in words."""
    memory = memory_band(run)
    peak_ends = memory.around(predicted.peak or 0)
    speed = speed_band(run)
    step_s = 0.0
    if predicted.step:
        step_s = predicted.step.total
    # the fastest of the known runs gives the shortest step
    step_ends = (step_s / speed.high, step_s / speed.low)
    return [_band(peak_ends, size, memory.words), _band(step_ends, seconds, speed.words)]


def _band(ends: tuple[float, float], say: Callable[[float], str], of: str) -> Band:
    least, most = ends
    return Band(ends=ends, words=f"{say(least)} to {say(most)}", of=of)


def _measured(run: RunSpec, records: Sequence[RunRecord]) -> Measured | None:
    """Peak and median step of the last record with the settings of the run; None where it was not measured."""
    # all settings that change what the run takes
    wanted: dict[str, Any] = {"engine": "lab"}
    for name in _SETTINGS:
        wanted[name] = getattr(run, name)
    wanted["model"] = name_of(run.model)  # as records have it
    # the newest first, which replaces older ones of the same settings
    for record in reversed(records):
        settings = {name: record.spec.get(name) for name in wanted}
        if settings != wanted:
            continue
        summary = record.summary
        peak = summary.peak_memory_bytes.total
        step_s = summary.step_time_s.median
        return Measured(peak=peak, step_s=step_s, peak_words=size(peak), step_words=seconds(step_s))
    return None


def _here(run: RunSpec, records: Sequence[RunRecord]) -> Here | None:
    """The step on this machine of a model of one's own, from the last measured run that it can be predicted from; None
    without one.
    """
    if not run.own_model:
        return None
    from fsdplab.sessions.first_run import step_here  # which imports torch

    # the newest first
    for record in reversed(records):
        step = step_here(record, run)
        if step is not None:
            words = seconds(step.seconds) + scattered(step.scatter)
            return Here(step_s=step.seconds, words=words, of=step.of)
    return None


# ---- titles


def memory_title(rows: Sequence[Row], card: int | None) -> str:
    """Say which rows exceed the card."""
    if card is None:
        return "Memory of a rank at its peak"
    over = [row for row in rows if row["over"]]
    if not over:
        return f"Memory: all fit the card of {size(card)}"
    if len(over) == 1:
        (row,) = over
        return f"Memory: {row['name']} is {size(row['over'])} over the card"
    return f"Memory: {len(over)} of {len(rows)} are over the card of {size(card)}"


def step_title(rows: Sequence[Row]) -> str:
    """Name the rows with the shortest step."""
    times: list[tuple[str, float]] = []
    for row in rows:
        if row["step_s"]:
            times.append((row["name"], row["step_s"]))
    if not times:
        return "Step"
    shortest = min(step_s for _, step_s in times)
    # several strategies may be equal: with much to compute all hide their messages
    longest_equal = (1 + _EQUAL) * shortest
    best = [name for name, step_s in times if step_s <= longest_equal]
    if len(best) > 2:
        return f"Shortest step: {len(best)} of {len(rows)} are equal"
    return f"Shortest step: {', '.join(best)}"


# ---- the link's slider


def crossover_mark(side: str, run: Run, ends: tuple[float, float]) -> Mark:
    """Where the crossover stands on the link's slider, and what is said of it."""
    # nothing is simulated, so nothing is known to wait
    if outcome(run).step is None:
        return Mark(side=side, at=None, words="")
    crossed = crossover(run, ends)
    if crossed is None:
        return Mark(side=side, at=None, words=f"{side} waits at every speed")
    at, remains_s = crossed
    slowest = ends[0]
    # hidden already where the slider begins
    if at == slowest:
        return Mark(side=side, at=at, words=f"{side} hidden at every speed")
    # 223_740_000 reads as 224 MB/s: more digits are no use on a slider
    three_digits = float(f"{at:.3g}")
    rate = LinkSpec("", three_digits, 0.0).words
    words = f"{side} from {rate}: only the ends exposed, {seconds(remains_s)}"
    return Mark(side=side, at=at, words=words, more=_REMAINS)

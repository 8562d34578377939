"""The table of a comparison as plain text cells: the terminal and the page print the same rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.common.words import MISSING
from fsdplab.figures.view import RunView

_NAMED = tuple(dict.fromkeys(row.group for row in CATEGORY_ROWS.values() if row.group != "rest"))
GROUPS = {group: tuple(row.name for row in CATEGORY_ROWS.values() if row.group == group) for group in _NAMED}
SPLIT = f"= {' + '.join([*GROUPS, 'rest'])}"
COLUMNS = (
    "strategy",
    "engine",
    "step",
    "tokens/s",
    "peak",
    SPLIT,
    "predicted",
    "sent",
    "formula",
    "exposed",
    "hidden",
    "loss",
    "losses",
)
NUMBERS = ("step", "tokens/s", "peak", "sent", "loss")  # columns that are set flush right where there is room
WRAPPED = (SPLIT, "formula")  # columns whose text may take a second line
SHORT = ("step", "predicted")  # those whose text may break at every blank
LEGEND = (
    "step: median, ± half the range of the middle half of the steps (of 4 or more); peak: memory of the worst rank, in"
    " MB = parameters (slices and gathered) + gradients (slices and whole) + optimizer state + activations + rest"
    " (communication buffers, other); predicted: peak and step by arithmetic, and in brackets each over what was"
    " measured; sent: by one rank in one step; formula: what the strategy must send; exposed: time of a profiled step"
    " (mean) in which the rank communicated and did not compute, copies and waiting for other ranks included, a dash"
    " where nothing was sent or profiled; hidden: the part of communication under computing; loss: of the last step"
)
AGREE, DIFFER, EQUAL = "agree", "DIFFER", "equal"
_MOODS = {AGREE: "good", EQUAL: "good", DIFFER: "bad", "out of memory": "bad", "failed": "bad"}


def cells(run: RunView, unknown: str = MISSING) -> tuple[str, ...]:
    """One run's row, in the order of COLUMNS; what was not measured reads as a dash,
    an unknown verdict as `unknown`.
    """
    return (
        f"{run.strategy}, {run.note}" if run.note else run.strategy,
        run.engine,
        step_of(run),
        three_digits(run.tokens_per_s) if run.tokens_per_s else MISSING,
        size(run.peak),
        split_of(run),
        predicted_of(run),
        size(run.summary.comm.bytes_per_step),
        formula_of(run),
        exposed_of(run),
        MISSING if (hidden := run.summary.comm.overlap) is None else f"{hidden:.0%}",
        _last_loss(run.summary.losses),
        badge(run, unknown),
    )


def step_of(run: RunView) -> str:
    """The median step and its scatter, `398 ms ±3%`; of a run without a timed step its status."""
    if not run.step_median:
        return run.status.replace("_", " ")
    scatter = run.summary.step_time_s.scatter
    return seconds(run.step_median) + ("" if scatter is None else f" ±{scatter:.0%}")


def _last_loss(losses: Sequence[float | None]) -> str:
    """The loss of the last step; a dash where it was not measured, or is no number."""
    return MISSING if not losses or losses[-1] is None else f"{losses[-1]:.4f}"


def exposed_of(run: RunView) -> str:
    """Exposed time; a dash where the profiled steps show no communication, as the legend says."""
    return MISSING if run.sends_nothing else seconds(run.exposed_s)


def split_of(run: RunView) -> str:
    """The peak as a sum of five groups, in MB: `"39 + 39 + 77 + 31 + 15"`; a dash for an unknown group."""
    if not run.peak or not run.split:
        return MISSING
    known = {group: [run.split[name] for name in names if name in run.split] for group, names in GROUPS.items()}
    sums = [sum(parts) if parts else None for parts in known.values()]
    rest = run.peak - sum(nbytes or 0 for nbytes in sums)
    return " + ".join(MISSING if nbytes is None else _megabytes(nbytes) for nbytes in [*sums, rest])


def predicted_of(run: RunView) -> str:
    """Peak and step as predicted, each with its ratio to the measured one: `"199 MB (1.00), 98.1 ms (0.95)"`."""
    peak, step = beside(run.predicted_peak, run.peak, size), run.summary.predicted.step_time_s
    return peak if step is None else f"{peak}, {beside(step, run.step_median, seconds)}"


def beside(predicted: float | None, measured: float | None, shown: Callable[[float | None], str]) -> str:
    """A prediction and in brackets its ratio to what was measured; a dash where nothing is predicted."""
    if predicted is None:
        return MISSING
    return f"{shown(predicted)} ({predicted / measured:.2f})" if measured else shown(predicted)


def _megabytes(nbytes: int) -> str:
    """`_megabytes(38_600_000) == "39"`, `_megabytes(300_000) == "0.3"`."""
    return f"{nbytes / 1e6:.{0 if nbytes >= 9.5e6 else 1}f}"


def formula_of(run: RunView) -> str:
    """The formula's bytes, and whether the ledger equals them to the byte."""
    formula, sent = run.formula_bytes, run.summary.comm.bytes_per_step
    if formula is None or sent is None:
        return size(formula)
    off = sent - formula
    return f"{size(formula)} {EQUAL if not off else f'{DIFFER} {off:+,} B'}"


def mood(text: str) -> str:
    """Whether a cell's verdict is `good` or `bad`, for its colour: `mood("115 MB equal") == "good"`; else empty."""
    return _MOODS.get(next((word for word in (EQUAL, AGREE, DIFFER) if word in text.split()), text), "")


def badge(run: RunView, unknown: str = MISSING) -> str:
    """Whether a finished run's losses agree with the unsharded reference; a dash for a run that did not finish."""
    if run.status != "finished":
        return MISSING
    return unknown if run.matches is None else AGREE if run.matches else DIFFER

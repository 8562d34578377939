"""The table of a comparison as plain text cells: the terminal and the page print the same rows."""

from __future__ import annotations

from collections.abc import Callable

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
SHORT = ("predicted",)  # those whose text may break at every blank
LEGEND = (
    "step: median; peak: memory of the worst rank, in MB = parameters (slices and gathered) + gradients (slices and"
    " whole) + optimizer state + activations + rest (communication buffers, other); predicted: peak and step by"
    " arithmetic, and in brackets each over what was measured; sent: by one rank in one step;"
    " formula: what the strategy must send; exposed: time of a profiled step (mean) in which the rank communicated and"
    " did not compute, copies and waiting for other ranks included, a dash where nothing was sent or profiled; hidden:"
    " the part of communication under computing;"
    " loss: of the last step"
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
        seconds(run.step_median) if run.step_median else run.status.replace("_", " "),
        three_digits(run.tokens_per_s) if run.tokens_per_s else MISSING,
        size(run.peak),
        split_of(run),
        predicted_of(run),
        size(run.comm_bytes),
        formula_of(run),
        exposed_of(run),
        MISSING if run.overlap is None else f"{run.overlap:.0%}",
        f"{run.losses[-1]:.4f}" if run.losses and run.losses[-1] is not None else MISSING,
        badge(run, unknown),
    )


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
    peak = beside(run.predicted_peak, run.peak, size)
    return peak if run.predicted_step is None else f"{peak}, {beside(run.predicted_step, run.step_median, seconds)}"


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
    if run.formula_bytes is None:
        return MISSING
    if run.comm_bytes is None:
        return size(run.formula_bytes)
    off = run.comm_bytes - run.formula_bytes
    return f"{size(run.formula_bytes)} {EQUAL if not off else f'{DIFFER} {off:+,} B'}"


def mood(text: str) -> str:
    """Whether a cell's verdict is `good` or `bad`, for its colour: `mood("115 MB equal") == "good"`; else empty."""
    return _MOODS.get(next((word for word in (EQUAL, AGREE, DIFFER) if word in text.split()), text), "")


def badge(run: RunView, unknown: str = MISSING) -> str:
    """Whether a finished run's losses agree with the unsharded reference; a dash for a run that did not finish."""
    if run.status != "finished":
        return MISSING
    return unknown if run.matches is None else AGREE if run.matches else DIFFER

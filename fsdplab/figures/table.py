"""The table of a comparison as plain text cells: the terminal and the page print the same rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import percent, seconds, size, three_digits
from fsdplab.common.words import MISSING
from fsdplab.figures.view import RunView
from fsdplab.records import Summary
from fsdplab.records.summary import Profile


def _categories_by_group() -> dict[str, list[str]]:
    """Return the categories of each group of a narrow table; those of the rest are in none."""
    groups: dict[str, list[str]] = {}
    for row in CATEGORY_ROWS.values():
        if row.group != "rest":
            groups.setdefault(row.group, []).append(row.name)
    return groups


_GROUPS = _categories_by_group()
SPLIT = f"= {' + '.join([*_GROUPS, 'rest'])}"
OVER = "over the card"
_LONGER = 0.1  # of a timed step: exposed time of profiled steps that are longer by more is shown with their length
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=%|[kMG]?B\b|[mµ]?s\b)")
_MOODS = {"agree": "good", "equal": "good", "DIFFER": "bad", "out of memory": "bad", "failed": "bad"}


@dataclass(frozen=True)
class Column:
    """A column: its name, the text of a run's cell, what the name does not say itself, and how the text is set.

    `flush_right`: a number, where there is room. `wraps`: its text may take a second line; `breaks`: also after every
    amount. `in_brief`: it is among the few that matter most, "always", or only in a table whose runs have ("steady") or
    lack ("measured") the steady card's clock. `on_pages`: False where a page shows it as a figure.
    """

    name: str
    cell: Callable[[RunView], str]
    meaning: str = ""
    flush_right: bool = False
    wraps: bool = False
    breaks: bool = False
    in_brief: str = ""
    on_pages: bool = True


def step_of(run: RunView) -> str:
    """Return the median step and its scatter, `398 ms ±3 %`, `0.9 %`; of a run without a timed step its status."""
    if not run.step_median:
        return run.status.replace("_", " ")
    return seconds(run.step_median) + scattered(run.summary.step_time_s.scatter)


def split_of(run: RunView) -> str:
    """Return the peak as a sum of five groups, in MB: `"39 + 39 + 77 + 31 + 15"`, `"0.3"` where it is little; a dash
    for an unknown group.
    """
    if not run.peak or not run.split:
        return MISSING
    # each group is taken off below, so that all parts add up to the peak
    rest = run.peak
    words = []
    for categories in _GROUPS.values():
        # of a group's categories, those that the record has
        known = [run.split[category] for category in categories if category in run.split]
        words.append(_megabytes(sum(known)) if known else MISSING)
        rest -= sum(known)
    return " + ".join([*words, _megabytes(rest)])


def _megabytes(nbytes: int) -> str:
    # `10` from 9.5 MB on, `9.4` and `0.3` below
    decimals = 0 if nbytes >= 9.5e6 else 1
    return f"{nbytes / 1e6:.{decimals}f}"


def predicted_of(run: RunView) -> str:
    """Return peak and step as predicted, each with its ratio to the measured one: `"199 MB (1.00), 98.1 ms (0.95)"`."""
    peak = beside(run.predicted_peak, run.peak, size)
    if run.summary.predicted.step_time_s is None:
        return peak
    return f"{peak}, {predicted_step(run)}"


def predicted_step(run: RunView) -> str:
    """Return the step as predicted, with the scatter of the run that it is from, and its ratio to the measured one:
    `"98.1 ms ±3 % (0.95)"`; a dash where it is not predicted.
    """
    predicted = run.summary.predicted

    def shown(step: float | None) -> str:
        return seconds(step) + scattered(predicted.step_scatter)

    return beside(predicted.step_time_s, run.step_median, shown)


def scattered(scatter: float | None) -> str:
    """Return ` ±3 %`, ` ±0.4 %`; nothing where it is not known."""
    if scatter is None:
        return ""
    # `±1 %` from 0.95 % on, `±0.4 %` below
    decimals = 0 if scatter >= 0.0095 else 1
    return f" ±{100 * scatter:.{decimals}f} %"


def beside(predicted: float | None, measured: float | None, shown: Callable[[float | None], str]) -> str:
    """Return a prediction and in brackets its ratio to what was measured; a dash where nothing is predicted."""
    if predicted is None:
        return MISSING
    if not measured:
        return shown(predicted)
    return f"{shown(predicted)} ({predicted / measured:.2f})"


def speed_of(summary: Summary) -> str:
    """Return tokens a second; `812 samples/s` of a model of one's own whose batches have none; else a dash."""
    if summary.tokens_per_s:
        return three_digits(summary.tokens_per_s)
    if summary.samples_per_s:
        return f"{three_digits(summary.samples_per_s)} samples/s"
    return MISSING


def optimizer_of(profile: Profile | None) -> str:
    """Return the optimizer's step: `85.0 ms, 40 % exchange`, `12.0 ms`; a dash where it was not profiled."""
    if profile is None or not profile.optimizer_s:
        return MISSING
    words = seconds(profile.optimizer_s)
    exchange = (profile.exchange_s or 0.0) / profile.optimizer_s
    # less would read as 0 %
    if exchange >= 0.005:
        words += f", {percent(exchange)} exchange"
    return words


def exposed_of(run: RunView) -> str:
    """Return exposed seconds of a profiled step; `378 ms of 524 ms` where it is longer than a timed one by a tenth."""
    # 0 ms would claim that something was sent and hidden
    if run.sends_nothing or run.exposed_s is None:
        return MISSING
    words = seconds(run.exposed_s)
    longer = 0.0  # profiled steps than timed ones, as a part of these
    if run.summary.profile:
        longer = run.summary.profile.overhead or 0.0
    # a timed step of 400 ms, and profiled ones that are 0.31 longer: `of 524 ms`
    if run.step_median and longer > _LONGER:
        words += f" of {seconds(run.step_median * (1 + longer))}"
    return words


def formula_of(run: RunView) -> str:
    """Return the formula's bytes, and whether the ledger equals them to the byte."""
    formula, sent = run.summary.formula_bytes_per_step, run.summary.comm.bytes_per_step
    if formula is None or sent is None:
        return size(formula)
    if sent == formula:
        return f"{size(formula)} equal"
    return f"{size(formula)} DIFFER {sent - formula:+,} B"


def _last_loss(run: RunView) -> str:
    losses = run.summary.losses
    if not losses or losses[-1] is None:
        return MISSING
    return f"{losses[-1]:.4f}"


def badge(run: RunView) -> str:
    """Return whether a finished run's losses agree with the unsharded reference; a dash where that is not known."""
    if run.status != "finished" or run.matches is None:
        return MISSING
    return "agree" if run.matches else "DIFFER"


def peak_of(run: RunView) -> str:
    """Return the peak, and whether it is over the run's card: `373 MB, over the card`."""
    words = size(run.peak)
    if run.peak and run.over_card:
        words += f", {OVER}"
    return words


def _strategy_of(run: RunView) -> str:
    return f"{run.strategy}, {run.note}" if run.note else run.strategy


# What was not measured reads as a dash; the order is that of the table.
COLUMN_ROWS = (
    Column("strategy", _strategy_of, in_brief="always"),
    Column("engine", lambda run: run.engine),
    Column("peak", peak_of, "memory of the worst rank", breaks=True, in_brief="always"),
    Column(
        SPLIT,
        split_of,
        "the peak, in MB, as parameters (sharded and unsharded) + gradients (sharded and unsharded) + optimizer state +"
        " activations + rest (communication buffers, other)",
        wraps=True,
        on_pages=False,
    ),
    Column(
        "sent",
        lambda run: size(run.summary.comm.bytes_per_step),
        "by one rank in one step",
        flush_right=True,
        in_brief="always",
    ),
    Column(
        "step, simulated",  # left out where no run is behind a link that the steady card can simulate
        lambda run: seconds(run.steady.step_time_s),
        "on the steady card, the same on every machine",
        flush_right=True,
        in_brief="steady",
    ),
    Column(
        "hidden, simulated",
        lambda run: percent(run.steady.overlap),
        "the part of its communication that is under computing",
        flush_right=True,
        in_brief="steady",
    ),
    Column(
        "step, measured",
        step_of,
        "median, ± half the range of the middle half of the steps (of 4 or more)",
        breaks=True,
        in_brief="always",
    ),
    Column("tokens/s", lambda run: speed_of(run.summary), flush_right=True),
    Column("predicted", predicted_of, "computed before the run, (1.00) is predicted / measured", breaks=True),
    Column("formula", formula_of, "what the strategy must send", wraps=True),
    Column(
        "exposed",
        exposed_of,
        "time of a profiled step (mean) in which the rank communicated and did not compute, copies and waiting for"
        " other ranks included, a dash where nothing was sent or profiled; of a step that the profiler made longer by a"
        " tenth or more also its length",
        breaks=True,
        in_brief="measured",
    ),
    Column(
        "hidden, measured",
        lambda run: percent(run.summary.comm.overlap),
        "the part of communication under computing in profiled steps",
        in_brief="measured",
    ),
    Column("loss", _last_loss, "of the last step", flush_right=True),
    Column(
        "losses",
        badge,
        "whether they agree with the unsharded twin's, one process that replays every rank's batches",
        in_brief="always",
    ),
    Column(
        "optimizer",
        lambda run: optimizer_of(run.summary.profile),
        "its step in profiled steps, and the part of it that exchanges matrices",
        breaks=True,
    ),
)
EVERY_COLUMN = tuple(column.name for column in COLUMN_ROWS)
COLUMNS = tuple(column.name for column in COLUMN_ROWS if column.on_pages)


def column(name: str) -> Column:
    """Return the row of a column; one that a table has beside those of a run has plain text."""
    for row in COLUMN_ROWS:
        if row.name == name:
            return row
    return Column(name, lambda run: MISSING)


def brief(runs: Sequence[RunView]) -> tuple[str, ...]:
    """Return the seven columns that matter most: with the steady card's clock where a run has it."""
    clock = "steady" if any(run.steady.step_time_s for run in runs) else "measured"
    return tuple(row.name for row in COLUMN_ROWS if row.in_brief in ("always", clock))


def told(runs: Sequence[RunView], columns: Sequence[str] = COLUMNS) -> tuple[str, ...]:
    """Return those of the columns in which one of the runs has a value at least."""
    rows = [cells(run, columns) for run in runs]
    valued = []
    # a column of nothing but dashes is left out
    for place, name in enumerate(columns):
        if any(row[place] != MISSING for row in rows):
            valued.append(name)
    return tuple(valued)


def cells(run: RunView, columns: Sequence[str] = COLUMNS) -> tuple[str, ...]:
    """Return one run's row, in the order of `columns`."""
    return tuple(column(name).cell(run) for name in columns)


def unbroken(text: str) -> str:
    """Join each number and its unit by a blank at which no line ends, so that a cell may break between amounts only.

    >>> unbroken("1.74 s ±11 %, over the card").split(" ")
    ['1.74\\xa0s', '±11\\xa0%,', 'over', 'the', 'card']
    """
    return _BEFORE_UNIT.sub("\u00a0", text)


def legend(columns: Sequence[str]) -> str:
    """Return what the columns mean that do not say it themselves: `peak: memory of the worst rank; ...`."""
    meanings = []
    for name in columns:
        meaning = column(name).meaning
        if meaning:
            meanings.append(f"{name}: {meaning}")
    return "; ".join(meanings)


def mood(text: str) -> str:
    """Return whether a cell's verdict is `good` or `bad`, for its colour: `mood("115 MB equal") == "good"`; else
    nothing.
    """
    if OVER in text:
        return "bad"
    # the whole text, as of `out of memory`, then its words, as of `115 MB equal`
    for word in (text, *text.split()):
        if word in _MOODS:
            return _MOODS[word]
    return ""

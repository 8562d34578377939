"""The sums of a profiled step, computed in one place: figures, findings, tables and JSON show the same numbers.

A summary is the mean over the profiled steps of one rank. Means of partitions are a partition again, so compute only +
overlapped + exposed + other is the step, and on the link + copying + waiting for a peer or a core is exposed; medians
would not add up. The rank that is exposed longest represents the run: its mean is the number that is called *exposed*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isclose
from operator import itemgetter
from statistics import fmean
from typing import Any

from fsdplab.common.rows import grouped
from fsdplab.records import PARTS_OF_EXPOSED

Row = Mapping[str, Any]


@dataclass(frozen=True)
class StepSummary:
    """One rank's mean step, in nanoseconds: `compute_ns` is `compute_only_ns` + `overlapped_ns`; `device_busy_ns` how
    long a GPU computed, copied or communicated.

    `on_link_ns` + `copying_ns` + `waiting_ns` + `no_core_ns` (waiting for a core) is `exposed_ns`; None in records of
    earlier versions, which lack them.
    """

    rank: int
    steps: int
    step_ns: float
    compute_ns: float
    compute_only_ns: float
    overlapped_ns: float
    exposed_ns: float
    other_ns: float
    on_link_ns: float | None = None
    copying_ns: float | None = None
    waiting_ns: float | None = None
    no_core_ns: float | None = None
    device_busy_ns: float | None = None

    def __post_init__(self) -> None:
        values = [getattr(self, name) for name in PARTS_OF_EXPOSED]
        parts = [value for value in values if value is not None]
        if parts:
            assert isclose(sum(parts), self.exposed_ns, rel_tol=1e-9, abs_tol=1e-3), (parts, self.exposed_ns)

    @property
    def communication_ns(self) -> float:
        """Time with communication, hidden or not."""
        return self.overlapped_ns + self.exposed_ns

    @property
    def hidden(self) -> float | None:
        """The part of communication that computing hid, 0 to 1; None where nothing was sent."""
        return self.overlapped_ns / self.communication_ns if self.communication_ns else None


# all but rank and steps, which are no means
_NAMES = tuple(each.name for each in fields(StepSummary))[2:]


def summaries(breakdown: Iterable[Row]) -> dict[int, StepSummary]:
    """The summary of each rank, from rows of a record's `breakdown` table; {} without rows."""
    by_rank = grouped(breakdown, itemgetter("rank"))
    return {rank: _summary(rank, rows) for rank, rows in sorted(by_rank.items())}


def _summary(rank: int, rows: Sequence[Row]) -> StepSummary:
    # columns that records of earlier versions lack stay None
    known = [name for name in _NAMES if all(row.get(name) is not None for row in rows)]
    means = {name: fmean(row[name] for row in rows) for name in known}
    if "waiting_ns" in means:  # records from before `no_core_ns` have the other three parts
        means.setdefault("no_core_ns", 0.0)
    return StepSummary(rank, len(rows), **means)


def step_summary(breakdown: Iterable[Row]) -> StepSummary | None:
    """The summary of the rank that is exposed longest, the first of equals; None without rows.

    A rank whose profiled steps are exposed for 10, 10 and 40 ms is exposed for 20 ms a step.
    """
    return max(summaries(breakdown).values(), key=lambda each: (each.exposed_ns, -each.rank), default=None)


def exposure(breakdown: Iterable[Row]) -> dict[str, Any]:
    """What a record's summary says of communication: exposed seconds with their parts, and the part of communication
    that computing hid, of the rank that is exposed longest; None without rows.

    A rank whose step has 6 ms of communication, 2 of them exposed: `exposed_s` is 0.002, `overlap` 0.667.
    """
    worst = step_summary(breakdown)
    exposed: dict[str, Any] = {}
    for name in _EXPOSURE:
        span_ns = getattr(worst, f"{name}_ns", None)
        exposed[f"{name}_s"] = None if span_ns is None else span_ns / 1e9
    exposed["overlap"] = worst.hidden if worst else None
    return exposed


_EXPOSURE = ("exposed", "on_link", "copying", "waiting", "no_core")


@dataclass(frozen=True)
class ExposedCell:
    """One unit's collectives of one kind in one phase, in nanoseconds a step. `cause`: why the link was not hidden."""

    unit: str
    phase: str
    kind: str
    communication_ns: float
    exposed_ns: float
    on_link_ns: float
    copying_ns: float
    waiting_ns: float
    no_core_ns: float
    cause: str

    @property
    def shown_cause(self) -> str:
        """The one cause that figures and tables give for the whole: copying, waiting for a peer or for a core where one
        of these is most of it, as the findings that claim it say.
        """
        parts = {"waiting_for_peer": self.waiting_ns, "copying": self.copying_ns, "no_core": self.no_core_ns}
        for name, part in parts.items():
            # more than half of it
            if 2 * part > self.exposed_ns:
                return name
        return self.cause


def exposed_cells(rows: Iterable[Row], steps: int) -> list[ExposedCell]:
    """One rank's rows of `exposed`, summed over its profiled steps and divided by their number: together they are what
    its summary calls exposed.

    The cause is the one of most exposed time. 10 ms in one of two steps are 5 ms a step.
    """
    by_label = grouped(rows, itemgetter("unit", "phase", "kind"))
    return [_cell(label, of_label, steps) for label, of_label in by_label.items()]


def _cell(label: tuple[str, str, str], rows: Sequence[Row], steps: int) -> ExposedCell:
    """The mean of rows of one unit, phase and kind."""
    # the cause of the whole is the one with most exposed time behind it
    by_cause: Counter[str] = Counter()
    for row in rows:
        by_cause[row["cause"]] += row["exposed_ns"]
    exposed_ns = sum(row["exposed_ns"] for row in rows) / steps
    columns = zip(*map(_parts, rows))
    return ExposedCell(
        *label,
        communication_ns=sum(row["communication_ns"] for row in rows) / steps,
        exposed_ns=exposed_ns,
        cause=max(by_cause, key=by_cause.__getitem__) if exposed_ns else "hidden",
        **{name: sum(column) / steps for name, column in zip(PARTS_OF_EXPOSED, columns)},
    )


def _parts(row: Row) -> list[int]:
    """By `PARTS_OF_EXPOSED`; by the cause alone in records of earlier versions."""
    if row.get("waiting_ns") is not None:
        return [row.get(name) or 0 for name in PARTS_OF_EXPOSED]
    # (on the link, copying, waiting, without a core): all of it is what the cause says
    if row["cause"] == "waiting_for_peer":
        return [0, 0, row["exposed_ns"], 0]
    return [row["exposed_ns"], 0, 0, 0]


# ---- the optimizer's step: its computing is that of the optimizer's ranges, or after the last backward of a step; an
# optimizer that needs whole matrices exchanges them, and what of that no computing hides is exposed in this phase


PHASE = "optimizer"


@dataclass(frozen=True)
class OptimizerStep:
    """Seconds a step of one rank: all of the phase, and what of it is exposed exchange.

    >>> OptimizerStep(0.1, 0.04).exchanging
    0.4
    """

    seconds: float
    exchange_s: float = 0.0

    @property
    def exchanging(self) -> float:
        """The part of the phase in which matrices are exchanged, 0 to 1."""
        return self.exchange_s / self.seconds if self.seconds else 0.0


def optimizer_step(tables: Mapping[str, Iterable[Row]], rank: int) -> OptimizerStep | None:
    """The phase of a rank, mean of its profiled steps; None without a profiled step, or where nothing shows it."""
    # the profiled steps of the rank
    steps = {row["step"] for row in tables.get("breakdown", ()) if row["rank"] == rank}
    if not steps:
        return None
    # computing of the phase, from the timeline; the optimizer's exchange that it did not hide, from `exposed`
    computed_ns = 0
    for row in tables.get("timeline", ()):
        is_of_phase = row["lane"] == "compute" and row["phase"] == PHASE
        if is_of_phase and row["rank"] == rank and row["step"] in steps:
            computed_ns += row["end_ns"] - row["start_ns"]
    exposed_ns = 0
    for row in tables.get("exposed", ()):
        if row["phase"] == PHASE and row["rank"] == rank:
            exposed_ns += row["exposed_ns"]
    total_s = (computed_ns + exposed_ns) / 1e9 / len(steps)
    return OptimizerStep(total_s, exposed_ns / 1e9 / len(steps)) if total_s else None


def of_the_worst(tables: Mapping[str, Iterable[Row]]) -> OptimizerStep | None:
    """That of the rank that is exposed longest, which represents the run."""
    worst = step_summary(tables.get("breakdown", ()))
    return optimizer_step(tables, worst.rank) if worst else None

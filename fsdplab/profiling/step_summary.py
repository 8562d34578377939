"""The sums of a profiled step, computed in one place: figures, findings, tables and JSON show the same numbers.

A summary is the mean over the profiled steps of one rank. Means of partitions are a partition again, so compute only +
overlapped + exposed + other is the step; medians would not add up. The rank that is exposed longest represents the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class StepSummary:
    """One rank's mean step, in nanoseconds: `compute_ns` is `compute_only_ns` + `overlapped_ns`."""

    rank: int
    steps: int
    step_ns: float
    compute_ns: float
    compute_only_ns: float
    overlapped_ns: float
    exposed_ns: float
    other_ns: float

    @property
    def communication_ns(self) -> float:
        """Time with communication, hidden or not."""
        return self.overlapped_ns + self.exposed_ns

    @property
    def hidden(self) -> float | None:
        """The part of communication that computing hid, 0 to 1; None where nothing was sent."""
        return self.overlapped_ns / self.communication_ns if self.communication_ns else None


_MEANS = ("step_ns", "compute_ns", "compute_only_ns", "overlapped_ns", "exposed_ns", "other_ns")


def summaries(breakdown: Iterable[Mapping[str, Any]]) -> dict[int, StepSummary]:
    """The summary of each rank, from rows of a record's `breakdown` table; {} without rows."""
    by_rank: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in breakdown:
        by_rank[row["rank"]].append(row)
    return {
        rank: StepSummary(rank, len(rows), **{name: fmean(row[name] for row in rows) for name in _MEANS})
        for rank, rows in sorted(by_rank.items())
    }


def step_summary(breakdown: Iterable[Mapping[str, Any]]) -> StepSummary | None:
    """The summary of the rank that is exposed longest, the first of equals; None without rows.

    A rank whose profiled steps are exposed for 10, 10 and 40 ms is exposed for 20 ms a step.
    """
    return max(summaries(breakdown).values(), key=lambda each: (each.exposed_ns, -each.rank), default=None)

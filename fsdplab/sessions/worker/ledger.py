"""Rank side of the ledger: every collective of a run, written to the rank's file after each step.

A long run has hundreds of thousands of rows, so a rank holds those of the latest step only, and those that the analysis
of its traces needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdplab.sessions.worker.rank_process import RankContext

Row = dict[str, Any]


class Ledger:
    """Collects rows of the record's `ledger` table; `kept` are those of the steps for which `keep(step)` is true."""

    def __init__(self, context: RankContext, keep: Callable[[int], bool]) -> None:
        self._context, self._keep = context, keep
        self._unwritten: list[Row] = []
        self.of_step: list[Row] = []  # of the step that was written last
        self.kept: list[Row] = []

    def add(self, row: Row) -> None:
        """A collective has ended."""
        self._unwritten.append(row)

    def write(self) -> None:
        """A step has ended: write its rows."""
        self.of_step, self._unwritten = self._unwritten, []
        self.kept += [row for row in self.of_step if self._keep(row["step"])]
        if self.of_step:
            self._context.append("ledger", *self.of_step)

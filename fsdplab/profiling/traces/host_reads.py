"""How often a step's host reads a number out of a tensor, and how often it takes the norm of a single tensor.

`.item()`, `bool(tensor)` and printing a tensor read a number: on a GPU the host then waits for all that it has queued.
Norms of single tensors are those that no operator on a list of tensors takes. What an optimizer does so is its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fsdplab.profiling.intervals import Intervals, union
from fsdplab.profiling.traces.events import Events, Window

# the name in the table `activities`, and the operators that it counts
COUNTED = {"read": ("aten::_local_scalar_dense",), "norm": ("aten::linalg_vector_norm", "aten::norm")}
_OF_A_LIST = ("aten::_foreach_norm",)


class HostReads:
    """The operators of one trace that are counted, each by its row."""

    def __init__(self, found: Events) -> None:
        self._found = found
        optimizer = [(each.start, each.end) for each in found.ranges if each.label == "optimizer"]
        lists = found.spans_of(_rows_named(found, _OF_A_LIST))
        apart = union(np.array(optimizer, dtype=np.int64).reshape(-1, 2), lists)
        self._rows = {name: _outside(found, _rows_named(found, names), apart) for name, names in COUNTED.items()}

    def of_step(self, window: Window, rank: int) -> list[dict[str, Any]]:
        """Rows of the table `activities` of one step."""
        found, listed = self._found, []
        for name, rows in self._rows.items():
            mine = rows[(found.start[rows] >= window.start) & (found.start[rows] < window.end)]
            if len(mine):
                took_ns = int((found.end[mine] - found.start[mine]).sum())
                where = {"rank": rank, "step": window.number, "name": name}
                listed.append({**where, "count": len(mine), "took_ns": took_ns, "nbytes": 0})
        return listed


def _rows_named(found: Events, names: Iterable[str]) -> np.ndarray:
    numbers = [number for number, name in enumerate(found.names) if name in set(names)]
    return np.flatnonzero(np.isin(found.name, numbers))


def _outside(found: Events, rows: np.ndarray, apart: Intervals) -> np.ndarray:
    """The rows that begin inside none of these disjoint spans."""
    if not len(apart):
        return rows
    at = np.searchsorted(apart[:, 0], found.start[rows], side="right") - 1
    inside = (at >= 0) & (found.start[rows] < apart[at, 1])
    return rows[~inside]

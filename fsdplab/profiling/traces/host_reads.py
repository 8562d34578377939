"""What a step's host does that its shares of computing do not show: numbers that it reads out of tensors, norms of
single tensors, and graphs that no backward uses.

`.item()`, `bool(tensor)` and printing a tensor read a number: on a GPU the host then waits for all that it has queued.
Norms of single tensors are those that no operator on a list of tensors takes. What an optimizer does so is its own.
Each node of a graph that a forward builds has a number, and the backward that uses it the same one: numbers of the
forward that no backward has are of a graph that was built and dropped. What is computed inside a backward is
recomputed, and builds no graph of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fsdplab.profiling.intervals import Intervals, size, union
from fsdplab.profiling.traces.event_kinds import Kind
from fsdplab.profiling.traces.events import Events, Window

# the name in the table `activities`, and the operators that it counts
COUNTED = {"read": ("aten::_local_scalar_dense",), "norm": ("aten::linalg_vector_norm", "aten::norm")}
_OF_A_LIST = ("aten::_foreach_norm",)
NODES, DROPPED = "graph", "dropped graph"  # the nodes of a step's graphs, and those of them that no backward uses
NAMES = (*COUNTED, NODES, DROPPED)


class HostReads:
    """The operators of one trace that are counted, each by its row."""

    def __init__(self, found: Events) -> None:
        self._found = found
        optimizer = [(each.start, each.end) for each in found.ranges if each.label == "optimizer"]
        lists = found.spans_of(_rows_named(found, _OF_A_LIST))
        apart = union(np.array(optimizer, dtype=np.int64).reshape(-1, 2), lists)
        self._rows = {name: _outside(found, _rows_named(found, names), apart) for name, names in COUNTED.items()}
        self._graphs = _Graphs(found)

    def of_step(self, window: Window, rank: int) -> list[dict[str, Any]]:
        """Rows of the table `activities` of one step."""
        found, listed = self._found, []
        for name, rows in self._rows.items():
            mine = rows[(found.start[rows] >= window.start) & (found.start[rows] < window.end)]
            if len(mine):
                took_ns = int((found.end[mine] - found.start[mine]).sum())
                where = {"rank": rank, "step": window.number, "name": name}
                listed.append({**where, "count": len(mine), "took_ns": took_ns, "nbytes": 0})
        for name, (count, took_ns) in self._graphs.of_step(window).items():
            where = {"rank": rank, "step": window.number, "name": name}
            listed.append({**where, "count": count, "took_ns": took_ns, "nbytes": 0})
        return listed


class _Graphs:
    """The numbers of autograd's nodes in one trace: when a forward built them, and which of them a backward used."""

    def __init__(self, found: Events) -> None:
        self._found = found
        rows, numbers = found.sequence[:, 0], found.sequence[:, 1]
        is_forward = found.kind[rows] == Kind.OPERATOR
        forward = rows[is_forward]
        backward = union(found.spans(Kind.AUTOGRAD))
        kept = np.isin(forward, _outside(found, forward, backward))
        self._built, self._numbers = forward[kept], numbers[is_forward][kept]
        self._used = set(numbers[~is_forward].tolist())

    def of_step(self, window: Window) -> dict[str, tuple[int, int]]:
        """How many nodes a step built and dropped, and for how long; nothing where no backward has numbers."""
        starts = self._found.start[self._built]
        in_step = (starts >= window.start) & (starts < window.end)
        numbers = set(self._numbers[in_step].tolist())
        dropped = numbers - self._used
        if not self._used or not dropped:
            return {}
        of_dropped = in_step & np.isin(self._numbers, list(dropped))
        return {NODES: (len(numbers), self._lasted(in_step)), DROPPED: (len(dropped), self._lasted(of_dropped))}

    def _lasted(self, which: np.ndarray) -> int:
        return size(union(self._found.spans_of(self._built[which])))


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

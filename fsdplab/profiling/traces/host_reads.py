"""What a step's host does that its shares of computing do not show: numbers that it reads out of tensors, norms of
single tensors, and graphs that no backward uses.

`.item()`, `bool(tensor)` and printing a tensor read a number: on a GPU the host then waits for all that it has queued.
Norms of single tensors are those that no operator on a list of tensors takes, and no backward uses: a norm that is a
part of the loss is needed. What an optimizer does so is its own.
Each node of a graph that a forward builds has a number, and the backward that uses it the same one: many numbers in a
row that no backward has are of a graph that was built and dropped. What is computed inside a backward is recomputed,
and builds no graph of its own. An operator has no number where torch.no_grad() is around it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fsdplab.profiling.intervals import EMPTY, Intervals, pairs, size, subtract, union, within
from fsdplab.profiling.traces.event_kinds import Kind
from fsdplab.profiling.traces.events import Events, Window

# the name in the table `activities`, and the operators that it counts
COUNTED = {"read": ("aten::_local_scalar_dense",), "norm": ("aten::linalg_vector_norm", "aten::norm")}
_OF_A_LIST = ("aten::_foreach_norm",)
NODES, DROPPED = "graph", "dropped graph"  # the nodes of a step's graphs, and those of them that no backward uses
NO_GRAPH = "products without a graph"  # of matrices, outside of the optimizer and of any backward
# Marks of a recorded job (recording/batches.py): a step, a backward or the loading of a batch has ended; a forward
# begins. What lies between them, without operators, may be spent on the next batch.
LOOP_GOES_ON, FORWARD_BEGINS = "fsdplab::loop_goes_on", "fsdplab::forward_begins"
BEFORE_FORWARD = "before a forward"
PREPARING = "preparing"  # the same as the loop's own thread counts it, in CPU time
NAMES = (*COUNTED, NODES, DROPPED, NO_GRAPH, BEFORE_FORWARD, PREPARING)
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution")
# A forward that is dropped drops its nodes one after the other; a check after each layer drops one or two in between.
IN_A_ROW = 8


class HostReads:
    """The operators of one trace that are counted, each by its row."""

    def __init__(self, events: Events) -> None:
        self._events = events
        # An optimizer reads and takes norms by itself, and a norm of a list calls those of its tensors where no kernel
        # takes all at once: neither is what somebody wrote into the loop.
        optimizer: list[tuple[int, int]] = []
        for labelled in events.ranges:
            if labelled.label == "optimizer":
                optimizer.append((labelled.start, labelled.end))
        lists = events.spans_of(_rows_named(events, _OF_A_LIST))
        not_counted = union(pairs(optimizer), lists)

        self._graphs = _Graphs(events)
        self._rows: dict[str, np.ndarray] = {}  # of each name: its operators, as rows of the events
        for name, operators in COUNTED.items():
            rows = _rows_named(events, operators)
            of_no_loss = rows[~np.isin(rows, self._graphs.trained)]
            self._rows[name] = _outside(events, of_no_loss, not_counted)
        self._rows[NO_GRAPH] = _outside(events, self._graphs.products_outside, union(pairs(optimizer)))
        self._before_forward = _before_forward(events)

    def of_step(self, window: Window, rank: int) -> list[dict[str, Any]]:
        """Rows of the table `activities` of one step."""
        counts = {**self._operators(window), **self._graphs.of_step(window)}
        alone = within(self._before_forward, window.start, window.end)
        if len(alone):
            counts[BEFORE_FORWARD] = len(alone), size(alone)
        activities = []
        for name, (count, took_ns) in counts.items():
            activities.append(
                {
                    "rank": rank,
                    "step": window.number,
                    "name": name,
                    "count": count,
                    "took_ns": took_ns,
                    "nbytes": 0,  # nothing is moved
                }
            )
        return activities

    def _operators(self, window: Window) -> dict[str, tuple[int, int]]:
        """How many operators of each name began in a step, and for how long they ran."""
        counts = {}
        for name, rows in self._rows.items():
            starts = self._events.start[rows]
            in_step = rows[(starts >= window.start) & (starts < window.end)]
            if len(in_step):
                lasted = self._events.end[in_step] - self._events.start[in_step]
                counts[name] = len(in_step), int(lasted.sum())
        return counts


class _Graphs:
    """The numbers of autograd's nodes in one trace: when a forward built them, and which of them a backward used.

    `trained`: the operators whose nodes a backward used, as rows of the events.
    """

    def __init__(self, events: Events) -> None:
        # Operators of a forward that built nodes 5, 6 and 7, and ranges of autograd that ran 7 and 6: node 5 was built
        # and not used.
        self._events = events
        rows = events.sequence[:, 0]
        numbers = events.sequence[:, 1]
        is_forward = events.kind[rows] == Kind.OPERATOR
        self._used = set(numbers[~is_forward].tolist())

        # what runs inside a backward is recomputed: the graph that it builds is used at once
        forward = rows[is_forward]
        backward = union(events.spans(Kind.AUTOGRAD))
        is_kept = np.isin(forward, _outside(events, forward, backward))
        self._built = forward[is_kept]  # the operators, as rows of the events
        self._numbers = numbers[is_forward][is_kept]  # of each of them its node's
        self.trained = self._builders_of_used()
        # products that are no operators with a number and are inside of none
        products = _outside(events, _rows_named(events, _PRODUCTS), backward)
        numbered = union(events.spans_of(forward))
        self.products_outside = _outside(events, products, numbered)

    def _builders_of_used(self) -> np.ndarray:
        """The operators that built nodes which a backward used.

        An operator that builds no node has the number of the next node: of 5, 5, 6 the second operator built node 5.
        """
        order = np.argsort(self._events.start[self._built], kind="stable")
        rows, numbers = self._built[order], self._numbers[order]
        # the last operator with a number is the first one in reverse
        _, from_the_end = np.unique(numbers[::-1], return_index=True)
        last = len(numbers) - 1 - from_the_end
        is_used = np.isin(numbers[last], list(self._used))
        return rows[last[is_used]]

    def of_step(self, window: Window) -> dict[str, tuple[int, int]]:
        """How many nodes a step built and dropped, and for how long; nothing where no backward has numbers."""
        starts = self._events.start[self._built]
        in_step = (starts >= window.start) & (starts < window.end)
        numbers = np.unique(self._numbers[in_step])  # of the step's nodes, in the order in which they were built
        is_dropped = _in_long_runs(~np.isin(numbers, list(self._used)))
        if not self._used or not is_dropped.any():
            return {}
        dropped = numbers[is_dropped]
        of_dropped = in_step & np.isin(self._numbers, dropped)
        return {NODES: (len(numbers), self._lasted(in_step)), DROPPED: (len(dropped), self._lasted(of_dropped))}

    def _lasted(self, which: np.ndarray) -> int:
        """For how long these operators ran, those inside others counted once."""
        spans = self._events.spans_of(self._built[which])
        return size(union(spans))


def _before_forward(events: Events) -> Intervals:
    """When no operator ran between a mark of the loop and the forward that follows it."""
    loop, forward = (events.start[_rows_named(events, (name,))] for name in (LOOP_GOES_ON, FORWARD_BEGINS))
    if not len(loop) or not len(forward):
        return EMPTY
    loop, forward = np.sort(loop), np.sort(forward)
    last_mark = np.searchsorted(loop, forward, side="right") - 1
    spans = []
    for mark, begin in zip(last_mark.tolist(), forward.tolist()):
        if mark >= 0:
            spans.append((int(loop[mark]), begin))
    # of two forwards after one mark the first one has the batch, and what runs in it is no time without operators
    first_of_mark = {begin: (begin, end) for begin, end in reversed(spans)}
    return subtract(pairs(sorted(first_of_mark.values())), events.spans(Kind.OPERATOR, Kind.AUTOGRAD))


def _in_long_runs(flags: np.ndarray) -> np.ndarray:
    """The flags of which at least IN_A_ROW neighbours are set: of one in between others none is left."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    long_runs = np.zeros_like(flags)
    # the edges are where a run begins and where it has ended, in turn
    for begin, end in edges.reshape(-1, 2):
        long_runs[begin:end] = end - begin >= IN_A_ROW
    return long_runs


def _rows_named(events: Events, names: Iterable[str]) -> np.ndarray:
    """The rows of events of these names."""
    # an event holds the number of its name, so each different name is compared once
    wanted = set(names)
    numbers = [number for number, name in enumerate(events.names) if name in wanted]
    return np.flatnonzero(np.isin(events.name, numbers))


def _outside(events: Events, rows: np.ndarray, spans: Intervals) -> np.ndarray:
    """The rows that begin inside none of these disjoint spans."""
    if not len(spans):
        return rows
    starts = events.start[rows]
    # disjoint spans: only the one that began last can hold a start; -1 where none began before it
    last_begun = np.searchsorted(spans[:, 0], starts, side="right") - 1
    is_inside = (last_begun >= 0) & (starts < spans[last_begun, 1])
    return rows[~is_inside]

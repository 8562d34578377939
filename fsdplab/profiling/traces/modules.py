"""The module of the model in which work began, from the ranges that the profiler writes with `with_stack=True`.

A forward's work is in the range of its module (`nn.Module: Block_3`). A backward's is in none: its node of the graph
has the number of the operator that built it, and belongs to that operator's module. Modules are told at the outermost
depth at which there are several: the blocks of a model, and not the wrapper around it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsdplab.profiling.traces.event_kinds import Kind
from fsdplab.profiling.traces.events import Events, Range
from fsdplab.profiling.traces.segments import nests


class Modules:
    """Finds the module at instants of threads; "" where the trace has none."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._around = nests(events.modules)
        # an operator and the node that it built have one number; of several operators with it the first counts
        self._forward: dict[str, int] = {}  # number of a node -> row of the operator that built it
        backward = []
        for row, number in dict(events.sequence.tolist()).items():
            kind = events.kind[row]
            if kind == Kind.AUTOGRAD:
                backward.append(self._node(row, number))
            if kind == Kind.OPERATOR:
                self._forward.setdefault(str(number), row)
        self._nodes = nests(backward)
        self._depth = self._depth_of_several() if events.modules else 0

    def _node(self, row: int, number: int) -> Range:
        """A node of the backward as a range that is labelled by its number."""
        events = self._events
        return Range(str(number), "", int(events.start[row]), int(events.end[row]), int(events.thread[row]))

    def _depth_of_several(self) -> int:
        """The outermost depth at which several modules ran."""
        names: list[set[str]] = []  # of each depth, the outermost first
        for module in self._events.modules:
            depth = len(self._path(module.start, module.thread)) - 1
            while len(names) <= depth:
                names.append(set())
            names[depth].add(module.label)
        return next((depth for depth, labels in enumerate(names) if len(labels) > 1), 0)

    def _path(self, instant: int, thread: int) -> list[str]:
        """The modules around an instant, outermost first."""
        nest = self._around.get(thread)
        if nest is None:
            return []
        # `around` is innermost first
        return [module.label for module in reversed(nest.around(instant))]

    def at(self, instants: np.ndarray, threads: np.ndarray) -> list[str]:
        """The module of work that began at each instant on each thread."""
        if not self._events.modules:
            return [""] * len(instants)
        return [self._at(instant, thread) for instant, thread in zip(instants.tolist(), threads.tolist())]

    def _at(self, instant: int, thread: int) -> str:
        # autograd's threads are inside no module
        path = self._path(instant, thread) or self._path_of_forward(instant, thread)
        if not path:
            return ""
        # what the wrapper does itself is inside no module of that depth
        return path[min(self._depth, len(path) - 1)]

    def _path_of_forward(self, instant: int, thread: int) -> Sequence[str]:
        """Of a backward, the modules of the operator that built its node."""
        nest = self._nodes.get(thread)
        if nest is None:
            return []
        for node in nest.around(instant):
            row = self._forward.get(node.label)
            if row is not None:
                return self._path(int(self._events.start[row]), int(self._events.thread[row]))
        return []

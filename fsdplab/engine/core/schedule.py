"""What to gather ahead: pure decisions over unit names, shared by the engine and by the planner's simulator.

Forward order is learnt: the first forward gathers every unit on demand, later ones gather `depth` units ahead as long
as they follow the order learnt. Backward order is the reverse of the order in which forwards ended.
"""

from __future__ import annotations

from collections.abc import Sequence


class Schedule:
    """The order of units, and which of them to gather next.

    >>> plan = Schedule(depth=1)
    >>> for _ in range(2):
    ...     plan.begin()
    ...     ahead = [plan.before_forward(u) for u in ("root", "a", "b")]
    ...     for u in ("a", "b", "root"): plan.after_forward(u)
    >>> ahead, plan.before_backward("root"), plan.before_backward("b"), plan.before_backward("a")
    ([['a'], ['b'], []], ['b'], ['a'], [])
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._learned: list[str] = []
        self._entered: list[str] = []
        self._ended: list[str] = []

    def begin(self) -> None:
        """A new root forward begins; what the last one did is the order to expect."""
        self._learned, self._entered, self._ended = self._entered or self._learned, [], []

    def before_forward(self, unit: str) -> Sequence[str]:
        """Note that `unit` begins; the units to gather behind its forward."""
        self._entered.append(unit)
        position = len(self._entered)
        if self._learned[:position] != self._entered:
            return []
        return self._learned[position : position + self.depth]

    def after_forward(self, unit: str) -> None:
        """Note that the forward of `unit` ended."""
        self._ended.append(unit)

    def before_backward(self, unit: str) -> Sequence[str]:
        """The units to gather behind the backward of `unit`, nearest first."""
        if unit in self._ended:
            last = len(self._ended) - 1 - self._ended[::-1].index(unit)
            del self._ended[last:]
        return self._ended[: -self.depth - 1 : -1] if self.depth else []

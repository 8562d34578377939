"""What communication could be hidden, and what was: the judgement of overlap, from intervals alone.

Units 0, 1, ... run in this order forward and in reverse backward. Full sharding with one unit of prefetch lets
communication travel behind exactly one piece of computing, its slot:

    forward of i     the all-gather of i + 1
    backward of i    the all-gather of i - 1 and the reduce-scatter of i + 1

In a slot min(communication, computing) can be hidden. The first gather of a forward and of a backward, and the last
reduction, have nothing to hide behind and do not count. Hidden is the communication during which something was
computed, at most what can be hidden, slot by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdplab.profiling.intervals import Intervals, intersect, length, union

_UNDER = 0.5  # of what fits, to count as lying under


@dataclass(frozen=True)
class Span:
    """Something that a unit did in [start_ns, end_ns): `what` is compute, all_gather or reduce_scatter, `phase` forward
    or backward.
    """

    unit: str
    what: str
    phase: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Slot:
    """A piece of computing, and the communication that may hide behind it; all in nanoseconds."""

    unit: str
    phase: str
    compute_ns: int
    communication_ns: int
    hideable_ns: int
    hidden_ns: int


@dataclass(frozen=True)
class Hiding:
    """One step, judged. `elsewhere` names, in words, communication that did not run under the computing of its slot."""

    slots: tuple[Slot, ...]
    elsewhere: tuple[str, ...]

    @property
    def hideable_ns(self) -> int:
        """What could be hidden."""
        return sum(slot.hideable_ns for slot in self.slots)

    @property
    def hidden_ns(self) -> int:
        """What of it was hidden."""
        return sum(slot.hidden_ns for slot in self.slots)

    @property
    def share(self) -> float | None:
        """The hidden part of what could be hidden, 0 to 1; None where nothing could."""
        return self.hidden_ns / self.hideable_ns if self.hideable_ns else None


def judge(units: Sequence[str], spans: Sequence[Span]) -> Hiding:
    """Judge the spans of one step of `units`, given in forward order. A unit without a span of a kind has none there.

    Two units that compute 10 each forward, the gather of the second (4) from 2 to 6: 4 could be hidden and were. From 8
    to 12, with the second's forward from 12 on: 2 of 4.
    """
    busy = union([(span.start_ns, span.end_ns) for span in spans if span.what == "compute"])
    slots, elsewhere = [], []
    for index, unit in enumerate(units):
        for phase, behind in (("forward", _behind_forward(units, index)), ("backward", _behind_backward(units, index))):
            computing = _of(spans, unit, "compute", phase)
            travelling = {(other, what): _of(spans, other, what, phase) for other, what in behind}
            slots.append(_slot(unit, phase, computing, union(*travelling.values()), busy))
            elsewhere += [
                f"{what} of {other} not under {phase} of {unit}"
                for (other, what), it in travelling.items()
                if not _lies_under(it, computing)
            ]
    return Hiding(tuple(slots), tuple(elsewhere))


def _behind_forward(units: Sequence[str], index: int) -> list[tuple[str, str]]:
    return [(other, "all_gather") for other in units[index + 1 : index + 2]]


def _behind_backward(units: Sequence[str], index: int) -> list[tuple[str, str]]:
    before = [(units[index - 1], "all_gather")] if index else []
    return before + [(other, "reduce_scatter") for other in units[index + 1 : index + 2]]


def _of(spans: Sequence[Span], unit: str, what: str, phase: str) -> Intervals:
    return union(
        [(span.start_ns, span.end_ns) for span in spans if (span.unit, span.what, span.phase) == (unit, what, phase)]
    )


def _slot(unit: str, phase: str, computing: Intervals, travelling: Intervals, busy: Intervals) -> Slot:
    hideable = min(length(computing), length(travelling))
    hidden = min(length(intersect(travelling, busy)), hideable)
    return Slot(unit, phase, length(computing), length(travelling), hideable, hidden)


def _lies_under(travelling: Intervals, computing: Intervals) -> bool:
    fits = min(length(travelling), length(computing))
    return length(intersect(travelling, computing)) >= _UNDER * fits

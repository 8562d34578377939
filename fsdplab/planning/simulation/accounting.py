"""A simulated rank's step in the record's terms, in whole nanoseconds: every instant in one part of the step.

The definitions are those of measured steps (`profiling/traces/account.py`): an instant with communication and
without compute is exposed, and belongs to the collective that ends first; between a collective's turn on this rank and
its beginning, the rank waits for its peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .network import Collective
from .ranks import RankLog, Span

_ENOUGH = 0.1  # computing of a tenth of the exposed time is something to hide behind, as for measured steps


def nanoseconds(seconds: float) -> int:
    """Whole nanoseconds: `nanoseconds(0.0015) == 1_500_000`."""
    return round(seconds * 1e9)


@dataclass
class Passage:
    """One collective as one rank saw it, and how much of it was exposed."""

    collective: Collective
    issue: int
    start: int  # its turn came on this rank
    begin: int  # on all of its ranks
    end: int
    waiting_ns: int = 0
    on_link_ns: int = 0

    @property
    def exposed_ns(self) -> int:
        """On the link and waiting for a peer."""
        return self.waiting_ns + self.on_link_ns


@dataclass
class Account:
    """The parts of a rank's step in ns, its collectives, and the exposed intervals with the collective of each."""

    step_ns: int
    passages: list[Passage]
    compute_only_ns: int = 0
    overlapped_ns: int = 0
    exposed_ns: int = 0
    other_ns: int = 0
    exposed: list[tuple[int, int, Passage]] = field(default_factory=list)


def account(log: RankLog, index: int) -> Account:
    """The account of a rank's log; `index` is its class's. The parts' sum is the step's length, which is asserted."""
    passages = [_passage(each, index) for each in log.collectives]
    found = Account(nanoseconds(log.end), passages)
    computed = [(nanoseconds(span.start), nanoseconds(span.end)) for span in log.computed]
    edges = {0, found.step_ns}.union(*computed, *((each.start, each.begin, each.end) for each in passages))
    travelling = sorted(passages, key=lambda each: each.start)
    active: list[Passage] = []
    busy_at = at = 0
    ordered = sorted(edges)
    for low, high in zip(ordered, ordered[1:]):
        while at < len(travelling) and travelling[at].start <= low:
            active.append(travelling[at])
            at += 1
        active = [each for each in active if each.end > low]
        while busy_at < len(computed) and computed[busy_at][1] <= low:
            busy_at += 1
        busy = busy_at < len(computed) and computed[busy_at][0] <= low
        _add(found, low, high, busy, min(active, key=lambda each: each.end, default=None))
    parts = found.compute_only_ns + found.overlapped_ns + found.exposed_ns + found.other_ns
    assert parts == found.step_ns, f"the parts of a simulated step sum to {parts} ns, and the step is {found.step_ns}"
    return found


def _passage(each: Collective, index: int) -> Passage:
    assert each.begun is not None and each.ended is not None, f"{each.unit}'s {each.transfer.kind} never ended"
    times = (each.issued[index], each.started[index], each.begun, each.ended)
    return Passage(each, *map(nanoseconds, times))


def _add(found: Account, low: int, high: int, busy: bool, owner: Passage | None) -> None:
    """An interval in which nothing begins and nothing ends."""
    length = high - low
    if busy:
        found.overlapped_ns += length if owner else 0
        found.compute_only_ns += 0 if owner else length
    elif owner is None:
        found.other_ns += length
    else:
        found.exposed_ns += length
        owner.waiting_ns += length if high <= owner.begin else 0
        owner.on_link_ns += 0 if high <= owner.begin else length
        if found.exposed and found.exposed[-1][1] == low and found.exposed[-1][2] is owner:
            low = found.exposed.pop()[0]
        found.exposed.append((low, high, owner))


def cause_of(passage: Passage, computed: Sequence[Span]) -> str:
    """Why its exposed time was not hidden: one of the record's causes, in the order of `account.py`."""
    exposed = passage.exposed_ns
    if not exposed:
        return "hidden"
    if 2 * (passage.start - passage.issue) >= exposed:
        return "link_busy"
    if 2 * passage.waiting_ns >= exposed:
        return "waiting_for_peer"
    before = sum(
        nanoseconds(span.end) - nanoseconds(span.start) for span in computed if nanoseconds(span.end) <= passage.issue
    )
    late = passage.collective.on_demand and before > _ENOUGH * exposed
    return "late_start" if late else "nothing_to_hide_behind"

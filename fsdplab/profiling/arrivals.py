"""When the ranks of a record came to their collectives, on one clock and on clocks of their own.

A late rank is every other rank's exposed time. On the CPU a rank comes to a collective when it issues it; on a GPU its
host runs ahead, so it comes when the device begins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from fsdplab.common.collectives import PAIRED
from fsdplab.profiling.traces.clocks import clocks_of, contradict
from fsdplab.profiling.traces.groups import of_axis
from fsdplab.profiling.traces.meeting import Key, matched
from fsdplab.records import RunRecord
from fsdplab.records.tables import Row

Arrivals = Mapping[Any, Mapping[int, int]]  # of each collective (by its `Key`): rank -> when it came, in ns


def arrivals_of(record: RunRecord, steps: Iterable[int]) -> dict[Key, dict[int, int]]:
    """For each collective, by its identity: rank -> when it came, in ns on one clock, of these steps; collectives of
    one rank alone are left out.
    """
    return Meetings.of(record, steps).arrivals()


@dataclass(frozen=True)
class Meetings:
    """The rows of a record's collectives, and which of them are the same collective on several ranks."""

    rows: Sequence[Row]
    shared: Mapping[Key, Sequence[Row]]  # the rows of each collective of several ranks
    ahead: Mapping[int, int]  # rank -> by how many ns its clock is ahead
    on_gpu: bool

    @classmethod
    def of(cls, record: RunRecord, steps: Iterable[int]) -> Meetings:
        """The collectives of these steps. The ledger has all steps of the lab's engine, the table `collectives` the
        profiled ones of every engine.
        """
        wanted = set(steps)
        ledger = [row for row in record.table("ledger") if row["step"] in wanted]
        if ledger:
            rows = [_of_axis(row, record.spec) for row in ledger]
        else:
            rows = [row for row in record.table("collectives") if row["step"] in wanted]
        shared: dict[Key, list[Row]] = {}
        for key, members in matched(rows).items():
            if len(members) > 1:
                shared[key] = members
        # a ledger's ends are those of its host: it shows only that clocks differ by far
        is_one_clock = bool(ledger) and not contradict(shared.values())
        clocks = {} if is_one_clock else clocks_of(shared.values())
        ahead = {rank: clock.ahead_ns for rank, clock in clocks.items()}
        return cls(rows, shared, ahead, record.environment.get("device") == "cuda")

    def arrivals(self) -> dict[Key, dict[int, int]]:
        """For each shared collective: rank -> when it came."""
        arrivals = {}
        for key, members in self.shared.items():
            arrivals[key] = {row["rank"]: self._came(row) for row in members}
        return arrivals

    def own_clocks(self) -> dict[Key, dict[int, int]] | None:
        """The same arrivals on the ranks' own clocks, which stand still while they wait for others; None where the rows
        do not say how long they waited.
        """
        last_came: dict[int, int] = {}  # by the identity of a row: when the last rank came to its collective
        for members in self.shared.values():
            last = max(map(self._came, members))
            for row in members:
                last_came[id(row)] = last

        waits: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of each rank: until when, and for how long
        for row in self.rows:
            waited_ns = self._waited_ns(row, last_came.get(id(row)))
            if waited_ns is None:
                return None
            ended = self._ended(row)
            # a wait is over when the last rank comes, and the rest of the collective is the link's
            until = min(last_came.get(id(row), ended), ended)
            waits[row["rank"]].append((until, waited_ns))

        clocks = {rank: _StandingClock(of_rank) for rank, of_rank in waits.items()}
        arrivals = {}
        for key, members in self.shared.items():
            on_own_clock: dict[int, int] = {}
            for row in members:
                rank = row["rank"]
                on_own_clock[rank] = clocks[rank].at(self._came(row))
            arrivals[key] = on_own_clock
        return arrivals

    def _came(self, row: Row) -> int:
        """When the rank of a row came."""
        came: int | None = None
        if not self.on_gpu:
            came = row.get("issue_ns")
        if came is None:  # on a GPU, and where a record does not tell when it was issued
            came = row["start_ns"]
        return int(came) - self.ahead.get(row["rank"], 0)

    def _ended(self, row: Row) -> int:
        """When it ended there."""
        return int(row["end_ns"]) - self.ahead.get(row["rank"], 0)

    def _waited_ns(self, row: Row, last: int | None) -> int | None:
        """For how long a rank stood still in a collective until its last rank came, at `last`; where nobody knows who
        that was, for how long it stood still at all.
        """
        if "waited_ns" not in row:
            waiting_ns: int | None = row.get("waiting_ns")
            if waiting_ns is None or last is not None:
                return waiting_ns
            return waiting_ns + row["on_link_ns"]
        # of a ledger: the time before the end in which whoever needs the result stood still
        blocked_ns = row["waited_ns"]
        if blocked_ns is None:
            return None
        ended = self._ended(row)
        from_when = max(ended - blocked_ns, self._came(row))
        until = ended if last is None else min(ended, last)
        return max(0, until - from_when)


def _of_axis(row: Row, spec: Mapping[str, Any]) -> Row:
    """A row of the ledger with its process group: that of the mesh's axis."""
    if row["kind"] == PAIRED:
        return row
    group = of_axis(spec, row["rank"], row["kind"])
    return row | {"members": group.members, "group_size": group.size}


class _StandingClock:
    """A clock that stands still during its rank's waits.

    >>> clock = _StandingClock([(300, 100)])       # until 300, for 100
    >>> clock.at(200), clock.at(300), clock.at(350)
    (200, 200, 250)
    """

    def __init__(self, waits: Sequence[tuple[int, int]]) -> None:
        # of waits until 300 for 100 and until 500 for 20: 0, 100 and 120 ns have been waited before, between and behind
        ordered = sorted(waits)
        self._until = [until for until, _ in ordered]
        self._waited = [0, *accumulate(waited_ns for _, waited_ns in ordered)]

    def at(self, instant: int) -> int:
        """What it shows: the instant, less all waits that have ended by then."""
        return instant - self._waited[bisect_right(self._until, instant)]

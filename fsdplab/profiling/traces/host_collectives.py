"""The collectives of CPU ranks, and of gloo between GPUs: an engine's ranges open them, transports complete them.

A collective begins as a draft, opened by the range that issues it. A transport (one of gloo's ranges, the host's copies
through shared memory, a row of an emulated link's ledger) completes the draft that it belongs to. They are matched by
order, since gloo works in the order of issue.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from fsdplab.common.collectives import collective_row
from fsdplab.common.rows import grouped
from fsdplab.profiling.traces.chrome import LATEST_NS
from fsdplab.profiling.traces.collective import (
    CLOSES,
    GOES_ON,
    MARKED,
    OPENS,
    Collective,
    Piece,
    carry,
    issued_by_consumer,
    rows_within,
)
from fsdplab.profiling.traces.event_kinds import Kind
from fsdplab.profiling.traces.events import Events, Range, Transfer
from fsdplab.profiling.traces.groups import Group, Groups
from fsdplab.profiling.traces.segments import nests

_ISSUE = attrgetter("issue")
_SAME_SIZE, _UNTOLD, _OTHER_SIZE = range(3)
_MOST_WAITING = 64  # calls among which that of a transfer is looked for


class Drafts:
    """Drafts of collectives, opened by the engine's ranges and completed by transports.

    `collectives` has all of them, in the order in which they were opened. Call the `take_...` methods of the transports
    that the run used, shared memory first.
    """

    def __init__(self, events: Events, groups: Groups) -> None:
        self.collectives: list[Collective] = []
        self._events = events
        self._groups = groups
        self._awaiting = _Awaiting()
        self._nests = nests(events.ranges)
        self._of_mark: dict[int, Collective] = {}  # by the identity of the engine's range
        self._has_gloo = any(transfer.carrier == Kind.GLOO for transfer in events.transfers)
        # of each kind and unit the drafts that a later range closes, the oldest first
        to_close: dict[tuple[str, str], deque[Collective]] = defaultdict(deque)
        for mark in events.ranges:
            if mark.label in MARKED and mark.label != "link":
                self._take_mark(mark, to_close)

    def _take_mark(self, mark: Range, to_close: dict[tuple[str, str], deque[Collective]]) -> None:
        """Open a draft with an engine's range, or find the draft that the range closes or goes on with."""
        # which kind of draft it closes or goes on with; None where it opens one
        goes_on = mark.label in GOES_ON
        closes = CLOSES.get(mark.label)
        if goes_on:
            closes = "all_reduce"
        elif mark.label == "all_reduce" and not self._has_gloo and to_close["all_reduce", mark.unit]:
            closes = "all_reduce"  # over shared memory a pair of ranges of one name
        kind = closes or OPENS[mark.label]
        queue = to_close[kind, mark.unit]

        # the draft: the oldest that is open, or a new one
        if goes_on and not queue:
            return
        if goes_on:
            draft = queue[0]  # which stays: a range behind this one closes it
        elif closes and queue:
            draft = queue.popleft()
        else:
            draft = self._open(kind, mark.unit, mark.start, mark)
            if not closes:
                queue.append(draft)
        draft.add(Piece(mark.start, mark.end, "copy-out" if closes else "copy-in"))
        self._of_mark[id(mark)] = draft

    def _open(self, kind: str, unit: str, issue: int, mark: Range | None = None) -> Collective:
        """Begin a draft that waits for its transport; `mark` is the range or the call that issued it."""
        draft = Collective(kind, unit, issue, mark=mark)
        if mark is not None:
            draft.own = issued_by_consumer(self._around(mark), unit)
        self.collectives.append(draft)
        self._awaiting.add(draft)
        return draft

    def _around(self, call: Range) -> list[Range]:
        """The engine's ranges around a call, the innermost first."""
        nest = self._nests.get(call.thread)
        if nest is None:  # a thread on which the engine runs nothing
            return []
        return nest.around(call.start)

    # ---- transports

    def take_shared_memory(self, role: str = "") -> None:
        """Take the host's copies for torch's own engines: the transport itself, or beside an emulated link's transfer
        with a `role`.
        """
        for transfer in self._events.transfers:
            if transfer.carrier == Kind.SHM:
                call = Range(transfer.kind, "", transfer.start, transfer.end, transfer.thread)
                owner = self._owner(call)
                owner.by_host = True
                self._complete(owner, transfer, role=role)

    def take_gloo(self) -> None:
        """Take gloo's ranges in order of time, each with the issue of its family that it carries out."""
        issues: dict[str, list[Range]] = defaultdict(list)
        for issue in _outermost(self._events.issues):
            issues[_family(issue.label)].append(issue)
        for transfer in self._events.transfers:
            if transfer.carrier != Kind.GLOO:
                continue
            waiting = issues[_family(transfer.kind)]
            call = self._issue_of_gloo(transfer, waiting)
            if call is not None:
                waiting.remove(call)
                self._complete(self._owner(call), transfer, call)
            else:  # the trace does not show the call
                draft = self._oldest_for(transfer)
                draft.issued = draft.mark is not None
                self._complete(draft, transfer)

    def _issue_of_gloo(self, transfer: Transfer, waiting: Sequence[Range]) -> Range | None:
        """The issue that a transfer carries out: the oldest, as gloo works in the order of issue inside of a process
        group; several groups overtake each other, so kind and size come first, as far as they are told.
        """
        best: tuple[bool, int] | None = None
        call = None
        for issue in waiting[:_MOST_WAITING]:
            if issue.start > transfer.start:
                break
            fits = _carries_other_kind(issue.label, transfer.kind), self._size_differs(issue, transfer)
            if best is None or fits < best:
                best, call = fits, issue
            if best == (False, _SAME_SIZE):
                break
        return call

    def _size_differs(self, call: Range, transfer: Transfer) -> int:
        """Whether a tensor of the call has the size of the transfer: `_SAME_SIZE`, `_UNTOLD` or `_OTHER_SIZE`."""
        given = _numels(self._events.details[call.row].get("Input Dims")) if call.row >= 0 else []
        moved = _numels(transfer.details.get("Input Dims"))
        if not any(given) or not any(moved):
            return _UNTOLD
        # several tensors may be moved as one
        if sum(moved) in (*given, sum(given)) or set(moved) <= set(given):
            return _SAME_SIZE
        return _OTHER_SIZE

    def _oldest_for(self, transfer: Transfer) -> Collective:
        """The draft of a transfer whose issue the trace does not show."""
        draft = self._awaiting.oldest(transfer.end, "of kind", transfer.kind)
        if draft is None:
            draft = self._awaiting.oldest(transfer.end, _family(transfer.kind))
        if draft is None:
            draft = self._open(transfer.kind, "", transfer.start)
        return draft

    def take_link(self, ledger: Sequence[dict[str, Any]], life: Sequence[dict[str, Any]]) -> None:
        """Take the link's transfers in order, each with the oldest draft of its kind and unit; what blocked the host
        goes to the transfer it waited for.
        """
        unshards = [transition for transition in life if transition["state"] == "unsharding"]
        for row, start, end in rows_within(self._events, ledger):
            key = ["of kind", row["kind"]]
            if row["unit"]:  # torch's engines give the link no unit: the order of issue decides
                key.append(row["unit"])
            draft = self._awaiting.oldest(end, *key)
            if draft is None:
                issue = _issue_of(row, unshards) - self._events.base_ns
                draft = self._open(row["kind"], row["unit"], issue)
            self._awaiting.remove(draft)
            draft.pass_link(row, start, end)
        self._take_waits_for_link()

    def _take_waits_for_link(self) -> None:
        """Give each wait for the link to the unit's transfer whose end is nearest, of those issued by then."""
        carried = [draft for draft in self.collectives if draft.transport]
        carried.sort(key=attrgetter("end"))
        by_unit = grouped(carried, attrgetter("unit"))
        times: dict[str, np.ndarray] = {}  # of each unit two rows: when its transfers ended, and were issued
        for unit, drafts in by_unit.items():
            times[unit] = np.array([(draft.end, draft.issue) for draft in drafts]).T
        for wait in self._events.ranges:
            if wait.label != "link" or wait.unit not in times:
                continue
            ends, issues = times[wait.unit]
            was_issued = issues <= wait.end
            # a wait that ends at 50, of transfers that ended at 48 and 70 and were issued by then: the first one
            distance = np.where(was_issued, abs(ends - wait.end), LATEST_NS)
            nearest = int(np.argmin(distance))
            if was_issued[nearest]:
                by_unit[wait.unit][nearest].add(Piece(wait.start, wait.end, "blocked"))

    # ---- which draft a transport belongs to

    def _owner(self, call: Range) -> Collective:
        """The draft that a call belongs to: of the engine's range around it, or the newest of the unit around it that
        still lacks a transport.
        """
        around = self._around(call)
        family = _family(call.label)
        unit = around[0].unit if around else ""
        draft = self._of_ranges(around)
        if draft is None and around:
            draft = self._awaiting.newest(call.start, family, unit)
        if draft is None:
            return self._open(call.label, unit, call.start, call)
        # a second transport, or one that fits the draft in no other way, is a collective of its own
        if draft.transport:
            return self._open_inside(draft, call)
        if _family(draft.kind) != family or draft.issue > call.start:
            return self._open(call.label, draft.unit, call.start, call)
        if call.label != draft.kind:  # another kind of the family, such as the all_reduce of a reduce_scatter
            self._awaiting.remove(draft)
            draft.kind = call.label or draft.kind
            self._awaiting.add(draft)
        return draft

    def _open_inside(self, outer: Collective, call: Range) -> Collective:
        """Begin a draft for a call in the range of another collective, which has its transport: the rest of the range
        is the call's. FSDP2 reduces among the shards and sums over the replicas in one range.
        """
        draft = self._open(call.label, outer.unit, call.start, call)
        for place, piece in enumerate(outer.pieces):
            if piece.role and piece.start <= call.start < piece.end:
                outer.pieces[place] = piece._replace(end=call.start)
                draft.add(piece._replace(start=call.start))
                draft.mark = call._replace(end=max(call.end, piece.end))
        return draft

    def _of_ranges(self, around: Sequence[Range]) -> Collective | None:
        """The draft that the innermost of these ranges opened or closed."""
        for outer in around:
            draft = self._of_mark.get(id(outer))
            if draft is not None:
                return draft
        return None

    def _complete(self, draft: Collective, transfer: Transfer, call: Range | None = None, role: str = "") -> None:
        """Give a draft its transfer; one with a `role` lies beside the transport, which is still to come."""
        if not role:
            self._awaiting.remove(draft)
        carry(draft, transfer, [transfer.details], self._group(draft, transfer, call), self._events, role)

    def _group(self, draft: Collective, transfer: Transfer, call: Range | None) -> Group:
        """The process group: as the transfer's arguments tell it, the shapes of its call, or the engine's unit."""
        group = self._groups.of_call([transfer.details])
        if not group.members and call is not None and call.row >= 0:
            name = self._events.names[int(self._events.name[call.row])]
            group = self._groups.of_operator(name, self._events.details[call.row])
        if not group.members:
            group = self._groups.of_unit(draft.kind) if draft.unit else self._groups.only
        return group


class _Awaiting:
    """Drafts that lack a transport, in order of issue: of each family or kind, and of each unit in it."""

    def __init__(self) -> None:
        self._lists: dict[tuple[str, ...], list[Collective]] = defaultdict(list)

    def add(self, draft: Collective) -> None:
        """Note a draft that lacks its transport."""
        for key in self._keys(draft):
            insort(self._lists[key], draft, key=_ISSUE)

    def remove(self, draft: Collective) -> None:
        """Forget a draft that has its transport, or whose kind changes."""
        for key in self._keys(draft):
            self._lists[key].remove(draft)

    def oldest(self, until: int, *key: str) -> Collective | None:
        """The first that was issued by `until`: `oldest(9, "gather")`, `oldest(9, "of kind", "all_gather", "unit")`."""
        drafts = self._lists.get(key)
        if not drafts or drafts[0].issue > until:
            return None
        return drafts[0]

    def newest(self, until: int, *key: str) -> Collective | None:
        """The last that was issued by `until`."""
        drafts = self._lists.get(key, [])
        issued = bisect_right(drafts, until, key=_ISSUE)  # how many of them
        if not issued:
            return None
        return drafts[issued - 1]

    @staticmethod
    def _keys(draft: Collective) -> list[tuple[str, ...]]:
        """The lists that a draft is in: with and without its unit, since a transport may not tell that."""
        family = _family(draft.kind)
        of_family = [(family,), (family, draft.unit)]
        of_kind = [("of kind", draft.kind), ("of kind", draft.kind, draft.unit)]
        return [*of_family, *of_kind]


def _family(kind: str) -> str:
    """The family of a kind, in which kinds may stand for each other: gloo carries a reduce_scatter by an all_reduce."""
    return collective_row(kind).family or kind


def _carries_other_kind(issued: str, moved: str) -> bool:
    """Whether a transfer of a kind is none of an issued kind: gloo carries a reduce_scatter alone by other kinds."""
    return issued != moved and issued != "reduce_scatter"


def _numels(dims: Any) -> list[int]:
    """The elements of each tensor in an event's dimensions, in which lists of tensors are nested: `[[2, 3], [[4]]]` has
    tensors of 6 and of 4; those without dimensions, which are scalars and other arguments, are left out.
    """
    if not isinstance(dims, list) or not dims:
        return []
    if all(type(length) is int for length in dims):
        return [math.prod(dims)]
    numels: list[int] = []
    for inner in dims:
        numels += _numels(inner)
    return numels


def _issue_of(row: dict[str, Any], unshards: Sequence[dict[str, Any]]) -> int:
    """When a transfer without a range was issued: a gather as its unit last began to unshard, others as they began."""
    began = row["start_ns"]
    if row["kind"] != "all_gather":
        return began
    earlier = []
    for unshard in unshards:
        if unshard["unit"] == row["unit"] and unshard["time_ns"] <= began:
            earlier.append(unshard["time_ns"])
    return max(earlier, default=began)


def _outermost(calls: Sequence[Range]) -> list[Range]:
    """Calls that are not made by another call of the list: functional collectives call the plain ones."""
    kept: list[Range] = []
    until: dict[int, int] = {}  # of each thread, when the last call that was kept ends
    for call in calls:
        if call.start >= until.get(call.thread, call.start):
            kept.append(call)
            until[call.thread] = call.end
    return kept

"""The collectives of a trace: each one's transport, the host's copies for it, who issued it, and when.

A collective has several events: a range on the thread that issued it, a `c10d::` operator, a range on one of gloo's
threads or a kernel, and a copy-out later. They are matched by order: gloo works in the order of issue, and a kernel has
the number of its launch. The ranges around the issue name the unit. Engines without ranges (DDP, DeepSpeed) leave the
unit empty.

Which collective a kernel carries is said, in this order, by its own arguments, by the c10d or NCCL call around its
launch, and by its name: NCCL's kernel `SendRecv` carries an all_to_all too. Bytes and the process group are looked for
in the same order.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from fsdplab.common.collectives import PEER_COPY, collective_row, kind_of
from fsdplab.common.rows import grouped
from fsdplab.profiling.intervals import Intervals, union
from fsdplab.profiling.traces.chrome import LATEST_NS
from fsdplab.profiling.traces.event_kinds import Kind
from fsdplab.profiling.traces.events import Events, Range, Transfer
from fsdplab.profiling.traces.groups import Group, Groups
from fsdplab.profiling.traces.segments import Nest, nests
from fsdplab.profiling.traces.tensor_types import tensor_bytes

_OPENS = {
    "all_gather": "all_gather", "post_backward_reduce": "reduce_scatter", "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
}  # fmt: skip
_CLOSES = {"all_gather_copy_out": "all_gather", "reduce_scatter": "reduce_scatter"}
_GOES_ON = {"all_reduce_sum"}
MARKED = {*_OPENS, *_CLOSES, *_GOES_ON, "link"}
_CONSUMERS = {"pre_forward", "pre_backward"}
_ISSUE = attrgetter("issue")


class Piece(NamedTuple):
    """An interval in which a collective moved bytes: its transport (role ""), copy-in, copy-out or blocked."""

    start: int
    end: int
    role: str = ""


@dataclass(slots=True, eq=False)
class Collective:
    """One collective of one rank. Times are the trace's own ns; `nbytes` is its whole payload where the trace tells,
    else None.

    `held`: the call that issued it kept the host until the bytes had arrived. `own`: its consumer issued it (no
    prefetch). `by_host`: the host itself copies the bytes (shared memory). `issued`: the trace shows who issued it.
    `transport`: the transfer itself; None for transports that only copy on the host (shared memory).
    """

    kind: str
    unit: str
    issue: int
    pieces: list[Piece] = field(default_factory=list)
    phase: str = ""
    mark: Range | None = None
    own: bool = False
    by_host: bool = False
    issued: bool = True
    emulated: bool = False
    nbytes: int | None = None
    group: str = ""  # the process group's name, its number of ranks and its identity, where the trace tells
    group_size: int | None = None
    members: str = ""
    transport: Piece | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        given, self.pieces = self.pieces, []
        for piece in given:
            self.add(piece)

    def add(self, piece: Piece) -> None:
        """One more of its pieces; the first without a role is the transport."""
        self.pieces.append(piece)
        if self.transport is None and not piece.role:
            self.transport = piece

    def pass_link(self, row: dict[str, Any], start: int, end: int) -> None:
        """Take an emulated link's transfer, a row of the ledger, for its transport."""
        self.add(Piece(start, end))
        self.phase, self.emulated, self.nbytes, self.by_host = row["phase"], True, row["logical_bytes"], False

    @property
    def label(self) -> tuple[str, str, str, bool]:
        """By what a figure tells it from others: unit, phase, kind and whether it is emulated."""
        return self.unit, self.phase, self.kind, self.emulated

    @property
    def start(self) -> int:
        """When bytes began to move."""
        return self.first if self.transport is None else self.transport.start

    @property
    def end(self) -> int:
        """When they had arrived."""
        return self.last if self.transport is None else self.transport.end

    @property
    def first(self) -> int:
        """When anything began for it, copies on the host among it."""
        pieces = self.pieces
        return pieces[0].start if len(pieces) == 1 else min(piece.start for piece in pieces)

    @property
    def last(self) -> int:
        """When everything for it had ended."""
        pieces = self.pieces
        return pieces[0].end if len(pieces) == 1 else max(piece.end for piece in pieces)

    @property
    def held(self) -> bool:
        """Whether the issuing call covered at least half of the transport."""
        way = self.transport
        if way is None or self.mark is None:
            return False
        return 2 * (min(way.end, self.mark.end) - max(way.start, self.mark.start)) >= way.end - way.start


def find_collectives(
    found: Events, ledger: Sequence[dict[str, Any]] = (), life: Sequence[dict[str, Any]] = ()
) -> list[Collective]:
    """All collectives in order of issue; the rank's rows of an emulated link's `ledger` replace the transports."""
    groups = Groups(found.distributed)
    if found.on_gpu:
        moved = sorted([*_launched(found, groups), *_through_host(found, groups)], key=_ISSUE)
        collectives = _linked(moved, ledger, found)
    else:
        book = _Book(found, groups)
        if ledger:
            book.shared_memory("copy-in")
            book.emulated(ledger, life)
        else:
            book.shared_memory()
            book.gloo()
        collectives = [each for each in book.drafts if each.pieces]
    for each in collectives:  # those that only the host's copies or a link carried
        if not each.members:
            group = groups.of_unit(each.kind) if each.unit else groups.only
            each.group, each.members = each.group or group.name, group.members
            each.group_size = each.group_size or group.size
    return sorted(collectives, key=_ISSUE)


def communicating(found: Events) -> dict[int, Intervals]:
    """When each thread of the host copied for a collective, or was inside a c10d call, where it enqueues or waits."""
    apart: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for each in [*(each for each in found.ranges if each.label in MARKED), *found.issues]:
        apart[each.thread].append((each.start, each.end))
    for transfer in found.transfers:
        if transfer.carrier == Kind.SHM:
            apart[transfer.thread].append((transfer.start, transfer.end))
    return {thread: union(spans) for thread, spans in apart.items()}


class _Book:
    """Drafts of collectives, opened by the engine's ranges and completed by transports."""

    def __init__(self, found: Events, groups: Groups) -> None:
        self.found, self._groups = found, groups
        self.drafts: list[Collective] = []
        self._awaiting = _Awaiting()
        self._nests = nests(found.ranges)
        self._of_mark: dict[int, Collective] = {}
        self._silent = not any(transfer.carrier == Kind.GLOO for transfer in found.transfers)
        waiting: dict[tuple[str, str], deque[Collective]] = defaultdict(deque)
        for mark in found.ranges:
            if mark.label in MARKED and mark.label != "link":
                self._mark(mark, waiting)

    def _mark(self, mark: Range, waiting: dict[tuple[str, str], deque[Collective]]) -> None:
        kind, goes_on = _CLOSES.get(mark.label), mark.label in _GOES_ON
        if goes_on or mark.label == "all_reduce" and self._silent and waiting["all_reduce", mark.unit]:
            kind = "all_reduce"  # over shared memory a pair of ranges of one name
        queue = waiting[kind or _OPENS[mark.label], mark.unit]
        if kind and queue:
            draft = queue[0] if goes_on else queue.popleft()
        elif goes_on:
            return
        else:
            draft = self._open(kind or _OPENS[mark.label], mark.unit, mark.start, mark)
            if not kind:
                queue.append(draft)
        draft.add(Piece(mark.start, mark.end, "copy-out" if kind else "copy-in"))
        self._of_mark[id(mark)] = draft

    def _open(self, kind: str, unit: str, issue: int, mark: Range | None = None) -> Collective:
        draft = Collective(kind, unit, issue, mark=mark)
        draft.own = mark is not None and _issued_by_consumer(self._around(mark), unit)
        self.drafts.append(draft)
        self._awaiting.add(draft)
        return draft

    def _around(self, call: Range) -> list[Range]:
        return self._nests[call.thread].around(call.start) if call.thread in self._nests else []

    def _complete(self, draft: Collective, transfer: Transfer, call: Range | None = None, role: str = "") -> None:
        if not role:
            self._awaiting.remove(draft)
        group = self._groups.of_call([transfer.details])
        if not group.members and call is not None and call.row >= 0:
            name = self.found.names[int(self.found.name[call.row])]
            group = self._groups.of_operator(name, self.found.details[call.row])
        if not group.members:
            group = self._groups.of_unit(draft.kind) if draft.unit else self._groups.only
        _carry(draft, transfer, [transfer.details], group, self.found, role)

    def shared_memory(self, role: str = "") -> None:
        """The host's copies for torch's own engines: the transport itself, or beside an emulated link's transfer."""
        for transfer in self.found.transfers:
            if transfer.carrier == Kind.SHM:
                owner = self._owner(Range(transfer.kind, "", transfer.start, transfer.end, transfer.thread))
                owner.by_host = True
                self._complete(owner, transfer, role=role)

    def gloo(self) -> None:
        """Gloo's ranges in order of time, each with the oldest issue of its family that came before it."""
        issues: dict[str, deque[Range]] = defaultdict(deque)
        for issue in _outermost(self.found.issues):
            issues[_family(issue.label)].append(issue)
        for transfer in (each for each in self.found.transfers if each.carrier == Kind.GLOO):
            family = _family(transfer.kind)
            call: Range | None = None
            if (queue := issues[family]) and queue[0].start <= transfer.start:
                call = queue.popleft()
                draft = self._owner(call)
            else:
                draft = (
                    self._awaiting.oldest(transfer.end, "of kind", transfer.kind)
                    or self._awaiting.oldest(transfer.end, family)
                    or self._open(transfer.kind, "", transfer.start)
                )
                draft.issued = draft.mark is not None
            self._complete(draft, transfer, call)

    def _owner(self, call: Range) -> Collective:
        """The draft that a call belongs to: of the engine's range around it, or the newest of the unit around it that
        still lacks a transport.
        """
        around, family = self._around(call), _family(call.label)
        draft = next((self._of_mark[id(each)] for each in around if id(each) in self._of_mark), None)
        unit = around[0].unit if around else ""
        if draft is None and around:
            draft = self._awaiting.newest(call.start, family, unit)
        if draft is None or draft.transport or _family(draft.kind) != family or draft.issue > call.start:
            return self._open(call.label, draft.unit if draft else unit, call.start, call)
        if call.label != draft.kind:
            self._awaiting.remove(draft)
            draft.kind = call.label or draft.kind
            self._awaiting.add(draft)
        return draft

    def emulated(self, ledger: Sequence[dict[str, Any]], life: Sequence[dict[str, Any]]) -> None:
        """The link's transfers in order, each with the oldest draft of its kind and unit; what blocked the host goes to
        the transfer it waited for.
        """
        unshards = [each for each in life if each["state"] == "unsharding"]
        for row, start, end in _rows_within(self.found, ledger):
            # torch's engines give the link no unit: the order of issue decides
            fitting = self._awaiting.oldest(end, "of kind", row["kind"], *([row["unit"]] if row["unit"] else []))
            issue = _issue_of(row, unshards) - self.found.base_ns
            draft = fitting or self._open(row["kind"], row["unit"], issue)
            self._awaiting.remove(draft)
            draft.pass_link(row, start, end)
        self._blocked()

    def _blocked(self) -> None:
        """Gives each wait for the link to the unit's transfer whose end is nearest, of those issued by then."""
        carried = sorted((each for each in self.drafts if each.transport), key=attrgetter("end"))
        passing = grouped(carried, attrgetter("unit"))
        times = {unit: np.array([(each.end, each.issue) for each in drafts]).T for unit, drafts in passing.items()}
        for wait in self.found.ranges:
            if wait.label == "link" and wait.unit in times:
                ends, issues = times[wait.unit]
                nearest = int(np.argmin(np.where(issues <= wait.end, abs(ends - wait.end), LATEST_NS)))
                if issues[nearest] <= wait.end:
                    passing[wait.unit][nearest].add(Piece(wait.start, wait.end, "blocked"))


class _Awaiting:
    """Drafts that lack a transport, in order of issue: of each family or kind, and of each unit in it."""

    def __init__(self) -> None:
        self._lists: dict[tuple[str, ...], list[Collective]] = defaultdict(list)

    def add(self, draft: Collective) -> None:
        for key in self._keys(draft):
            insort(self._lists[key], draft, key=_ISSUE)

    def remove(self, draft: Collective) -> None:
        for key in self._keys(draft):
            self._lists[key].remove(draft)

    def oldest(self, until: int, *key: str) -> Collective | None:
        """The first that was issued by `until`: `oldest(9, "gather")`, `oldest(9, "of kind", "all_gather", "unit")`."""
        held = self._lists.get(key)
        return held[0] if held and held[0].issue <= until else None

    def newest(self, until: int, *key: str) -> Collective | None:
        """The last that was issued by `until`."""
        held = self._lists.get(key, [])
        at = bisect_right(held, until, key=_ISSUE)
        return held[at - 1] if at else None

    @staticmethod
    def _keys(draft: Collective) -> list[tuple[str, ...]]:
        family = _family(draft.kind)
        return [(family,), (family, draft.unit), ("of kind", draft.kind), ("of kind", draft.kind, draft.unit)]


def _family(kind: str) -> str:
    return collective_row(kind).family or kind


def _issue_of(row: dict[str, Any], unshards: Sequence[dict[str, Any]]) -> int:
    """When a transfer without a range was issued: a gather as its unit last began to unshard, others as they began."""
    began, until = [each["time_ns"] for each in unshards if each["unit"] == row["unit"]], row["start_ns"]
    return max((time for time in began if time <= until and row["kind"] == "all_gather"), default=until)


def _issued_by_consumer(around: Iterable[Range], unit: str) -> bool:
    """Whether the unit that needs the result issued it, inside its own pre_forward or pre_backward: no prefetch."""
    for each in around:
        if each.label == "backward_prefetch":
            return False
        if each.label in _CONSUMERS:
            return each.unit == unit
    return False


def _outermost(calls: Sequence[Range]) -> list[Range]:
    """Calls that are not made by another call of the list: functional collectives call the plain ones."""
    kept: list[Range] = []
    until: dict[int, int] = {}
    for call in calls:
        if call.start >= until.get(call.thread, call.start):
            kept.append(call)
            until[call.thread] = call.end
    return kept


def _launched(found: Events, groups: Groups) -> list[Collective]:
    """The kernels that communicate, with the instant and the ranges of their launches, and the device's copies that
    pack and unpack for them.
    """
    by_thread, calls = nests(found.ranges), nests(found.issues)
    launched = []
    for transfer in found.transfers:
        if transfer.carrier in (Kind.GLOO, Kind.SHM):
            continue
        launch, thread = _launch_of(found, transfer.row)
        issued = launch is not None
        if launch is None:
            launch = transfer.start
        around = by_thread[thread].around(launch) if thread in by_thread else []
        unit = next((each.unit for each in around if each.label not in ("backward_prefetch", "optimizer")), "")
        evidence = [transfer.details, *_arguments(found, calls.get(thread), launch)]
        collective = Collective(_kind_by(evidence, transfer, found), unit, launch)
        collective.own, collective.issued = _issued_by_consumer(around, unit), issued
        _carry(collective, transfer, evidence, groups.of_call(evidence), found)
        launched.append(collective)
    _pack(found, launched, by_thread)
    return launched


def _launch_of(found: Events, row: int) -> tuple[int | None, int]:
    """When device work was launched and by which thread; (None, -1) where the trace does not say."""
    call = int(found.launched_by[row])
    return (int(found.start[call]), int(found.thread[call])) if call >= 0 else (None, -1)


def _arguments(found: Events, calls: Nest | None, launch: int) -> list[Mapping[str, Any]]:
    """What the c10d and NCCL calls around a launch were given, the innermost first; each says its own `name` too."""
    around = calls.around(launch) if calls is not None else []
    return [{"name": found.names[int(found.name[call.row])], **found.details[call.row]} for call in around]


def _kind_by(evidence: Sequence[Mapping[str, Any]], transfer: Transfer, found: Events) -> str:
    """The collective: as arguments call it, as a call around the launch is named, as the kernel is named."""
    said = [each.get("Collective name") for each in evidence] + [each.get("name") for each in evidence]
    kind = next((kind for name in said if isinstance(name, str) and (kind := kind_of(name))), transfer.kind)
    copied = found.names[int(found.name[transfer.row])].startswith(("Memcpy", "Copy"))
    return kind or (PEER_COPY if copied else "other")


def _pack(found: Events, launched: Sequence[Collective], by_thread: Mapping[int, Nest]) -> None:
    """Give each copy inside the device that an engine's range launched to the collective of the same unit that it packs
    or unpacks for: the next one, or the last one before.
    """
    by_unit = grouped(launched, lambda each: (each.kind, each.unit))
    for row in found.rows(Kind.DEVICE_COPY).tolist():
        launch, thread = _launch_of(found, row)
        if launch is None or thread not in by_thread:
            continue
        mark = next((each for each in by_thread[thread].around(launch) if each.label in {*_OPENS, *_CLOSES}), None)
        if mark is None:
            continue
        start, end = int(found.start[row]), int(found.end[row])
        unpacks = mark.label in _CLOSES
        same = by_unit.get((_CLOSES.get(mark.label) or _OPENS[mark.label], mark.unit), [])
        fitting = [each for each in same if (each.end <= start if unpacks else each.start >= end)]
        if fitting:
            owner = fitting[-1] if unpacks else fitting[0]
            owner.add(Piece(start, end, "copy-out" if unpacks else "copy-in"))


def _through_host(found: Events, groups: Groups) -> list[Collective]:
    """What gloo moved between GPUs through host memory; the ranges around it launch its copies, and copy nothing."""
    book = _Book(found, groups)
    book.gloo()
    moved = [each for each in book.drafts if each.transport]
    for each in moved:
        each.pieces = [each.transport] if each.transport else []
    return moved


def _linked(launched: Sequence[Collective], ledger: Sequence[dict[str, Any]], found: Events) -> list[Collective]:
    """The collectives of a GPU with the link's transfers in place of their kernels, each of its kind and unit in order.

    A stream waits for the link before the kernel starts, so the kernel is the last piece of what the link takes.
    """
    waiting: dict[tuple[str, str], deque[Collective]] = defaultdict(deque)
    for each in launched:
        waiting[each.kind, each.unit].append(each)
    apart = []
    for row, start, end in _rows_within(found, ledger):
        queue = waiting[row["kind"], row["unit"]]
        if queue and queue[0].issue <= end:
            draft = queue.popleft()
            end = max(end, draft.end)
        else:
            apart.append(draft := Collective(row["kind"], row["unit"], start))
        draft.pieces, draft.transport, draft.issue = [], None, min(draft.issue, start)
        draft.pass_link(row, start, end)
    return [*launched, *apart]


def _rows_within(found: Events, ledger: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], int, int]]:
    """The ledger's rows that the trace saw a part of, each with its start and end there, by their start."""
    rows = [(row, row["start_ns"] - found.base_ns, row["end_ns"] - found.base_ns) for row in ledger]
    seen = [each for each in rows if each[2] >= found.first and each[1] <= found.last]
    return sorted(seen, key=lambda each: each[1])


def _carry(
    collective: Collective, transfer: Transfer, evidence: Sequence[Mapping[str, Any]], group: Group, found: Events,
    role: str = "",
) -> None:  # fmt: skip
    """Give a collective its transfer: when it ran, its bytes and its process group, as far as the evidence tells."""
    collective.add(Piece(transfer.start, transfer.end, role))
    collective.group, collective.group_size, collective.members = group.name, group.size, group.members
    slices = group.size or found.world_size if collective_row(collective.kind).given_by == "shards" else 1
    payloads = (_payload(details, slices) for details in evidence)
    collective.nbytes = next((nbytes for nbytes in payloads if nbytes), None)


def _payload(details: Mapping[str, Any], slices: int) -> int | None:
    """Bytes of all ranks' slices: by NCCL's own figures, by the shapes that a c10d operator was given, the larger of
    what it sends and what it fills, or by those that gloo or NCCL was given, of one slice.
    """
    if "bytes" in details:
        return details["bytes"] if isinstance(details["bytes"], int) else None
    counts = (details.get(key) for key in ("In msg nelems", "Out msg nelems"))
    if elements := max((count for count in counts if isinstance(count, int)), default=0):
        return tensor_bytes([elements], details.get("dtype")) or None
    shapes, types = details.get("Input Dims"), details.get("Input type")
    listed = list(zip(shapes, types)) if isinstance(shapes, list) and isinstance(types, list) else []
    if str(details.get("name", "")).startswith("c10d::"):
        return max((tensor_bytes(dims, each) for dims, each in listed), default=0) or None
    return slices * sum(tensor_bytes(dims or [1], each) for dims, each in listed) or None  # a scalar has no dims

"""The collectives of a trace: each one's transport, the host's copies for it, who issued it, and when.

A collective has several events: a range on the thread that issued it, a `c10d::` operator, a range on one of gloo's
threads or a kernel, and a copy-out later. They are matched by order: gloo works in the order of issue, and a kernel has
the number of its launch. The ranges around the issue name the unit. Engines without ranges (DDP, DeepSpeed) leave the
unit empty.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fsdplab.profiling.traces.classify import Range, Thread, TraceEvents, Transfer, unit_name
from fsdplab.profiling.traces.segments import nests

_FAMILY = {"all_gather": "gather", "reduce_scatter": "reduction", "all_reduce": "reduction", "all_to_all": "reduction"}
_OPENS = {"all_gather": "all_gather", "post_backward_reduce": "reduce_scatter", "all_reduce": "all_reduce"}
_CLOSES = {"all_gather_copy_out": "all_gather", "reduce_scatter": "reduce_scatter"}
_GOES_ON = {"all_reduce_sum": "all_reduce"}
MARKED = {*_OPENS, *_CLOSES, *_GOES_ON, "link"}
_CONSUMERS = {"pre_forward", "pre_backward"}
_ITEM = {
    "float": 4, "double": 8, "int": 4, "long": 8, "bfloat16": 2, "half": 2, "c10::bfloat16": 2, "c10::half": 2,
    "float16": 2, "float32": 4,
    "signed char": 1, "unsigned char": 1, "char": 1, "byte": 1, "bool": 1, "short": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """One interval in which a collective moved bytes; `role` is "" for the transport itself, else copy-in, copy-out or
    blocked.
    """

    start: int
    end: int
    role: str = ""


@dataclass
class Collective:
    """One collective of one rank. Times are the trace's own ns; `nbytes` is its whole payload where the trace tells,
    else None.

    `held`: the call that issued it kept the host until the bytes had arrived. `own`: its consumer issued it (no
    prefetch). `by_host`: the host itself copies the bytes (shared memory). `issued`: the trace shows who issued it.
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

    @property
    def transport(self) -> Piece | None:
        """The transfer itself; None for transports that only copy on the host (shared memory)."""
        return next((piece for piece in self.pieces if not piece.role), None)

    @property
    def start(self) -> int:
        """When bytes began to move."""
        return self.transport.start if self.transport else min(piece.start for piece in self.pieces)

    @property
    def end(self) -> int:
        """When they had arrived."""
        return self.transport.end if self.transport else max(piece.end for piece in self.pieces)

    @property
    def held(self) -> bool:
        """Whether the issuing call covered at least half of the transport."""
        way = self.transport
        if way is None or self.mark is None:
            return False
        return 2 * (min(way.end, self.mark.end) - max(way.start, self.mark.start)) >= way.end - way.start


def find_collectives(
    found: TraceEvents, ledger: Sequence[dict[str, Any]] = (), life: Sequence[dict[str, Any]] = ()
) -> list[Collective]:
    """All collectives in order of issue. `ledger`: the emulated link's transfers of this rank (absolute ns), which
    replace the trace's transports.
    """
    if found.on_gpu:
        return sorted(_launched(found), key=lambda each: each.issue)
    book = _Book(found)
    if ledger:
        book.shared_memory("copy-in")
        book.emulated(ledger, life)
    else:
        book.shared_memory()
        book.gloo()
    return sorted((each for each in book.drafts if each.pieces), key=lambda each: each.issue)


class _Book:
    """Drafts of collectives, opened by the engine's ranges and completed by transports."""

    def __init__(self, found: TraceEvents) -> None:
        self.found = found
        self.drafts: list[Collective] = []
        self._nests = nests(found.ranges)
        self._of_mark: dict[int, Collective] = {}
        self._silent = not any(transfer.thread[0] == "gloo" for transfer in found.transfers)
        waiting: dict[tuple[str, str], deque[Collective]] = defaultdict(deque)
        for mark in found.ranges:
            if mark.label in MARKED:
                self._mark(mark, waiting)

    def _mark(self, mark: Range, waiting: dict[tuple[str, str], deque[Collective]]) -> None:
        if (goes_on := _GOES_ON.get(mark.label)) and (unit := waiting[goes_on, mark.unit]):
            unit[0].pieces.append(Piece(mark.start, mark.end, "copy-out"))
            self._of_mark[id(mark)] = unit[0]
            return
        kind = _CLOSES.get(mark.label)
        if mark.label == "all_reduce" and self._silent and waiting["all_reduce", mark.unit]:
            kind = "all_reduce"  # shared memory: the second range of a pair
        if kind and waiting[kind, mark.unit]:
            draft = waiting[kind, mark.unit].popleft()
            draft.pieces.append(Piece(mark.start, mark.end, "copy-out"))
        elif kind or mark.label in _OPENS:
            draft = self._open(kind or _OPENS[mark.label], mark.unit, mark.start, mark)
            draft.pieces.append(Piece(mark.start, mark.end, "copy-out" if kind else "copy-in"))
            if not kind:
                waiting[draft.kind, mark.unit].append(draft)
        else:
            return
        self._of_mark[id(mark)] = draft

    def _open(self, kind: str, unit: str, issue: int, mark: Range | None = None) -> Collective:
        draft = Collective(kind, unit, issue, mark=mark)
        draft.own = mark is not None and _issued_by_consumer(self._around(mark.thread, mark.start), unit)
        self.drafts.append(draft)
        return draft

    def _around(self, thread: Thread, instant: int) -> list[Range]:
        return self._nests[thread].around(instant) if thread in self._nests else []

    def _complete(self, draft: Collective, transfer: Transfer, role: str = "") -> None:
        draft.pieces.append(Piece(transfer.start, transfer.end, role))
        draft.nbytes = _payload(transfer, draft.kind, int(self.found.distributed.get("world_size") or 1))

    def shared_memory(self, role: str = "") -> None:
        """The host's copies for torch's own engines: the transport itself, or beside an emulated link's transfer."""
        for transfer in self.found.transfers:
            if transfer.thread[0] == "shm":
                call = Range(transfer.kind, "", transfer.start, transfer.end, transfer.thread[1:])
                owner = self._owner(call)
                owner.by_host = True
                self._complete(owner, transfer, role)

    def gloo(self) -> None:
        """Gloo's ranges in order of time, each with the oldest issue of its family that came before it."""
        issues: dict[str, deque[Range]] = defaultdict(deque)
        for call in _outermost(self.found.issues):
            issues[_FAMILY.get(call.label, call.label)].append(call)
        for transfer in self.found.transfers:
            if transfer.thread[0] != "gloo":
                continue
            family = _FAMILY.get(transfer.kind, transfer.kind)
            queue = issues[family]
            known = bool(queue) and queue[0].start <= transfer.start
            self._complete(self._owner(queue.popleft()) if known else self._oldest(family, transfer), transfer)

    def _owner(self, call: Range) -> Collective:
        """The draft that a call belongs to: of the engine's range around it, or the newest of the unit around it that
        still lacks a transport.
        """
        around = self._around(call.thread, call.start)
        family = _FAMILY.get(call.label, call.label)
        draft = next((self._of_mark[id(each)] for each in around if id(each) in self._of_mark), None)
        unit = around[0].unit if around else ""
        if draft is None and around:
            draft = next(
                (
                    each
                    for each in reversed(self.drafts)
                    if self._awaits(each, family, call.start) and each.unit == unit
                ),
                None,
            )
        if draft is None or not self._awaits(draft, family, call.start):
            draft = self._open(call.label, draft.unit if draft else unit, call.start, None)
            draft.own = _issued_by_consumer(around, draft.unit)
            draft.mark = call
        draft.kind = call.label or draft.kind
        return draft

    def _oldest(self, family: str, transfer: Transfer) -> Collective:
        fitting = (each for each in self.drafts if self._awaits(each, family, transfer.end))
        draft = next(fitting, None) or self._open(transfer.kind, "", transfer.start)
        draft.issued = draft.mark is not None
        return draft

    @staticmethod
    def _awaits(draft: Collective, family: str, until: int) -> bool:
        return draft.transport is None and _FAMILY.get(draft.kind, draft.kind) == family and draft.issue <= until

    def emulated(self, ledger: Sequence[dict[str, Any]], life: Sequence[dict[str, Any]]) -> None:
        """The link's transfers in order, each with the oldest draft of its kind and unit; what blocked the host goes to
        the transfer it waited for.
        """
        base = self.found.base_ns
        for row in sorted(ledger, key=lambda each: each["start_ns"]):
            start, end, kind, unit = row["start_ns"] - base, row["end_ns"] - base, row["kind"], unit_name(row["unit"])
            if end < self.found.first or start > self.found.last:
                continue
            unnamed = row["unit"] == ""  # torch's engines give the link no unit: the order of issue decides
            fitting = (
                each for each in self.drafts
                if each.kind == kind and (unnamed or each.unit == unit) and each.transport is None and each.issue <= end
            )  # fmt: skip
            draft = next(fitting, None) or self._open(kind, unit, _issue(row, life, base))
            draft.pieces.append(Piece(start, end))
            draft.phase, draft.emulated, draft.nbytes, draft.by_host = row["phase"], True, row["logical_bytes"], False
        for wait in (each for each in self.found.ranges if each.label == "link"):
            passing = [
                each for each in self.drafts if each.unit == wait.unit and each.transport and each.issue <= wait.end
            ]
            if passing:
                awaited = min(passing, key=lambda each: abs(each.end - wait.end))
                awaited.pieces.append(Piece(wait.start, wait.end, "blocked"))


def _issue(row: dict[str, Any], life: Sequence[dict[str, Any]], base: int) -> int:
    """When a transfer without a range was issued: for a gather the last time its unit began to unshard, else as it
    began.
    """
    began = [
        each["time_ns"]
        for each in life
        if each["unit"] == row["unit"] and each["state"] == "unsharding" and each["time_ns"] <= row["start_ns"]
    ]
    return (max(began) if began and row["kind"] == "all_gather" else row["start_ns"]) - base


def _issued_by_consumer(around: Iterable[Range], unit: str) -> bool:
    """Whether the unit that needs the result issued it, as it needed it: inside its own pre_forward or pre_backward,
    not in a prefetch.
    """
    for each in around:
        if each.label == "backward_prefetch":
            return False
        if each.label in _CONSUMERS:
            return each.unit == unit
    return False


def _outermost(calls: Sequence[Range]) -> list[Range]:
    """Calls that are not made by another call of the list: functional collectives call the plain ones."""
    kept: list[Range] = []
    until: dict[Thread, int] = {}
    for call in calls:
        if call.start >= until.get(call.thread, call.start):
            kept.append(call)
            until[call.thread] = call.end
    return kept


def _launched(found: TraceEvents) -> Iterable[Collective]:
    """NCCL's kernels, and the transfers of ranks that share a GPU, each with the instant and the ranges of its
    launch.
    """
    at = Launches(found)
    by_thread = nests(found.ranges)
    for transfer in found.transfers:
        if transfer.launch is None:
            continue
        launch, thread = at.of(transfer.launch)
        around = by_thread[thread].around(launch) if launch is not None and thread in by_thread else []
        unit = next((each.unit for each in around if each.label not in ("backward_prefetch", "optimizer")), "")
        collective = Collective(transfer.kind or "other", unit, transfer.start if launch is None else launch)
        collective.own, collective.issued = _issued_by_consumer(around, unit), launch is not None
        collective.pieces.append(Piece(transfer.start, transfer.end))
        collective.nbytes = _payload(transfer, collective.kind, int(found.distributed.get("world_size") or 1))
        yield collective


class Launches:
    """Finds the host's launch of a kernel by its correlation number."""

    def __init__(self, found: TraceEvents) -> None:
        threads = list(found.launches)
        logged = enumerate(found.launches.values())
        parts = [
            (np.array(numbers), spans.pairs()[:, 0], np.full(len(numbers), index)) for index, (numbers, spans) in logged
        ]
        empty: np.ndarray = np.empty(0, dtype=np.int64)
        numbers, starts, owners = (
            (np.concatenate([empty, *column]) for column in zip(*parts)) if parts else (empty,) * 3
        )
        order = np.argsort(numbers, kind="stable")
        self._numbers, self._starts, self._owners, self._threads = numbers[order], starts[order], owners[order], threads

    def of(self, correlation: int) -> tuple[int | None, Thread | None]:
        """The launch's start and thread; (None, None) where the trace lacks it."""
        at = int(np.searchsorted(self._numbers, correlation))
        if at == len(self._numbers) or self._numbers[at] != correlation:
            return None, None
        return int(self._starts[at]), self._threads[int(self._owners[at])]

    def starts(self, correlations: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
        """The launches' starts for many kernels; `otherwise` where the trace lacks one."""
        if not len(self._numbers):
            return otherwise
        at = np.minimum(np.searchsorted(self._numbers, correlations), len(self._numbers) - 1)
        return np.where(self._numbers[at] == correlations, self._starts[at], otherwise)


def _payload(transfer: Transfer, kind: str, world_size: int) -> int | None:
    """The whole payload in bytes, of all ranks' slices; from NCCL's own figures or from the shapes that gloo was
    given.
    """
    details = transfer.details if isinstance(transfer.details, dict) else {}
    if "bytes" in details:
        return details["bytes"] if isinstance(details["bytes"], int) else None
    given = [details.get("In msg nelems"), details.get("Out msg nelems")]
    if elements := max((each for each in given if isinstance(each, int)), default=0):
        size = _ITEM.get(str(details.get("dtype")).lower())
        return elements * size if size else None
    shapes, types = _list(details.get("Input Dims")), _list(details.get("Input type"))
    sizes = [
        math.prod(shape) * _ITEM[str(kind_).lower()]
        for shape, kind_ in zip(shapes, types)
        if shape and _flat(shape) and str(kind_).lower() in _ITEM
    ]
    if not sizes:
        return None
    return sum(sizes) * (world_size if kind == "all_gather" else 1)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _flat(shape: Any) -> bool:
    return isinstance(shape, list) and all(isinstance(each, int) for each in shape)

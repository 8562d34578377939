"""The collectives of a GPU: kernels that communicate, each with the host's call that launched it.

Which collective a kernel carries is said, in this order, by its own arguments, by the c10d or NCCL call around its
launch, and by its name: NCCL's kernel `SendRecv` carries an all_to_all too. Bytes and the process group are looked for
in the same order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from fsdplab.common.collectives import PEER_COPY, kind_of
from fsdplab.common.rows import grouped
from fsdplab.profiling.traces.collective import CLOSES, OPENS, Collective, Piece, carry, issued_by_consumer, rows_within
from fsdplab.profiling.traces.event_kinds import Kind
from fsdplab.profiling.traces.events import Events, Range, Transfer
from fsdplab.profiling.traces.groups import Groups
from fsdplab.profiling.traces.segments import Nest, nests

_OF_NO_UNIT = ("backward_prefetch", "optimizer")  # ranges that name no unit, or another one's


def launched_collectives(events: Events, groups: Groups) -> list[Collective]:
    """The kernels that communicate, with the instant and the ranges of their launches, and the device's copies that
    pack and unpack for them.
    """
    ranges = nests(events.ranges)  # of the engine, by thread
    calls = nests(events.issues)  # of c10d, by thread
    collectives = []
    for transfer in events.transfers:
        if transfer.carrier in (Kind.GLOO, Kind.SHM):
            continue
        # work whose launch the trace does not show counts as issued at its start
        launch, thread = _launch_of(events, transfer.row)
        is_known = launch is not None
        if launch is None:
            launch = transfer.start

        # who issued it, and what it was given
        around = ranges[thread].around(launch) if thread in ranges else []
        unit = next((outer.unit for outer in around if outer.label not in _OF_NO_UNIT), "")
        given = _arguments(events, calls.get(thread), launch)
        evidence = [transfer.details, *given]  # the kernel's own first: it is asked before the calls around it

        collective = Collective(_kind_by(evidence, transfer, events), unit, launch)
        collective.own = issued_by_consumer(around, unit)
        collective.issued = is_known
        carry(collective, transfer, evidence, groups.of_call(evidence), events)
        collectives.append(collective)
    _add_copies(events, collectives, ranges)
    return collectives


def _launch_of(events: Events, row: int) -> tuple[int | None, int]:
    """When device work was launched and by which thread; (None, -1) where the trace does not say."""
    call = int(events.launched_by[row])
    if call < 0:
        return None, -1
    return int(events.start[call]), int(events.thread[call])


def _arguments(events: Events, calls: Nest | None, launch: int) -> list[Mapping[str, Any]]:
    """What the c10d and NCCL calls around a launch were given, the innermost first; each says its own `name` too."""
    if calls is None:
        return []
    given: list[Mapping[str, Any]] = []
    for call in calls.around(launch):
        name = events.names[int(events.name[call.row])]
        given.append({"name": name, **events.details[call.row]})
    return given


def _kind_by(evidence: Sequence[Mapping[str, Any]], transfer: Transfer, events: Events) -> str:
    """The collective: as arguments call it, as a call around the launch is named, as the kernel is named."""
    # arguments of any call tell more than the name of any
    for key in ("Collective name", "name"):
        for details in evidence:
            name = details.get(key)
            kind = kind_of(name) if isinstance(name, str) else ""
            if kind:
                return kind
    if transfer.kind:
        return transfer.kind
    name_of_work = events.names[int(events.name[transfer.row])]
    if name_of_work.startswith(("Memcpy", "Copy")):
        return PEER_COPY
    return "other"


def _add_copies(events: Events, collectives: Sequence[Collective], ranges: Mapping[int, Nest]) -> None:
    """Give each copy inside the device that an engine's range launched to the collective of the same unit that it packs
    or unpacks for: the next one, or the last one before.
    """
    by_kind_and_unit = grouped(collectives, lambda collective: (collective.kind, collective.unit))
    for row in events.rows(Kind.DEVICE_COPY).tolist():
        launch, thread = _launch_of(events, row)
        if launch is None or thread not in ranges:
            continue
        mark = _copying_range(ranges[thread].around(launch))
        if mark is None:
            continue
        start, end = int(events.start[row]), int(events.end[row])
        if mark.label in CLOSES:  # it unpacks what the last one before it has brought
            of_unit = by_kind_and_unit.get((CLOSES[mark.label], mark.unit), [])
            before = [collective for collective in of_unit if collective.end <= start]
            if before:
                before[-1].add(Piece(start, end, "copy-out"))
        else:  # it packs for the next one, if the same range launched that
            of_unit = by_kind_and_unit.get((OPENS[mark.label], mark.unit), [])
            launched = [collective for collective in of_unit if mark.start <= collective.issue <= mark.end]
            after = [collective for collective in launched if collective.start >= end]
            if after:
                after[0].add(Piece(start, end, "copy-in"))


def _copying_range(around: Sequence[Range]) -> Range | None:
    """The innermost of the engine's ranges that pack or unpack."""
    return next((outer for outer in around if outer.label in OPENS or outer.label in CLOSES), None)


def with_link(launched: Sequence[Collective], ledger: Sequence[dict[str, Any]], events: Events) -> list[Collective]:
    """The collectives of a GPU with the link's transfers in place of their kernels, each of its kind and unit in order.

    A stream waits for the link before the kernel starts, so the kernel is the last piece of what the link takes.
    """
    waiting: dict[tuple[str, str], deque[Collective]] = defaultdict(deque)
    for collective in launched:
        waiting[collective.kind, collective.unit].append(collective)
    unlaunched = []
    for row, start, end in rows_within(events, ledger):
        queue = waiting[row["kind"], row["unit"]]
        if queue and queue[0].issue <= end:
            collective = queue.popleft()
            end = max(end, collective.end)
        else:  # the trace does not show its kernel
            collective = Collective(row["kind"], row["unit"], start)
            unlaunched.append(collective)
        # the link's transfer takes the place of the kernel and of all copies around it
        collective.pieces = []
        collective.transport = None
        collective.issue = min(collective.issue, start)
        collective.pass_link(row, start, end)
    return [*launched, *unlaunched]

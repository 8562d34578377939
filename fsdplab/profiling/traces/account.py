"""One step of one rank: every instant has one owner and one part, and every table is a sum over these labels.

A step is cut into cells, stretches in which nothing changes. A cell computes, communicates, does both or neither:

    computing alone       compute_only_ns
    both                  overlapped_ns
    communication alone   exposed: on the link, packing, unpacking, waiting for a peer, or without a core
    neither               idle, by its cause (`idle_causes`)

so compute only + overlapped + exposed + idle is the step, which `account` checks.

A step of 100 ns that computes from 0 to 60, with an all-gather on the link from 40 to 90:

    cell        0-40            40-60         60-90      90-100
    owner       none            all-gather    all-gather none
    part        compute only    overlapped    on link    rest
    sums        40              20            30         10

Read `account` first: it makes the cells, gives each its owner, then its part, and sums them up. A cell with
communication has one owner: the host's own copies and waits name theirs, else it is the collective that ends first,
since the host goes on at its end. An exposed cell is packing or unpacking where the host copies for its owner (unless
the host idles for longer than dispatching takes), else on the link where a transport of its communicator moves
bytes, else waiting for a peer; without a core where the host waited for one meanwhile and no bytes moved.

Causes of a collective's exposed time, in the order in which they are tried:
- `hidden`: nothing of it was exposed;
- `unknown`: the trace does not show who issued it;
- `waiting_for_peer`, `nothing_to_hide_behind` of what the host carries itself: by whether the host mostly idled;
- `link_busy`: it spent at least half of what was exposed behind other collectives of its communicator, between its
  issue and its start (two process groups do not queue behind each other);
- `waiting_for_peer`: as long between issue and start with a free link (an emulated link starts with the last issue);
  over several ranks' traces `with_peers` (peers) finds the rest;
- `late_start`: its consumer issued it when needed (no prefetch), or the issuing call blocked the host, though there was
  computing to hide it;
- `nothing_to_hide_behind`: issued early and on a free link, but too little computing was left: the first gather, the
  last reduction, small units.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from fsdplab.profiling.intervals import Cells, Intervals, before, close_gaps, first_label, pairs, union, within
from fsdplab.profiling.memory.timeline import AccountingError
from fsdplab.profiling.traces.collective import Collective
from fsdplab.profiling.traces.event_kinds import Kind
from fsdplab.profiling.traces.events import Events, Window
from fsdplab.profiling.traces.idle_causes import AT_ONCE_NS, idle_causes
from fsdplab.profiling.traces.segments import Segments
from fsdplab.profiling.traces.steps import all_device_work
from fsdplab.records.tables import IDLE_PARTS, PARTS_OF_COLLECTIVE

# The parts of a step, each a label of cells: its position in this row.
PARTS = ("compute_only_ns", "overlapped_ns", *PARTS_OF_COLLECTIVE, *(f"idle {name}" for name in IDLE_PARTS))
_COMPUTE_ONLY, _OVERLAPPED = range(2)
_EXPOSED = PARTS.index(PARTS_OF_COLLECTIVE[0])
_ON_LINK, _PACKING, _UNPACKING, _WAITING, _NO_CORE = range(_EXPOSED, _EXPOSED + len(PARTS_OF_COLLECTIVE))
_IDLE = _NO_CORE + 1
_IDLE_NO_CORE = _IDLE + IDLE_PARTS.index("no_core_ns")
_REST = _IDLE + IDLE_PARTS.index("rest_ns")
_OUTSIDE = -1  # a cell before or after the step

_DISPATCH_NS = 100_000  # between two operators of a copy the host dispatches the next one; idle for longer, it waits
_BACK_TO_BACK_NS = 10_000  # two kernels this close on a GPU: the second waited for the first
_ENOUGH = 0.1  # computing of a tenth of the exposed time is something to hide behind
_HOOKS = ("pre_forward", "pre_backward", "post_backward", "root_post_backward_callback", "link", "backward_prefetch")


class TraceSets:
    """What the steps of one trace share, as sorted, disjoint sets.

    `host_busy`: when any thread of the host ran an operator; `device`: when the device did anything at all; `blocked`:
    when the host waited in a synchronising call; `core_waits`: when it waited for a core, where somebody noted that;
    `lifecycle`: when an engine's hooks ran; `idle`: spans with the causes in `idle_causes`, positions in `IDLE_PARTS`.
    """

    def __init__(
        self, events: Events, collectives: Sequence[Collective], segments: Segments, core_waits: Intervals
    ) -> None:
        self.events = events
        self.segments = segments
        self.on_gpu = events.on_gpu
        self.host_busy = union(*events.host_busy.values())
        self.device = all_device_work(events, collectives)
        self.blocked = union(events.spans(Kind.BLOCKED, Kind.BLOCKING_LAUNCH))
        self.core_waits = union(core_waits)
        hooks = [(hook.start, hook.end) for hook in events.ranges if hook.label.startswith(_HOOKS)]
        self.lifecycle = union(hooks)
        self.idle, self.idle_causes = idle_causes(events, self.device)


@dataclass(frozen=True)
class Account:
    """A step's cells with their labels, the sums over them, and why each of the step's collectives was exposed."""

    cells: Cells
    owner: np.ndarray  # of each cell: an index of the step's collectives, -1 for none
    part: np.ndarray  # of each cell: a position in `PARTS`, -1 outside of the step
    host: np.ndarray  # of each cell: whether the host ran operators
    sums: dict[str, int]  # ns of the step by `PARTS`
    parts: np.ndarray  # ns of exposed time: a row a collective, a column for each of `PARTS_OF_COLLECTIVE`
    causes: list[str]  # of each collective
    core_wait_ns: int  # how long the host waited for a core, also while it computed

    @property
    def computing(self) -> np.ndarray:
        """Which cells compute."""
        return (self.part == _COMPUTE_ONLY) | (self.part == _OVERLAPPED)

    @property
    def exposed(self) -> np.ndarray:
        """Which cells are exposed communication."""
        return (self.part >= _EXPOSED) & (self.part < _IDLE)

    @property
    def moving(self) -> np.ndarray:
        """Which cells are exposed on the link."""
        return self.part == _ON_LINK


def account(window: Window, computing: Intervals, collectives: Sequence[Collective], trace: TraceSets) -> Account:
    """Label every instant of a step; AccountingError if it did not add up.

    `computing`: sorted and disjoint, inside the window; `collectives`: the step's own. A step of 100 ms with 80
    computing, 50 communicating and 40 of that at once: `sums` has compute_only 40, overlapped 40, and 10 ms in the
    parts of exposed time.
    """
    # 1. cells: whatever begins or ends is an edge
    span = [window.start, window.end]
    changes = trace.segments.changes
    changes = changes[(changes > window.start) & (changes < window.end)]
    columns = _Columns(collectives, [window.start, *changes.tolist(), window.end], trace.segments)
    host_busy = within(trace.host_busy, *span)
    idle = within(trace.idle, *span)
    core_waits = within(trace.core_waits, *span)
    lifecycle = within(trace.lifecycle, *span)
    of_collectives = (columns.piece_spans, columns.moments, columns.asleep)
    cells = Cells(span, changes, computing, *of_collectives, host_busy, idle, core_waits, lifecycle)

    # 2. owners: of the pieces that hold a cell the one that is painted last
    inside = cells.inside([span])  # a collective may begin before the step and end after it
    computes = cells.inside(computing)
    host = cells.inside(host_busy)
    piece = cells.paint(columns.piece_spans[columns.painting_order], columns.painting_order)
    owner = np.where(piece >= 0, columns.piece_owner[piece], -1) if len(collectives) else piece
    exposed = inside & ~computes & (owner >= 0)

    # 3. parts: the first of these that holds in a cell
    exposed_part = _exposed_parts(cells, exposed, owner, piece, host, columns, trace.on_gpu)
    no_core = cells.inside(core_waits)
    last_begun = np.searchsorted(trace.idle[:, 0], cells.start, side="right")
    idle_cause = np.append(-1, trace.idle_causes)[last_begun]
    part = first_label(
        [
            (~inside, _OUTSIDE),
            (computes & (owner >= 0), _OVERLAPPED),
            (computes, _COMPUTE_ONLY),
            (exposed & no_core & (exposed_part != _ON_LINK), _NO_CORE),
            (exposed, exposed_part),
            (no_core, _IDLE_NO_CORE),
            (cells.inside(idle), _IDLE + idle_cause),
        ],
        otherwise=_REST,
    )

    # 4. sums: each cell has one part, so the parts add up to the step
    sums = dict(zip(PARTS, cells.sums(part, len(PARTS)).tolist()))
    if sum(sums.values()) != window.end - window.start:
        raise AccountingError(f"step {window.number} does not add up to {sums}; report this with the trace")
    parts = _parts_by_collective(cells, exposed, owner, part, len(collectives))
    host_ns = cells.sums(np.where(exposed & host, owner, -1), len(collectives))
    causes = _causes(parts.sum(1), host_ns, cells, computes, columns, trace.on_gpu, window.start)
    core_wait_ns = int(cells.length[no_core & inside].sum())
    return Account(cells, np.where(inside, owner, -1), part, host, sums, parts, causes, core_wait_ns)


def _parts_by_collective(
    cells: Cells, exposed: np.ndarray, owner: np.ndarray, part: np.ndarray, collectives: int
) -> np.ndarray:
    """Exposed ns of each collective (rows) by `PARTS_OF_COLLECTIVE` (columns)."""
    many = len(PARTS_OF_COLLECTIVE)
    # a label for each place of the table, row after row, so that one sum over cells fills all of it
    place_in_table = many * owner + part - _EXPOSED
    sums = cells.sums(np.where(exposed, place_in_table, -1), many * collectives)
    return sums.reshape(-1, many)


class _Columns:
    """A step's collectives as columns, and their pieces as columns beside them (`piece_...`).

    `painting_order`: the order in which pieces are painted over the cells; the last one is a cell's owner.
    """

    def __init__(self, collectives: Sequence[Collective], changes: Sequence[int], segments: Segments) -> None:
        self.issue = np.array([collective.issue for collective in collectives], dtype=np.int64)
        self.start = np.array([collective.start for collective in collectives], dtype=np.int64)
        self.end = np.array([collective.end for collective in collectives], dtype=np.int64)
        self.own = np.array([collective.own for collective in collectives], dtype=bool)
        self.held = np.array([collective.held for collective in collectives], dtype=bool)
        self.issued = np.array([collective.issued for collective in collectives], dtype=bool)
        self.emulated = np.array([collective.emulated for collective in collectives], dtype=bool)
        self.by_host = np.array([collective.by_host for collective in collectives], dtype=bool)
        self.gathers = np.array([collective.kind == "all_gather" for collective in collectives], dtype=bool)
        self.asleep = pairs([_asleep(collective) for collective in collectives])
        # collectives whose group the trace does not tell are taken for those of one communicator
        members = [collective.members for collective in collectives]
        self.communicator: np.ndarray = np.unique(members, return_inverse=True)[1]

        # Until when computing could have hidden a collective: to the end of its phase, the last one of that name.
        phase_ends = dict(zip(segments.phases_at(changes[:-1]), changes[1:]))
        hidden_until = [phase_ends.get(collective.phase, changes[-1]) for collective in collectives]
        self.until = np.array(hidden_until, dtype=np.int64)
        self.moments = np.concatenate([self.issue, self.start, self.end, self.until])
        self._list_pieces(collectives)
        self._list_transports(collectives)

    def _list_pieces(self, collectives: Sequence[Collective]) -> None:
        """List the pieces of all collectives, and in which order they are painted."""
        spans: list[tuple[int, int]] = []
        owners: list[int] = []
        copies: list[int] = []
        has_role: list[bool] = []
        for index, collective in enumerate(collectives):
            for piece in collective.pieces:
                spans.append((piece.start, piece.end))
                owners.append(index)
                copies.append(_copying(piece.role, collective))
                has_role.append(bool(piece.role))
        self.piece_spans = pairs(spans)
        self.piece_owner = np.array(owners, dtype=np.int64)
        self.piece_copies = np.array(copies, dtype=np.int64)
        # Transports first, so that the host's own copies and waits win; of equals the one that ends first wins.
        place_by_end: np.ndarray = np.argsort(np.lexsort((self.issue, self.end)))
        earlier_ends = -place_by_end[self.piece_owner]
        self.painting_order = np.lexsort((self.piece_copies > 0, earlier_ends, np.array(has_role, dtype=np.int64)))

    def _list_transports(self, collectives: Sequence[Collective]) -> None:
        """List which collectives have a transport, and when something else than the host moved bytes."""
        has_transport = [collective.transport is not None for collective in collectives]
        self.has_transport = np.array(has_transport, dtype=bool)
        self.on_link = self.has_transport & ~self.by_host
        self.transports_on_link = np.stack([self.start[self.on_link], self.end[self.on_link]], axis=1)


def _copying(role: str, collective: Collective) -> int:
    """The part that a piece is where the host works: packing, unpacking, or 0 where it is no copy."""
    if role == "copy-in":
        return _PACKING
    if role == "copy-out" or (collective.by_host and not role):
        return _UNPACKING
    return 0


def _asleep(collective: Collective) -> tuple[int, int]:
    """When the host still slept though the bytes had come; nothing for what the host copies, and for kernels.

    A transfer that ended at 900 for which the host was blocked until 950: (900, 950), still time on the link.
    """
    if collective.by_host or collective.transport is None or len(collective.pieces) == 1:
        return collective.end, collective.end
    woke = max(piece.end for piece in collective.pieces if piece.role in ("", "blocked"))
    return collective.end, woke


def _exposed_parts(
    cells: Cells,
    exposed: np.ndarray,  # which cells are exposed
    owner: np.ndarray,  # of each cell: its collective, -1 for none
    piece: np.ndarray,  # of each cell: the piece of this collective
    host: np.ndarray,  # in which cells the host ran operators
    columns: _Columns,
    on_gpu: bool,
) -> np.ndarray:
    """The part that each exposed cell is of: packing or unpacking, on the link, or waiting for a peer."""
    if not len(columns.piece_owner):
        return owner
    # packing or unpacking, as long as the host works at it
    copies = np.where(exposed, columns.piece_copies[piece], 0)
    if not on_gpu:  # there the device copies, whatever the host does
        idle_in_copy = (copies > 0) & ~host
        pauses, _ = cells.runs(np.where(idle_in_copy, owner, -1))
        long_pauses = pauses[pauses[:, 1] - pauses[:, 0] >= _DISPATCH_NS]
        copies[cells.inside(long_pauses)] = 0
    # on the link while its communicator moves bytes, and until the host has noticed that they came
    bytes_came, woke = columns.asleep[owner].T
    is_on_link = (bytes_came <= cells.start) & (cells.start < woke)
    of_transport = columns.communicator[columns.on_link]
    for communicator in np.unique(of_transport):
        is_of_it = columns.communicator[owner] == communicator
        is_on_link |= is_of_it & cells.inside(columns.transports_on_link[of_transport == communicator])
    return np.where(copies > 0, copies, np.where(is_on_link, _ON_LINK, _WAITING))


def _causes(
    exposed: np.ndarray,  # of each collective: ns of exposed time
    host_ns: np.ndarray,  # of each collective: ns of these in which the host worked
    cells: Cells,
    computes: np.ndarray,  # which cells compute
    columns: _Columns,
    on_gpu: bool,
    start: int,  # when the step began: nothing before it could hide a collective of it
) -> list[str]:
    """The cause of each collective's exposed time, as the file's beginning says."""
    queued = _queued(columns, on_gpu)
    computed_before = cells.between(computes, start, np.maximum(columns.issue, start))
    computed_after = cells.between(computes, columns.end, np.maximum(columns.until, columns.end))

    # A gather is late if it could have been issued before that computing, any other if its call kept the host from the
    # computing after it.
    if on_gpu:
        issued_when_needed = columns.start - columns.issue < AT_ONCE_NS
        held_needlessly: np.ndarray = np.zeros(len(columns.held), dtype=bool)  # a GPU's host does not wait in the call
    else:
        issued_when_needed = columns.own | columns.held
        held_needlessly = columns.held & (computed_after > _ENOUGH * exposed)
    could_be_earlier = issued_when_needed & (computed_before > _ENOUGH * exposed)
    late = np.where(columns.gathers, could_be_earlier, held_needlessly)

    waited_on_free_link = columns.start - columns.issue - queued
    causes = first_label(
        [
            (exposed == 0, "hidden"),
            (~columns.issued, "unknown"),
            (columns.by_host & (2 * host_ns <= exposed), "waiting_for_peer"),
            (columns.by_host, "nothing_to_hide_behind"),
            (2 * queued >= exposed, "link_busy"),
            (columns.emulated & (2 * waited_on_free_link >= exposed), "waiting_for_peer"),
            (late, "late_start"),
        ],
        otherwise="nothing_to_hide_behind",
    )
    return causes.tolist()


def _queued(columns: _Columns, on_gpu: bool) -> np.ndarray:
    """Nanoseconds that each collective spent behind others of its communicator, between its issue and its start.

    A host that runs ahead issues long before the input is computed, so on a GPU only others that ran until this one
    began count. A kernel that was issued at 0 and starts at 50, behind one that ran from 20 to 45: 25 ns, where both
    are of CPU ranks; on a GPU as much, since the pause between them is short.
    """
    queued: np.ndarray = np.zeros(len(columns.issue), dtype=np.int64)
    for lane in _lanes(columns):
        starts = columns.start[lane]
        transports = np.stack([starts, columns.end[lane]], axis=1)
        queued_from = columns.issue[lane]
        if on_gpu:
            busy = close_gaps(transports, _BACK_TO_BACK_NS)
            if not len(busy):  # none of them has a length, so nothing was behind one
                continue
            last_begun = np.searchsorted(busy[:, 0], starts) - 1
            is_behind = (last_begun >= 0) & (busy[last_begun, 1] >= starts)
            queued_from = np.where(is_behind, np.maximum(queued_from, busy[last_begun, 0]), starts)
        queued[lane] = np.maximum(0, before(transports, starts) - before(transports, queued_from))
    return queued


def _lanes(columns: _Columns) -> list[list[int]]:
    """Sort the collectives that have a transport into lanes, in each of which one begins when the one before has ended.

    A communicator of NCCL is one lane, and so is an emulated link with one queue; gloo's two threads and a link's two
    queues are two. Groups that the trace does not tell have as many as it shows at once.
    """
    by_communicator: dict[int, list[tuple[int, int]]] = defaultdict(list)  # the end of each lane so far, and the lane
    lanes: list[list[int]] = []
    by_start = np.lexsort((columns.end, columns.start))
    for index in by_start[columns.has_transport[by_start]].tolist():
        ends = by_communicator[int(columns.communicator[index])]
        # of the lanes that are free, the one that ended last: that is what it was behind
        free = bisect_right(ends, int(columns.start[index]), key=itemgetter(0))
        if free:
            _, lane = ends.pop(free - 1)
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(index)
        insort(ends, (int(columns.end[index]), lane))
    return lanes

"""One step of one rank: every instant has one owner and one part, and every table is a sum over these labels.

A cell (a stretch in which nothing changes) computes, communicates, does both or neither; so compute only + overlapped +
exposed + other is the step. A cell with communication has one owner: the host's own copies and waits name theirs, else
it is the collective that ends first, since the host goes on at its end. An exposed cell is packing or unpacking where
the host copies for its owner (unless the host idles for longer than dispatching takes), else on the link where a
transport moves bytes, else waiting for a peer; without a core where the host waited for one meanwhile and no bytes
moved. A cell with neither has a cause of idle time.

Causes of a collective's exposed time, in the order in which they are tried:
- `hidden`: nothing of it was exposed;
- `unknown`: the trace does not show who issued it;
- `waiting_for_peer`, `nothing_to_hide_behind` of what the host carries itself: by whether the host mostly idled;
- `link_busy`: it spent at least half of what was exposed behind other collectives, between its issue and its start;
- `waiting_for_peer`: as long between issue and start with a free link (an emulated link starts with the last issue);
  over several ranks' traces `with_peers` (peers) finds the rest;
- `late_start`: its consumer issued it when needed (no prefetch), or the issuing call blocked the host, though there was
  computing to hide it;
- `nothing_to_hide_behind`: issued early and on a free link, but too little computing was left: the first gather, the
  last reduction, small units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fsdplab.profiling.intervals import Cells, Intervals, close_gaps, covered, pairs, subtract, union, within
from fsdplab.profiling.memory.timeline import AccountingError
from fsdplab.profiling.traces.collectives import Collective
from fsdplab.profiling.traces.events import COPIES, DEVICE_WORK, Events, Kind, Window, known
from fsdplab.profiling.traces.segments import Segments
from fsdplab.profiling.traces.steps import all_device_work
from fsdplab.records.tables import IDLE_PARTS, PARTS_OF_COLLECTIVE

PARTS = ("compute_only_ns", "overlapped_ns", *PARTS_OF_COLLECTIVE, *(f"idle {name}" for name in IDLE_PARTS))
_COMPUTE_ONLY, _OVERLAPPED = range(2)
_EXPOSED = PARTS.index(PARTS_OF_COLLECTIVE[0])
_ON_LINK, _PACKING, _UNPACKING, _WAITING, _NO_CORE = range(_EXPOSED, _EXPOSED + len(PARTS_OF_COLLECTIVE))
_IDLE = _NO_CORE + 1
_IDLE_NO_CORE, _REST = (_IDLE + IDLE_PARTS.index(name) for name in ("no_core_ns", "rest_ns"))
_DISPATCH_NS = 100_000  # between two operators of a copy the host dispatches the next one; idle for longer, it waits
_BACK_TO_BACK_NS = 10_000  # two kernels this close on a GPU: the second waited for the first
_LIFECYCLE = (
    "pre_forward", "pre_backward", "post_backward", "root_post_backward_callback", "link", "backward_prefetch",
)  # fmt: skip
_ENOUGH = 0.1  # computing of a tenth of the exposed time is something to hide behind


class TraceSets:
    """What the steps of one trace share, as sorted, disjoint sets; `lifecycle`: when an engine's hooks ran."""

    def __init__(
        self, found: Events, collectives: Sequence[Collective], segments: Segments, core_waits: Intervals
    ) -> None:
        self.found, self.segments, self.on_gpu = found, segments, found.on_gpu
        self.host_busy = union(*found.host_busy.values())
        self.device = all_device_work(found, collectives)
        self.blocked = union(found.spans(Kind.BLOCKED, Kind.BLOCKING_LAUNCH))
        self.core_waits = union(core_waits)
        self.lifecycle = union([(each.start, each.end) for each in found.ranges if each.label.startswith(_LIFECYCLE)])
        self.idle, self.idle_causes = idle_causes(found, self.device)  # spans, and for each a position in IDLE_PARTS


@dataclass(frozen=True)
class Account:
    """A step's cells, each with its owner (an index of the step's collectives, -1 for none) and its part (a position in
    `PARTS`, -1 outside of the step). `host` says where the host ran operators; `sums` are ns by `PARTS`, `parts` of
    exposed time for each collective by `PARTS_OF_COLLECTIVE`; `causes` says why. `core_wait_ns`: how long the host
    waited for a core, also while it computed.
    """

    cells: Cells
    owner: np.ndarray
    part: np.ndarray
    host: np.ndarray
    sums: dict[str, int]
    parts: np.ndarray
    causes: list[str]
    core_wait_ns: int

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


def account(window: Window, computing: Intervals, mine: Sequence[Collective], trace: TraceSets) -> Account:
    """Label every instant of a step; AccountingError if it did not add up.

    `computing`: sorted and disjoint, inside the window; `mine`: the step's own collectives. A step of 100 ms with 80
    computing, 50 communicating and 40 of that at once: `sums` has compute_only 40, overlapped 40, and 10 ms in the
    parts of exposed time.
    """
    span, changes = [window.start, window.end], trace.segments.changes
    changes = changes[(changes > window.start) & (changes < window.end)]
    of = _Columns(mine, [window.start, *changes.tolist(), window.end], trace.segments)
    sets = (trace.host_busy, trace.idle, trace.core_waits, trace.lifecycle)
    host_busy, idle, core_waits, lifecycle = (within(each, *span) for each in sets)
    cells = Cells(span, changes, computing, of.spans, of.moments, of.asleep, host_busy, idle, core_waits, lifecycle)
    inside, computes, host = cells.inside([span]), cells.inside(computing), cells.inside(host_busy)
    piece = cells.paint(of.spans[of.order], of.order)
    owner = np.where(piece >= 0, of.owner[piece], -1) if len(mine) else piece
    exposed = inside & ~computes & (owner >= 0)
    idle_cause = np.append(-1, trace.idle_causes)[np.searchsorted(trace.idle[:, 0], cells.start, side="right")]
    how, no_core = _exposed_parts(cells, exposed, owner, piece, host, of, trace.on_gpu), cells.inside(core_waits)
    told = [
        (~inside, -1), (computes & (owner >= 0), _OVERLAPPED), (computes, _COMPUTE_ONLY),
        (exposed & no_core & (how != _ON_LINK), _NO_CORE), (exposed, how), (no_core, _IDLE_NO_CORE),
        (cells.inside(idle), _IDLE + idle_cause),
    ]  # fmt: skip
    part = np.select([where for where, _ in told], [label for _, label in told], _REST)
    sums = dict(zip(PARTS, cells.sums(part, len(PARTS)).tolist()))
    if sum(sums.values()) != window.end - window.start:
        raise AccountingError(f"step {window.number} does not add up to {sums}; report this with the trace")
    many = len(PARTS_OF_COLLECTIVE)
    parts = cells.sums(np.where(exposed, many * owner + part - _EXPOSED, -1), many * len(mine)).reshape(-1, many)
    busy = cells.sums(np.where(exposed & host, owner, -1), len(mine))
    causes = _causes(parts.sum(1), busy, cells, computes, of, trace.on_gpu, window.start)
    core_wait = int(cells.length[no_core & inside].sum())
    return Account(cells, np.where(inside, owner, -1), part, host, sums, parts, causes, core_wait)


class _Columns:
    """A step's collectives and their pieces as columns; `order` is that in which pieces are painted: the last wins."""

    def __init__(self, mine: Sequence[Collective], changes: Sequence[int], segments: Segments) -> None:
        phase_ends = dict(zip(segments.phases_at(changes[:-1]), changes[1:]))  # the last of each phase in the step
        pieces = [(piece, index, each) for index, each in enumerate(mine) for piece in each.pieces]
        self.spans = pairs([(piece.start, piece.end) for piece, _, _ in pieces])
        self.owner = np.array([index for _, index, _ in pieces], dtype=np.int64)
        self.copies = np.array([_copying(piece.role, each) for piece, _, each in pieces], dtype=np.int64)
        self.issue, self.start, self.end = (
            np.array([getattr(each, name) for each in mine], dtype=np.int64) for name in ("issue", "start", "end")
        )
        by_end: np.ndarray = np.argsort(np.lexsort((self.issue, self.end)))
        roles = np.array([bool(piece.role) for piece, _, _ in pieces], dtype=np.int64)
        self.order = np.lexsort((self.copies > 0, -by_end[self.owner], roles))
        carried = [(each.transport, each.by_host) for each in mine if each.transport]
        self.ways = pairs([way[:2] for way, _ in carried])
        self.moving = pairs([way[:2] for way, by_host in carried if not by_host])
        self.asleep = pairs([_asleep(each) for each in mine])
        self.until = np.array([phase_ends.get(each.phase, changes[-1]) for each in mine], dtype=np.int64)
        self.moments = np.concatenate([self.issue, self.start, self.end, self.until])
        flags = ("own", "held", "issued", "emulated", "by_host")
        self.own, self.held, self.issued, self.emulated, self.by_host = (
            np.array([getattr(each, name) for each in mine], dtype=bool) for name in flags
        )
        self.gathers = np.array([each.kind == "all_gather" for each in mine], dtype=bool)


def _copying(role: str, each: Collective) -> int:
    """The part that a piece is where the host works: packing, unpacking, or 0 where it is no copy."""
    if role == "copy-in":
        return _PACKING
    return _UNPACKING if role == "copy-out" or each.by_host and not role else 0


def _asleep(each: Collective) -> tuple[int, int]:
    """When the host still slept though the bytes had come; nothing for what the host copies, and for kernels."""
    if each.by_host or each.transport is None or len(each.pieces) == 1:
        return each.end, each.end
    return each.end, max(piece.end for piece in each.pieces if piece.role in ("", "blocked"))


def _exposed_parts(
    cells: Cells,
    exposed: np.ndarray,
    owner: np.ndarray,
    piece: np.ndarray,
    host: np.ndarray,
    of: _Columns,
    on_gpu: bool,
) -> np.ndarray:
    """The part that each exposed cell is of."""
    if not len(of.owner):
        return owner
    copies = np.where(exposed, of.copies[piece], 0)
    if not on_gpu:  # there the device copies, whatever the host does
        pauses = cells.runs(np.where((copies > 0) & ~host, owner, -1))[0]
        copies[cells.inside(pauses[pauses[:, 1] - pauses[:, 0] >= _DISPATCH_NS])] = 0
    came, until = of.asleep[owner].T
    moves = cells.inside(of.moving) | (came <= cells.start) & (cells.start < until)
    return np.where(copies > 0, copies, np.where(moves, _ON_LINK, _WAITING))


def _causes(
    exposed: np.ndarray, busy: np.ndarray, cells: Cells, computes: np.ndarray, of: _Columns, on_gpu: bool, start: int
) -> list[str]:
    """Of every collective, as the file's beginning says; `busy`: ns of its exposed time in which the host worked."""
    before = cells.between(computes, start, np.maximum(of.issue, start))
    after = cells.between(computes, of.end, np.maximum(of.until, of.end))
    queued = _queued(cells, of, on_gpu)
    at_once = of.start - of.issue < AT_ONCE_NS if on_gpu else of.own | of.held
    held = of.held & (after > _ENOUGH * exposed) & (not on_gpu)
    late = np.where(of.gathers, at_once & (before > _ENOUGH * exposed), held)
    tried = [
        ("hidden", exposed == 0), ("unknown", ~of.issued),
        ("waiting_for_peer", of.by_host & (2 * busy <= exposed)), ("nothing_to_hide_behind", of.by_host),
        ("link_busy", 2 * queued >= exposed),
        ("waiting_for_peer", of.emulated & (2 * (of.start - of.issue - queued) >= exposed)), ("late_start", late),
    ]  # fmt: skip
    return np.select([found for _, found in tried], [name for name, _ in tried], "nothing_to_hide_behind").tolist()


def _queued(cells: Cells, of: _Columns, on_gpu: bool) -> np.ndarray:
    """Nanoseconds that each collective spent behind others on the link, between its issue and its start.

    A host that runs ahead issues long before the input is computed, so on a GPU only others that ran until this one
    began count.
    """
    begun = of.issue
    if on_gpu and len(runs := close_gaps(of.ways, _BACK_TO_BACK_NS)):
        at = np.searchsorted(runs[:, 0], of.start) - 1
        behind = (at >= 0) & (runs[at, 1] >= of.start)
        begun = np.where(behind, np.maximum(of.issue, runs[at, 0]), of.start)
    return np.maximum(0, cells.between(cells.inside(of.ways), begun, of.start))


# ---- why nothing ran
#
# On a GPU a gap ends when the next work begins, and the launch of that work says why it was late. As in HTA's breakdown
# of idle time, a gap is the host's where the launch came after the gap had begun, and the device's own where the next
# work was queued already. Two things differ: HTA looks at each stream alone, here the device is idle only when all its
# streams are; and HTA calls all of the host's gaps "host wait", here those are split further by what the host did.
#
# - `data_loading_ns`: of the host's gaps, while the host took a batch from its DataLoader (on the CPU: all that time);
# - `synchronisation_ns`: of the host's gaps, where the host was blocked in a synchronising call
#   (`cudaStreamSynchronize`, `.item()`) as the device ran dry, so that it could launch nothing ahead;
# - `host_bound_ns`: the rest of the host's gaps, and the time after the last work: Python and operator overhead;
# - `kernel_gap_ns`: shorter than 10 us, with the next work queued already (HTA: below 30 ns, less than devices need);
# - `copies_ns`: data was copied between the host and the device;
# - `device_copies_ns`: data was copied inside the device, or memory was set;
# - `no_core_ns`: the host waited for a core, where somebody noted that;
# - `rest_ns`: unknown. The next work was queued and waited longer (for another stream, an event, a peer), or its launch
#   is not in the trace, or the device did another step's work; on a CPU, all time without an operator.


AT_ONCE_NS = 100_000  # work that starts this soon after its launch waited for nothing else: the host came late
_KERNEL_GAP_NS = 10_000
_RETURN_NS = 5_000  # a synchronising call ends this much after the work that it waits for: the clocks differ slightly
_HOST, _KERNEL_GAP, _LOADING, _SYNC, _COPIES, _DEVICE_COPIES = (
    IDLE_PARTS.index(f"{name}_ns")
    for name in ("host_bound", "kernel_gap", "data_loading", "synchronisation", "copies", "device_copies")
)


def idle_causes(found: Events, device: Intervals) -> tuple[Intervals, np.ndarray]:
    """Disjoint spans in order of time, each with a position in `IDLE_PARTS`; what is in none of them is `rest_ns`.

    `device`: when the device did anything at all, sorted and disjoint. A gap of 50 us whose next kernel was launched
    45 us after it began: 50 us are `host_bound_ns`.
    """
    loading = union(found.spans(Kind.LOADING))
    if not found.on_gpu:
        return loading, np.full(len(loading), _LOADING)
    copies, inside = (union(found.spans(kind)) for kind in COPIES)
    gaps = subtract([(found.first, found.last)], device)
    late, queued = _by_launch(found, gaps)
    blocked = found.spans(Kind.BLOCKED, Kind.BLOCKING_LAUNCH)
    dry = late[covered(union(blocked + [0, _RETURN_NS]), late[:, 0])]
    short = queued[queued[:, 1] - queued[:, 0] < _KERNEL_GAP_NS]
    cells = Cells([found.first, found.last], late, short, copies, inside, loading, blocked)
    host = cells.inside(late)
    told = [
        (host & cells.inside(loading), _LOADING), (host & (cells.inside(blocked) | cells.inside(dry)), _SYNC),
        (host, _HOST), (cells.inside(short), _KERNEL_GAP), (cells.inside(copies), _COPIES),
        (cells.inside(inside), _DEVICE_COPIES),
    ]  # fmt: skip
    return cells.runs(np.select([where for where, _ in told], [label for _, label in told], -1))


def _by_launch(found: Events, gaps: Intervals) -> tuple[Intervals, Intervals]:
    """(what of the gaps is the host's, gaps whose next work was queued before they began)."""
    works = found.rows(*DEVICE_WORK)
    starts, launched = found.start[works], found.of_launch(found.end, works)
    order = np.lexsort((launched, starts))  # of equal starts the first launched
    starts, launched = np.append(starts[order], found.last), np.append(launched[order], found.last)
    at = np.searchsorted(starts[:-1], gaps[:, 1])
    launched = launched[at]
    late = known(launched) & (launched > gaps[:, 0])
    until = np.where(gaps[:, 1] - launched < AT_ONCE_NS, gaps[:, 1], launched)
    return np.stack([gaps[late, 0], until[late]], axis=1), gaps[known(launched) & ~late]

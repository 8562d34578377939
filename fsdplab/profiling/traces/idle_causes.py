"""Why nothing ran: the spans of a trace with neither computing nor communication, each with its cause.

On a GPU a gap ends when the next work begins, and the launch of that work says why it was late. As in HTA's breakdown
of idle time, a gap is the host's where the launch came after the gap had begun, and the device's own where the next
work was queued already. Two things differ: HTA looks at each stream alone, here the device is idle only when all its
streams are; and HTA calls all of the host's gaps "host wait", here those are split further by what the host did.

- `data_loading_ns`: of the host's gaps, while the host took a batch from its DataLoader (on the CPU: all that time);
- `synchronisation_ns`: of the host's gaps, where the host was blocked in a synchronising call
  (`cudaStreamSynchronize`, `.item()`) as the device ran dry, so that it could launch nothing ahead;
- `host_bound_ns`: the rest of the host's gaps, and the time after the last work: Python and operator overhead;
- `kernel_gap_ns`: shorter than 10 us, with the next work queued already (HTA: below 30 ns, less than devices need);
- `copies_ns`: data was copied between the host and the device;
- `device_copies_ns`: data was copied inside the device, or memory was set;
- `no_core_ns`: the host waited for a core, where somebody noted that;
- `rest_ns`: unknown. The next work was queued and waited longer (for another stream, an event, a peer), or its launch
  is not in the trace, or the device did another step's work; on a CPU, all time without an operator.
"""

from __future__ import annotations

import numpy as np

from fsdplab.profiling.intervals import Cells, Intervals, covered, first_label, subtract, union
from fsdplab.profiling.traces.event_kinds import COPIES, DEVICE_WORK, Kind
from fsdplab.profiling.traces.events import Events, known
from fsdplab.records.tables import IDLE_PARTS

AT_ONCE_NS = 100_000  # work that starts this soon after its launch waited for nothing else: the host came late
_KERNEL_GAP_NS = 10_000
_RETURN_NS = 5_000  # a synchronising call ends this much after the work that it waits for: the clocks differ slightly
_HOST = IDLE_PARTS.index("host_bound_ns")
_KERNEL_GAP = IDLE_PARTS.index("kernel_gap_ns")
_LOADING = IDLE_PARTS.index("data_loading_ns")
_SYNC = IDLE_PARTS.index("synchronisation_ns")
_COPIES = IDLE_PARTS.index("copies_ns")
_DEVICE_COPIES = IDLE_PARTS.index("device_copies_ns")


def idle_causes(events: Events, device: Intervals) -> tuple[Intervals, np.ndarray]:
    """Disjoint spans in order of time, each with a position in `IDLE_PARTS`; what is in none of them is `rest_ns`.

    `device`: when the device did anything at all, sorted and disjoint. A gap of 50 us whose next kernel was launched
    45 us after it began: 50 us are `host_bound_ns`.
    """
    loading = union(events.spans(Kind.LOADING))
    if not events.on_gpu:
        # on a CPU nothing is launched: only loading has a cause of its own
        return loading, np.full(len(loading), _LOADING)
    to_host, inside_device = (union(events.spans(kind)) for kind in COPIES)
    blocked = events.spans(Kind.BLOCKED, Kind.BLOCKING_LAUNCH)
    gaps = subtract([(events.first, events.last)], device)
    late, queued = _by_launch(events, gaps)
    # A blocked host cannot launch ahead: a gap that begins while it is blocked is the synchronisation's to its end.
    blocked_until_return = union(blocked + [0, _RETURN_NS])
    dry = late[covered(blocked_until_return, late[:, 0])]
    short = queued[queued[:, 1] - queued[:, 0] < _KERNEL_GAP_NS]
    cells = Cells([events.first, events.last], late, short, to_host, inside_device, loading, blocked)
    is_host_late = cells.inside(late)
    cause = first_label(
        [
            (is_host_late & cells.inside(loading), _LOADING),
            (is_host_late & (cells.inside(blocked) | cells.inside(dry)), _SYNC),
            (is_host_late, _HOST),
            (cells.inside(short), _KERNEL_GAP),
            (cells.inside(to_host), _COPIES),
            (cells.inside(inside_device), _DEVICE_COPIES),
        ],
        otherwise=-1,
    )
    return cells.runs(cause)


def _by_launch(events: Events, gaps: Intervals) -> tuple[Intervals, Intervals]:
    """Split gaps by the launch of the next work: (the host's part of them, gaps whose next work was queued before)."""
    works = events.rows(*DEVICE_WORK)
    starts = events.start[works]
    launches = events.of_launch(events.end, works)
    order = np.lexsort((launches, starts))  # of equal starts the first launched
    # Behind the last work the trace itself ends the gap, as if work had been launched there.
    starts = np.append(starts[order], events.last)
    launches = np.append(launches[order], events.last)

    # the first work that starts at a gap's end or later; one past the last is the end of the trace
    next_work = np.searchsorted(starts[:-1], gaps[:, 1])
    launched = launches[next_work]
    gap_starts, gap_ends = gaps[:, 0], gaps[:, 1]
    is_late = known(launched) & (launched > gap_starts)
    # A gap from 0 to 500 us with a launch at 450: all of it is the host's. With a launch at 200: up to there, since
    # the work then waited for something else.
    starts_at_once = gap_ends - launched < AT_ONCE_NS
    host_until = np.where(starts_at_once, gap_ends, launched)
    of_host = np.stack([gap_starts[is_late], host_until[is_late]], axis=1)
    return of_host, gaps[known(launched) & ~is_late]

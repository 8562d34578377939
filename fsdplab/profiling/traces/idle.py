"""Why nothing ran: the causes of idle time, as labelled spans of a trace.

On a GPU a gap ends when the next work begins, and the launch of that work says why it was late. As in HTA's breakdown
of idle time, a gap is the host's where the launch came after the gap had begun, and the device's own where the next
work was queued already. Two things differ: HTA looks at each stream alone, here the device is idle only when all its
streams are; and HTA calls all of the host's gaps "host wait", here those are split further by what the host did.

- `data_loading_ns`: of the host's gaps, while the host took a batch from its DataLoader (on the CPU: all of that time);
- `synchronisation_ns`: of the host's gaps, where the host was blocked in a synchronising call (`cudaStreamSynchronize`,
  `.item()`) as the device ran dry, so that it could launch nothing ahead;
- `host_bound_ns`: the rest of the host's gaps, and the time after the last work: Python and operator overhead;
- `kernel_gap_ns`: shorter than 10 us, with the next work queued already (HTA: below 30 ns, less than devices need);
- `copies_ns`: the copy engines worked (memcpy, memset);
- `no_core_ns`: the host waited for a core, where somebody noted that (`account`);
- `rest_ns`: unknown. The next work was queued and waited longer (for another stream, an event, a peer), or its launch
  is not in the trace, or the device did another step's work; on a CPU, all time without an operator.
"""

from __future__ import annotations

import numpy as np

from fsdplab.profiling.intervals import Cells, Intervals, covered, subtract, union
from fsdplab.profiling.traces.events import Events, Kind, known

AT_ONCE_NS = 100_000  # work that starts this soon after its launch waited for nothing else: the host came late
_KERNEL_GAP_NS = 10_000
_RETURN_NS = 5_000  # a synchronising call ends this much after the work that it waits for: the clocks differ slightly
_HOST, _KERNEL_GAP, _LOADING, _SYNC, _COPIES = range(5)


def idle_causes(found: Events, device: Intervals) -> tuple[Intervals, np.ndarray]:
    """Disjoint spans in order of time, each with a position in `IDLE_PARTS`; what is in none of them is `rest_ns`.

    `device`: when the device did anything at all, sorted and disjoint. A gap of 50 us whose next kernel was launched
    45 us after it began: 50 us are `host_bound_ns`.
    """
    loading = union(found.spans(Kind.LOADING))
    if not found.on_gpu:
        return loading, np.full(len(loading), _LOADING)
    copies, gaps = union(found.spans(Kind.COPY)), subtract([(found.first, found.last)], device)
    late, queued = _by_launch(found, gaps)
    blocked = found.spans(Kind.BLOCKED, Kind.BLOCKING_LAUNCH)
    dry = late[covered(union(blocked + [0, _RETURN_NS]), late[:, 0])]
    short = queued[queued[:, 1] - queued[:, 0] < _KERNEL_GAP_NS]
    cells = Cells([found.first, found.last], late, short, copies, loading, blocked)
    host = cells.inside(late)
    told = [
        (host & cells.inside(loading), _LOADING), (host & (cells.inside(blocked) | cells.inside(dry)), _SYNC),
        (host, _HOST), (cells.inside(short), _KERNEL_GAP), (cells.inside(copies), _COPIES),
    ]  # fmt: skip
    return cells.runs(np.select([where for where, _ in told], [label for _, label in told], -1))


def _by_launch(found: Events, gaps: Intervals) -> tuple[Intervals, Intervals]:
    """(what of the gaps is the host's, gaps whose next work was queued before they began)."""
    works = found.rows(Kind.KERNEL, Kind.COMM, Kind.COPY)
    starts, launched = found.start[works], found.launch_ends(works)
    order = np.lexsort((launched, starts))  # of equal starts the first launched
    starts, launched = np.append(starts[order], found.last), np.append(launched[order], found.last)
    at = np.searchsorted(starts[:-1], gaps[:, 1])
    launched = launched[at]
    late = known(launched) & (launched > gaps[:, 0])
    until = np.where(gaps[:, 1] - launched < AT_ONCE_NS, gaps[:, 1], launched)
    return np.stack([gaps[late, 0], until[late]], axis=1), gaps[known(launched) & ~late]

"""Why neither computing nor communication ran: the part "other" of a step, split by cause, exactly.

On a GPU a gap ends when the next work begins, and the launch of that work says why it was late. As in HTA's breakdown
of idle time, a gap is the host's where the launch came after the gap had begun, and the device's own where the next
work was queued already. Two things differ: HTA looks at each stream alone, here the device is idle only when all its
streams are; and HTA calls all of the host's gaps "host wait", here those are split further by what the host did.

- `data_loading_ns`: of the host's gaps, while the host took a batch from its DataLoader;
- `synchronisation_ns`: of the host's gaps, where the host was blocked in a synchronising call (`cudaStreamSynchronize`,
  `.item()`) as the device ran dry, so that it could launch nothing ahead;
- `host_bound_ns`: the rest of the host's gaps: Python and operator overhead;
- `kernel_gap_ns`: shorter than 10 us, with the next work queued already (HTA: below 30 ns, less than devices need);
- `copies_ns`: the copy engines worked (memcpy, memset);
- `rest_ns`: the next work was queued and waited longer (for another stream, an event, a peer), or its launch is not in
  the trace, or the device did another step's work.

On the CPU the host itself works: `data_loading_ns`, and `rest_ns` for everything else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsdplab.profiling.intervals import Intervals, intersect, size, subtract, union, within
from fsdplab.profiling.memory.timeline import AccountingError
from fsdplab.profiling.traces.classify import TraceEvents
from fsdplab.profiling.traces.collectives import Collective
from fsdplab.profiling.traces.steps import Window, all_device_work, known, launch_ends_of
from fsdplab.records.tables import IDLE_PARTS

_AT_ONCE_NS = 100_000  # work that starts this soon after its late launch waited for nothing else
_KERNEL_GAP_NS = 10_000
_RETURN_NS = 5_000  # a synchronising call ends this much after the work that it waits for: the clocks differ slightly


class IdleTime:
    """Splits the part "other" of any step of one trace."""

    def __init__(self, found: TraceEvents, collectives: Sequence[Collective]) -> None:
        self._loading, self._copies = union(found.loading.pairs()), union(found.copies.pairs())
        self._busy = all_device_work(found, collectives)
        self._on_gpu = found.on_gpu
        blocked = found.blocked.pairs()
        self._blocked = union(blocked)
        self._just_blocked = union(np.stack([blocked[:, 0], blocked[:, 1] + _RETURN_NS], axis=1))
        self._starts, self._launched = _work(found)

    def parts(self, window: Window, other: Intervals) -> dict[str, int]:
        """Nanoseconds of each cause; they sum to `other`, which is sorted, disjoint and inside the window.

        A gap of 50 us whose next kernel was launched 45 us after it began: 50 us are `host_bound_ns`.
        """
        parts = dict.fromkeys(IDLE_PARTS, 0)
        if self._on_gpu:
            self._on_device(window, other, parts)
        else:
            parts["data_loading_ns"] = size(intersect(other, within(self._loading, window.start, window.end)))
        parts["rest_ns"] += size(other) - sum(parts.values())
        if min(parts.values()) < 0:
            raise AccountingError(
                f"step {window.number}: the causes {parts} of {size(other)} idle ns do not add up; report this with the"
                " trace"
            )
        return parts

    def _on_device(self, window: Window, other: Intervals, parts: dict[str, int]) -> None:
        parts["copies_ns"] = size(intersect(other, within(self._copies, window.start, window.end)))
        gaps = subtract(other, within(self._busy, window.start, window.end))
        if not len(gaps) or not len(self._starts):
            return
        late, queued = self._by_launch(gaps)
        short = queued[queued[:, 1] - queued[:, 0] < _KERNEL_GAP_NS]
        parts["kernel_gap_ns"] = size(short)
        loading = intersect(late, self._loading)
        parts["data_loading_ns"] = size(loading)
        blocked = union(late[self._ran_dry(late)], intersect(late, self._blocked))
        parts["synchronisation_ns"] = size(subtract(blocked, loading))
        parts["host_bound_ns"] = size(late) - size(union(loading, blocked))

    def _ran_dry(self, gaps: Intervals) -> np.ndarray:
        """For each gap whether the host was blocked when it began."""
        if not len(self._just_blocked):
            return np.zeros(len(gaps), dtype=bool)
        at = np.searchsorted(self._just_blocked[:, 0], gaps[:, 0], side="right") - 1
        return (at >= 0) & (gaps[:, 0] < self._just_blocked[at, 1])

    def _by_launch(self, gaps: Intervals) -> tuple[Intervals, Intervals]:
        """(what of the gaps is the host's, gaps whose next work was queued before they began)."""
        at = np.minimum(np.searchsorted(self._starts, gaps[:, 1], side="left"), len(self._starts) - 1)
        launched = self._launched[at]
        told = (self._starts[at] == gaps[:, 1]) & known(launched)
        late = told & (launched > gaps[:, 0])
        until = np.minimum(launched, gaps[:, 1])
        until = np.where(gaps[:, 1] - until < _AT_ONCE_NS, gaps[:, 1], until)
        return np.stack([gaps[late, 0], until[late]], axis=1), gaps[told & ~late]


def _work(found: TraceEvents) -> tuple[np.ndarray, np.ndarray]:
    """All work of the device in order of its start, and when the host had launched each (a launch may take long: the
    first of a kernel loads its code); of equal starts the first launched.
    """
    moving = [each for each in found.transfers if each.launch is not None]
    moved = np.array([each.start for each in moving], dtype=np.int64)
    starts = np.concatenate([found.kernels.pairs()[:, 0], found.copies.pairs()[:, 0], moved])
    numbers = [*found.kernel_launches, *found.copy_launches, *(each.launch for each in moving)]
    launched = launch_ends_of(found, numbers)
    order = np.lexsort((launched, starts))
    return starts[order], launched[order]

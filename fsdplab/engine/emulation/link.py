"""Emulates a network of a chosen bandwidth and latency, per mesh axis, in front of any transport.

On one machine bytes move at memory speed, so sharding looks free. Behind a link a collective is done no earlier than

    max(link free, last rank's issue) + latency x steps + wire bytes / bandwidth        (ring: Patarasuk and Yuan 2009)

and whoever needs it sooner sleeps. Waiting costs no CPU, so overlap becomes visible, and repeatable, on two cores. A
link carries its collectives one after the other, as one communicator does; with two queues gathers and reductions
travel independently, each at full bandwidth (two communicators on a network that one of them does not fill).

All ranks compute the same times: each writes when it issued its k-th collective to a board in shared memory that its
peers read. On CUDA streams wait, not hosts, and there is one queue (`stream_link.py`).
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import nn

from fsdplab.engine import compat, events
from fsdplab.engine.core import transport as core
from fsdplab.engine.core.hooks import units_under
from fsdplab.engine.emulation.stream_link import HostFunctionHold, StreamChannel
from fsdplab.engine.features.matrix_optimizer import MatrixOptimizer
from fsdplab.engine.transport.shared_memory.arena import PeerMemory, SharingRefused
from fsdplab.engine.transport.shared_memory.process_group import SharedMemoryGroup

_START = 64  # bytes of a header before the board
_RING = 1024  # issues that the board remembers: far more than can be in flight
_SYNC_S = 20e-6  # how long to sleep while a peer's issue has not arrived


@dataclass(frozen=True)
class Link:
    """Bandwidth in bytes/s, latency in seconds per step of the ring; `queues` = 2 separates gathers from reductions.

    A ring of n ranks takes n - 1 steps for an all-gather or a reduce-scatter, twice as many for an all-reduce.

    >>> Link(bytes_per_s=1e9, latency_s=1e-5).transfer_ns(wire_bytes=1_000_000, steps=1)
    1010000
    """

    bytes_per_s: float
    latency_s: float = 0.0
    queues: int = 1

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.latency_s >= 0 or self.queues not in (1, 2):
            raise ValueError(
                f"a link needs a bandwidth above 0, a latency of at least 0 and 1 or 2 queues; got {self.bytes_per_s}"
                f" bytes/s, {self.latency_s} s and {self.queues}"
            )

    def transfer_ns(self, wire_bytes: int, steps: int) -> int:
        """Return how many nanoseconds `wire_bytes` take in `steps` steps on the free link."""
        # latency x steps + wire bytes / bandwidth, from seconds to nanoseconds
        return round(1e9 * (self.latency_s * steps + wire_bytes / self.bytes_per_s))

    def collective(self, kind: str, logical_bytes: int, ranks: int) -> tuple[int, int]:
        """Return wire bytes, and nanoseconds on the free link, of a collective of `ranks` ranks.

        >>> Link(1e9).collective("all_gather", 4_000, 4)
        (3000, 3000)
        """
        # An all-reduce is a reduce-scatter and an all-gather: P = 4,000 bytes on 4 ranks send 2 x 3,000.
        rounds = 2 if kind == "all_reduce" else 1
        wire_bytes = rounds * logical_bytes * (ranks - 1) // ranks
        return wire_bytes, self.transfer_ns(wire_bytes, rounds * (ranks - 1))

    def carry(self, row: core.Row, ranks: int) -> tuple[core.Row, int]:
        """Return the row of a collective that passes this link, and its nanoseconds on the free link."""
        wire, duration_ns = self.collective(row.keywords["kind"], row.keywords["logical_bytes"], ranks)
        return partial(row, wire_bytes=wire, emulated=True), duration_ns


class Board:
    """When each rank issued its k-th collective. Without shared memory a rank reads its own issues only, and takes them
    for all.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        numbers = ctypes.c_int64 * (2 * _RING)  # no tensors: they would count as memory of the training
        try:
            arenas = PeerMemory(group, _START + ctypes.sizeof(numbers)).arenas
            self._all = [numbers.from_buffer(arena.header, _START) for arena in arenas]
            self._issues_here = self._all[group.rank()]
        except SharingRefused:
            self._issues_here = numbers()
            self._all = [self._issues_here]

    def write(self, number: int, now_ns: int) -> None:
        """Note that this rank issues its collective `number` now."""
        # Two words a collective: its number and its time. Number 1,025 takes the place of number 1.
        place = 2 * (number % _RING)
        self._issues_here[place + 1] = now_ns
        self._issues_here[place] = number  # last: a peer that sees this number sees the time before it

    def last_issue(self, number: int) -> int:
        """Return when the last rank issued collective `number`; every rank must be known to have done so."""
        return max(self._issue(issues, number) for issues in self._all)

    def _issue(self, issues: ctypes.Array[ctypes.c_int64], number: int) -> int:
        """Return when one rank issued collective `number`, once it has written that; raise where it never will."""
        place = 2 * (number % _RING)
        deadline = time.monotonic() + 60
        while (seen := issues[place]) != number:
            if seen > number or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the emulated link lost collective {number}: a peer is at {seen}; ranks must run the same"
                    " collectives in the same order"
                )
            time.sleep(_SYNC_S)
        return issues[place + 1]


@dataclass
class Passage:
    """Collective `number` on a link; `times` (ns): the last rank issued it, the link took it up, and delivered it."""

    number: int
    duration_ns: int
    times: tuple[int, int, int] | None = None


class Queue:
    """Collectives that pass a link one after the other."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._issued, self._free_ns = 0, 0
        self._unresolved: deque[Passage] = deque()
        self.deliveries = ThreadPoolExecutor(1, "emulated link")  # its thread starts with the first

    def enter(self, duration_ns: int, issue_ns: int) -> Passage:
        """Join the queue, to be carried for that long; issued at `issue_ns`."""
        self._issued += 1
        passage = Passage(self._issued, duration_ns)
        self._unresolved.append(passage)
        # Peers read this to see when the last rank has issued it.
        self._board.write(passage.number, issue_ns)
        return passage

    def times(self, passage: Passage) -> tuple[int, int, int]:
        """Return the times of `passage`; all ranks must have issued it, and who was interrupted here may ask again."""
        # Those before it come first: the link is free for one when it has delivered the one before. Issued at 0 and 2,
        # 5 ns each: the first passes from 0 to 5, the second from 5 to 10.
        while passage.times is None:
            first = self._unresolved[0]
            issued = self._board.last_issue(first.number)
            start = max(self._free_ns, issued)
            self._free_ns = start + first.duration_ns
            first.times = issued, start, self._free_ns
            self._unresolved.popleft()
        return passage.times


class Transfer(core.Departure):
    """A collective that passes a link of the host; its row has the link's times, not those of the bytes."""

    def __init__(self, row: core.Row, duration_ns: int, queue: Queue) -> None:
        super().__init__(row)
        self._duration_ns, self._queue = duration_ns, queue

    def leave(self) -> None:
        """Join the queue."""
        self._passage = self._queue.enter(self._duration_ns, self.issue_ns)

    def moved(self, start_ns: int, end_ns: int, waited_ns: int | None) -> None:
        """Wait with the row: the link takes longer."""

    def arrive(self, awaited_ns: int) -> None:
        """Sleep until the link has delivered, and write the row."""
        # All ranks compute the same three times from the board.
        issued, start, end = self._queue.times(self._passage)
        remaining = end - time.time_ns()
        if remaining > 0:
            with events.span("link", self._row.keywords["unit"]):
                time.sleep(remaining / 1e9)
        # until all ranks have issued, the host waits for a peer, not for the link
        super().moved(start, end, max(0, end - max(issued, awaited_ns)))

    def deliver(
        self,
        result: list[torch.Tensor],  # any shapes: what the collective has left
    ) -> torch.futures.Future:
        """A future that holds `result` once the link has delivered, for engines that wait in C++. The row is written
        now that all ranks have issued: how long anybody waits is not known.
        """
        _, start, end = self._queue.times(self._passage)
        super().moved(start, end, None)
        future: torch.futures.Future = torch.futures.Future()
        if end <= time.time_ns():
            future.set_result(result)
        else:
            self._queue.deliveries.submit(_set_at, end, future, result)
        return future


def _set_at(
    time_ns: int,
    future: torch.futures.Future,
    result: list[torch.Tensor],  # any shapes
) -> None:
    """Sleep until a time, then give `future` its result."""
    time.sleep(max(0.0, (time_ns - time.time_ns()) / 1e9))
    future.set_result(result)


class Channel:
    """A rank's end of one emulated link: its queues. `ranks`: how many the group is taken to have, if not those that it
    has.
    """

    def __init__(self, link: Link, group: dist.ProcessGroup, ranks: int | None = None) -> None:
        self._link, self._ranks = link, ranks or group.size()
        self._queues = [Queue(Board(group)) for _ in range(link.queues)]

    def depart(self, row: core.Row) -> Transfer:
        """Make the transfer of a collective that is about to be issued."""
        # Gathers take the first queue, all else the last; with one queue these are the same.
        queue = self._queues[0 if row.keywords["kind"] == "all_gather" else -1]
        return Transfer(*self._link.carry(row, self._ranks), queue)

    def depart_for_torch(
        self,
        kind: str,
        outputs: Sequence[torch.Tensor],  # any shapes: what this rank receives
    ) -> Callable[..., torch.futures.Future]:
        """A collective of an engine that has no units joins its queue; `outputs` are what this rank receives. What is
        returned makes the future of its result.
        """
        logical = sum(output.nbytes for output in outputs)
        if kind == "reduce_scatter":  # a rank receives its part only
            logical *= self._ranks
        dtype = ""
        if outputs:
            dtype = str(outputs[0].dtype).removeprefix("torch.")
        row = partial(
            events.Collective,
            unit="",
            phase="backward" if compat.inside_backward() else "forward",
            kind=kind,
            logical_bytes=logical,
            padding_bytes=0,
            dtype=dtype,
            issue_ns=time.time_ns(),
        )
        transfer = self.depart(row)
        transfer.leave()
        return transfer.deliver


def channel(
    link: Link, group: dist.ProcessGroup, streams: torch.device | None, ranks: int | None = None
) -> Channel | StreamChannel:
    """Make this rank's end of `link`, on the host or on a device's streams; the host's is collective over `group`."""
    if streams is None:
        return Channel(link, group, ranks)
    if link.queues != 1:
        raise ValueError(
            "a link between CUDA ranks has one queue (the driver runs its waits one after the other), got"
            f" {link.queues}; give queues=1"
        )
    return StreamChannel(partial(link.carry, ranks=ranks or group.size()), HostFunctionHold(streams))


def behind(transport: core.Transport, link: Link, ranks: int | None = None) -> core.Transport:
    """Put `link` in front of `transport`, in place of one that was there; its other users are not slowed.
    Collective over its group.

    With `ranks`, collectives take as long as those of so many ranks do: a group of one can imitate a larger one. Raises
    `ValueError` for two queues on CUDA.
    """
    return transport.behind(channel(link, transport.group, transport.streams, ranks))


def emulate(model: nn.Module, *, shard: Link | None = None, replicate: Link | None = None) -> None:
    """Put links between the ranks of a sharded model: `shard` where shards are gathered and reduced, `replicate`
    between replicas.

    None takes a link away. Call it between steps, on all ranks. Under no_shard the ranks are replicas of each other,
    and `shard` is the link between them. Raises `ValueError` on devices other than CPU and CUDA.
    """
    made: dict[int, core.Transport] = {}  # one link a transport, whose units share it

    def linked(transport: core.Transport | None, link: Link | None) -> core.Transport | None:
        if transport is not None and id(transport) not in made:
            made[id(transport)] = transport.behind(None) if link is None else behind(transport, link)
        return made.get(id(transport))

    for memory in (unit.memory for unit in units_under(model, True)):
        config = memory.config
        if config.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"an emulated link works between CPU or CUDA ranks, got {config.device}; run on one of these, or"
                " without a link"
            )
        # A unit that shards over no group: its replicas are all ranks.
        across = shard if config.shard is None else replicate
        memory.config = replace(config, shard=linked(config.shard, shard), replicate=linked(config.replicate, across))


def emulate_exchange(optimizer: MatrixOptimizer, link: Link | None) -> None:
    """Put a link between the owners of an optimizer's matrices; None takes it away. Collective at the next step."""
    if link is None:
        optimizer.behind(None)
    else:  # one link a group and device
        optimizer.behind(cache(lambda group, on: channel(link, group, on if compat.has_streams(on) else None)))


def emulate_group(group: SharedMemoryGroup, link: Link | None) -> None:
    """Put a link between the ranks of a shared-memory process group, for torch's own engines; None takes it away.
    Collective.
    """
    group.put_behind(None if link is None else Channel(link, group.gloo).depart_for_torch)

"""`shared_gpu`: several ranks on one GPU, which NCCL refuses; a learner with a single GPU sees real streams and real
overlap.

Every rank opens its peers' arenas (CUDA IPC), and slices and gradients move from arena to arena inside the GPU: a
gather copies each rank's slice from its slot to where the forward reads it, a reduction sums the parts of all slots in
rank order in float32, so results carry the same bits in every run. Gathers and reductions have a stream each. Without
MPS the processes take turns on the GPU: streams, memory and overlap are real, the step time of n ranks is not that of n
GPUs.

The group (gloo) is used for set-up only. On CPU ranks the same operations run in host memory, as a rehearsal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdplab.engine import compat, events
from fsdplab.engine.core.gathered import Gathered
from fsdplab.engine.core.layout import Layout
from fsdplab.engine.core.packing import pack, unpack_from
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.transport import Gradients, Outgoing, Stamp
from fsdplab.engine.transport.gloo import announce, sum_in_rank_order
from fsdplab.engine.transport.shared_gpu.host import HostFabric, ThreadStream
from fsdplab.engine.transport.shared_gpu.series import Fabric, Series, moving, watched
from fsdplab.engine.transport.shared_memory.peers import SharingRefused
from fsdplab.engine.transport.shared_memory.process_group import machines_of
from fsdplab.engine.transport.streams import StreamedTransport, comm_stream

_SLOTS = 2  # the next operation may begin while peers still read the last


class SharedGpuTransport(StreamedTransport):
    """Gathers and reduces among ranks that share one GPU, or rehearses it among CPU ranks of one machine."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self.fabric = fabric_for(group, device)
        self.gathers, self.reductions = (Series(group, self.fabric, _SLOTS) for _ in range(2))
        self.watchdog = watched(group, self.fabric, [self.gathers, self.reductions])
        host = device.type == "cpu"
        self._gather_stream = ThreadStream("gathers") if host else comm_stream(device, "gather")
        self._reduce_stream = ThreadStream("reduces") if host else comm_stream(device, "reduce")
        self._all_reduce_stream = self._reduce_stream  # both use the same memory, in turn
        self._announced = compat.silent_group(self.rank, self.ranks)

    @property
    def arena_bytes(self) -> int:
        """Bytes of this rank's arenas, which the caching allocator's figures leave out."""
        return self.gathers.arena_bytes + self.reductions.arena_bytes

    def settle(self) -> None:
        """Raise `PeerLost` where a rank is missing; nobody reads slices in place."""
        self.watchdog.check()

    def announce_buffers(self) -> None:
        """Tag this rank's arenas."""
        self.gathers.announce()
        self.reductions.announce()

    def all_gather(self, outgoing: Outgoing, whole: Gathered, stamp: Stamp) -> Pending:
        """Publish this rank's slice, and fill `whole` from every rank's; it is allocated here, on the stream that will
        free it.
        """
        layout, line, buffer = whole.layout, self.gathers, whole.tensor
        send = outgoing.made(buffer.device)

        def issue(asynchronous: bool) -> None:
            with events.span("all_gather", stamp.unit), moving("all_gather", layout.total_bytes):
                number, slot = line.claim(outgoing.nbytes, f"all_gather of {stamp.unit}")
                slot.copy_(send.view(torch.uint8))
                line.publish(number)
                for peer in self._nearest_first():
                    unpack_from(peer, line.read(peer, number, outgoing.nbytes), whole)
                line.done(number)

        note = self.note(stamp, "all_gather", layout.total_bytes, layout.padding_bytes, outgoing.dtype)
        announce("all_gather", self._announced, lambda: (_like(send, self.ranks), _like(send)))
        return self._gather_stream.run(issue, _nothing, note, send, buffer)

    def reduce_scatter(
        self, layout: Layout, gradients: Gradients, output: torch.Tensor, stamp: Stamp, divide: float
    ) -> Pending:
        """Publish all slices of this rank's gradients, and sum this rank's slice over all ranks; `gradients` are held
        until then.
        """
        gradients, line = list(gradients), self.reductions

        def issue(asynchronous: bool) -> None:
            with events.span("reduce_scatter", stamp.unit), moving("reduce_scatter", layout.total_bytes):
                number, slot = line.claim(layout.total_bytes, f"reduce_scatter of {stamp.unit}")
                pack(layout, gradients, slot.view(output.dtype))
                line.publish(number)
                wholes = (line.read(peer, number, layout.total_bytes) for peer in range(self.ranks))
                sum_in_rank_order(
                    (whole.view(output.dtype).view(self.ranks, -1)[self.rank] for whole in wholes), output, divide
                )
                line.done(number)

        note = self.note(stamp, "reduce_scatter", layout.total_bytes, layout.padding_bytes, output.dtype)
        announce("reduce_scatter", self._announced, lambda: (_like(output), _like(output, self.ranks)))
        return self._reduce_stream.run(issue, _nothing, note, gradients, output)

    def all_reduce(
        self, buffer: torch.Tensor, stamp: Stamp, divide: float, padding: int = 0, after: Pending | None = None
    ) -> Pending:
        """Publish `buffer`, sum one nth of it over all ranks, publish that, and gather the others' sums."""
        pieces, line = buffer.tensor_split(self.ranks), self.reductions

        def issue(asynchronous: bool) -> None:
            with events.span("all_reduce", stamp.unit), moving("all_reduce", buffer.nbytes):
                number, slot = line.claim(buffer.nbytes, f"all_reduce of {stamp.unit}")
                slot.copy_(buffer.view(torch.uint8))
                line.publish(number)
                wholes = (line.read(peer, number, buffer.nbytes) for peer in range(self.ranks))
                parts = (whole.view(buffer.dtype).tensor_split(self.ranks)[self.rank] for whole in wholes)
                sum_in_rank_order(parts, pieces[self.rank], divide)
                line.done(number)
                self._share(pieces, stamp)

        note = self.note(stamp, "all_reduce", buffer.nbytes, padding, buffer.dtype)
        announce("all_reduce", self._announced, lambda: (_like(buffer), _like(buffer)))
        return self._all_reduce_stream.run(issue, _nothing, note, buffer, after=after)

    def _share(self, pieces: Sequence[torch.Tensor], stamp: Stamp) -> None:
        """Give every rank what each has summed."""
        line, mine = self.reductions, pieces[self.rank]
        number, slot = line.claim(pieces[0].nbytes, f"all_reduce of {stamp.unit}, second half")
        slot[: mine.nbytes].copy_(mine.view(torch.uint8))
        line.publish(number)
        for peer in self._nearest_first()[1:]:
            pieces[peer].copy_(line.read(peer, number, pieces[peer].nbytes).view(mine.dtype))
        line.done(number)

    def _nearest_first(self) -> list[int]:
        return [(self.rank + step) % self.ranks for step in range(self.ranks)]


def fabric_for(group: dist.ProcessGroup, device: torch.device) -> Fabric:
    """The memory and streams that the ranks of `group` share; ValueError unless they are on one machine and on one GPU
    of it.
    """
    machines = machines_of(group)
    if None in machines or len(machines) != 1:
        found = "one where that is impossible" if None in machines else f"{len(machines)} machines"
        raise ValueError(
            "transport 'shared_gpu' needs all ranks on one x86-64 Linux machine that lets them share memory; got"
            f" {found}: use 'nccl'"
        )
    if device.type != "cuda":
        return HostFabric()
    from fsdplab.engine.transport.shared_gpu.cuda import CudaFabric

    told: list[str] = [""] * group.size()
    dist.all_gather_object(told, str(torch.cuda.get_device_properties(device).uuid), group=group)
    if len(set(told)) != 1:
        raise ValueError(
            f"transport 'shared_gpu' needs all ranks on one GPU; got {len(set(told))} GPUs for {len(told)} ranks: use"
            " 'nccl', one rank a GPU"
        )
    return CudaFabric(device)


def made_for(group: dist.ProcessGroup, device: torch.device) -> SharedGpuTransport:
    """The transport, or a ValueError that says why it cannot be."""
    try:
        return SharedGpuTransport(group, device)
    except SharingRefused as error:
        raise ValueError(
            f"transport 'shared_gpu' needs a system that lets ranks open each other's memory; {error}"
        ) from error


def _nothing() -> None:
    """What remains to be done after an operation."""


def _like(tensor: torch.Tensor, times: int = 1) -> torch.Tensor:
    """A flat tensor on the CPU of the size and dtype of `times` times `tensor`."""
    return torch.empty(times * tensor.numel(), dtype=tensor.dtype, device="cpu")

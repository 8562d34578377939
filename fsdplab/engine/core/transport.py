"""Defines what a unit asks of the ranks it shares a group with: to gather shards, to reduce gradients.

A unit hands over its layout, its shard and the buffers to fill; the transport decides about staging, issues the
collective and returns a `Pending`. `transport/staged.py` does so through flat buffers (NCCL, and gloo),
`transport/shared_memory/` through memory that ranks share.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from fsdplab.engine import compat, events
from fsdplab.engine.core.average import Average
from fsdplab.engine.core.buffers import ShardStorage, UnshardedBuffer, pack
from fsdplab.engine.core.layout import Layout
from fsdplab.engine.core.pending import Pending

Row = partial["events.Collective"]  # all but `start_ns`, `end_ns`, and how long whoever needs the result was blocked
Gradients = Sequence["torch.Tensor | None"]  # whole ones; None is one that is missing


@dataclass(frozen=True)
class CollectiveLabel:
    """The unit and the phase that a collective runs for, as the ledger has them."""

    unit: str
    phase: str


@dataclass(frozen=True)
class SendShard:
    """This rank's shard, `nbytes` in the dtype that is sent.

    `write` copies it into memory (bytes) of the transport's choice, and returns what to wait for before that is read.
    `resident` is the stored shard (bytes), where it is sent as it is and lies where the transport can read it.
    """

    nbytes: int
    dtype: torch.dtype
    write: Callable[[torch.Tensor], Pending]
    resident: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        shard: torch.Tensor,  # [elements], in the dtype that is sent
    ) -> SendShard:
        """Describe a shard that lies ready in a tensor."""
        resident = shard.view(torch.uint8)
        write = lambda target: Pending(lambda: None, target.copy_(resident))  # noqa: E731
        return cls(shard.nbytes, shard.dtype, write, resident)

    def made(self, device: torch.device) -> torch.Tensor:
        """Return the shard as a tensor of its dtype, [shard elements]: the resident one, or one made for this."""
        if self.resident is not None:
            return self.resident.view(self.dtype)
        shard = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self.write(shard).wait()
        return shard.view(self.dtype)


class Departure:
    """A collective from its issue until its result is used. `row` makes its row of the ledger.

    Behind an emulated link (`emulation/`) it takes longer, and the row has the link's times.
    """

    def __init__(self, row: Row) -> None:
        self._row = row

    @property
    def issue_ns(self) -> int:
        """When this rank issued it."""
        return self._row.keywords["issue_ns"]

    def leave(self) -> None:
        """Note that the collective is issued next on the current stream; what is interrupted before is tried again."""

    def moved(self, start_ns: int, end_ns: int, waited_ns: int | None) -> None:
        """Write the row, now that the transport has moved the bytes."""
        if events.listening():
            events.emit(self._row(start_ns=start_ns, end_ns=end_ns, waited_ns=waited_ns))

    def arrive(self, awaited_ns: int) -> None:
        """Return when the host, which has waited since `awaited_ns`, may use the result."""


class Unseen(Departure):
    """Of what has no row in the ledger, and meets no link."""

    issue_ns = 0

    def __init__(self) -> None:
        super().__init__(partial(events.Collective))

    def moved(self, start_ns: int, end_ns: int, waited_ns: int | None) -> None:
        """Write no row."""


class Link(Protocol):
    """An emulated link, as a transport uses it."""

    def depart(self, row: Row) -> Departure:
        """Note that a collective is about to be issued; return its departure."""


class Transport(ABC):
    """Gathers and reduces over one process group."""

    streams: torch.device | None = None  # the device whose streams wait for collectives; None where the host does
    _link: Link | None = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, group.rank(), group.size()

    def behind(self, link: Link | None) -> Transport:
        """Return the same transport with `link` in front of it, or none; other users of this one are not slowed."""
        # The copy has the same group, streams and buffers.
        made = copy.copy(self)
        made._link = link
        return made

    @abstractmethod
    def all_gather(self, shard: SendShard, whole: UnshardedBuffer, label: CollectiveLabel) -> Pending:
        """Fill `whole` from every rank's shard; its memory is taken no earlier than it is written to."""

    @abstractmethod
    def reduce_scatter(
        self,
        layout: Layout,
        gradients: Gradients,  # [rows, *others] each, whole; None: this rank has none
        output: torch.Tensor,  # [shard elements], in the dtype that is sent
        label: CollectiveLabel,
        average: Average,
    ) -> Pending:
        """Average every rank's `gradients`, and leave this rank's shard in `output`."""

    @abstractmethod
    def all_reduce(
        self,
        buffer: torch.Tensor,  # [shard elements], this rank's sum over the shards
        label: CollectiveLabel,
        average: Average,
        padding: int = 0,  # bytes of `buffer` that hold no gradient
        after: Pending | None = None,  # the work on another stream that fills `buffer`
    ) -> Pending:
        """Average `buffer`, which is marked, over all ranks in place; `after`: the work on another stream that fills
        it.
        """

    def all_reduce_packed(
        self,
        layout: Layout,
        gradients: Gradients,  # [rows, *others] each, whole; None: this rank has none
        output: torch.Tensor,  # [shard elements], one shard being everything here
        label: CollectiveLabel,
        average: Average,
    ) -> Pending:
        """Pack `gradients` into `output` and average it over all ranks in place."""
        pack(layout, gradients, output)
        average.mark(output)
        return self.all_reduce(output, label, average, layout.padding_bytes)

    def largest(
        self,
        flags: torch.Tensor,  # [units] (uint8), 1: this rank's shards of the unit have changed
    ) -> torch.Tensor:
        """Return the largest of all ranks' `flags`, at once: a few bytes, in no ledger."""
        compat.all_reduce_unseen(flags, self.group)
        return flags

    def meet(self) -> None:
        """Return once all ranks have come here, before they communicate by other means; raise where one begins anew.

        Here the collective that follows is the meeting.
        """

    def storage(self, device: torch.device) -> ShardStorage:
        """Return where shards rest that no offload policy sends elsewhere."""
        return ShardStorage(device)

    def await_peers(self) -> None:
        """Return once peers have read what they read in place; nothing is, here."""

    def recover(self) -> None:
        """Begin anew where a rank has failed in the middle of a collective: then all ranks must come here."""

    def leave_step(self, unfinished: bool) -> None:
        """Begin anew as `recover` does, also where this rank has left a step `unfinished`."""

    def announce_buffers(self) -> None:
        """Tag buffers that outlive a collective, for whoever subscribed since they were made."""

    def separate_reductions(self, enable: bool) -> None:
        """Let reductions no longer queue behind gathers, or again; where they never do there is nothing to separate."""

    def depart(self, label: CollectiveLabel, kind: str, logical: int, padding: int, dtype: torch.dtype) -> Departure:
        """Make the departure of a collective that is about to be issued; `logical` and `padding` are bytes."""
        rounds = 2 if kind == "all_reduce" else 1  # an all-reduce is a reduce-scatter and an all-gather
        # Of 8 MB in all, each of 4 ranks sends 6 MB, in an all-reduce 12 MB.
        wire = rounds * logical * (self.ranks - 1) // self.ranks
        return departure(label, kind, logical, wire, padding, dtype, self._link)


def departure(
    label: CollectiveLabel, kind: str, logical: int, wire: int, padding: int, dtype: torch.dtype, link: Link | None
) -> Departure:
    """Make the departure of a collective that is about to be issued behind `link`, if there is one; sizes are bytes."""
    row = partial(
        events.Collective,
        unit=label.unit,
        phase=label.phase,
        kind=kind,
        logical_bytes=logical,
        wire_bytes=wire,
        padding_bytes=padding,
        dtype=str(dtype).removeprefix("torch."),
        issue_ns=time.time_ns(),
    )
    if link is None:
        return Departure(row)
    return link.depart(row)

"""One collective of one rank: its pieces on the link and on the host, its bytes and its process group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fsdplab.common.collectives import collective_row
from fsdplab.profiling.traces.events import Events, Range, Transfer
from fsdplab.profiling.traces.groups import Group
from fsdplab.profiling.traces.tensor_types import tensor_bytes

# An engine's ranges -> the collective that they belong to. The first ones pack and issue it, the second ones unpack
# what has come or wait for it, and the last one repeats the range before it.
OPENS = {
    "all_gather": "all_gather",
    "post_backward_reduce": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
}
CLOSES = {"all_gather_copy_out": "all_gather", "reduce_scatter": "reduce_scatter"}
GOES_ON = {"all_reduce_sum"}
MARKED = {*OPENS, *CLOSES, *GOES_ON, "link"}
_CONSUMERS = {"pre_forward", "pre_backward"}


class Piece(NamedTuple):
    """An interval in which a collective moved bytes: its transport (role ""), copy-in, copy-out or blocked."""

    start: int
    end: int
    role: str = ""


@dataclass(slots=True, eq=False)
class Collective:
    """One collective of one rank. Times are the trace's own ns; `nbytes` is its whole payload where the trace tells,
    else None.

    `held`: the call that issued it kept the host until the bytes had arrived. `own`: its consumer issued it (no
    prefetch). `by_host`: the host itself copies the bytes (shared memory). `issued`: the trace shows who issued it.
    `transport`: the transfer itself; None for transports that only copy on the host (shared memory).
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
    group: str = ""  # the process group's name, its number of ranks and its identity, where the trace tells
    group_size: int | None = None
    members: str = ""
    transport: Piece | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # through `add`, which finds the transport among them
        given, self.pieces = self.pieces, []
        for piece in given:
            self.add(piece)

    def add(self, piece: Piece) -> None:
        """Add one more of its pieces; the first without a role is the transport."""
        self.pieces.append(piece)
        if self.transport is None and not piece.role:
            self.transport = piece

    def pass_link(self, row: dict[str, Any], start: int, end: int) -> None:
        """Take an emulated link's transfer, a row of the ledger, for its transport."""
        self.add(Piece(start, end))
        self.phase = row["phase"]
        self.nbytes = row["logical_bytes"]
        self.emulated = True
        self.by_host = False

    def join(self, group: Group) -> None:
        """Take a process group for the one that it was of."""
        self.group = group.name
        self.group_size = group.size
        self.members = group.members

    @property
    def label(self) -> tuple[str, str, str, bool]:
        """By what a figure tells it from others: unit, phase, kind and whether it is emulated."""
        return self.unit, self.phase, self.kind, self.emulated

    @property
    def start(self) -> int:
        """When bytes began to move."""
        return self.first if self.transport is None else self.transport.start

    @property
    def end(self) -> int:
        """When they had arrived."""
        return self.last if self.transport is None else self.transport.end

    @property
    def first(self) -> int:
        """When anything began for it, copies on the host among it."""
        pieces = self.pieces
        return pieces[0].start if len(pieces) == 1 else min(piece.start for piece in pieces)

    @property
    def last(self) -> int:
        """When everything for it had ended."""
        pieces = self.pieces
        return pieces[0].end if len(pieces) == 1 else max(piece.end for piece in pieces)

    @property
    def held(self) -> bool:
        """Whether the issuing call covered at least half of the transport."""
        transport = self.transport
        # `mark` is the range of the call that issued it
        if transport is None or self.mark is None:
            return False
        covered = min(transport.end, self.mark.end) - max(transport.start, self.mark.start)
        return 2 * covered >= transport.end - transport.start


def issued_by_consumer(around: Iterable[Range], unit: str) -> bool:
    """Whether the unit that needs the result issued it, inside its own pre_forward or pre_backward: no prefetch."""
    # from the innermost range outwards: a prefetch runs inside of another unit's pre_backward
    for outer in around:
        if outer.label == "backward_prefetch":
            return False
        if outer.label in _CONSUMERS:
            return outer.unit == unit
    return False


# ---- what was moved, and among whom


def carry(
    collective: Collective,
    transfer: Transfer,
    evidence: Sequence[Mapping[str, Any]],
    group: Group,
    events: Events,
    role: str = "",
) -> None:
    """Give a collective its transfer: when it ran, its bytes and its process group, as far as the evidence tells."""
    collective.add(Piece(transfer.start, transfer.end, role))
    collective.join(group)
    # gloo and NCCL are given one rank's slice of an all-gather: 4 ranks, 2 MB each, are 8 MB
    slices = 1
    if collective_row(collective.kind).given_by == "shards":
        slices = group.size or events.world_size
    collective.nbytes = None
    # the first that tells the bytes counts
    for details in evidence:
        nbytes = _payload(details, slices)
        if nbytes:
            collective.nbytes = nbytes
            return


def _payload(details: Mapping[str, Any], slices: int) -> int | None:
    """Bytes of all ranks' slices: by NCCL's own figures, by the shapes that a c10d operator was given, the larger of
    what it sends and what it fills, or by those that gloo or NCCL was given, of one slice.
    """
    if "bytes" in details:
        return details["bytes"] if isinstance(details["bytes"], int) else None
    counts = [details.get("In msg nelems"), details.get("Out msg nelems")]
    elements = max((count for count in counts if isinstance(count, int)), default=0)
    if elements:
        return tensor_bytes([elements], details.get("dtype")) or None
    shapes, types = details.get("Input Dims"), details.get("Input type")
    tensors = list(zip(shapes, types)) if isinstance(shapes, list) and isinstance(types, list) else []
    if str(details.get("name", "")).startswith("c10d::"):
        return max((tensor_bytes(dims, kind) for dims, kind in tensors), default=0) or None
    one_slice = sum(tensor_bytes(dims or [1], kind) for dims, kind in tensors)  # a scalar has no dims
    return slices * one_slice or None


def rows_within(events: Events, ledger: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], int, int]]:
    """The ledger's rows that the trace saw a part of, each with its start and end there, by their start."""
    seen = []
    for row in ledger:
        start = row["start_ns"] - events.base_ns
        end = row["end_ns"] - events.base_ns
        if end >= events.first and start <= events.last:
            seen.append((row, start, end))
    return sorted(seen, key=lambda transfer: transfer[1])

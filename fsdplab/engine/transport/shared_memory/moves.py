"""The algorithms of the shared-memory process group: which rank writes and reads what, in which slot, in which order.

Tensors come here flat and checked (`shm_group` does that). Long ones travel in pieces: peers read a piece while it is
still in the cache, and no slot grows beyond a piece. Sums are taken in rank order, in float32 for 16-bit floats, so
results carry the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.engine.transport.shared_memory.slots import Slots

_PIECE = 4 << 20  # bytes of a slot: larger payloads travel in pieces
_SMALL = 32 << 10  # bytes up to which every rank sums everything: one round of waiting instead of two
_SLOTS = 3  # an all-reduce takes two numbers: with an even count its data would always wait for the same slot
_LIKE_MAX = {"MAX": torch.maximum, "MIN": torch.minimum}
_OPERATIONS = ("SUM", "AVG", *_LIKE_MAX)
_NARROW = (torch.float16, torch.bfloat16)  # accumulated in float32
_FLOATS = (*_NARROW, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def _unrepeatable(move: Callable[..., None]) -> Callable[..., None]:
    """`move`, which no rank can go on after if it was interrupted on one."""

    @wraps(move)
    def moved(self: Moves, *arguments: Any) -> None:
        with self._slots.unrepeatable(move.__name__):
            move(self, *arguments)

    return moved


class Moves:
    """Collectives on flat tensors over the slots of `group`, which is used for set-up only."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._ranks = group.rank(), group.size()
        self._slots = Slots(group, _SLOTS)
        self._nearest_first = [(self._rank + step) % self._ranks for step in range(self._ranks)]

    @_unrepeatable
    def all_reduce(self, flat: torch.Tensor, operation: str) -> None:
        """Reduce in place."""
        for part in _cut(flat, _PIECE // flat.element_size()):
            number = self._publish([part], part.nbytes, f"all_reduce {operation} {_name(part)}")
            if part.nbytes <= _SMALL:
                self._reduce(number, part.nbytes, 0, part, operation)
            else:
                self._reduce_and_share(number, part.tensor_split(self._ranks), operation)
            self._slots.done(number)

    def _reduce_and_share(self, number: int, shares: Sequence[torch.Tensor], operation: str) -> None:
        """Every rank reduces its share, puts it back into its slot (nobody else reads it there before) and copies the
        others'.
        """
        mine, nbytes = shares[self._rank], sum(share.nbytes for share in shares)
        firsts = [sum(len(share) for share in shares[:peer]) for peer in range(self._ranks)]
        self._reduce(number, nbytes, firsts[self._rank], mine, operation)
        for peer in self._nearest_first:
            whole = self._slots.read(peer, number, nbytes).view(mine.dtype)
            share = whole[firsts[peer] : firsts[peer] + len(shares[peer])]
            if peer == self._rank:
                share.copy_(mine)
                summed = self._publish([], 1, "all_reduce, second half")
            else:
                self._slots.read(peer, summed, 1)
                shares[peer].copy_(share)
        self._slots.done(summed)

    @_unrepeatable
    def all_gather(self, wholes: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
        """Fill `wholes[r]` from rank r's `mine`; all are bytes, and ranks may differ in size."""
        longest = max(len(whole) for whole in wholes)
        for start in range(0, longest, _PIECE):
            size = min(_PIECE, longest - start)
            own = mine[start : start + size]
            number = self._publish([own], size, "all_gather")
            for peer in self._nearest_first:
                part = wholes[peer][start : start + size]
                part.copy_(own if peer == self._rank else self._slots.read(peer, number, size)[: len(part)])
            self._slots.done(number)

    @_unrepeatable
    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], operation: str) -> None:
        """Reduce `inputs[r]` into rank r's output; ranks may differ in size."""
        longest, word = max(len(each) for each in inputs), output.element_size()
        width = _PIECE // word // self._ranks
        for start in range(0, longest, width):
            length = min(width, longest - start)
            nbytes, label = length * word * self._ranks, f"reduce_scatter {operation} {_name(output)}"
            number = self._publish([each[start : start + length] for each in inputs], nbytes, label)
            self._reduce(number, nbytes, self._rank * length, output[start : start + length], operation)
            self._slots.done(number)

    @_unrepeatable
    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        """Give the root's bytes to all."""
        for part in _cut(flat, _PIECE):
            number = self._publish([part] if self._rank == root else [], part.nbytes, f"broadcast from {root}")
            if self._rank != root:
                part.copy_(self._slots.read(root, number, part.nbytes))
            self._slots.done(number)

    @_unrepeatable
    def meet(self) -> None:
        """Return when all ranks are here."""
        number = self._publish([], 1, "barrier")
        for peer in self._nearest_first:
            self._slots.read(peer, number, 1)
        self._slots.done(number)

    def _publish(self, parts: Sequence[torch.Tensor], nbytes: int, label: str) -> int:
        """Write `parts` at equal distances into this rank's slot; the operation's number. All ranks give equal `nbytes`
        and `label`.
        """
        number, slot = self._slots.claim(nbytes, label)
        for part, place in zip(parts, slot.chunk(len(parts) or 1)):
            place[: part.nbytes].copy_(part.view(torch.uint8))
        self._slots.publish(number)
        return number

    def _reduce(self, number: int, nbytes: int, first: int, output: torch.Tensor, operation: str) -> None:
        """Reduce what starts at element `first` of every rank's slot into `output`, rank 0 first."""
        total = torch.empty_like(output, dtype=torch.float32) if output.dtype in _NARROW else output
        for peer in range(self._ranks):
            part = self._slots.read(peer, number, nbytes).view(output.dtype)[first : first + len(output)]
            if not peer:
                total.copy_(part)
            elif operation in _LIKE_MAX:
                _LIKE_MAX[operation](total, part.to(total.dtype), out=total)
            else:
                total.add_(part)
        if operation == "AVG":
            total.div_(self._ranks)
        if total is not output:
            output.copy_(total)


def operation_of(opts: Any, tensor: torch.Tensor) -> str:
    """The name of the reduction; an error where it is not offered for such a tensor."""
    wanted = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    name = next((name for name in _OPERATIONS if wanted == getattr(dist.ReduceOp, name)), None)
    if name is None:
        raise ValueError(f"shared memory reduces with {', '.join(_OPERATIONS)}, not {wanted.op.name}: use a gloo group")
    if tensor.dtype not in (_FLOATS if name == "AVG" else _FLOATS + _INTEGERS):
        raise ValueError(f"shared memory does not reduce {tensor.dtype} with {name}: use a gloo group")
    return name


def _cut(flat: torch.Tensor, length: int) -> Sequence[torch.Tensor]:
    return flat.split(length) if len(flat) else ()


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

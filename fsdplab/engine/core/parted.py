"""Gathers parameters that are sent in a form of their own: tensor subclasses with `fsdp_pre_all_gather` and
`fsdp_post_all_gather`.

A quantised weight, say, sends its packed integers and its scales, and is put together after the gather. The protocol is
PyTorch FSDP2's: the subclass at rest says which plain tensors to send (the same sizes on every rank) and what to
remember; afterwards it gets all ranks' tensors, end to end, and returns the gathered value with the tensors to free.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from fsdplab.engine import compat
from fsdplab.engine.core.layout import Layout, Slot
from fsdplab.engine.core.param import ShardedParam
from fsdplab.engine.core.policy import MixedPrecisionPolicy


def gathers_itself(
    parameter: torch.Tensor,  # any shape
) -> bool:
    """Whether `parameter` says itself how it is gathered: by its class, or by methods given to its local tensor."""
    local = compat.local_of(parameter)
    methods = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
    defined = [name for name in methods if hasattr(local, name)]
    if len(defined) == 1:
        raise AssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather extensions:"
            f" {type(local).__name__} has {defined[0]} only"
        )
    return bool(defined)


def in_its_form(param: ShardedParam) -> ShardedParam:
    """Return `param` as it is sent: its shard may be given the methods long after it was cut."""
    if isinstance(param, PartedParam) or not gathers_itself(param.at_rest):
        return param
    return PartedParam(param)


class PartedParam(ShardedParam):
    """A parameter whose shard is sent as one or more plain tensors of its own choosing: its parts (a quantised weight's
    integers and scales, say).
    """

    def __init__(self, plain: ShardedParam) -> None:
        self.__dict__.update(plain.__dict__)
        self.gathered = None
        self._size, self._stride = self.at_rest.size(), self.at_rest.stride()
        self._parts: tuple[torch.Tensor, ...] = ()  # what this rank sends in the gather under way
        self._remembered: Any = None  # what the subclass asked to be given back after it
        self._outputs: list[torch.Tensor] = []  # everybody's parts, each in a storage that comes and goes
        self._value: torch.Tensor | None = None  # what was made of them; longer than `gathered` where rows are padded
        self._freed: tuple[torch.Tensor, ...] = ()
        self._dtype_wanted = self.dtype

    def _rows_of(
        self,
        original: torch.Tensor,  # [rows, *others]
        start: int,
        stop: int,
    ) -> torch.Tensor:
        """Copy rows [start, stop) into memory that is padded to the largest rank's rows."""
        most_rows = -(-self.shape[0] // self.axes.shard_ranks)
        padded = original.new_zeros((most_rows, *original.shape[1:]))
        rows = padded.narrow(0, 0, stop - start)
        if stop > start:
            rows.copy_(original.narrow(0, start, stop - start))
        return rows

    def settled(self) -> bool:
        """Whether it is where its unit expects it: always, since its storage is its own affair."""
        return True

    def prepare(self, policy: MixedPrecisionPolicy) -> list[tuple[str, Sequence[int], int]]:
        """Ask for the parts of the next gather; return their (name, gathered shape, itemsize)."""
        inner = self.local
        mesh = self.axes.mesh
        if mesh.ndim > 1:
            mesh = mesh[mesh.mesh_dim_names[-1]]  # the dimension that shards; the one before it replicates
        ask = inner.fsdp_pre_all_gather
        wanted = len(inspect.signature(ask).parameters)
        if wanted not in (1, 5):  # PyTorch's older and newer form of the method
            raise AssertionError(
                f"Invalid fsdp_pre_all_gather: {type(inner).__name__}'s takes {wanted} arguments. Expects"
                " fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy)"
            )
        if wanted == 1:
            self._parts, self._remembered = ask(mesh)
        else:
            module, _ = next(self.sites())
            self._parts, self._remembered = ask(mesh, self._size, self._stride, module, policy)
        self._dtype_wanted = policy.param_dtype or self.dtype
        # The parts become slots of the unit's layout, named as the parameter with a number: "weight[0]", "weight[1]".
        return [self._entry(number, part) for number, part in enumerate(self._parts)]

    def _entry(
        self,
        number: int,
        part: torch.Tensor,  # [rows, *others]: what this rank sends
    ) -> tuple[str, Sequence[int], int]:
        """Return the name, the gathered shape and the itemsize of one part.

        A part with as many rows as this rank has may be shorter than on other ranks: it is sent padded.
        """
        ranks = self.axes.shard_ranks
        rows = part.shape[0]
        if rows == self.local.shape[0]:
            rows = -(-self.shape[0] // ranks)  # 5 rows on 2 ranks are sent as 3 and 3
        gathered_shape = (rows * ranks, *part.shape[1:])
        return f"{self.name}[{number}]", gathered_shape, part.element_size()

    def write_parts(
        self,
        layout: Layout,
        target: torch.Tensor,  # [shard_bytes] (uint8), this rank's shard
    ) -> None:
        """Copy the parts to their places in `target`, this rank's shard, [shard_bytes]."""
        for slot, part in zip(self.slots(layout), self._parts):
            packed = part.contiguous().reshape(-1).view(torch.uint8)  # [bytes]
            place = target[slot.offset : slot.offset + packed.numel()]
            place.copy_(packed)

    def assemble(
        self,
        layout: Layout,
        whole: torch.Tensor,  # [whole_bytes] (uint8), the parts of all ranks
    ) -> None:
        """Make the gathered value out of everybody's parts, in the same tensor as the first time."""
        self._receive(layout, whole)
        received = (tuple(self._outputs), self._remembered, self._dtype_wanted)
        if self.gathered is None:
            self._value, self._freed = self.local.fsdp_post_all_gather(*received)
            rows = self._value.detach()
            if rows.shape[0] > self._size[0]:  # padded, where the ranks do not divide the rows
                rows = rows.narrow(0, 0, self._size[0])
            self.gathered = self.as_gathered(rows)
        else:
            for tensor in self._freed:
                _allocate(tensor)
            assert self._value is not None
            out = self._value
            if self.gathered.shape == out.shape:  # no rows are padded: modules show this very tensor
                out = self.gathered
            self.local.fsdp_post_all_gather(*received, out=out)
        self._parts, self._remembered = (), None

    def _receive(
        self,
        layout: Layout,
        whole: torch.Tensor,  # [whole_bytes] (uint8), the parts of all ranks
    ) -> None:
        """Copy everybody's parts out of `whole`: subclasses want tensors that begin with their storage, and autograd
        may have saved them, so that their versions must not change.
        """
        slots = self.slots(layout)
        if not self._outputs:  # made once: later gathers fill the same tensors
            outputs = []
            for slot, part in zip(slots, self._parts):
                outputs.append(torch.empty(slot.shape, dtype=part.dtype, device=whole.device))
            self._outputs = outputs  # all of them: what is interrupted before this is done again
        for slot, output in zip(slots, self._outputs):
            start = slot.whole_offset
            _allocate(output)
            with _unsafe_preserve_version_counter(output):
                in_bytes = output.view(-1).view(torch.uint8)
                in_bytes.copy_(whole[start : start + output.nbytes])

    def release(self) -> None:
        """Free what the gathered value was made of."""
        for tensor in (*self._freed, *self._outputs):
            tensor.untyped_storage().resize_(0)

    def slots(self, layout: Layout) -> list[Slot]:
        """Return where the parts are in `layout`."""
        return [
            slot for slot in layout.slots if slot.name.rpartition("[")[0] == self.name
        ]  # "weight[0]" is of "weight"


def _allocate(
    tensor: torch.Tensor,  # any shape, its storage freed or not
) -> None:
    """Give `tensor` its memory again."""
    if tensor.untyped_storage().nbytes() == 0:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)

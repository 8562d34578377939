"""Warns where ranks begin to train with weights that are not the same on all of them.

Ranks that draw their own initial weights (no common seed) leave a model of which each shard is another draw, and
replicas that never become equal. Sharding keeps no whole weights to compare later, so it notes a checksum of each:

    sharded       checksum of the whole parameter, and of this rank's shard of it
    first forward checksum of this rank's shard again: one that has changed was loaded or initialised since, so the
                  whole of before counts no more. One all-reduce over the ranks that shard compares the wholes, and one
                  over the replicas compares what they hold now.

A checksum is the sum of the bits as whole numbers: it does not depend on the order of the sum, on any machine.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdplab.engine import compat
from fsdplab.engine.core.memory import UnitMemory
from fsdplab.engine.core.placement import local_part
from fsdplab.engine.core.transport import Transport

WORD_BYTES = 8
_MASK = (1 << 62) - 1  # room for the sign, with which one all-reduce finds the least and the largest
_enabled = True
_noted: weakref.WeakKeyDictionary[UnitMemory, Noted] = weakref.WeakKeyDictionary()


@dataclass
class Noted:
    """Checksums of a unit's parameters when it was sharded: of the wholes and of this rank's shards, [parameters]."""

    wholes: torch.Tensor
    shards: torch.Tensor


def set_initial_weights_check(enabled: bool) -> None:
    """Have models that are sharded from now on checked at their first forward, or not: every rank reads its weights
    twice, and one all-reduce over each group compares the checksums. On by default.
    """
    global _enabled
    _enabled = enabled


class WholeWeights:
    """Notes the checksums of a unit: made before its parameters are cut, `cut` is called afterwards."""

    def __init__(self, memory: UnitMemory) -> None:
        self._memory = memory
        self._wholes: torch.Tensor | None = None  # [parameters] (int64)
        if _enabled:
            self._wholes = _checksums([local_part(param.at_rest) for param in memory.params])

    def cut(self) -> None:
        """Note the checksums of the shards, which the parameters are now."""
        if self._wholes is not None:
            shards = _checksums([param.local for param in self._memory.params])
            _noted[self._memory] = Noted(self._wholes, shards)


@compat.with_real_tensors
def warn_of_differing_weights(memories: Iterable[UnitMemory]) -> None:
    """Compare what was noted of `memories` over their ranks, once; collective over the groups of each."""
    checked = [memory for memory in memories if memory in _noted]
    if not checked:
        return
    now = {memory: _checksums([param.local for param in memory.params]) for memory in checked}
    # A rank that has left an earlier step waits in a transport, and never comes to a collective of the group.
    transports: dict[dist.ProcessGroup, Transport] = {}
    over_shards: dict[dist.ProcessGroup, list[tuple[UnitMemory, torch.Tensor]]] = {}
    over_replicas: dict[dist.ProcessGroup, list[tuple[UnitMemory, torch.Tensor]]] = {}
    for memory in checked:
        noted = _noted[memory]
        shard, replicate = memory.config.shard, memory.config.replicate
        # One maximum finds the largest and, of the negatives, the least: checksums 3 and 5 give 5 and -3, and the least
        # is 3. Where the two differ, ranks do.
        if shard is not None:
            # 1 where somebody has written to the shard since: then it says nothing of the whole that it was cut from.
            rewritten = (now[memory] != noted.shards).long()
            sent = torch.stack([noted.wholes, -noted.wholes, rewritten])
            over_shards.setdefault(shard.group, []).append((memory, sent))
            transports.setdefault(shard.group, shard)
        if replicate is not None:
            sums = now[memory]
            sent = torch.stack([sums, -sums, torch.zeros_like(sums)])
            over_replicas.setdefault(replicate.group, []).append((memory, sent))
            transports.setdefault(replicate.group, replicate)
    for group, entries in over_shards.items():
        transports[group].meet()
        _warn(
            _differing(group, entries),
            "differ between ranks before sharding, so each shard is of another initialisation; call torch.manual_seed"
            " with the same number on all ranks before the model is built, or load one state dict on all",
        )
    for group, entries in over_replicas.items():
        transports[group].meet()
        _warn(
            _differing(group, entries),
            "differ between replicas, which will never be equal; initialise or load the same weights on all ranks"
            " (torch.manual_seed, or a broadcast from one rank)",
        )
    for memory in checked:
        del _noted[memory]


def _warn(names: Sequence[str], text: str) -> None:
    """Warn of the parameters called `names`, if there are any."""
    if not names:
        return
    which = names[0]
    if len(names) > 1:
        which = f"{which} and {len(names) - 1} more"
    warnings.warn(
        f"the weights of {which} {text} (set_initial_weights_check(False) leaves this check out)", stacklevel=4
    )


def _differing(
    group: dist.ProcessGroup,
    entries: Sequence[tuple[UnitMemory, torch.Tensor]],  # [3, parameters] (int64) of each unit
) -> list[str]:
    """Return the names of parameters whose checksums differ over `group`, and that no rank has written since."""
    # [3, parameters of all units]: one all-reduce a group, whatever the number of units.
    sent = torch.cat([rows for _, rows in entries], dim=1)
    largest, minus_least, rewritten = _maximum_over(group, sent).unbind()
    differs = ((largest != -minus_least) & (rewritten == 0)).tolist()
    names = [f"{param.name} of unit {memory.name!r}" for memory, _ in entries for param in memory.params]
    return [name for name, is_other in zip(names, differs) if is_other]


def _maximum_over(
    group: dist.ProcessGroup,
    values: torch.Tensor,  # [3, parameters] (int64)
) -> torch.Tensor:
    """Return the largest values of all ranks, by the backend itself: it belongs to no step, so no tool shall see it."""
    carried = values.to(compat.device_for(group, torch.device("cpu")))
    compat.all_reduce_unseen(carried, group)
    return carried.cpu()


@compat.with_real_tensors
@torch.no_grad()
def _checksums(
    tensors: Sequence[torch.Tensor],  # any shapes, any dtypes
) -> torch.Tensor:
    """Return one number a tensor, [tensors] (int64); 0 for those without values that can be read as bits."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    sums = [_checksum(tensor) for tensor in tensors]  # all are enqueued before the host waits for the first
    return torch.stack([checksum.cpu() for checksum in sums])


def _checksum(
    tensor: torch.Tensor,  # any shape, any dtype
) -> torch.Tensor:
    """Return the sum of the bits of a tensor as words of 64 bits, 0-d (int64)."""
    if type(tensor) is not torch.Tensor or tensor.is_meta or tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device="cpu")  # also where another device is the default
    flat = tensor.contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    in_bytes = flat.view(torch.uint8)  # [bytes]
    if in_bytes.storage_offset() % WORD_BYTES:
        in_bytes = in_bytes.clone()  # words are read where they are aligned
    # Words of 64 bits are summed where they lie. Narrower ones would be widened first: a copy of twice the size, which
    # would stay in the allocator between the shards.
    end = in_bytes.numel() // WORD_BYTES * WORD_BYTES
    words = in_bytes[:end].view(torch.int64)
    rest = in_bytes[end:]  # up to 7 bytes
    return (words.sum() + rest.sum(dtype=torch.int64)) & _MASK

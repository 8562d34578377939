"""Which transport a group gets: NCCL's on CUDA; on CPU shared memory where all its ranks are on one machine, else gloo."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from .shared import SharedTransport
from .slots import machine_of_this_rank
from .transport import GlooTransport, Transport

TRANSPORTS = ("auto", "gloo", "shm", "nccl")
_living: weakref.WeakValueDictionary[tuple[int, str], Transport] = weakref.WeakValueDictionary()


def transport_of(group: dist.ProcessGroup, device: torch.device, wanted: str = "auto") -> Transport:
    """The transport for `group`, one for all units that use it; every rank of the group must call it, and no other.

    Raises `ValueError` for an unknown name, and where the wanted transport cannot work here.
    """
    if wanted not in TRANSPORTS:
        raise ValueError(f"unknown transport {wanted!r}; expected one of {', '.join(TRANSPORTS)}")
    if (wanted == "nccl") != (device.type == "cuda") and wanted != "auto":
        raise ValueError(f"transport {wanted!r} does not move tensors on {device.type}; leave it at 'auto'")
    found = _living.get((id(group), wanted))  # a transport holds its group, so the id is not used again while it lives
    if found is None:
        found = _living[id(group), wanted] = _make(group, device, wanted)
    return found


def _make(group: dist.ProcessGroup, device: torch.device, wanted: str) -> Transport:
    if device.type == "cuda":
        return Transport(group, device)
    if wanted == "gloo" or dist.get_backend(group) != "gloo":
        return GlooTransport(group, device)
    machines: list[tuple[str, ...] | None] = [None] * group.size()
    dist.all_gather_object(machines, machine_of_this_rank(), group=group)
    if None not in machines and len(set(machines)) == 1:
        return SharedTransport(group, device)
    if wanted == "shm":
        raise ValueError(f"transport 'shm' needs all ranks on one x86-64 Linux machine; got {len(set(machines))} machines")
    return GlooTransport(group, device)

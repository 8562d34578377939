"""Selects the transport of a group: over gloo on CPU shared memory where all ranks are on one machine, else gloo.

Over any other backend (NCCL, those written in Python, torch's test backends) and on GPUs the staged one, which asks for
nothing but the collectives. A gloo group carries tensors of a GPU through host memory.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdplab.engine import compat
from fsdplab.engine.core.transport import Transport
from fsdplab.engine.transport.gloo import GlooTransport
from fsdplab.engine.transport.shared_memory.arena import SharingRefused
from fsdplab.engine.transport.shared_memory.process_group import SharedMemoryGroup
from fsdplab.engine.transport.shared_memory.transport import SharedTransport
from fsdplab.engine.transport.staged import StagedTransport

TRANSPORTS = ("auto", "gloo", "shm", "nccl")
_MOVES = {"cpu": ("gloo", "shm"), "cuda": ("gloo", "nccl")}  # by the device of the tensors


@dataclass(frozen=True)
class Known:
    """A transport, its group, and where to look whether that was destroyed (threads that are ranks differ on that)."""

    group: dist.ProcessGroup
    transport: Transport
    alive: Container[dist.ProcessGroup]


# Kept until the group is destroyed, not until a model is deleted: setting up is collective, deleting is not.
_known: dict[tuple[int, str], Known] = {}


def transport_of(group: dist.ProcessGroup, device: torch.device, wanted: str = "auto") -> Transport:
    """Return the transport for `group`, one for all units that use it; its ranks must call it, and no others.

    One that has failed in the middle of a collective begins anew: who builds a model again after that can train.
    Raises `ValueError` for an unknown name, and where the wanted transport cannot work here.
    """
    if wanted not in TRANSPORTS:
        raise ValueError(f"unknown transport {wanted!r}; expected one of {', '.join(TRANSPORTS)}")
    if wanted != "auto" and wanted not in _MOVES.get(device.type, ()):
        raise ValueError(f"transport {wanted!r} does not move tensors on {device.type}; leave it at 'auto'")
    forget_destroyed()
    key = (id(group), wanted)  # the group is held, so its id is not used again while it is known
    if key not in _known:
        below = group.gloo if isinstance(group, SharedMemoryGroup) else group  # the engine brings its own algorithms
        _known[key] = Known(group, _make(below, device, wanted), compat.groups_alive())
    transport = _known[key].transport
    transport.recover()
    transport.announce_buffers()
    return transport


def forget_destroyed() -> None:
    """Free the transports, and their shared memory, of groups that were destroyed; making a transport does it too."""
    for key, known in list(_known.items()):
        if known.group not in known.alive:
            _known.pop(key, None)


def _make(group: dist.ProcessGroup, device: torch.device, wanted: str) -> Transport:
    """Make the transport for a group: staged on GPUs and over other backends than gloo, else by what `wanted` says."""
    backend = compat.backend_of(group, device)
    if device.type == "cuda" or wanted == "auto" and backend != "gloo":
        return StagedTransport(group, device)
    if backend != "gloo":
        raise ValueError(f"transport {wanted!r} works over a gloo group, but this one's backend is {backend}")
    if wanted == "gloo":
        return GlooTransport(group, device)
    try:
        return SharedTransport(group, device)
    except SharingRefused as error:
        if wanted == "shm":
            raise ValueError(
                f"transport 'shm' needs all ranks on one x86-64 Linux machine that lets them share; {error}"
            ) from error
    return GlooTransport(group, device)

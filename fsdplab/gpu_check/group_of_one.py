"""One process as a whole process group, and an engine that gathers and reduces in it all the same.

At world size 1 no engine communicates. To see streams, buffers and overlap on a single GPU, the lab's units are given a
transport over the group of one rank: NCCL then copies where it would send, and everything around it is as with many
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from fsdplab.engine.core.transport import Transport
from fsdplab.engine.emulation.link import Link, behind
from fsdplab.engine.shard import units_of
from fsdplab.engine.transport.gloo import GlooTransport
from fsdplab.engine.transport.staged import StagedTransport


@contextmanager
def group_of_one(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone, NCCL on CUDA and gloo on CPU, for the time of the block."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def made_to_gather(
    model: nn.Module, device: torch.device, link: Link | None = None, ranks: int | None = None
) -> nn.Module:
    """Have the units of `model`, sharded over the group of one, gather and reduce; with `link` as slowly as `ranks`
    ranks behind it.

    Call it before the first forward.
    """
    transport: Transport = (StagedTransport if device.type == "cuda" else GlooTransport)(dist.group.WORLD, device)
    if link is not None:
        transport = behind(transport, link, ranks)
    for unit in units_of(model):
        unit.config = replace(unit.config, shard=transport)
    return model

"""The rank that the warm starter forks before it says that it is ready: it forms a group of one, as other ranks do."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def main(store: str) -> None:
    """Meet nobody at the file `store`, and reduce a tensor over gloo."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1, timeout=timedelta(seconds=10))
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()

"""Functions as a learner writes them, right and wrong, for test_sessions_call.py."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import all_reduce


def add_up(rank, world_size, payload):
    x = payload["start"] + rank
    all_reduce(x)
    print(f"rank {rank} has {x.tolist()}")
    return {"sum": x, "rank": rank, "again": (payload["word"], [1.5, None, True])}


def only_the_payload(payload):
    return payload * 10 + dist.get_rank()


def pass_around(rank, world_size, payload):
    got = torch.zeros(8)
    operations = [
        dist.P2POp(dist.isend, torch.full((8,), float(rank)), (rank + 1) % world_size),
        dist.P2POp(dist.irecv, got, (rank - 1) % world_size),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    dist.barrier()
    return got[0].item()


def raise_on_one(rank, world_size, payload):
    if rank == 1:
        raise ValueError("the slices do not fit")
    dist.barrier()


def hang_on_one(rank, world_size, payload):
    if rank == 1:
        time.sleep(10_000)
    dist.all_reduce(torch.ones(4))


def wait_for_each_other(rank, world_size, payload):
    dist.recv(torch.ones(4), src=1 - rank)


def die_on_one(rank, world_size, payload):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


def exit_on_one(rank, world_size, payload):
    if rank == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(4))


def leave_on_one(rank, world_size, payload):
    if rank == 1:
        sys.exit(0)


def forget_to_send(rank, world_size, payload):
    if rank == 1:
        dist.recv(torch.ones(4), src=0)


def return_an_object(rank, world_size, payload):
    return [1, {"key": object()}]

"""Functions that forked ranks call, for test_warm_starts.py: they leave traces in their process, or look at it."""

from __future__ import annotations

import builtins
import contextlib
import os
import random
import subprocess
import sys
import threading
import time

import numpy
import torch
import torch.distributed as dist
from torch import nn


def look(rank, world_size, payload):
    """What this process looks like to its program."""
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "threads": (torch.get_num_threads(), threading.active_count()),
        "dtype": str(torch.get_default_dtype()),
        "seed": torch.initial_seed(),
        "draws": (random.random(), float(numpy.random.random())),
        "left": [name for name in ("left_behind",) if hasattr(torch, name) or hasattr(builtins, name)],
        "session": os.getsid(0) == os.getpid(),
        "parent": os.getppid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "files": open_files(),
        "grad": torch.is_grad_enabled(),
    }


def open_files():
    """What this process holds open, without what another of its threads closes meanwhile."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(found)


def leave_traces(rank, world_size, payload):
    """Change everything that a process can change of itself."""
    torch.left_behind = builtins.left_behind = True
    torch.manual_seed(7)
    torch.set_num_threads(3)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "yes"
    sys.path.append("left-behind")
    os.chdir("/")
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()


def compute_sharded(rank, world_size, payload):
    """Forward and backward of a small sharded model over shared memory, twice: segments, if anything leaves some."""
    from fsdplab.engine import shard_model

    torch.manual_seed(0)
    model = shard_model(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), "full_shard", units=[nn.Linear])
    for _ in range(2):
        loss = model(torch.ones(2, 16)).square().mean()
        loss.backward()
    return loss.item()


def return_at_once(rank, world_size, payload):
    """Leave before the others may have connected."""
    return rank


def return_never(rank, world_size, payload):
    """Sleep in Python."""
    while True:
        time.sleep(1)


def print_and_end(rank, world_size, payload):
    """End this process without a word to Python."""
    print("last words")
    dist.barrier()
    os._exit(3)


def where_it_is(rank, world_size, payload):
    """The working folder, which may have no path."""
    return os.stat(".").st_ino


def start_a_child(rank, world_size, payload):
    """Leave a process running."""
    return subprocess.Popen(["sleep", "1000"]).pid


def work(rank, world_size, payload):
    """Say that work has begun in the file `payload["said"]`, and meet until the file `payload["stop"]` is there."""
    pids = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        with open(payload["said"] + ".new", "w") as file:
            file.write(" ".join(map(str, pids)))
        os.replace(payload["said"] + ".new", payload["said"])
    going = torch.ones(1)
    while going.item():
        time.sleep(0.05)
        going.fill_(float(not os.path.exists(payload["stop"])))
        dist.broadcast(going, 0)
    return rank

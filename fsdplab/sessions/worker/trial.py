"""Tries what every rank must be able to do: the warm starter forks this rank before it reports that it is ready."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdplab.sessions.launch.mailbox import RANKS_STORE

_WITHIN_S = 20
_DRIVER = "libcuda.so.1"
_NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED: what the driver answers in a child of a process that has used it


def main() -> None:
    """Look whether CUDA can be used if there is any, form a group of one, and reduce a tensor over gloo."""
    signal.alarm(_WITHIN_S)
    if torch.version.cuda is not None and _cuda_is_spoilt():
        sys.exit(
            "CUDA was touched while the warm starter imported (look at sitecustomize.py and at what it loads;"
            " torch.cuda.is_available() is enough), and no forked process can use it then"
        )
    store = dist.FileStore(os.environ[RANKS_STORE], 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=10))
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


def _cuda_is_spoilt() -> bool:
    """Return whether this process was forked from one that has used CUDA; neither torch nor the driver says so before
    the fork.

    It does not start the driver: one that nobody has loaded is as good as new.
    """
    if torch.cuda._is_in_bad_fork():
        return True
    try:
        driver = ctypes.CDLL(_DRIVER, mode=os.RTLD_NOLOAD)
    except OSError:  # nobody has loaded it
        return False
    return driver.cuInit(0) == _NOT_INITIALIZED

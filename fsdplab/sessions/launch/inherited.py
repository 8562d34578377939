"""Gives a forked rank, a child of the starter, what a process inherits: the caller's environment, folder and limits.

Three kinds, and this file decides which is which:

    taken over    what a running process can change in itself: variables, folder, signals, limits, ...
    fixed         what it cannot, because Python, torch or libc have read it at their start, or because the kernel
                  forbids it: a caller in which this has changed since gets another starter
    of the lab    the signals by which ranks are ended, interrupted and asked: they act in every rank, forked or not

tests/test_as_fresh.py compares forked ranks with those of torchrun, and lists what still differs.
"""

from __future__ import annotations

import locale
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdplab.common.pythons import with_this_checkout
from fsdplab.common.temporary import TEMPORARY, folder_of_this_process

# Variables that a process reads once, at its start or when it loads a library.
_READ_AT_START = (
    "LD_",
    "PYTHON",
    "LC_",
    "LANG",
    "LOCPATH",
    "TORCH",
    "PYTORCH_",
    "TRITON_",
    "KINETO_",
    "MALLOC_",
    "GLIBC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "NPY_",
    "NUMPY_",
    "ATEN_",
    "DNNL_",
    "ONEDNN_",
)
_RIGHTS = ("Uid:", "Gid:", "Groups:", "Cap", "NoNewPrivs:", "Seccomp:")
_OF_THE_LAB = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGCHLD")
    if hasattr(signal, name)  # Windows, which imports this, lacks most
)


def rank_environment() -> dict[str, str]:
    """Return the caller's environment, so that a checkout works without being installed, each rank computes on one
    thread, and gloo uses loopback, whatever interface was chosen for several machines.
    """
    inherited = with_this_checkout(
        {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    )
    inherited[TEMPORARY] = str(folder_of_this_process())
    inherited.setdefault("OMP_NUM_THREADS", "1")
    # the profiler logs its start and stop to stderr
    inherited.setdefault("KINETO_LOG_LEVEL", "99")
    inherited.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if loopback := next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None):
        inherited["GLOO_SOCKET_IFNAME"] = loopback
    return inherited


def fixed(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Return what a forked process cannot take over from this one; where it has changed, another starter is needed."""
    read = sorted((name, value) for name, value in environment.items() if name.startswith(_READ_AT_START))
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    # a relative entry of PYTHONPATH means another folder after a change of the working folder
    here = os.stat(".") if any(path and not os.path.isabs(path) for path in paths) else None
    counted = not re.match(r"\s*[1-9]", environment.get("OMP_NUM_THREADS", ""))  # threads: one for each core
    return (
        read,
        here and (here.st_dev, here.st_ino),
        os.sched_getaffinity(0) if counted else None,
        [line for line in _status() if line.startswith(_RIGHTS)],
        _read("/proc/self/cgroup"),
        [os.readlink(path) for path in sorted(Path("/proc/self/ns").glob("*"))],
    )


def inherited() -> dict[str, Any]:
    """Return what a child of this thread would inherit now, JSON-able, without its environment and its folder."""
    import resource  # Windows has none

    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "umask": _umask(),
        "ignored": [which for which in signal.valid_signals() if signal.getsignal(which) == signal.SIG_IGN],
        "blocked": [int(which) for which in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in limits},
        "cores": sorted(os.sched_getaffinity(0)),
        "scheduler": [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "oom": _read(_OOM),
    }


def take_over(caller: Mapping[str, Any]) -> None:
    """Make this forked process, in everything but environment and folder, what a child of the caller would be.

    What is as it should be is not asked for: a container may deny the call.
    """
    import resource

    os.umask(caller["umask"])
    if _read(_OOM) != caller["oom"]:
        Path(_OOM).write_text(caller["oom"])
    if set(caller["cores"]) != os.sched_getaffinity(0):
        os.sched_setaffinity(0, caller["cores"])
    if [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority] != caller["scheduler"]:
        policy, priority = caller["scheduler"]
        os.sched_setscheduler(0, policy, os.sched_param(priority))
    with suppress(PermissionError):  # only root may raise a priority
        os.setpriority(os.PRIO_PROCESS, 0, caller["nice"])
    for name, limits in caller["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    _take_over_signals(caller["ignored"], caller["blocked"])


def signals_of_the_lab() -> None:
    """Let the lab's own signals act in this process and in its children, whatever the caller does with them."""
    for which in _OF_THE_LAB:
        signal.signal(which, signal.default_int_handler if which == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_THE_LAB)


def as_if_fresh(callers: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Give this forked process the variables of its caller and its own, and what a new interpreter derives from them or
    draws at random.
    """
    import numpy
    import torch

    # Python chooses it, where the locale is C, for itself and its children
    coerced = {name: value for name, value in os.environ.items() if name == "LC_CTYPE"}
    os.environ.clear()
    os.environ.update({**callers, **coerced, **own})
    time.tzset()
    locale.setlocale(locale.LC_ALL, "C")  # an import may have chosen the user's
    locale.setlocale(locale.LC_CTYPE, "")
    tempfile.tempdir = None  # an import may have set it
    numpy.random.seed()  # Python's own generator is seeded anew by fork
    torch.default_generator.seed()


_OOM = "/proc/self/oom_score_adj"


def _read(path: str) -> str:
    """Return a file of the kernel; "" where this one has none."""
    with suppress(OSError):
        return Path(path).read_text()
    return ""


def _status() -> list[str]:
    return _read("/proc/thread-self/status").splitlines()


def _umask() -> int:
    for line in _status():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    own = os.umask(0o077)  # an older kernel tells only who sets it
    os.umask(own)
    return own


def _take_over_signals(ignored: list[int], blocked: list[int]) -> None:
    """Ignore and block what the caller ignores and blocks; Python itself ignores two."""
    for which in signal.valid_signals() - {*_OF_THE_LAB, signal.SIGPIPE, signal.SIGXFSZ}:
        wanted = signal.SIG_IGN if which in ignored else signal.SIG_DFL
        if signal.getsignal(which) in (signal.SIG_IGN, signal.SIG_DFL) and signal.getsignal(which) != wanted:
            signal.signal(which, wanted)
    signal.pthread_sigmask(signal.SIG_SETMASK, set(blocked) & signal.valid_signals())
    signals_of_the_lab()

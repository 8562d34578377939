"""What a rank sees of its process, and callers that change themselves after their starter began: for test_as_fresh.py.

    python -m tests.as_fresh FOLDER SEED CHANGES...     a caller

The same file is the program of the ranks, which write FOLDER/warm-0.json, torchrun-0.json, ...
"""

from __future__ import annotations

import contextlib
import gc
import json
import locale
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STARTS = ("warm", "torchrun")
RANKS = 2
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
STATUS = ("Uid", "Gid", "Groups", "Umask", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")


# ---- a rank


def seen() -> dict[str, Any]:
    """All that this process can see of itself, JSON-able."""
    import torch

    return {
        "environment": dict(os.environ),
        "status": of_status(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "signals": {each.name: str(signal.getsignal(each)) for each in signal.Signals},
        "blocked": sorted(int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "folder": folder(),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduler": os.sched_getscheduler(0),
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "cores": sorted(os.sched_getaffinity(0)),
        "leader": (os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()),
        "descriptors": descriptors(),
        "path": sys.path,
        "argv": sys.argv,
        "flags": {name: getattr(sys.flags, name) for name in sys.flags.__match_args__},
        "options of Python": (sys._xoptions, sys.warnoptions),
        "filters of warnings": sorted(map(str, warnings.filters)),
        "encodings": (sys.getfilesystemencoding(), locale.getencoding() if sys.version_info > (3, 11) else ""),
        "streams": {name: of_stream(getattr(sys, name)) for name in ("stdin", "stdout", "stderr")},
        "hooks": (sys.excepthook is sys.__excepthook__, sys.gettrace(), sys.getrecursionlimit()),
        "garbage": (gc.isenabled(), gc.get_threshold()),
        "main": (sys.modules["__main__"].__file__, __name__),
        "time zone": (time.tzname, time.timezone, time.strftime("%H:%M %Z", time.localtime(1_000_000))),
        "locale": {name: locale.setlocale(getattr(locale, name)) for name in dir(locale) if name.startswith("LC_")},
        "temporary folder": tempfile.gettempdir(),
        "Python's threads": threading.active_count(),
        "torch": {
            "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
            "dtype": str(torch.get_default_dtype()),
            "grad": torch.is_grad_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "precision": torch.get_float32_matmul_precision(),
            "threads of a kernel": threads_of_a_kernel(),
        },
        "draws": (random.random(), torch.rand(()).item(), os.urandom(4).hex(), torch.initial_seed()),
        "hash": hash("x"),
    }


def of_status() -> dict[str, str]:
    rows = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    return {name: rows.get(name, "") for name in STATUS}


def folder() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        return str(error)


def descriptors() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def of_stream(stream: Any) -> list[Any]:
    return [stream.encoding, stream.errors, stream.line_buffering, stream.write_through]


def threads_of_a_kernel() -> int:
    """How many threads this process begins for a kernel that computes on all that it may."""
    import torch

    before = len(os.listdir("/proc/self/task"))
    torch.ones(1 << 20).add_(1.0)
    return len(os.listdir("/proc/self/task")) - before


# ---- a caller


def _variables(draw: random.Random, folder: Path) -> None:
    os.environ["SET_LATER"] = "yes \N{SNOWMAN}\n" + chr(0xDCFF)
    os.environ["TMPDIR"] = str(folder)
    del os.environ["UNSET_LATER"]


def _limits(draw: random.Random, folder: Path) -> None:
    for name, soft in (("RLIMIT_NOFILE", draw.randint(200, 300)), ("RLIMIT_CORE", 0), ("RLIMIT_STACK", 1 << 22)):
        resource.setrlimit(getattr(resource, name), (soft, resource.getrlimit(getattr(resource, name))[1]))


def _ignored(draw: random.Random, folder: Path) -> None:
    for which in (signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGWINCH):
        signal.signal(which, draw.choice([signal.SIG_IGN, signal.SIG_DFL]))
    signal.signal(signal.SIGALRM, lambda *_: None)


def _blocked(draw: random.Random, folder: Path) -> None:
    blocked = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGRTMIN}
    signal.pthread_sigmask(signal.SIG_BLOCK, {which for which in blocked if draw.random() < 0.7})


def _folder(draw: random.Random, folder: Path) -> None:
    os.chdir(folder)


def _locale(draw: random.Random, folder: Path) -> None:
    os.environ[draw.choice(["LC_ALL", "LANG", "LC_CTYPE"])] = draw.choice(["C", "C.UTF-8", "POSIX"])


def _time_zone(draw: random.Random, folder: Path) -> None:
    os.environ["TZ"] = draw.choice(["EST5EDT", "XYZ-3", "Asia/Tokyo"])
    time.tzset()


def _threads(draw: random.Random, folder: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = draw.choice(["2", "3", "2,1", "0", "none", ""])
    os.environ["OMP_WAIT_POLICY"] = "passive"


def _of_torch(draw: random.Random, folder: Path) -> None:
    os.environ["TORCH_LOGS"] = "+dynamo"
    os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def _of_python(draw: random.Random, folder: Path) -> None:
    os.environ["PYTHONHASHSEED"] = str(draw.randint(1, 9))
    os.environ["PYTHONWARNINGS"] = "ignore::ResourceWarning"


def _out_of_memory(draw: random.Random, folder: Path) -> None:
    Path("/proc/self/oom_score_adj").write_text(str(draw.randint(700, 999)))


# what a running process can take over, and what it has read at its start
TAKEN_OVER: dict[str, Callable[[random.Random, Path], object]] = {
    "variables": _variables,
    "umask": lambda draw, folder: os.umask(draw.choice([0o077, 0o027, 0o000])),
    "limits": _limits,
    "ignored signals": _ignored,
    "blocked signals": _blocked,
    "folder": _folder,
    "time zone": _time_zone,
    "priority": lambda draw, folder: os.nice(draw.randint(1, 5)),
    "out of memory": _out_of_memory,
    "cores": lambda draw, folder: os.sched_setaffinity(0, {draw.choice(sorted(os.sched_getaffinity(0)))}),
    "scheduler": lambda draw, folder: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
}
FIXED: dict[str, Callable[[random.Random, Path], object]] = {
    "locale": _locale,
    "threads": _threads,
    "variables of torch": _of_torch,
    "variables of Python": _of_python,
}


def caller(folder: Path, seed: str, changes: Sequence[str]) -> None:
    """Begin a starter, change this process in these ways, and start ranks in both."""
    from fsdplab.sessions.launch import warm
    from fsdplab.sessions.launch.launcher import RunningRanks, end_ranks
    from fsdplab.sessions.launch.mailbox import Mailbox

    os.environ["UNSET_LATER"] = "yes"
    warm.begin()
    first, draw = warm.starter_pid(), random.Random(seed)
    for name in changes:
        (TAKEN_OVER | FIXED)[name](draw, folder)
    for start in STARTS:
        ranks = RunningRanks.start([__file__, str(folder)], Mailbox(folder / "ranks"), RANKS, 150.0, start)
        while ranks.agent.running(1.0):
            pass
        end_ranks([ranks])
    print("the same starter" if warm.starter_pid() == first else "another starter")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        text = json.dumps(seen(), default=str, indent=1)
        start = "warm" if os.environ.get("FSDPLAB_RANKS_STORE") else "torchrun"
        path = Path(sys.argv[1], f"{start}-{os.environ['RANK']}.json")
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
    else:
        caller(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])

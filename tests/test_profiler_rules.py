"""What profiles ask for, and that one is stopped when gloo's threads have noted what they did."""

from __future__ import annotations

import ctypes
import hashlib
import io
import threading
import time
import tokenize
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

import fsdplab
from fsdplab.profiling import profiler

pytestmark = pytest.mark.skipif(not profiler._TASKS.exists(), reason="looks at threads in /proc")
_PR_SET_NAME = 15
_LARGE = bytes(1 << 26)  # hashing it takes a while, in which Python's lock is free


def work(name: bytes, named: threading.Event, enough: threading.Event) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)
    named.set()
    while not enough.is_set():
        hashlib.sha256(_LARGE).digest()


def is_seen(looks_for_s: float) -> bool:
    deadline = time.monotonic() + looks_for_s
    while not (seen := profiler._at_work()) and time.monotonic() < deadline:
        time.sleep(0.001)  # in which the thread can take Python's lock
    return seen


@pytest.mark.parametrize("name,seen", [(b"pt_gloo_runloop", True), (b"another", False)])
def test_a_gloo_thread_at_work_is_waited_for_and_no_other(name, seen, monkeypatch) -> None:
    named, enough = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(name, named, enough))
    thread.start()
    try:
        assert named.wait(60)
        assert is_seen(looks_for_s=60 if seen else 0.3) is seen
        monkeypatch.setattr(profiler, "_AT_MOST_S", 0.2)
        profiler.await_gloo_threads()  # ends although the thread works on
        assert not enough.is_set() and thread.is_alive()
    finally:
        enough.set()
        thread.join()


def threads_of_gloo() -> tuple[int, bool]:
    dist.barrier()
    profiler.await_gloo_threads()
    named = [task for task in profiler._TASKS.iterdir() if "(pt_gloo_runloop)" in (task / "stat").read_text()]
    return len(named), profiler._at_work()


def test_gloos_threads_have_this_name_and_rest_between_collectives(ranks) -> None:
    for count, at_work in ranks(2, threads_of_gloo):
        assert count > 0 and not at_work


def test_every_profile_of_the_package_asks_for_kernels():
    """A first profile of the host alone would leave all later ones of the process without kernels."""
    package = Path(fsdplab.__file__).parent
    naming = [path.name for path in package.rglob("*.py") if "ProfilerActivity." in _code_of(path)]
    assert naming == ["profiler.py"]


def _code_of(path: Path) -> str:
    """The file without its texts, in which the two activities may be named to a user."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return "".join(each.string for each in tokens if each.type not in (tokenize.STRING, tokenize.COMMENT))


@pytest.mark.parametrize(("device", "kernels"), [("cpu", False), ("cuda", True)])
def test_a_profile_of_a_gpu_records_its_kernels(device, kernels):
    asked = profiler.activities_on(torch.device(device))
    assert ProfilerActivity.CPU in asked and (ProfilerActivity.CUDA in asked) == kernels

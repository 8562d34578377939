"""What each event of a trace counts as, judged by its name and category.

On the CPU, computing is every operator (`aten::mm`, custom ones too) on a thread that is no transport's; `c10d::*` only
enqueues or waits, and autograd's own ranges hold Python hooks and waiting, so neither computes. On a GPU, computing is
every kernel that moves no bytes between ranks (`CommKernels`); copies and memsets by the copy engines, between host and
device or inside the device, are neither computing nor communication, and copies to another device are communication.
Communication is `gloo:*` on gloo's threads, `shm:*` and the engine's marked ranges on the thread that runs them, and
communication kernels.
"""

from __future__ import annotations

import re
from enum import IntEnum

from fsdplab.common.collectives import kind_of
from fsdplab.profiling.traces.comm_kernels import CommKernels


class Kind(IntEnum):
    """What an event counts as."""

    OPERATOR = 0  # computes, where no device does
    AUTOGRAD = 1
    RANGE = 2  # of an engine or an optimizer
    ISSUE = 3  # a c10d operator
    LOADING = 4
    STEP = 5
    GLOO = 6
    SHM = 7
    KERNEL = 8  # computes on a device
    COMM = 9  # a kernel that communicates
    COPY = 10  # between the host and a device
    DEVICE_COPY = 11  # inside a device, memsets among them
    LAUNCH = 12
    BLOCKED = 13
    BLOCKING_LAUNCH = 14
    IGNORED = 15
    MARK = 16  # an instant that the recording of a job notes


COPIES = (Kind.COPY, Kind.DEVICE_COPY)
DEVICE_WORK = (Kind.KERNEL, Kind.COMM, *COPIES)

# ---- categories

_OF_BEFORE = {  # categories as PyTorch wrote them until 2021 -> as it does now
    "Operator": "cpu_op",
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Runtime": "cuda_runtime",
}
_OF_HOST = ("cpu_op", "user_annotation")
_OF_RUNTIME = ("cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver")
READ = {*_OF_HOST, *_OF_RUNTIME, "kernel", "gpu_memcpy", "gpu_memset", *_OF_BEFORE}
OF_PYTHON = "python_function"  # the category of Python's stack
# what the profiler writes beside them: of itself, Python's stack, arrows, and what is shown twice
PASSED_OVER = {
    "",
    "python_function",
    "gpu_user_annotation",
    "cuda_sync",
    "overhead",
    "Trace",
    "fwdbwd",
    "ac2g",
    "emulated",
    "async_cpu_to_gpu",
    "cpu_instant_event",
    "cuda_profiler_range",
    "external_correlation",
    "collective_comm",
    "PyTorch Profiler",
}

# ---- names

_STEP = re.compile(r"^ProfilerStep#(\d{1,18})$")  # a record holds 64 bits
_STARTS = (
    ("gloo:", Kind.GLOO),
    ("shm:", Kind.SHM),
    ("FSDP::", Kind.RANGE),
    ("Optimizer.", Kind.RANGE),
    ("autograd::engine::evaluate_function", Kind.AUTOGRAD),
    ("enumerate(DataLoader)", Kind.LOADING),
    ("fsdplab::", Kind.MARK),
)
# What PyTorch of before 1.10 shows of a node, with nothing around it. One function of the engine has such a name and
# runs in the forward (engine/core/hooks.py).
_BACKWARD_NODE = re.compile(r"^(?!_EndOfBackward$)\w+Backward\d*$")
_CALL_WITH_ARGUMENTS = "record_param_comms"  # c10d's own event of a call, with the collective's name, bytes and group
_CALLS = ("c10d::", "_c10d_functional::", "nccl:")
_NO_COMPUTING = (
    *("c10d::", "_c10d_functional::", "c10d_functional::", "autograd::engine::", "torch::autograd::"),
    *("gloo:", "nccl:", "shm:", "FSDP::"),
)
_SYNCHRONOUS_COPIES = ("cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream")  # the host waits for these
_INSIDE_A_DEVICE = re.compile(r"Memcpy [DA]to[DA]\b|CopyDeviceToDevice")
_TO_ANOTHER_DEVICE = re.compile(r"Memcpy PtoP|CopyPeer|PeerToPeer")


def kind_of_event(name: str, category: str, comm_kernels: CommKernels) -> Kind:
    """Judge an event of a category in `READ`.

    >>> kind_of_event("aten::mm", "cpu_op", CommKernels()).name
    'OPERATOR'
    """
    category = _OF_BEFORE.get(category, category)
    if category in _OF_HOST:
        return _of_host(name, category)
    if category in _OF_RUNTIME:
        return _of_runtime(name)
    if category != "kernel":
        return _of_copy_engine(name, category)
    return Kind.KERNEL if comm_kernels.kind(name) is None else Kind.COMM


def _of_host(name: str, category: str) -> Kind:
    """Judge an operator or a range of the host."""
    if _STEP.match(name):
        return Kind.STEP
    for start, kind in _STARTS:
        if name.startswith(start):
            return kind
    if _BACKWARD_NODE.search(name):
        return Kind.AUTOGRAD
    if name == _CALL_WITH_ARGUMENTS:
        return Kind.ISSUE
    if name.startswith(_CALLS):
        return Kind.ISSUE if kind_of(name) else Kind.IGNORED
    computes = category == "cpu_op" and "::" in name and not name.startswith(_NO_COMPUTING)
    return Kind.OPERATOR if computes else Kind.IGNORED


def _of_runtime(name: str) -> Kind:
    """Judge a call of the host to the device's runtime: it launches work, waits, or both."""
    launches = "Launch" in name or "Memcpy" in name or "Memset" in name
    if "Synchronize" in name or name in _SYNCHRONOUS_COPIES:
        return Kind.BLOCKING_LAUNCH if launches else Kind.BLOCKED
    return Kind.LAUNCH if launches else Kind.IGNORED


def _of_copy_engine(name: str, category: str) -> Kind:
    """Judge a copy or a memset by its direction."""
    if category == "gpu_memset" or _INSIDE_A_DEVICE.search(name):
        return Kind.DEVICE_COPY
    return Kind.COMM if _TO_ANOTHER_DEVICE.search(name) else Kind.COPY

"""Looks at each batch as it reaches the model in the profiled steps: how long the loop worked to prepare it, and what
it holds.

A loop that tokenises, decodes or collates by itself calls no function that could be wrapped. So what is timed is its
main thread from the end of a step, a backward or the data loader's batch to the model's next forward. Only CPU time
counts, since waiting is no preparing, and not what is counted as something else (activities.py). Marks in the trace
tell what of it operators took (profiling/traces/host_reads.py), such as those of an average of the weights.

What a batch holds is a checksum of some of its elements: ranks that have the same one in each step train on the same
data, also where dropout makes their losses differ.
"""

from __future__ import annotations

import ctypes
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdplab.profiling.traces.host_reads import FORWARD_BEGINS, LOOP_GOES_ON, PREPARING
from fsdplab.recording.rows import Taken, is_main_thread

_ELEMENTS = 4096  # of each tensor that are looked at, spread over all of it


class _Begin(NamedTuple):
    """When the loop went on: the clock, its thread's CPU time, and what had been noted of the step by then, all in
    nanoseconds.
    """

    taken: Taken
    clock_ns: int
    cpu_ns: int
    noted_ns: int


class Batches:
    """Told when the loop goes on (`loop_goes_on`); looks at a batch when the model's forward begins.

    `give_up` is told of an error while a batch is looked at, which may be of any type: the forward goes on.
    """

    def __init__(self, model: nn.Module, give_up: Callable[[str], None]) -> None:
        self._give_up = give_up
        self._began: _Begin | None = None
        self._step = 0
        self._seen: dict[int, list[torch.Tensor]] = {}  # by step
        # before an engine's own hooks, which gather parameters
        self._hook = model.register_forward_pre_hook(self._forward, prepend=True, with_kwargs=True)

    def loop_goes_on(self, taken: Taken, step: int) -> None:
        """A step, a backward or the loading of a batch has ended: what follows may prepare a batch of this step."""
        self._step = step
        _mark(LOOP_GOES_ON)
        self._began = _Begin(taken, time.perf_counter_ns(), time.thread_time_ns(), taken.noted_ns)

    def end(self) -> None:
        """Look at no more batches."""
        self._hook.remove()

    def checksums(self) -> dict[int, int]:
        """Return a checksum of the batches of each step, by its number."""
        checksums = {}
        for step, tensors in self._seen.items():
            checksum = 0
            for tensor in tensors:
                on_host = tensor.cpu()
                # not `numpy()`, whose calls are counted, and which has no bf16
                content = ctypes.string_at(on_host.data_ptr(), on_host.nbytes)
                checksum = zlib.crc32(content, checksum)
            checksums[step] = checksum
        return checksums

    def _forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # a forward without a graph is one of an evaluation
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or not is_main_thread():
            return
        try:
            self._note_preparing()
            self._look_at((args, kwargs))
        except Exception as error:  # such as one of a batch's own functions
            self._give_up(f"the batch of step {self._step}: {type(error).__name__}: {error}")

    def _look_at(self, batch: Any) -> None:
        for value in tree_leaves(batch):
            if type(value) is torch.Tensor and _has_elements(value):
                # a step without tensors has no checksum: it would be that of all ranks
                self._seen.setdefault(self._step, []).append(_some_of(value))

    def _note_preparing(self) -> None:
        began, self._began = self._began, None
        # of several forwards in a row the first one has the batch
        if began is None:
            return
        noted_ns = began.taken.noted_ns - began.noted_ns
        clock_ns = time.perf_counter_ns() - began.clock_ns - noted_ns
        cpu_ns = time.thread_time_ns() - began.cpu_ns
        began.taken.note(PREPARING, max(0, min(clock_ns, cpu_ns)))
        _mark(FORWARD_BEGINS)


def _mark(name: str) -> None:
    """Note an instant in the trace, which tells the operators that ran between two of them."""
    with torch.profiler.record_function(name):
        pass


def _has_elements(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a grid of elements in memory, as nested, sparse and meta ones are not."""
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return tensor.numel() > 0


def _some_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of at most so many elements of a tensor, at about equal distances in memory.

    It stays on the tensor's device: a copy to the host would wait until a GPU has done all that came before.
    """
    # images whose channels come last are one stretch of memory too: in the order of their strides they need no copy
    by_stride = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    elements = tensor.detach().permute(by_stride).reshape(-1)
    every = -(-elements.numel() // _ELEMENTS)
    # the loop may write its next batch into the same memory
    return elements[::every].clone()

"""Finds the memory that PyTorch's kernels on the CPU take inside an operator, which fake tensors do not show.

That of common kernels follows from their source. Convolutions and recurrent layers leave it to oneDNN, which decides by
the processor: such an operator is run once for each of its shapes, under the profiler.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.profiler import profile
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from fsdplab.planning.lab_memory.presets import attention_backward_scratch, attention_scratch
from fsdplab.profiling.profiler import activities_on

aten = torch.ops.aten
MOST = 2**28  # bytes: an operator on more than these is not tried
_TRIED = {aten.convolution, aten.convolution_backward, aten.mkldnn_rnn_layer, aten.mkldnn_rnn_layer_backward}


@dataclass(frozen=True)
class Taken:
    """`scratch`: bytes at the peak of an operator beside its results; `results`: bytes of each, () as they seem."""

    scratch: int = 0
    results: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Like:
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        """Make one of zeros, of which no index is out of range."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="cpu").zero_()


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute as a rank does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def taken_by(func: Any, args: tuple, result: Any) -> Taken:
    """Return what `func` takes besides its visible results, on one thread."""
    packet = func._overloadpacket
    if packet in _RULES:
        return Taken(_RULES[packet](args, result))
    if packet not in _TRIED:
        return Taken()
    if torch.cuda.is_available():  # a profile of the host would leave later ones without kernels
        return Taken()
    # arguments that are equal for the kernel are equal, and can be hashed: shapes in the place of tensors
    leaves: list[Any] = []
    nbytes = 0
    values, tree = tree_flatten(args)
    for value in values:
        if isinstance(value, Tensor):
            nbytes += value.numel() * value.element_size()
            leaves.append(_Like(tuple(value.shape), value.stride(), value.dtype))
        else:
            # lists of strides and paddings cannot be hashed
            leaves.append(tuple(value) if isinstance(value, list) else value)
    if nbytes > MOST:
        return Taken()
    return _tried(func, tuple(leaves), tree)


@lru_cache(maxsize=512)
def _tried(func: Any, leaves: tuple, tree: TreeSpec) -> Taken:
    """Run it once."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else each profile writes two lines to stderr
    with one_thread(), unset_fake_temporarily(), torch.enable_grad():  # oneDNN keeps what a backward needs
        args = tree_unflatten([x.make() if isinstance(x, _Like) else x for x in leaves], tree)
        with profile(activities=activities_on(torch.device("cpu")), profile_memory=True) as profiled:
            result = func(*args)
    results = tuple(x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, Tensor))
    now = peak = 0
    # in the order of time: +bytes where one begins, -bytes where it ends
    for _, nbytes in sorted(_changes(profiled.profiler.kineto_results.experimental_event_tree())):
        now += nbytes
        peak = max(peak, now)
    # what is alive at the end are the results
    return Taken(peak - now, results)


def _changes(nodes: Any) -> Iterator[tuple[int, int]]:
    """Time and bytes of every allocation and free."""
    for node in nodes:
        if node.tag == _EventType.Allocation:
            yield node.start_time_ns, node.typed[1].alloc_size
        yield from _changes(node.children)


def _attention(args: tuple, result: Any) -> int:
    sequence, head_width = args[0].shape[-2:]
    return attention_scratch(sequence, head_width)


def _attention_backward(args: tuple, result: Any) -> int:
    return attention_backward_scratch(args[1].shape[-2])


def _layer_norm_backward(args: tuple, result: Any) -> int:
    """Return the bytes of one thread's sums for weight and bias."""
    weight = result[1]
    if weight is None:
        return 0
    return 2 * weight.numel() * weight.element_size()


_RULES: dict[Any, Callable[[tuple, Any], int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.native_layer_norm_backward: _layer_norm_backward,
}

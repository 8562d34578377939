"""The profiler's event tree, read into allocator events and the uses of their addresses.

The tree (`kineto_results.experimental_event_tree()`) is the one route that carries an allocation's address, the ranges
it happened in, and the addresses that operators were given. It is a private API of torch, used in this file only. Found
by experiment (torch 2.13, CPU):

- allocations of the calling thread, of autograd's threads and of gloo's worker threads are in it; those of plain Python
  threads are not, nor is what gloo allocates itself for its sockets;
- the free of a block that was allocated before profiling began is not reported (CPU; the CUDA allocator reports it);
- what a collective used is sometimes freed by a thread that the profiler does not see: if it is not alive at the end,
  it ends with its last use;
- `torch::autograd::AccumulateGrad` names every whole gradient, a `c10d::` operator every buffer it moves, also those
  made in C++ (DDP's buckets).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _EventType, _TensorMetadata

from fsdplab.engine.events import Tag
from fsdplab.profiling.memory.block_lifetimes import NEVER, AllocatorEvent

_BACKWARD = "autograd::engine::evaluate_function"
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_COLLECTIVES = ("c10d::", "gloo:", "nccl:")
_MAKES_BUCKETS = "DistributedDataParallel.forward"  # DDP makes its buckets anew in its second forward, in C++
# An allocation directly in one of these ranges is the gathered parameters' own storage. (FSDP2 and the lab, then
# FSDP1.)
_GATHERED_IN = (
    "FSDP::all_gather_copy_out",
    "FullyShardedDataParallel._pre_forward",
    "FullyShardedDataParallel._pre_backward_prefetch",
    "FullyShardedDataParallel._pre_backward_hook",
)
# The innermost of these ranges around an allocation decides. Memory that autograd's accumulation keeps is an engine's
# bucket.
_CATEGORY_IN = (
    *((name, "communication_buffers") for name in _COLLECTIVES),
    ("FSDP::all_gather", "communication_buffers"),
    ("FSDP::post_backward_reduce", "communication_buffers"),
    ("FSDP::all_reduce", "communication_buffers"),
    (_ACCUMULATE, "communication_buffers"),
    ("Optimizer.step", "other"),
)


@dataclass(frozen=True)
class Trace:
    """Allocator events in order of time; whole gradients as tags; uses by collectives as hints; when the last backward
    ended.
    """

    events: list[AllocatorEvent]
    gradients: list[Tag]
    hints: list[Tag]
    work_end_ns: int


def read_trace(
    profile: torch.profiler.profile,
    device: torch.device,
    *,
    buffers: Set[int] = frozenset(),
    alive: Callable[[], Set[int]] = set,
    gathers_into_parameters: bool = False,
) -> Trace:
    """The memory of one device in a finished profile (made with `profile_memory` and `record_shapes`).

    `buffers` are addresses that their engine announced as communication buffers; `alive()` gives those still alive
    after the profile (it is asked only where it matters). `gathers_into_parameters`: the outputs of all-gathers, and
    what is concatenated from them, are the parameters themselves (DeepSpeed).
    """
    results = profile.profiler.kineto_results if profile.profiler else None
    if results is None or not hasattr(results, "experimental_event_tree"):
        raise RuntimeError(
            f"torch {torch.__version__} gave a profile without an event tree, so its memory cannot be measured; "
            "fsdplab reads torch 2.11 to 2.15: install one of these, or run with memory=False"
        )
    nodes = sorted(_walk(results.experimental_event_tree()), key=lambda node: node.start_ns)
    events = [event for node in nodes if (event := _allocation(node, device)) is not None]
    uses = _Uses(device, gathers_into_parameters)
    for node in nodes:
        uses.see(node)
    ends = [node.of_tree.end_time_ns for node in nodes if node.name.startswith(_BACKWARD)]
    return Trace(
        events + _unseen_frees(nodes, events, device, buffers, alive),
        uses.gradients,
        uses.hints,
        max(ends, default=NEVER),
    )


class _Node(NamedTuple):
    """A node of the tree, with what is asked for often: each question to the tree makes its answer anew."""

    of_tree: Any
    name: str
    start_ns: int
    kind: Any
    allocation: Any  # its fields, None for what is no allocation


def _walk(roots: Iterable[Any]) -> Iterator[_Node]:
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        yield _node(node)
        waiting.extend(node.children)


def _node(node: Any) -> _Node:
    kind = node.tag
    return _Node(node, node.name, node.start_time_ns, kind, node.typed[1] if kind == _EventType.Allocation else None)


def _allocation(node: _Node, device: torch.device) -> AllocatorEvent | None:
    fields = node.allocation
    if fields is None or not _same(fields.device, device):
        return None
    category, unit = _home(node) if fields.alloc_size > 0 else ("", "")
    return AllocatorEvent(node.start_ns, fields.ptr, fields.alloc_size, category, unit)


def _same(found: torch.device, wanted: torch.device) -> bool:
    return found.type == wanted.type and (wanted.type == "cpu" or found.index == wanted.index)


def _home(node: _Node) -> tuple[str, str]:
    """The category, and the unit where the name holds one, that the ranges around an allocation give it."""
    chain = list(_ancestors(node.of_tree))
    if chain and chain[0].startswith(_GATHERED_IN):
        return "gathered_parameters", _unit(chain[0])
    for name in chain:
        for prefix, category in _CATEGORY_IN:
            if name.startswith(prefix):
                return category, _unit(name)
    return "", ""


def _ancestors(node: Any) -> Iterator[str]:
    while (node := node.parent) is not None:
        yield node.name


def _unit(name: str) -> str:
    """`FSDP::all_gather (blocks.3)` -> `blocks.3`; FSDP2 leaves the root's name out."""
    if not name.startswith("FSDP::"):
        return ""
    found = re.search(r"\((.+)\)$", name)
    return found.group(1) if found else "root"


def _storages(node: _Node, device: torch.device) -> list[tuple[int, int]]:
    """(address, bytes seen of it) of every storage an operator was given on the device, in order."""
    tensors = [t for t in _tensors(node) if _same(t.device, device)]
    return [(t.storage_data_ptr, math.prod(t.sizes) * t.dtype.itemsize) for t in tensors]


def _tensors(node: _Node) -> list[Any]:
    """The tensors with a storage that an operator was given."""
    inputs = node.of_tree.typed[1].inputs if node.kind == _EventType.TorchOp else ()
    return [t for t in _flat(inputs) if isinstance(t, _TensorMetadata) and t.storage_data_ptr]


def _flat(inputs: Iterable[Any]) -> Iterator[Any]:
    for one in inputs:
        yield from _flat(one) if isinstance(one, (list, tuple)) else (one,)


class _Uses:
    """Infers from operators, in order of time, the uses of their addresses."""

    def __init__(self, device: torch.device, gathers_into_parameters: bool) -> None:
        self.gradients: list[Tag] = []
        self.hints: list[Tag] = []
        self._device = device
        self._into_parameters = gathers_into_parameters
        self._gathered: set[int] = set()

    def see(self, node: _Node) -> None:
        if node.name == _ACCUMULATE:
            self.gradients += self._tags(node, "whole_gradients")
        elif node.name.startswith(_COLLECTIVES):
            self._collective(node)
        elif self._into_parameters and node.name == "aten::cat":
            self._concatenation(node)

    def _collective(self, node: _Node) -> None:
        tags = self._tags(node, "communication_buffers")
        if self._into_parameters and node.name.startswith("c10d::") and "gather" in node.name and tags:
            self._gathered.add(tags[0].pointer)
            tags[0] = self._tags(node, "gathered_parameters")[0]
        self.hints += tags

    def _concatenation(self, node: _Node) -> None:
        sources = {pointer for pointer, _ in _storages(node, self._device)}
        if sources and sources <= self._gathered:
            made = (
                event
                for child in node.of_tree.children
                if (event := _allocation(_node(child), self._device)) and event.nbytes > 0
            )
            self.hints += [Tag("gathered_parameters", event.pointer, event.nbytes, event.time_ns, "") for event in made]

    def _tags(self, node: _Node, category: str) -> list[Tag]:
        return [Tag(category, at, nbytes, node.start_ns, "") for at, nbytes in _storages(node, self._device)]


# ---- frees on threads that the profiler does not see


@dataclass
class _Unfreed:
    """An allocation without a free: it ended before `until`, after the last operator that used it."""

    born_ns: int
    pointer: int
    nbytes: int
    travelled: bool  # whether a collective allocated it or was given it
    stays: bool  # whether only C++ holds it, so that Python cannot see it
    last_use_ns: int
    until: int = NEVER


def _unseen_frees(
    nodes: list[_Node],
    events: list[AllocatorEvent],
    device: torch.device,
    buffers: Set[int],
    alive: Callable[[], Set[int]],
) -> list[AllocatorEvent]:
    """The missing frees: of memory used by a collective that is neither alive at the end nor at its address."""
    blocks = _unfreed(nodes, events)
    for block, _ in _uses_of(blocks, (node for node in nodes if node.name.startswith(_COLLECTIVES)), device):
        block.travelled = True
    travelled = (block for block in blocks if block.travelled or block.pointer in buffers)
    doubtful = [block for block in travelled if block.until == NEVER and not block.stays]
    living = alive() if doubtful else set()
    gone = [b for b in blocks if b.until < NEVER] + [b for b in doubtful if b.pointer not in living]
    for block, user in _uses_of(gone, nodes, device):
        block.last_use_ns = max(block.last_use_ns, user.of_tree.end_time_ns)
    return [AllocatorEvent(min(block.last_use_ns, block.until - 1), block.pointer, -block.nbytes) for block in gone]


def _uses_of(blocks: list[_Unfreed], nodes: Iterable[_Node], device: torch.device) -> Iterator[tuple[_Unfreed, _Node]]:
    """The blocks beside the operators that were given them."""
    at: dict[int, list[_Unfreed]] = {}
    for block in blocks:
        at.setdefault(block.pointer, []).append(block)
    for node in nodes if at else ():
        for tensor in _tensors(node):
            for block in at.get(tensor.storage_data_ptr, ()):
                if block.born_ns <= node.start_ns < block.until and _same(tensor.device, device):
                    yield block, node


def _unfreed(nodes: list[_Node], events: list[AllocatorEvent]) -> list[_Unfreed]:
    """The blocks that were not seen to be freed."""
    allocations = {(node.start_ns, node.allocation.ptr): node for node in nodes if node.allocation is not None}
    unfreed: dict[int, list[_Unfreed]] = {}
    for event in events:
        earlier = unfreed.setdefault(event.pointer, [])
        if event.nbytes < 0:
            del earlier[-1:]
            continue
        if earlier:
            earlier[-1].until = event.time_ns
        around = tuple(_ancestors(allocations[event.time_ns, event.pointer].of_tree))
        travelled = any(name.startswith(_COLLECTIVES) for name in around)
        earlier.append(
            _Unfreed(event.time_ns, event.pointer, event.nbytes, travelled, _MAKES_BUCKETS in around, event.time_ns)
        )
    return [block for blocks in unfreed.values() for block in blocks]

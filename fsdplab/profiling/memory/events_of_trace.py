"""The profiler's event tree, read into allocator events and the uses of their addresses.

The tree (`kineto_results.experimental_event_tree()`) is the one route that carries an allocation's address, the ranges
it happened in, and the addresses that operators were given. It is a private API of torch, used in this file only. Found
by experiment (torch 2.13, CPU):

- allocations of the calling thread, of autograd's threads and of gloo's worker threads are in it; those of plain Python
  threads are not, nor is what gloo allocates itself for its sockets;
- the free of a block that was allocated before profiling began is not reported (CPU; the CUDA allocator reports it);
- what a collective used is sometimes freed by a thread that the profiler does not see: if it is not alive at the end,
  it ends with its last use;
- `torch::autograd::AccumulateGrad` names every unsharded gradient, a `c10d::` operator every buffer it moves, also
  those made in C++ (DDP's buckets).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch._C._profiler import _EventType, _TensorMetadata

from fsdplab.common.rows import grouped
from fsdplab.engine.events import Tag
from fsdplab.profiling.memory.timeline import NEVER, AllocatorEvent, blocks_of

_BACKWARD = "autograd::engine::evaluate_function"
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_COLLECTIVES = ("c10d::", "gloo:", "nccl:")
_MAKES_BUCKETS = "DistributedDataParallel.forward"  # DDP makes its buckets anew in its second forward, in C++
# What is allocated directly in one of these ranges is the unsharded parameters' own storage: FSDP2 and the lab, FSDP1.
_GATHERED_IN = (
    "FSDP::all_gather_copy_out",
    *(f"FullyShardedDataParallel.{name}" for name in ("_pre_forward", "_pre_backward_prefetch", "_pre_backward_hook")),
)
# Memory that autograd's accumulation keeps is an engine's bucket.
_BUFFERS_IN = (*_COLLECTIVES, "FSDP::all_gather", "FSDP::post_backward_reduce", "FSDP::all_reduce", _ACCUMULATE)
_TEMPORARIES_IN = "Optimizer.step"


@dataclass(frozen=True)
class Trace:
    """Allocator events; unsharded gradients as tags; uses by collectives as hints; when the last backward ended."""

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
    nodes = _all_nodes([_Node(root, (), device) for root in results.experimental_event_tree()])
    made = [(node, node.event) for node in nodes if node.event]
    events = [event for _, event in made]
    gradients = []
    for node in nodes:
        if node.name == _ACCUMULATE:
            gradients += node.tags("unsharded_gradients")
    return Trace(
        events=events + _unseen_frees(made, nodes, buffers, alive),
        gradients=gradients,
        hints=_hints(nodes, gathers_into_parameters),
        work_end_ns=max((node.end_ns for node in nodes if node.name.startswith(_BACKWARD)), default=NEVER),
    )


def _all_nodes(roots: Sequence[_Node]) -> list[_Node]:
    """All nodes of the trees, in order of time; a tree may be deeper than Python calls functions."""
    # a stack of our own instead of recursion
    waiting = list(roots)
    nodes = []
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        waiting += node.children
    return sorted(nodes, key=lambda node: node.start_ns)


class _Node:
    """A node of the tree, as far as it concerns one device. The tree makes every answer anew, so answers are kept."""

    def __init__(self, of_tree: Any, around: Sequence[str], device: torch.device) -> None:
        self._of_tree = of_tree
        self._device = device
        self._kind = of_tree.tag
        self.around = around  # the names of the ranges that it happened in, the innermost first
        self.name = of_tree.name
        self.start_ns = of_tree.start_time_ns
        self.end_ns = of_tree.end_time_ns
        self.event: AllocatorEvent | None = None
        fields = of_tree.typed[1]
        if self._kind == _EventType.Allocation and self._here(fields):
            # a free has a negative size, and belongs where its allocation does
            home = _home(around) if fields.alloc_size > 0 else ()
            self.event = AllocatorEvent(self.start_ns, fields.ptr, fields.alloc_size, *home)

    @property
    def children(self) -> list[_Node]:
        around = (self.name, *self.around)
        return [_Node(child, around, self._device) for child in self._of_tree.children]

    @cached_property
    def given(self) -> list[tuple[int, int]]:
        """(address, bytes seen of it) of every storage that the operator was given, in order."""
        if self._kind != _EventType.TorchOp:
            return []
        given = []
        for tensor in _tensors(self._of_tree.typed[1].inputs):
            if tensor.storage_data_ptr and self._here(tensor):
                # of a view less than its storage holds: the trace does not say the storage's size
                nbytes = math.prod(tensor.sizes) * tensor.dtype.itemsize
                given.append((tensor.storage_data_ptr, nbytes))
        return given

    def tags(self, category: str) -> list[Tag]:
        """A tag for every storage that the operator was given."""
        return [Tag(category, pointer, nbytes, self.start_ns, "") for pointer, nbytes in self.given]

    def _here(self, thing: Any) -> bool:
        """Whether an allocation or a tensor is on the device."""
        if thing.device.type != self._device.type:
            return False
        return self._device.type == "cpu" or thing.device.index == self._device.index


def _tensors(inputs: Iterable[Any]) -> Iterator[Any]:
    """The tensors in an operator's inputs, and in lists of them."""
    for given in inputs:
        if isinstance(given, (list, tuple)):
            yield from _tensors(given)
        elif isinstance(given, _TensorMetadata):
            yield given


def _home(around: Sequence[str]) -> tuple[str, str]:
    """The category and the unit that the ranges around an allocation give it; the innermost known range decides."""
    if around and around[0].startswith(_GATHERED_IN):
        return "unsharded_parameters", _unit(around[0])
    for name in around:
        if name.startswith(_BUFFERS_IN):
            return "communication_buffers", _unit(name)
        if name.startswith(_TEMPORARIES_IN):
            return "other", ""
    return "", ""


def _unit(name: str) -> str:
    """`FSDP::all_gather (blocks.3)` -> `blocks.3`; FSDP2 leaves the root's name out, and FSDP1 all names."""
    of_engine = re.fullmatch(r"FSDP::.*?(?:\((.+)\))?", name)
    if of_engine is None:
        return ""
    return of_engine.group(1) or "root"


def _hints(nodes: Iterable[_Node], gathers_into_parameters: bool) -> list[Tag]:
    """The buffers of collectives; what is gathered into parameters is the parameters, also once it is concatenated."""
    hints: list[Tag] = []
    gathered: set[int] = set()  # the addresses of what was gathered into
    for node in nodes:
        if node.name.startswith(_COLLECTIVES):
            tags = node.tags("communication_buffers")
            is_gather = node.name.startswith("c10d::") and "gather" in node.name
            if gathers_into_parameters and is_gather and tags:
                gathered.add(tags[0].pointer)  # the first argument is the output
                tags[0] = replace(tags[0], category="unsharded_parameters")
            hints += tags
        # parts that were gathered one by one become the whole parameter
        elif gathers_into_parameters and node.name == "aten::cat":
            sources = {pointer for pointer, _ in node.given}
            if sources and sources <= gathered:
                hints += _allocated_in(node, "unsharded_parameters")
    return hints


def _allocated_in(node: _Node, category: str) -> list[Tag]:
    """A tag for everything that was allocated directly in a node."""
    tags = []
    for child in node.children:
        event = child.event
        if event and event.nbytes > 0:
            tags.append(Tag(category, event.pointer, event.nbytes, event.time_ns, ""))
    return tags


# ---- frees on threads that the profiler does not see


@dataclass(frozen=True, eq=False)
class _Unfreed:
    """An allocation without a free; `until` is when its memory was allocated again."""

    node: _Node
    event: AllocatorEvent
    until: int


def _unseen_frees(
    made: Sequence[tuple[_Node, AllocatorEvent]],
    nodes: Sequence[_Node],
    buffers: Set[int],
    alive: Callable[[], Set[int]],
) -> list[AllocatorEvent]:
    """The missing frees: of memory that was allocated again, and of what a collective used that is not alive at the
    end. Such memory ended with its last use.
    """
    unfreed = _unfreed(made)
    used_by_collectives = _used_by_collectives(unfreed, nodes, buffers)
    doubtful = []
    for block in unfreed:
        # only C++ holds what DDP makes, so that Python cannot see whether it is alive
        is_of_ddp = _MAKES_BUCKETS in block.node.around
        if block.until == NEVER and block in used_by_collectives and not is_of_ddp:
            doubtful.append(block)
    living = alive() if doubtful else set()
    # memory that was allocated again must have been freed before
    gone = [block for block in unfreed if block.until < NEVER]
    gone += [block for block in doubtful if block.event.pointer not in living]

    ends = {block: block.event.time_ns for block in gone}
    for block, user in _uses(gone, nodes):
        ends[block] = max(ends[block], user.end_ns)
    frees = []
    for block, end in ends.items():
        # a use that overlaps with the next allocation cannot push the free behind it
        freed_ns = min(end, block.until - 1)
        frees.append(AllocatorEvent(freed_ns, block.event.pointer, -block.event.nbytes))
    return frees


def _unfreed(made: Sequence[tuple[_Node, AllocatorEvent]]) -> list[_Unfreed]:
    """The allocations that end with no free: never, or with another allocation of their memory."""
    blocks = blocks_of(event for _, event in made)
    lives = zip(blocks.born.tolist(), blocks.died.tolist(), blocks.times[blocks.died].tolist())
    unfreed = []
    for born, died, until in lives:  # the first event is moment 1
        if until == NEVER or made[died - 1][1].nbytes > 0:
            node, event = made[born - 1]
            unfreed.append(_Unfreed(node, event, until))
    return unfreed


def _used_by_collectives(unfreed: Sequence[_Unfreed], nodes: Sequence[_Node], buffers: Set[int]) -> set[_Unfreed]:
    """The blocks that a collective was given, or that were allocated in one, or announced as its buffers."""
    collectives = [node for node in nodes if node.name.startswith(_COLLECTIVES)]
    used = {block for block, _ in _uses(unfreed, collectives)}
    for block in unfreed:
        is_made_in_one = any(name.startswith(_COLLECTIVES) for name in block.node.around)
        if is_made_in_one or block.event.pointer in buffers:
            used.add(block)
    return used


def _uses(blocks: Iterable[_Unfreed], nodes: Iterable[_Node]) -> Iterator[tuple[_Unfreed, _Node]]:
    """The blocks beside the operators that were given them."""
    # an address is used again and again: the block that lives at that time is meant
    at = grouped(blocks, lambda block: block.event.pointer)
    for node in nodes if at else ():
        for pointer, _ in node.given:
            for block in at.get(pointer, ()):
                if block.event.time_ns <= node.start_ns < block.until:
                    yield block, node

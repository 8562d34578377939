"""The storages alive when profiling began, and their categories.

On CUDA the allocator lists its own blocks. The CPU's allocator keeps no list, so the storages of all tensors are found
by `gc` and watched until they are freed, because the CPU profiler does not report frees of earlier allocations. Memory
that only C++ holds (DDP's buckets) shows up later, when a collective uses it.
"""

from __future__ import annotations

import gc
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdplab.engine.events import Tag
from fsdplab.profiling.memory.block_lifetimes import AllocatorEvent, Storage

Named = dict[int, str]  # address of a storage -> its category


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """The `torch.optim.Optimizer` inside a wrapper (DeepSpeed's `.optimizer`), or None where there is none."""
    while optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


def address(tensor: torch.Tensor, device: torch.device) -> int:
    """The address of the storage under a tensor (of a DTensor's local part); 0 where it has none on this device."""
    storage = _storage(getattr(tensor, "_local_tensor", tensor), device)
    return storage.data_ptr() if storage is not None else 0


def _storage(tensor: torch.Tensor, device: torch.device) -> torch.UntypedStorage | None:
    # wrappers own no memory; the wrapped tensor is found too
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return None
    storage = tensor.untyped_storage()
    here = storage.device
    if here.type != device.type or (device.type != "cpu" and here.index != device.index):
        return None
    return storage if storage.nbytes() else None


def living_storages(device: torch.device) -> dict[int, torch.UntypedStorage]:
    """Address -> storage of all tensors that Python can reach, without those that lie inside another one: the lab's
    slices have a storage each, over their unit's.
    """
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in _living_tensors():
        storage = _storage(tensor, device)
        if storage is not None and storage.data_ptr():
            known = found.get(storage.data_ptr())
            if known is None or known.nbytes() < storage.nbytes():
                found[storage.data_ptr()] = storage
    sizes = {pointer: storage.nbytes() for pointer, storage in found.items()}
    return {pointer: found[pointer] for pointer in outermost(sizes)}


def outermost(sizes: dict[int, int]) -> dict[int, int]:
    """Those spans (address -> bytes) that lie in no other one.

    >>> outermost({100: 50, 120: 10, 150: 5})
    {100: 50, 150: 5}
    """
    kept: dict[int, int] = {}
    end = 0
    for pointer in sorted(sizes, key=lambda at: (at, -sizes[at])):
        if pointer + sizes[pointer] > end:
            kept[pointer] = sizes[pointer]
            end = pointer + sizes[pointer]
    return kept


def holder(address: int, sizes: dict[int, int], starts: list[int]) -> int:
    """The beginning of the span that holds `address`, or the address itself; `starts` are the spans' beginnings,
    sorted.
    """
    index = bisect_right(starts, address) - 1
    return starts[index] if index >= 0 and address < starts[index] + sizes[starts[index]] else address


def _living_tensors() -> Iterator[torch.Tensor]:
    kinds: dict[type, bool] = {}
    for thing in gc.get_objects():
        kind = type(thing)  # not isinstance: it makes lazy proxies load
        if kind not in kinds:
            kinds[kind] = issubclass(kind, torch.Tensor)
        if kinds[kind]:
            yield thing


# ---- the category of a storage


def named_storages(model: torch.nn.Module, optimizer: Any, engine: str, device: torch.device) -> Named:
    """The category of every storage that the model and its optimizer own now: parameters at rest, gradients, state,
    buffers.
    """
    owned, optimizer = _engine_buffers(optimizer), inner_optimizer(optimizer)
    owned += [(buffer, "other") for buffer in model.buffers()]
    for parameter in model.parameters():
        slice_of_it = getattr(parameter, "ds_tensor", None)  # DeepSpeed 3: the parameter itself is the gathered value
        owned.append((parameter, "parameter_slices" if slice_of_it is None else "gathered_parameters"))
        owned += [] if slice_of_it is None else [(slice_of_it, "parameter_slices")]
    for parameter in _optimized(optimizer):
        owned.append((parameter, "parameter_slices"))
    named = {address(tensor, device): category for tensor, category in owned}
    named |= {tag.pointer: tag.category for tag in gradient_tags(model, optimizer, engine, device)}
    named |= dict.fromkeys(state_addresses(optimizer, device), "optimizer_state")
    named.pop(0, None)
    return named


def _engine_buffers(optimizer: Any) -> list[tuple[torch.Tensor, str]]:
    """Long-lived buffers with names specific to their engine: DeepSpeed 3's gradient slices and buckets."""
    slices = getattr(optimizer, "grad_partitions_flat_buffer", None)
    buckets = getattr(optimizer, "ipg_buckets", {}).values()
    owned = [] if slices is None else [(slices, "gradient_slices")]
    return owned + [
        (b.buffer, "communication_buffers") for b in buckets if isinstance(getattr(b, "buffer", None), torch.Tensor)
    ]


def _flat_handles(model: torch.nn.Module) -> list[Any]:
    """FSDP1's handles: a flat parameter each, whose gradient outlives `zero_grad` where the original parameters are
    shown.
    """
    return [handle for module in model.modules() if hasattr(handle := getattr(module, "_handle", None), "flat_param")]


def _optimized(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    if optimizer is None:
        return []
    groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return groups + [key for key in optimizer.state if isinstance(key, torch.Tensor)]


def state_addresses(optimizer: torch.optim.Optimizer | None, device: torch.device) -> set[int]:
    """The addresses of the tensors in an optimizer's state."""
    if optimizer is None:
        return set()
    values = [value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values()]
    return {address(value, device) for value in values if isinstance(value, torch.Tensor)} - {0}


def gradient_tags(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, engine: str, device: torch.device
) -> list[Tag]:
    """A tag for every gradient held now: slices where the engine shards what the optimizer sees,
    whole ones elsewhere.
    """
    handles, optimized = _flat_handles(model), _optimized(optimizer)
    flat_slices = any(handle.uses_sharded_strategy for handle in handles)
    masters = {id(parameter) for parameter in optimized} if engine.startswith("deepspeed") else set()
    tags = {}
    for parameter in [*model.parameters(), *optimized, *(handle.flat_param for handle in handles)]:
        grad = getattr(parameter.grad, "_local_tensor", parameter.grad)
        if grad is not None and (at := address(grad, device)):
            sliced = flat_slices or grad is not parameter.grad or id(parameter) in masters
            tags[at] = Tag(
                "gradient_slices" if sliced else "whole_gradients",
                at,
                grad.untyped_storage().nbytes(),
                time.time_ns(),
                "",
            )
    return list(tags.values())


# ---- the storages alive now


def alive_now(device: torch.device) -> Set[int]:
    """The addresses in use on this device: all of them on CUDA, those that Python can reach on the CPU."""
    if device.type == "cuda":
        return cuda_blocks(torch.cuda.memory_snapshot(), device.index).keys()
    return living_storages(device).keys()


class WatchedStorages:
    """The storages alive now; on the CPU they are watched until `stop`, and `storages()` says when each was freed."""

    def __init__(self, device: torch.device, named: Named, ignore: Iterable[torch.Tensor] = ()) -> None:
        self._gone: dict[int, int] = {}
        self._watched: dict[int, tuple[weakref.ref[torch.UntypedStorage], weakref.finalize]] = {}
        living = {} if device.type == "cuda" else living_storages(device)
        if device.type == "cuda":
            sizes = cuda_blocks(torch.cuda.memory_snapshot(), device.index)
        else:
            sizes = {pointer: storage.nbytes() for pointer, storage in living.items()}
        starts = sorted(sizes)
        self._named = {holder(at, sizes, starts): category for at, category in named.items()}
        tensors = () if device.type == "cuda" else ignore  # whose allocator never sees host memory
        ignored = {holder(address(tensor, device), sizes, starts) for tensor in tensors}
        self._sizes = {pointer: nbytes for pointer, nbytes in sizes.items() if pointer not in ignored}
        self._watched = {at: self._watch(at, storage) for at, storage in living.items() if at not in ignored}

    def _watch(
        self, pointer: int, storage: torch.UntypedStorage
    ) -> tuple[weakref.ref[torch.UntypedStorage], weakref.finalize]:
        end = weakref.finalize(storage, self._leave, pointer)
        end.atexit = False
        return weakref.ref(storage), end

    def _leave(self, pointer: int) -> None:
        self._gone.setdefault(pointer, time.time_ns())

    def look(self) -> None:
        """Record the storages that were resized to zero; nothing announces that, so call it at important instants."""
        for pointer, (reference, _) in self._watched.items():
            storage = reference()
            if storage is not None and (not storage.nbytes() or storage.data_ptr() != pointer):
                self._leave(pointer)

    def stop(self) -> None:
        """Look a last time and stop watching."""
        self.look()
        for _, end in self._watched.values():
            end.detach()
        self._watched.clear()

    def storages(self) -> list[Storage]:
        """The storages of the beginning, each with its category and the time of its free."""
        return [
            Storage(at, nbytes, self._named.get(at, ""), gone_ns=self._gone.get(at))
            for at, nbytes in self._sizes.items()
        ]


def cuda_blocks(snapshot: Iterable[dict[str, Any]], index: int | None) -> dict[int, int]:
    """Address and size of every active block in `torch.cuda.memory_snapshot()` on one device.

    >>> blocks = [{"size": 512, "state": "inactive"}, {"size": 1024, "state": "active_allocated"}]
    >>> cuda_blocks([{"device": 0, "address": 4096, "blocks": blocks}], 0)
    {4608: 1024}
    """
    return dict(pair for segment in snapshot if segment["device"] == index for pair in _active(segment))


def _active(segment: dict[str, Any]) -> Iterator[tuple[int, int]]:
    at = segment["address"]
    for block in segment["blocks"]:
        if block["state"] == "active_allocated":
            yield at, block["size"]
        at += block["size"]


# ---- offloaded memory on CPU ranks


class OffloadedTensors:
    """The offloaded tensors, and when gradients join them: `departures` are frees for the timeline.

    On a GPU the allocator of the device never sees host memory. On CPU ranks there is one memory for both, so the split
    is emulated: parameters at rest and optimizer state are left out from the beginning, a reduced gradient from the
    moment its parameter gets it. Memory in use counts, as on a card, except a card's staging copy of the slice that is
    being gathered in its own dtype: one unit's, at most.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self.departures: list[AllocatorEvent] = []

    def resting(self) -> list[torch.Tensor]:
        """Parameters at rest and the tensors of the optimizer's state."""
        states = [] if self._optimizer is None else self._optimizer.state.values()
        state = [value for each in states for value in each.values() if isinstance(value, torch.Tensor)]
        return [*self._model.parameters(), *state]

    def watch(self) -> list[Callable[[], None]]:
        """Record every gradient from now on; returns functions that end that."""
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        return [parameter.register_post_accumulate_grad_hook(self._leave).remove for parameter in trained]

    def _leave(self, parameter: torch.Tensor) -> None:
        gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
        if at := address(gradient, self._device):
            self.departures.append(AllocatorEvent(time.time_ns(), at, -gradient.untyped_storage().nbytes()))

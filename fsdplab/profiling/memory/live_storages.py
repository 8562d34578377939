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
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdplab.engine.events import Tag
from fsdplab.profiling.memory.timeline import LONG_AGO, NEVER, AllocatorEvent


def address(tensor: torch.Tensor, device: torch.device) -> int:
    """The address of the storage under a tensor (of a DTensor's local part); 0 where it has none on this device."""
    storage = _storage(getattr(tensor, "_local_tensor", tensor), device)
    return storage.data_ptr() if storage is not None else 0


def _storage(tensor: torch.Tensor, device: torch.device) -> torch.UntypedStorage | None:
    """The storage under a tensor; None where it has none on this device."""
    # wrappers own no memory; the wrapped tensor is found too
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return None
    storage = tensor.untyped_storage()
    # devices of CUDA differ by their index, and the CPU has none
    here = storage.device
    if here.type != device.type or (device.type != "cpu" and here.index != device.index):
        return None
    return storage if storage.nbytes() else None


def living_storages(device: torch.device) -> dict[int, torch.UntypedStorage]:
    """Address -> storage of all tensors that Python can reach, without those that lie inside another one: the lab's
    slices have a storage each, over their unit's.
    """
    largest: dict[int, torch.UntypedStorage] = {}  # at each address
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):  # not isinstance: it makes lazy proxies load
            continue
        storage = _storage(thing, device)
        if storage is None:
            continue
        at = storage.data_ptr()
        if at and (at not in largest or storage.nbytes() > largest[at].nbytes()):
            largest[at] = storage

    # in the order of their addresses: one that ends by the end of those before it lies inside them
    outermost = {}
    end = 0
    for at in sorted(largest):
        own_end = at + largest[at].nbytes()
        if own_end > end:
            outermost[at] = largest[at]
            end = own_end
    return outermost


def cuda_blocks(snapshot: Iterable[dict[str, Any]], index: int | None) -> dict[int, int]:
    """Address and size of every active block in `torch.cuda.memory_snapshot()` on one device.

    >>> blocks = [{"size": 512, "state": "inactive"}, {"size": 1024, "state": "active_allocated"}]
    >>> cuda_blocks([{"device": 0, "address": 4096, "blocks": blocks}], 0)
    {4608: 1024}
    """
    active = {}
    for segment in snapshot:
        if segment["device"] != index:
            continue
        # blocks lie one behind the other in their segment
        at = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                active[at] = block["size"]
            at += block["size"]
    return active


def alive_now(device: torch.device) -> dict[int, int]:
    """Address and size of what is in use on this device: of all blocks on CUDA, of what Python can reach on the CPU."""
    if device.type == "cuda":
        return cuda_blocks(torch.cuda.memory_snapshot(), device.index)
    return {at: storage.nbytes() for at, storage in living_storages(device).items()}


def take_workspaces(device: torch.device) -> dict[int, int]:
    """Address and size of the scratch memory that cuBLAS kept on this device, which is given back by this; {} on a CPU.

    Two threads that multiply on an H100 keep 33.6 MB each. cuBLAS takes it anew with its next product.
    """
    if device.type != "cuda":
        return {}
    torch.cuda.synchronize(device)
    # the allocator does not mark cuBLAS's blocks: they are those that vanish when it gives them back
    before = alive_now(device)
    torch._C._cuda_clearCublasWorkspaces()
    after = alive_now(device)
    return {at: size for at, size in before.items() if at not in after}


class WatchedStorages:
    """The storages alive now, with the categories of the addresses in `named` and without what holds a tensor in
    `ignore`; on the CPU they are watched until `stop`.
    """

    def __init__(self, device: torch.device, named: dict[int, str], ignore: Iterable[torch.Tensor] = ()) -> None:
        self._gone: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        living: dict[int, torch.UntypedStorage] = {}
        if device.type == "cpu":
            living = living_storages(device)
            self._sizes = {at: storage.nbytes() for at, storage in living.items()}
        else:
            self._sizes = alive_now(device)
        self._starts = sorted(self._sizes)
        ignored: set[int] = set()
        if device.type == "cpu":  # CUDA's allocator never sees what is ignored
            ignored = {self._start(address(tensor, device)) for tensor in ignore}
        categories = {self._start(at): category for at, category in named.items()}
        self._categories = {at: categories.get(at, "") for at in self._sizes if at not in ignored}
        for at, storage in living.items():  # CUDA's allocator reports all frees: nothing is watched there
            if at in self._categories:
                self._watched[at] = weakref.ref(storage, partial(self._leave, at))

    def look(self) -> None:
        """Record the storages that were resized to zero; nothing announces that, so call it at important instants."""
        for at, reference in self._watched.items():
            storage = reference()
            # an engine frees by `resize_(0)`, and a storage that grows again may lie elsewhere
            if storage is not None and (not storage.nbytes() or storage.data_ptr() != at):
                self._leave(at)

    def stop(self) -> None:
        """Look a last time and stop watching."""
        self.look()
        self._watched.clear()

    def events(self) -> list[AllocatorEvent]:
        """The storages as allocations of the beginning, with the times at which they were seen to be gone."""
        return [
            AllocatorEvent(LONG_AGO, at, self._sizes[at], category, gone_ns=self._gone.get(at, NEVER))
            for at, category in self._categories.items()
        ]

    def _start(self, at: int) -> int:
        """The start of the storage that an address lies in, or the address itself."""
        index = bisect_right(self._starts, at) - 1
        if index < 0:
            return at
        start = self._starts[index]
        return start if at < start + self._sizes[start] else at

    def _leave(self, at: int, _: object = None) -> None:
        """Note that a storage is gone; the first time counts."""
        self._gone.setdefault(at, time.time_ns())


class Owners:
    """What a model and its optimizer own on one device. `optimizer` is the one inside a wrapper such as DeepSpeed's."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, engine: str, device: torch.device) -> None:
        self._model, self._engine, self._device = model, engine, device
        self._outer = self.optimizer = optimizer
        # a wrapper holds the torch optimizer as its attribute `optimizer`, at times several deep
        while self.optimizer is not None and not isinstance(self.optimizer, torch.optim.Optimizer):
            self.optimizer = getattr(self.optimizer, "optimizer", None)

    def categories(self) -> dict[int, str]:
        """Address -> category of all storages owned now: parameters at rest, gradients, optimizer state, buffers."""
        owned = self._engine_buffers()
        owned += [(buffer, "other") for buffer in self._model.buffers()]
        for parameter in self._model.parameters():
            shard = getattr(parameter, "ds_tensor", None)
            if shard is None:
                owned.append((parameter, "sharded_parameters"))
            else:  # DeepSpeed 3: the parameter itself is the gathered value
                owned.append((parameter, "unsharded_parameters"))
                owned.append((shard, "sharded_parameters"))
        owned += [(parameter, "sharded_parameters") for parameter in self._optimized()]

        # of what lies at the same address the last one counts
        named: dict[int, str] = {}
        for tensor, category in owned:
            named[address(tensor, self._device)] = category
        for tag in self.gradient_tags():
            named[tag.pointer] = tag.category
        for at in self.state_addresses():
            named[at] = "optimizer_state"
        named.pop(0, None)  # what has no storage on this device
        return named

    def gradient_tags(self) -> list[Tag]:
        """A tag for every gradient held now: a slice where the engine shards what the optimizer sees."""
        # FSDP1's flat parameters, whose gradients outlive `zero_grad` where the original parameters are shown
        handles: list[Any] = [getattr(module, "_handle", None) for module in self._model.modules()]
        flat = [handle for handle in handles if hasattr(handle, "flat_param")]
        all_sliced = any(handle.uses_sharded_strategy for handle in flat)
        masters: set[int] = set()
        if self._engine.startswith("deepspeed"):
            masters = {id(master) for master in self._optimized()}
        parameters: list[Any] = [*self._model.parameters(), *self._optimized()]
        parameters += [handle.flat_param for handle in flat]
        tags = {}
        for parameter in parameters:
            grad = getattr(parameter.grad, "_local_tensor", parameter.grad)
            at = address(grad, self._device) if grad is not None else 0
            if at:
                # of a DTensor the part of this rank, of DeepSpeed's masters what it reduced into its slice
                is_shard = all_sliced or grad is not parameter.grad or id(parameter) in masters
                category = "sharded_gradients" if is_shard else "unsharded_gradients"
                tags[at] = Tag(category, at, grad.untyped_storage().nbytes(), time.time_ns(), "")
        return list(tags.values())

    def state_addresses(self) -> set[int]:
        """The addresses of the tensors in the optimizer's state."""
        return {address(tensor, self._device) for tensor in self.state()} - {0}

    def state(self) -> list[torch.Tensor]:
        """The tensors in the optimizer's state."""
        if self.optimizer is None:
            return []
        tensors = []
        for state in self.optimizer.state.values():
            if isinstance(state, dict):
                tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return tensors

    def _optimized(self) -> list[torch.Tensor]:
        """The tensors that the optimizer steps: DeepSpeed's are not the model's parameters."""
        if self.optimizer is None:
            return []
        groups = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return groups + [key for key in self.optimizer.state if isinstance(key, torch.Tensor)]

    def _engine_buffers(self) -> list[tuple[torch.Tensor, str]]:
        """Long-lived buffers with names specific to their engine: DeepSpeed 3's sharded gradients and buckets."""
        owned: list[tuple[torch.Tensor, str]] = []
        slices = getattr(self._outer, "grad_partitions_flat_buffer", None)
        if slices is not None:
            owned.append((slices, "sharded_gradients"))
        for bucket in getattr(self._outer, "ipg_buckets", {}).values():
            buffer = getattr(bucket, "buffer", None)
            if isinstance(buffer, torch.Tensor):
                owned.append((buffer, "communication_buffers"))
        return owned

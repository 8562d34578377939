"""Adds the methods of PyTorch's `FSDPModule`, in its words, to a module that is made a unit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from fsdplab.engine import compat
from fsdplab.engine.core.hooks import (
    Runtime,
    UnitHooks,
    after_forward,
    all_hooks_of,
    before_forward,
    bind_root,
    hooks_of,
    units_under,
)
from fsdplab.engine.core.pending import Pending
from fsdplab.engine.core.unit import UNSHARDED, Unit
from fsdplab.engine.features.misuse_checks import note_taken, watching_meta_buffers
from fsdplab.engine.torch_api import custom_collectives, torch_interop

_classes: dict[type, type] = {}


class FSDPModule(TorchFSDPModule):
    """A sharded module; its class is `FSDP<Name>`, a subclass of this and of what it was."""

    _orig_cls_mro_index = 3  # FSDP<Name>, this, PyTorch's, <Name>
    _unit_hooks: UnitHooks

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Module:
        """Slicing a container makes a new one of the original class, not of this one."""
        original = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        self = original.__new__(original, *args, **kwargs)
        self.__init__(*args, **kwargs)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise AssertionError(
            "FSDP does not support deepcopy. Please use state dict for serialization: a sharded model cannot be"
            " deep-copied; copy it first, then shard each copy"
        )

    def share_memory(self) -> NoReturn:
        """Raise: torch would end the process, as a DTensor has no memory of its own that could be shared."""
        raise RuntimeError(
            "share_memory of a sharded model would move the memory of DTensors, which have none; share the tensors of"
            " get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
        )

    # ---- by hand

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters; with `async_op`, returns a handle to wait on."""
        # All gathers are issued before one is waited for.
        for hooks in all_hooks_of(self):
            hooks.unshard()
        handle = UnshardHandle(units_under(self, recurse=False))
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's unsharded parameters and show the shards."""
        for unit in units_under(self, recurse=False):
            unit.reshard_by_hand()

    def reset_iter_state(self) -> None:
        """Make the root ready for the next forward after one or a backward raised. The gradients of the step are lost:
        those that were accumulated, and those of units that had already reduced them.
        """
        runtime, unit = bound(self), self._unit_hooks.unit
        if unit is not runtime.root:
            raise RuntimeError(
                f"reset_iter_state must be called on the root FSDP module; unit {unit.name!r} is below another"
            )
        unfinished = runtime.left_unfinished
        runtime.reset()
        # Some units have handed out gradients of the step that raised and others have not: no optimizer may use half of
        # them.
        for param in (param for unit in runtime.units.values() for param in unit.memory.params if unfinished):
            param.at_rest.grad = None

    # ---- what the next steps do

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the next backward reduces gradients or only accumulates them, whole, on each rank."""
        for unit in units_under(self, recurse):
            unit.sync = requires_gradient_sync
            unit.reduce_options = replace(unit.reduce_options, all_reduce=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether reductions end in the all-reduce over replicas, or keep their sum until one does."""
        for unit in units_under(self, recurse):
            unit.reduce_options = replace(unit.reduce_options, all_reduce=requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False announces that another backward comes before the optimizer steps."""
        # Before the first forward no root is known, so this module is taken for it.
        hooks = self._unit_hooks
        (hooks.runtime.root if hooks.runtime else hooks.unit).is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether units reshard after a forward; False keeps them unsharded through evaluation too."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}: {reshard_after_forward!r};"
                " a number of ranks is an argument of fully_shard"
            )
        for unit in units_under(self, recurse):
            unit.reshard_after_forward, unit.memory.fewer_ranks = reshard_after_forward, None
            unit.keep_unsharded = not reshard_after_forward
        # A unit that reshards from now on must notice backwards that none of its outputs announces.
        for module in self.modules() if recurse else [self]:
            for hooks in all_hooks_of(module):
                hooks.watch_parts()

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether units reshard after a backward; False saves gathers between micro-batches."""
        for unit in units_under(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False where the backward of this unit reads no parameter (an embedding's, say)."""
        for unit in units_under(self, recurse=False):
            unit.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather exactly these behind this module's forward; an empty list restores the default."""
        for unit in units_under(self, recurse=False):
            unit.ahead["forward"] = _units_in(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather exactly these behind this module's backward; an empty list restores the default."""
        for unit in units_under(self, recurse=False):
            unit.ahead["backward"] = _units_in(modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by `factor` instead of by the number of ranks."""
        if factor == 0:
            raise ZeroDivisionError("a gradient divide factor of 0 divides gradients by zero")
        for unit in units_under(self, recurse=False):
            unit.reduce_options = replace(unit.reduce_options, divide=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None],  # is given [shard elements]
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Call `hook` with the reduced shard of this unit before the optimizer's gradients are made from it."""
        unit = self._only_unit("set_all_reduce_hook")
        if stream is not None and unit.memory.config.axes.mesh.ndim == 2:
            raise ValueError("stream cannot be set when using native HSDP")
        unit.reduce_options = replace(
            unit.reduce_options, hook=hook if stream is None else custom_collectives.on_stream(hook, stream)
        )

    def set_post_optim_event(self, event: torch.Event) -> None:
        """The next root forward waits for `event` before it gathers; give a new one each step."""
        bound(self).post_optimizer_event = event

    # ---- how collectives run

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this unit with `comm` (PyTorch's `AllGather`: `allocate` and `__call__`)."""
        custom_collectives.use(self._only_unit("set_custom_all_gather"), gather=comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce this unit with `comm` (PyTorch's `ReduceScatter`: `allocate` and `__call__`)."""
        custom_collectives.use(self._only_unit("set_custom_reduce_scatter"), scatter=comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take staging buffers of gathers from the process group's own allocator, where it has one (NCCL)."""
        for unit in units_under(self, recurse=False):
            custom_collectives.allocate_from_group(unit, enable)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Take staging buffers of gathers from symmetric memory; a `RuntimeError` where that does not exist."""
        for unit in units_under(self, recurse=False):
            custom_collectives.allocate_symmetric(unit, backend)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted for compatibility: this engine always sums, then divides."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether parameters without a gradient get zeros, and units without any take part in reductions: where ranks
        may take different branches. Else a parameter that no rank has used keeps no gradient.
        """
        for unit in units_under(self, recurse):
            unit.reduce_options = replace(unit.reduce_options, unused=reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions may be under way at once: more hide more traffic and hold more memory. The largest number
        given below a root counts for all its units.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        for unit in units_under(self, recurse):
            unit.in_flight = max_input_buffers

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce on a communicator of its own, so that NCCL runs them beside gathers; collective over the shards."""
        for unit in units_under(self, recurse):
            if unit.memory.config.shard is not None:
                unit.memory.config.shard.separate_reductions(enable)

    # ---- when a step's backwards are over (PyTorch's pipelining asks for this from torch 2.15 on)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Announce that `finalize_backward` will end the step's backwards. Accepted on the root only.

        A backward that synchronises gradients still ends by itself, and what is left to finalise is then nothing.
        """
        hooks = self._unit_hooks
        if hooks.runtime is not None and hooks.runtime.root is not hooks.unit:
            raise RuntimeError("set_manual_backward_finalization must be called on the root module")

    def finalize_backward(self, *, async_op: bool = False) -> Any:
        """Reduce what the backwards since the last reduction have accumulated, and reshard, as the
        settings now say.

        With `async_op` a handle to wait on. Nothing happens before the first forward.
        """
        runtime = bound(self)
        # Before the first forward no gradient can have been accumulated.
        if runtime.has_run:
            runtime.finalize_backward()
        return Pending(lambda: None) if async_op else None  # the gradients are there already

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether unsharded parameters keep their memory, and its addresses, when they are resharded (for CUDA graphs).
        False counts from the next time that they are.
        """
        for unit in units_under(self, recurse):
            unit.memory.keep_storage = keep

    def _only_unit(self, method: str) -> Unit:
        """Return the unit of this module; a `ValueError` where its parameters are cut over several meshes."""
        if self._unit_hooks.beside:
            raise ValueError(
                f"{method} is not supported with multiple param groups (from per-param mesh via shard_placement_fn)."
                " It would be ambiguous across groups with different meshes"
            )
        return self._unit_hooks.unit

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, of the sharded ones also while the modules show unsharded ones."""
        super(TorchFSDPModule, self).zero_grad(set_to_none)
        # While a unit is unsharded, what torch resets are the gradients of the unsharded parameters.
        for param in (param for unit in units_under(self, recurse=True) for param in unit.memory.params):
            param.zero_gradient(set_to_none)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what any module does: while a unit is unsharded, its unsharded parameters."""
        yield from super(TorchFSDPModule, self).named_parameters(*args, **kwargs)
        if not torch.compiler.is_compiling():  # read to the end, as by a list
            note_taken(units_under(self, recurse=True))

    # ---- what torch looks for

    def _get_fsdp_state(self) -> torch_interop.State | None:
        """Return the state that torch's pipelining and other libraries ask for."""
        return compat.registered_state(self)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Accepted for compatibility: gathers are always asynchronous."""

    def _apply(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Apply a function (`to`, `to_empty`) to the shards, and take over what it puts in their place."""
        for unit in units_under(self, recurse=True):
            # The function must see shards, and may write to them: so peers have read them first.
            unit.reshard_by_hand()
        with watching_meta_buffers(self, below(self)):
            module = super(TorchFSDPModule, self)._apply(*args, **kwargs)
            for unit in units_under(self, recurse=True):
                unit.take_over_replaced()
        return module


class UnshardHandle(TorchUnshardHandle):
    """Work begun by `unshard(async_op=True)`."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units

    @compat.outside_modes
    def wait(self) -> None:
        """Return once the parameters may be read."""
        for unit in self._units:
            unit.finish_unshard("forward")


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have `module.<method_name>` unshard and reshard as `forward` does; nothing happens to other modules."""
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(
            f"{type(module)} does not have a method {method_name} to register; expected the name of one that it has"
        )
    original = getattr(module, method_name)

    @compat.frame_not_compiled
    @wraps(original, updated=())
    def hooked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = before_forward(self, args, kwargs)
        return after_forward(self, args, self._unit_hooks.run(self, original, *args, **kwargs))

    setattr(module, method_name, MethodType(hooked, module))


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Accepted for compatibility: roots over one group share streams and buffers always; a `ValueError` for other
    modules.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects list of FSDPModules but got {module}: fully_shard it first")


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return `FSDP<Name>`, a subclass; its `forward`, called directly, runs the hooks that `__call__` runs."""
    if cls not in _classes:
        body: dict[str, str | Callable[..., Any]] = {"__module__": cls.__module__}
        # A class without a forward of its own has none to guard.
        if cls.forward is not nn.Module.forward:
            body["forward"] = _guarded_forward_of(cls)
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), body)
    return _classes[cls]


def _guarded_forward_of(cls: type[nn.Module]) -> Callable[..., Any]:
    """Return the `forward` that `cls` has when it is called: libraries may replace it, before or after this."""

    @compat.frame_not_compiled
    @wraps(cls.forward, updated=())
    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # From `__call__`, whose hooks have gathered them, or after `unshard()`.
        if _is_gathered(self):
            return self._unit_hooks.run(self, cls.forward, self, *args, **kwargs)
        return self(*args, **kwargs)  # `model.forward(x)`: nobody has gathered the parameters

    return guarded


@compat.not_compiled
def _is_gathered(module: nn.Module) -> bool:
    """Whether the parameters of `module` are unsharded."""
    return all(unit.state is UNSHARDED for unit in units_under(module, recurse=False) if unit.memory.params)


def bound(module: nn.Module) -> Runtime:
    """Return the runtime of `module`, which becomes the root if it has none."""
    return module._unit_hooks.runtime or bind_root(module)


def below(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield `module` and what is below it, down to where another unit begins, each with the prefix of its names."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and hooks_of(child) is None:
            yield from below(child, f"{prefix}{name}.")


def _units_in(modules: Sequence[nn.Module]) -> list[weakref.ref[Unit]]:
    """Return references to the units of `modules`; raise `ValueError` for a module that is no unit."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: fully_shard it first")
    units = (unit for module in modules for unit in units_under(module, recurse=False))
    # Weak: units may name each other.
    return [weakref.ref(unit) for unit in dict.fromkeys(units)]

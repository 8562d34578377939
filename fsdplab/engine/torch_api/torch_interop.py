"""Answers what torch's own pipelining, and libraries like accelerate, ask a module for: `fully_shard.state(module)`.

Views of a unit under the names of PyTorch's FSDP2 (its private `FSDPState`, `FSDPParamGroup` and `FSDPParam`, torch
2.11 to 2.15); nothing is kept here but what somebody else has put around the hooks, as torch's memory tracker does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.autograd.graph import _MultiHandle

from fsdplab.engine import compat
from fsdplab.engine.core.hooks import Runtime, UnitHooks, after_forward, before_forward, bind_root
from fsdplab.engine.core.param import ShardedParam
from fsdplab.engine.core.unit import UNSHARDED, Unit

_states: weakref.WeakKeyDictionary[Unit, weakref.ref[State]] = weakref.WeakKeyDictionary()


class State:
    """The unit of a module. Reading it before the first forward does not decide who the root is."""

    def __init__(self, modules: Sequence[nn.Module], hooks: UnitHooks) -> None:
        self._module = weakref.ref(modules[0])
        self._hooks = hooks
        self._mp_policy = hooks.policy
        # One unit for each mesh that the module's parameters are cut over; usually there is one.
        self._groups = [Group(unit_hooks.unit, unit_hooks) for unit_hooks in (hooks, *hooks.beside)]
        before, after = hooks.handles
        self._pre_forward_hook_handle = _MultiHandle(tuple(before))
        self._post_forward_hook_handle = _MultiHandle(tuple(after))
        _states[hooks.unit] = weakref.ref(self)
        for module in modules:
            compat.register_state(module, self)

    @property
    def _state_ctx(self) -> Context:
        return Context(self._hooks)

    @property
    def _comm_ctx(self) -> Runtime | None:
        return self._hooks.runtime

    @property
    def _is_root(self) -> bool | None:
        if self._hooks.runtime is None:  # no forward has decided it yet
            return None
        return self._hooks.runtime.root is self._hooks.unit

    @property
    def _fsdp_param_groups(self) -> list[Group]:
        return [group for group in self._groups if group.fsdp_params]

    @property
    def _fsdp_param_group(self) -> Group | None:
        groups = self._fsdp_param_groups
        if len(groups) > 1:
            raise AssertionError(
                f"Expected at most 1 param group for backward compatibility, but got {len(groups)}: use"
                " _fsdp_param_groups where shard_placement_fn cuts parameters over several meshes"
            )
        if not groups:
            return None
        return groups[0]

    def _lazy_init(self) -> None:
        """Make the module a root, if no forward has decided that yet."""
        if self._hooks.runtime is None:
            bind_root(self._module())

    def _pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Do what the unit's hooks do before a forward, with the detours of its groups."""
        args, kwargs = before_forward(module, args, kwargs)
        for group in self._groups:
            group._take_part()
        return args, kwargs

    def _post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Do what the unit's hooks do after a forward."""
        return after_forward(module, args, output)

    def _root_post_backward_final_callback(self) -> None:
        """End the backward of the root."""
        if self._hooks.runtime is not None:
            self._hooks.runtime.end_backward()


class Context:
    """What all units of a root share."""

    def __init__(self, hooks: UnitHooks) -> None:
        self._root = hooks.unit
        self.all_states: list[State] = []
        if hooks.runtime is None:
            return
        self._root = hooks.runtime.root
        for unit in hooks.runtime.units.values():
            reference = _states.get(unit)
            state = None if reference is None else reference()
            if state is not None:
                self.all_states.append(state)

    @property
    def is_last_backward(self) -> bool:
        """Whether the optimizer steps after the next backward."""
        return self._root.is_last_backward

    @is_last_backward.setter
    def is_last_backward(self, value: bool) -> None:
        self._root.is_last_backward = value


class Group:
    """A unit as a parameter group."""

    def __init__(self, unit: Unit, hooks: UnitHooks) -> None:
        self._unit, self._hooks = unit, hooks

    @property
    def fsdp_params(self) -> list[Param]:
        """Its parameters."""
        return [Param(param, self._name_from_root(param.name)) for param in self._unit.memory.params]

    @property
    def _module_fqn(self) -> str | None:
        if self._hooks.runtime is None:
            return None
        return ", ".join(self._unit.memory.module_names)

    def _name_from_root(self, name: str) -> str | None:
        """Return a parameter's name in the root; modules that form a unit together are in the order of the tree."""
        if self._hooks.runtime is None:
            return None
        modules = self._unit.memory.module_names
        number, rest = "0", name
        if len(modules) > 1:  # "1.weight" is the weight of the second module
            number, _, rest = name.partition(".")
        return f"{modules[int(number)]}.{rest}".lstrip(".")

    @property
    def is_unsharded(self) -> bool:
        """Whether the modules show unsharded parameters."""
        return self._unit.state is UNSHARDED

    def unshard(self, async_op: bool = False) -> None:
        """Begin to gather."""
        self._hooks.unshard()

    def wait_for_unshard(self) -> None:
        """Finish gathering."""
        self._unit.finish_unshard("forward")

    def reshard(self) -> None:
        """Show the shards."""
        self._unit.reshard("forward")

    def pre_backward(self, *_: Any) -> None:
        """Gather, and the next units behind it."""
        Runtime.before_backward(self._hooks.bound, self._unit)  # also where the runtime's is a detour through this

    def post_backward(self, *_: Any) -> None:
        """Collect this unit's gradients and, if they are to be synchronised, begin to reduce them."""
        Runtime.after_backward(self._hooks.bound, self._unit)

    def _take_part(self) -> None:
        """Have the runtime call what somebody has put in place of these two methods."""
        runtime = self._hooks.bound
        for name, call in (("pre_backward", "before_backward"), ("post_backward", "after_backward")):
            method = getattr(runtime, call)
            # torch's memory tracker assigns a wrapper, `group.pre_backward = ...`, which lands in the `__dict__` of the
            # group.
            if name in self.__dict__ and not isinstance(method, _Detours):
                method = _Detours(method)
                setattr(runtime, call, method)
            if isinstance(method, _Detours):
                method.instead[self._unit] = self.__dict__.get(name)


class _Detours:
    """A method of a runtime that calls, for some units, what stands in place of their groups'."""

    def __init__(self, method: Callable[[Unit], None]) -> None:
        self._method = method
        self.instead: dict[Unit, Callable[[], None] | None] = {}

    def __call__(self, unit: Unit) -> None:
        instead = self.instead.get(unit)
        if instead is None:
            self._method(unit)
        else:
            instead()


class Param:
    """A parameter in its two forms."""

    def __init__(self, param: ShardedParam, name: str | None) -> None:
        self._param, self._param_fqn = param, name

    @property
    def sharded_param(self) -> nn.Parameter:
        """The shard that the optimizer updates."""
        return self._param.at_rest

    @property
    def unsharded_param(self) -> nn.Parameter | None:
        """What a forward reads; its memory comes and goes."""
        return self._param.gathered

    _unsharded_param = unsharded_param

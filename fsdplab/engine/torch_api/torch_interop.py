"""What torch's own pipelining, and libraries like accelerate, ask a sharded module for: `fully_shard.state(module)`.

Views of a unit under the names of PyTorch's FSDP2 (its private `FSDPState` and `FSDPParamGroup`, torch 2.11 to 2.15);
nothing is kept here.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import nn

from fsdplab.engine import compat
from fsdplab.engine.core.hooks import Runtime, UnitHooks, after_forward, before_forward, bind_root
from fsdplab.engine.core.unit import UNSHARDED, Unit

_states: weakref.WeakKeyDictionary[Unit, weakref.ref[State]] = weakref.WeakKeyDictionary()


class State:
    """The unit of a module. Reading it before the first forward does not decide who the root is."""

    def __init__(self, modules: Sequence[nn.Module], hooks: UnitHooks) -> None:
        self._module, self._hooks = weakref.ref(modules[0]), hooks
        self._mp_policy = hooks.policy
        _states[hooks.unit] = weakref.ref(self)
        for module in modules:
            compat.register_state(module, self)

    @property
    def _runtime(self) -> Runtime:
        return self._hooks.runtime or bind_root(self._module())

    @property
    def _state_ctx(self) -> Context:
        return Context(self._hooks)

    @property
    def _comm_ctx(self) -> Runtime | None:
        return self._hooks.runtime

    @property
    def _is_root(self) -> bool | None:
        return None if self._hooks.runtime is None else self._hooks.runtime.root is self._hooks.unit

    @property
    def _fsdp_param_groups(self) -> list[Group]:
        return [Group(hooks.unit, hooks) for hooks in (self._hooks, *self._hooks.beside) if hooks.unit.memory.params]

    @property
    def _fsdp_param_group(self) -> Group | None:
        groups = self._fsdp_param_groups
        if len(groups) > 1:
            raise AssertionError(
                f"Expected at most 1 param group for backward compatibility, but got {len(groups)}: use"
                " _fsdp_param_groups where shard_placement_fn cuts parameters over several meshes"
            )
        return groups[0] if groups else None

    def _lazy_init(self) -> None:
        self._runtime  # noqa: B018  binding is all there is to do

    def _pre_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return before_forward(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        return after_forward(module, args, output)

    def _root_post_backward_final_callback(self) -> None:
        if self._hooks.runtime is not None:
            self._hooks.runtime.end_backward()


def state_of(module: nn.Module) -> State | None:
    """The state that `fully_shard.state(module)` answers; None for a module that is no unit."""
    return compat.registered_state(module)


class Context:
    """What all units of a root share."""

    def __init__(self, hooks: UnitHooks) -> None:
        self._root = hooks.runtime.root if hooks.runtime else hooks.unit
        units = hooks.runtime.units.values() if hooks.runtime is not None else ()
        found = (reference() for unit in units if (reference := _states.get(unit)) is not None)
        self.all_states = [state for state in found if state is not None]

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
        self.fsdp_params = unit.memory.params
        self._module_fqn = ", ".join(unit.memory.places) if hooks.runtime is not None else None

    @property
    def is_unsharded(self) -> bool:
        """Whether the modules show gathered parameters."""
        return self._unit.state is UNSHARDED

    def unshard(self, async_op: bool = False) -> None:
        """Begin to gather."""
        runtime = self._hooks.runtime
        self._unit.unshard_by_hand(afresh=runtime is not None and runtime.left_unfinished)

    def wait_for_unshard(self) -> None:
        """Finish gathering."""
        self._unit.finish_unshard("forward")

    def reshard(self) -> None:
        """Show the slices."""
        self._unit.reshard("forward")

    def post_backward(self, *_: Any) -> None:
        """Collect this unit's gradients and, if they are to be synchronised, begin to reduce them."""
        assert self._hooks.runtime is not None, "no forward has begun"
        self._hooks.runtime.after_backward(self._unit)

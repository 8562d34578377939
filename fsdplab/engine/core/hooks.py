"""The engine's only contact with module hooks and autograd.

Before a forward: a pre-hook. Before a backward: a hook on every output tensor that needs a gradient. After a backward:
an identity function planted on the inputs, whose own backward runs once their gradients are complete. The end of the
backward: autograd's final callback, which also completes units whose inputs need no gradient. Parameter gradients are
never counted down: those of unused parameters never arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fsdplab.engine import compat
from fsdplab.engine.core.runtime import Runtime
from fsdplab.engine.core.unit import Unit
from fsdplab.engine.nested import cast_floats, map_tensors, tensors_in


class UnitHooks:
    """Binds a unit to its modules; holds no reference to them, so that deleting a model frees it at once.

    Several modules may form one unit. It is gathered before the first of them runs and dropped once all have run.
    Modules whose parameters are cut over several meshes have a unit for each: `beside` are the hooks of the others.
    """

    def __init__(self, modules: Sequence[nn.Module], unit: Unit, beside: Sequence[UnitHooks] = ()) -> None:
        self.unit, self.beside = unit, beside
        self.policy = unit.config.policy
        self.runtime: Runtime | None = None
        self.prefetch = 1
        self.is_last_backward = True
        self.recompute: Callable[..., Any] | None = None  # runs a forward so that the backward computes it again
        self._all = frozenset(id(module) for module in modules)
        self._to_run: set[int] = set()
        self._pass = 0  # the root forward in which `_to_run` was filled
        self._hidden = False  # whether a module of it ran whose backward nothing will announce
        for module in modules:
            module.__dict__["_unit_hooks"] = self
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward, prepend=False)
            module.register_forward_hook(self._after_exception, always_call=True)
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_state_dict)

    @property
    def _bound(self) -> Runtime:
        assert self.runtime is not None, "no forward has begun"
        return self.runtime

    @compat.not_compiled
    def before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Gather, cast the inputs, and plant the end of this unit's backward on them."""
        runtime = self.runtime or bind_root(module)
        if self.policy.cast_forward_inputs and self.policy.param_dtype:
            args, kwargs = cast_floats((args, kwargs), self.policy.param_dtype)
        if runtime.recomputes(self.unit):
            runtime.gather_again(self.unit)
            return args, kwargs
        first = len(self._all) == 1 or id(module) not in self._to_run or self._pass != runtime.passes
        if first:
            runtime.before_forward(self.unit)
            self._to_run, self._pass, self._hidden = set(self._all), runtime.passes, False
        if self.unit is runtime.root and (device := self.unit.config.device).type != "cpu":
            args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to(device))
        return self._plant(args, kwargs) if first and torch.is_grad_enabled() else (args, kwargs)

    @compat.not_compiled
    def after_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Drop the unit once all its modules ran, and ask to be called before its backward."""
        if not self._bound.recomputes(self.unit):
            wanting = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            for tensor in wanting:
                self._ask(tensor)
            if torch.is_grad_enabled() and compat.is_transformed():
                output = map_tensors(output, self._ask_through)
            elif torch.is_grad_enabled() and not wanting:
                self._hidden = self._hidden or self._trains(args)
            self._to_run.discard(id(module))
            if not self._to_run:
                self._bound.after_forward(self.unit, will_backward=torch.is_grad_enabled(), hidden=self._hidden)
        return cast_floats(output, self.policy.output_dtype) if self.policy.output_dtype else output

    def _trains(self, args: tuple) -> bool:
        """Whether the unit's weights may be read in a backward."""
        return any(each.requires_grad for each in (*tensors_in(args), *(param.at_rest for param in self.unit.params)))

    def _after_exception(self, module: nn.Module, *_: Any) -> None:
        """Note that the forward raised: otherwise `after_forward` has been called before this."""
        if self.runtime is not None and id(module) in self._to_run and not compat.inside_backward():
            self.runtime.raised = self.unit

    def _ask(self, output: torch.Tensor) -> None:
        """Be called before the backward of `output`; a view that is written to in place would lose its own hook."""
        output.register_hook(self._before_backward)
        below = output._base.grad_fn if output._is_view() else None
        if below is not None and not isinstance(below, torch.autograd.function.BackwardCFunction):
            below.register_prehook(self._before_backward_of_base)

    def _ask_through(self, output: torch.Tensor) -> torch.Tensor:
        """As `_ask` where `torch.func` hides that an output needs a gradient: a hook would never be called."""
        hidden = not output.requires_grad and (output.is_floating_point() or output.is_complex())
        return _BeginOfBackward.apply(self, output) if hidden else output

    @compat.not_compiled
    def _before_backward_of_base(self, gradients: tuple[torch.Tensor, ...]) -> None:
        self._bound.before_backward_of_base(self.unit)

    @compat.not_compiled
    def _before_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        self._bound.before_backward(self.unit)
        return gradient

    def after_backward(self) -> None:
        """The gradients of the unit's inputs are complete."""
        self._bound.after_backward(self.unit)

    def _before_state_dict(self, *_: Any) -> None:
        """A state dict reads and writes slices, also when a forward has left the unit gathered."""
        self.unit.reshard_by_hand()

    def _plant(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        wanting = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not wanting:
            return args, kwargs
        planted = iter(_EndOfBackward.apply(self, *wanting))
        return map_tensors((args, kwargs), lambda tensor: next(planted) if tensor.requires_grad else tensor)


class _EndOfBackward(torch.autograd.Function):
    """Identity on a unit's inputs whose backward says that the unit's own backward is over.

    `torch.func` may transform it: it has a rule for vmap, and tangents pass as they are.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(hooks: UnitHooks, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.hooks = inputs[0]

    @staticmethod
    def jvp(ctx: Any, _: object, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tangents

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:
        ctx.hooks.after_backward()
        return None, *gradients


class _BeginOfBackward(torch.autograd.Function):
    """Identity on an output, and on its tangent, whose backward asks for the unit first."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hooks: UnitHooks, output: torch.Tensor) -> torch.Tensor:
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.hooks = inputs[0]

    @staticmethod
    def jvp(ctx: Any, _: object, tangent: torch.Tensor | None) -> torch.Tensor | None:
        return None if tangent is None else _BeginOfBackward.apply(ctx.hooks, tangent)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return None, ctx.hooks._before_backward(gradient)


def hooks_of(module: nn.Module) -> UnitHooks | None:
    """The hooks that sharding put on `module`, if it is a unit."""
    return module.__dict__.get("_unit_hooks")


def all_hooks_of(module: nn.Module) -> list[UnitHooks]:
    """The hooks of every unit that `module` belongs to; one, unless its parameters are cut over several meshes."""
    hooks = hooks_of(module)
    return [] if hooks is None else [hooks, *hooks.beside]


def before_forward(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """What the hooks of `module` do before its forward."""
    for hooks in all_hooks_of(module):
        args, kwargs = hooks.before_forward(module, args, kwargs)
    return args, kwargs


def after_forward(module: nn.Module, args: tuple, output: Any) -> Any:
    """What the hooks of `module` do after its forward; the first to begin ends last."""
    for hooks in reversed(all_hooks_of(module)):
        output = hooks.after_forward(module, args, output)
    return output


def bind_root(root: nn.Module) -> Runtime:
    """Make `root`, the first unit to run, the root of all units below it, and name them by their place."""
    found: dict[UnitHooks, list[str]] = {}
    for name, module in root.named_modules():
        for hooks in all_hooks_of(module):
            found.setdefault(hooks, []).append(name)
    for hooks, names in found.items():
        if hooks.runtime is not None:
            raise RuntimeError(
                f"FSDP state has already been lazily initialized for {names[0]}\nFSDP requires running forward through"
                f" the root module first: unit {names[0]!r} already ran under another root; run the outermost sharded"
                " module first, so that it becomes the root of all units"
            )
        hooks.unit.places = names
        hooks.unit.name = "+".join(names) or ("(root)" if ["root"] in found.values() else "root")
    for hooks in found:
        for number, other in enumerate(hooks.beside, 2):
            other.unit.name = f"{hooks.unit.name} (mesh {number})"
    top: UnitHooks = root._unit_hooks
    runtime = Runtime({hooks.unit.name: hooks.unit for hooks in found}, top.prefetch)
    runtime.is_last_backward = top.is_last_backward
    for hooks in found:
        hooks.runtime = runtime
        if hooks.unit.reshard_after_forward is None:
            hooks.unit.reshard_after_forward = hooks not in (top, *top.beside)
    return runtime


def units_under(module: nn.Module, recurse: bool) -> list[Unit]:
    """The unit of `module`, with `recurse` those below it too."""
    modules = module.modules() if recurse else [module]
    return list(dict.fromkeys(hooks.unit for each in modules for hooks in all_hooks_of(each)))

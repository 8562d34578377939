"""The engine's only contact with module hooks and autograd.

Before a forward: a pre-hook. Before a backward: a hook on every output tensor that needs a gradient. After a backward:
an identity function planted on the inputs, whose own backward runs once their gradients are complete. The end of the
backward: autograd's final callback, which also completes units whose inputs need no gradient. Parameter gradients are
never counted down: those of unused parameters never arrive.

A loss may be computed from none of the outputs: from a tensor that a module kept, or from one inside an object that
`nested` cannot open. So the outputs of the modules inside a unit have a hook too where the unit is resharded before the
backward, and the first gradient that arrives on any parameter begins the backward if nothing else has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdplab.engine import compat, events
from fsdplab.engine.core.memory import hand_out_undecided, unchanged
from fsdplab.engine.core.step import Schedule, StepOrder
from fsdplab.engine.core.unit import DONE, RUNNING, Unit
from fsdplab.engine.nested import cast_floats, map_tensors, tensors_in

# what is called once, before a root's first forward that records gradients; a dict keeps the order and no double
before_training: dict[Callable[[nn.Module, Runtime], None], None] = {}


class Runtime(StepOrder):
    """The step order of one root as autograd drives it: when a backward ends, recomputation, steps that raised."""

    def __init__(self, units: dict[str, Unit], prefetch: int) -> None:
        super().__init__(units, Schedule(prefetch), events.span)
        self.post_optimizer_event: torch.Event | None = None
        self.raised: Unit | None = None  # whose forward an exception has left last
        self._has_trained = False  # whether a forward has recorded gradients

    @compat.outside_modes
    def before_forward(self, unit: Unit) -> None:
        if compat.inside_backward():  # activation checkpointing computes a larger region a second time
            self.unshard_again(unit)
        else:
            super().before_forward(unit)

    @compat.outside_modes
    def check_before_training(self, root: nn.Module) -> None:
        """Call those of `before_training`, the first time."""
        if not self._has_trained:
            self._has_trained = True
            for check in before_training:
                check(root, self)

    def _begin_forward(self, unit: Unit) -> None:
        self.raised = None
        compat.forget_casts()
        if self.post_optimizer_event is not None:
            self.post_optimizer_event.wait()
            self.post_optimizer_event = None
        super()._begin_forward(unit)

    @compat.outside_modes
    def after_forward(self, unit: Unit, will_backward: bool) -> None:
        if not compat.inside_backward():
            super().after_forward(unit, will_backward)

    def recomputes(self, unit: Unit) -> bool:
        """Whether a forward of `unit` now is activation checkpointing's second one, inside its backward."""
        return unit.backward is RUNNING and compat.inside_backward()

    @compat.outside_modes
    def unshard_again(self, unit: Unit) -> None:
        """A forward of `unit` runs within its backward, or within another; it may have been resharded meanwhile."""
        unit.start_unshard("backward")
        unit.finish_unshard("backward")

    @compat.outside_modes
    def before_backward(self, unit: Unit) -> None:
        self._queue_end()
        super().before_backward(unit)

    @compat.outside_modes
    @torch.no_grad()  # a backward with create_graph=True records what its hooks do
    def after_backward(self, unit: Unit) -> None:
        if compat.inside_backward():
            self._queue_end()
        super().after_backward(unit)

    def _queue_end(self) -> None:
        if not self.in_backward:
            compat.call_after_backward(self.end_backward)
            self.begin_backward()

    @torch.no_grad()
    def end_backward(self) -> None:
        super().end_backward()

    @torch.no_grad()
    def _unchanged(self, units: Sequence[Unit]) -> Sequence[Unit]:
        memories = unchanged([unit.memory for unit in units])
        return [unit for unit in units if unit.memory in memories]

    def _hand_out_undecided(self) -> None:
        hand_out_undecided(unit.memory for unit in self.units.values())

    @property
    def left_unfinished(self) -> bool:
        """Whether a step has ended in an exception, and neither `reset` nor another forward came since."""
        return self.raised is self.forward_of is not None or self.in_backward and not compat.inside_backward()

    def reset(self) -> None:
        unfinished = self.forward_of is not None or self.in_backward
        self.raised = None
        super().reset()
        for transport in dict.fromkeys(each for unit in self.units.values() for each in unit.memory.transports()):
            transport.leave_step(unfinished)
        for unit in self.units.values():
            unit.reshard_by_hand()


class UnitHooks:
    """Binds a unit to its modules; holds no reference to them, so that deleting a model frees it at once.

    Several modules may form one unit. It is unsharded before the first of them runs and resharded once all have run.
    Modules whose parameters are cut over several meshes have a unit for each: `beside` are the hooks of the others.
    """

    def __init__(self, modules: Sequence[nn.Module], unit: Unit, beside: Sequence[UnitHooks] = ()) -> None:
        self.unit, self.beside = unit, beside
        self.policy = unit.memory.config.policy
        self.runtime: Runtime | None = None
        self._all = frozenset(id(module) for module in modules)
        self._running: list[int] = []  # the modules whose forwards run, one twice that has called itself
        for each in beside:
            each._running = self._running
        self.handles: tuple[list[Any], list[Any]] = [], []  # of the hooks before forwards, and of those after them
        for module in modules:
            module.__dict__["_unit_hooks"] = self
            before = module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            self.handles[0].append(before)
            self.handles[1].append(module.register_forward_hook(self.after_forward, prepend=False))
            module.register_forward_hook(self._after_exception, always_call=True)
        for param in unit.memory.params:
            param.on_gradient = self._tells_of_gradients()
        self._watches_parts = False
        for module in dict.fromkeys([*modules, *self._showing()]):
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_state_dict)

    @property
    def bound(self) -> Runtime:
        """The runtime, once there is one."""
        assert self.runtime is not None, "no forward has begun"
        return self.runtime

    @compat.outside_modes
    def unshard(self) -> None:
        """Begin to unshard outside a forward."""
        self.unit.unshard_by_hand(afresh=self.runtime is not None and self.runtime.left_unfinished)

    @compat.not_compiled
    def before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Unshard, cast the inputs, and plant the end of this unit's backward on them."""
        runtime, unit = self.runtime or bind_root(module), self.unit
        if unit is runtime.root and torch.is_grad_enabled():
            runtime.check_before_training(module)
        if self.policy.cast_forward_inputs and self.policy.param_dtype:
            args, kwargs = cast_floats((args, kwargs), self.policy.param_dtype)
        if id(module) in self._running or runtime.recomputes(unit):
            runtime.unshard_again(unit)
            return args, kwargs
        first = len(self._all) == 1 or id(module) not in unit.to_run
        if first:
            runtime.before_forward(unit)
            unit.to_run, unit.hidden = set(self._all), False
        if unit is runtime.root and (device := unit.memory.config.device).type != "cpu":
            args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to(device))
        return self._plant(args, kwargs) if first and torch.is_grad_enabled() else (args, kwargs)

    @compat.not_compiled
    def after_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Reshard the unit once all its modules ran, and ask to be called before its backward."""
        unit = self.unit
        if not self.bound.recomputes(unit):
            wanting = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
            for tensor in wanting:
                self._ask(tensor)
            if torch.is_grad_enabled() and compat.is_transformed():
                output = map_tensors(output, self._ask_through)
            elif torch.is_grad_enabled() and not wanting:
                unit.hidden = unit.hidden or self._trains(args)
            if id(module) not in self._running:
                unit.to_run.discard(id(module))
                if not unit.to_run:
                    self.bound.after_forward(unit, will_backward=torch.is_grad_enabled())
        return cast_floats(output, self.policy.output_dtype) if self.policy.output_dtype else output

    def _showing(self) -> dict[nn.Module, None]:
        """The modules that show parameters of the unit."""
        return dict.fromkeys(module for param in self.unit.memory.params for module, _ in param.sites())

    def watch_parts(self) -> None:
        """Notice backwards that begin inside the unit, if it is resharded before them; else its weights are there."""
        if self._watches_parts or not self.unit.reshard_after_forward:
            return
        self._watches_parts = True
        for module in self._showing():
            if id(module) not in self._all or not type(module).__module__.startswith("torch.nn."):
                module.register_forward_hook(self._after_part)

    def _after_part(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Ask to be called before the backward of a module that shows parameters of the unit: a loss may come from what
        it has returned, or keeps.
        """
        if torch.compiler.is_compiling() or not self.unit.reshard_after_forward or not torch.is_grad_enabled():
            return
        if compat.inside_backward() or compat.is_transformed():
            return
        kept = [value for value in vars(module).values() if isinstance(value, torch.Tensor)]
        for tensor in (*tensors_in(output), *kept):
            if tensor.requires_grad and not tensor.is_leaf and not self._is_asked(tensor):
                tensor.register_hook(self._before_backward_of_part)

    def _is_asked(self, tensor: torch.Tensor) -> bool:
        """Whether a hook is there already: a module may keep a tensor for many forwards."""
        hooks = tensor._backward_hooks
        return bool(hooks) and self._before_backward_of_part in hooks.values()

    def _before_backward_of_part(self, gradient: torch.Tensor) -> None:
        if self.unit.backward is not RUNNING:
            self.bound.before_backward(self.unit)

    def _tells_of_gradients(self) -> Callable[[], None]:
        """What a parameter calls when autograd leaves a gradient on it; holds no reference to this."""
        told = weakref.ref(self)

        def arrived() -> None:
            hooks = told()
            if hooks is not None and hooks.runtime is not None and not hooks.runtime.in_backward:
                hooks.runtime._queue_end()

        return arrived

    def _trains(self, args: tuple) -> bool:
        """Whether the unit's weights may be read in a backward."""
        return any(
            each.requires_grad for each in (*tensors_in(args), *(param.at_rest for param in self.unit.memory.params))
        )

    @compat.frame_not_compiled
    def run(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a forward of `module`: a forward of itself that it calls is a part of it."""
        self._running.append(id(module))
        try:
            output = forward(*args, **kwargs)
        except BaseException:  # an interrupt too, after which nobody calls hooks
            self._running.remove(id(module))
            self._after_exception(module)
            raise
        self._running.remove(id(module))
        return output

    @compat.not_compiled
    def _after_exception(self, module: nn.Module, *_: Any) -> None:
        """Note that the forward raised: otherwise `after_forward` has been called before this."""
        if self.runtime is None or id(module) in self._running or compat.inside_backward():
            return
        if id(module) in self.unit.to_run:
            self.runtime.raised = self.unit

    def _ask(self, output: torch.Tensor) -> None:
        """Be called before the backward of `output`; a view that is written to in place would lose its own hook."""
        output.register_hook(partial(self._before_backward, self.unit.memory.replacements))
        below = output._base.grad_fn if output._is_view() else None
        if below is not None and not isinstance(below, torch.autograd.function.BackwardCFunction):
            below.register_prehook(self._before_backward_of_base)

    def _ask_through(self, output: torch.Tensor) -> torch.Tensor:
        """As `_ask` where `torch.func` hides that an output needs a gradient: a hook would never be called."""
        hidden = not output.requires_grad and (output.is_floating_point() or output.is_complex())
        return _BeginOfBackward.apply(self, output) if hidden else output

    @compat.not_compiled
    def _before_backward_of_base(self, gradients: tuple[torch.Tensor, ...]) -> None:
        if not self.bound.in_backward or self.unit.backward is not DONE:  # it may come after the view's backward
            self.bound.before_backward(self.unit)

    @compat.not_compiled
    def _before_backward(self, replacements: int, gradient: torch.Tensor) -> torch.Tensor:
        """The backward of a forward comes before which shards had been replaced so often."""
        if self.unit.memory.replacements != replacements:
            raise RuntimeError(
                f"the parameters of unit {self.unit.name!r} were replaced, and another forward has used the new ones,"
                " before the backward of a forward that used the old ones; call that backward first"
            )
        self.bound.before_backward(self.unit)
        return gradient

    def after_backward(self) -> None:
        """The gradients of the unit's inputs are complete."""
        self.bound.after_backward(self.unit)

    def _before_state_dict(self, *_: Any) -> None:
        """A state dict reads and writes shards, also when a forward has left the unit gathered."""
        self.unit.reshard_by_hand()

    def _plant(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        wanting = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not wanting:
            return args, kwargs
        planted = iter(_EndOfBackward.apply(self, *wanting))
        return map_tensors((args, kwargs), lambda tensor: next(planted) if tensor.requires_grad else tensor)


class _Identity(torch.autograd.Function):
    """An identity whose backward calls a unit's hooks. `torch.func` may transform it: it has a rule for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.hooks, ctx.replacements = inputs[0], inputs[0].unit.memory.replacements


class _EndOfBackward(_Identity):
    """On a unit's inputs: its backward says that the unit's own backward is over. Tangents pass as they are."""

    @staticmethod
    def forward(hooks: UnitHooks, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def jvp(ctx: Any, _: object, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tangents

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:
        ctx.hooks.after_backward()
        return None, *gradients


class _BeginOfBackward(_Identity):
    """On an output, and on its tangent: its backward asks for the unit first."""

    @staticmethod
    def forward(hooks: UnitHooks, output: torch.Tensor) -> torch.Tensor:
        return output

    @staticmethod
    def jvp(ctx: Any, _: object, tangent: torch.Tensor | None) -> torch.Tensor | None:
        return None if tangent is None else _BeginOfBackward.apply(ctx.hooks, tangent)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return None, ctx.hooks._before_backward(ctx.replacements, gradient)


def hooks_of(module: nn.Module) -> UnitHooks | None:
    """The hooks that sharding put on `module`, if it is a unit."""
    return module.__dict__.get("_unit_hooks")


def all_hooks_of(module: nn.Module) -> list[UnitHooks]:
    """The hooks of every unit that `module` belongs to; one, unless its parameters are cut over several meshes."""
    hooks = hooks_of(module)
    return [] if hooks is None else [hooks, *hooks.beside]


@compat.not_compiled
def before_forward(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """What the hooks of `module` do before its forward."""
    for hooks in all_hooks_of(module):
        args, kwargs = hooks.before_forward(module, args, kwargs)
    return args, kwargs


@compat.not_compiled
def after_forward(module: nn.Module, args: tuple, output: Any) -> Any:
    """What the hooks of `module` do after its forward; the first to begin ends last."""
    for hooks in reversed(all_hooks_of(module)):
        output = hooks.after_forward(module, args, output)
    return output


def bind_root(root: nn.Module, prefetch: int = 1) -> Runtime:
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
        hooks.unit.memory.module_names = names
        hooks.unit.memory.name = "+".join(names) or ("(root)" if ["root"] in found.values() else "root")
    for hooks in found:
        for number, other in enumerate(hooks.beside, 2):
            other.unit.memory.name = f"{hooks.unit.name} (mesh {number})"
    top: UnitHooks = root._unit_hooks
    runtime = Runtime({hooks.unit.name: hooks.unit for hooks in found}, prefetch)
    for hooks in found:
        hooks.runtime = runtime
        if hooks.unit.reshard_after_forward is None:
            hooks.unit.reshard_after_forward = hooks not in (top, *top.beside)
        hooks.watch_parts()
    return runtime


def units_under(module: nn.Module, recurse: bool) -> list[Unit]:
    """The unit of `module`, with `recurse` those below it too."""
    modules = module.modules() if recurse else [module]
    return list(dict.fromkeys(hooks.unit for each in modules for hooks in all_hooks_of(each)))

"""Connects units to module hooks and autograd; nothing else in the engine does.

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
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import nn

from fsdplab.engine import compat, events
from fsdplab.engine.core.memory import unchanged
from fsdplab.engine.core.reduction import hand_out_undecided
from fsdplab.engine.core.step import Schedule, StepOrder
from fsdplab.engine.core.transport import Transport
from fsdplab.engine.core.unit import DONE, RUNNING, Unit
from fsdplab.engine.nested import cast_floats, map_tensors, tensors_in

# Functions that are called once, before a root's first forward that records gradients; a dict keeps each of them once.
before_training: dict[Callable[[nn.Module, Runtime], None], None] = {}

# The types of what every module keeps as attributes.
_NO_TENSORS = (NoneType, bool, int, float, str, dict, OrderedDict, set)


class Runtime(StepOrder):
    """The step order of one root as autograd drives it: when a backward ends, recomputation, steps that raised."""

    def __init__(self, units: dict[str, Unit], prefetch: int) -> None:
        super().__init__(units, Schedule(prefetch), events.span)
        self.post_optimizer_event: torch.Event | None = None
        self.raised: Unit | None = None  # whose forward an exception has left last
        self._has_trained = False  # whether a forward has recorded gradients
        self._is_checking = False  # before the first of them, or whether an exception has left the checks
        self._evaluates = False  # whether the last forward of the root recorded none, and no backward came since
        self._evaluates_again = False  # whether the one before it neither

    @compat.outside_modes
    def before_forward(self, unit: Unit) -> None:
        """Unshard `unit`, and begin to unshard those that follow it."""
        if compat.inside_backward():  # activation checkpointing computes a larger region a second time
            self.unshard_again(unit)
        else:
            super().before_forward(unit)

    @compat.outside_modes
    def check_before_training(self, root: nn.Module) -> None:
        """Call the checks of `before_training`, before the first forward that records gradients."""
        if not self._has_trained:
            self._is_checking = True
            for check in before_training:
                check(root, self)
            # Last: checks that a rank has left are made again, by all ranks.
            self._has_trained, self._is_checking = True, False

    def _begin_forward(self, unit: Unit) -> None:
        """Begin a root forward: forget what an earlier step has left, and wait for an optimizer on another stream."""
        self.raised = None
        self._evaluates_again = self._evaluates and not torch.is_grad_enabled()
        self._evaluates = not torch.is_grad_enabled()
        compat.forget_casts()
        if self.post_optimizer_event is not None:
            self.post_optimizer_event.wait()
            self.post_optimizer_event = None
        super()._begin_forward(unit)

    @compat.outside_modes
    def after_forward(self, unit: Unit, will_backward: bool) -> None:
        """Reshard `unit` where its strategy does; a recomputation inside a backward leaves it unsharded."""
        if not compat.inside_backward():
            super().after_forward(unit, will_backward)

    def recomputes(self, unit: Unit) -> bool:
        """Whether a forward of `unit` now is activation checkpointing's second one, inside its backward."""
        return unit.backward is RUNNING and compat.inside_backward()

    @compat.outside_modes
    def unshard_again(self, unit: Unit) -> None:
        """Unshard `unit`, whose forward runs within its backward or within another: it may be sharded again by now."""
        unit.start_unshard("backward")
        unit.finish_unshard("backward")

    @compat.outside_modes
    def before_backward(self, unit: Unit) -> None:
        """Unshard `unit` for its backward; the first unit begins the root's backward."""
        self._queue_end()
        super().before_backward(unit)

    @compat.outside_modes
    @torch.no_grad()  # a backward with create_graph=True records what its hooks do
    def after_backward(self, unit: Unit) -> None:
        """Collect the gradients of `unit`, reshard it and begin to reduce them."""
        # A unit that no output has announced may be the first whose backward ends.
        if compat.inside_backward():
            self._queue_end()
        super().after_backward(unit)

    def _queue_end(self) -> None:
        """Begin the backward of the root, if it has not begun, and have autograd call its end."""
        if not self.in_backward:
            compat.call_after_backward(self.end_backward)
            self.begin_backward()

    @torch.no_grad()
    def end_backward(self) -> None:
        """End the backward of the root, without autograd recording what is done."""
        super().end_backward()
        self._evaluates = False

    @torch.no_grad()
    def _unchanged(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """Return those of `units` that need not be gathered again: no rank has other shards since.

        Where one evaluation follows another, only a rank that finds its own shards written to asks the others. So what
        is kept unsharded is evaluated without communication, by one rank alone or by some ranks more often.
        """
        memories = unchanged([unit.memory for unit in units], asks_always=not self._evaluates_again)
        return [unit for unit in units if unit.memory in memories]

    def _hand_out_undecided(self) -> None:
        """Hand out the gradients that this rank lacked and other ranks had."""
        hand_out_undecided(unit.memory for unit in self.units.values())

    @property
    def left_unfinished(self) -> bool:
        """Whether a step has ended in an exception, and neither `reset` nor another forward came since."""
        forward_raised = self.forward_of is not None and self.raised is self.forward_of
        # Autograd left the backward without calling its final callback.
        backward_raised = self.in_backward and not compat.inside_backward()
        return forward_raised or backward_raised

    def reset(self) -> None:
        """Leave a step that raised: units are resharded, and transports begin anew."""
        unfinished = self.forward_of is not None or self.in_backward or self._is_checking
        self.raised, self._is_checking = None, False
        super().reset()
        transports: dict[Transport, None] = {}  # of all units, in an order that all ranks share
        for unit in self.units.values():
            transports.update(dict.fromkeys(unit.memory.transports()))
        for transport in transports:
            transport.leave_step(unfinished)
        for unit in self.units.values():
            unit.reshard_by_hand()


class UnitHooks:
    """Binds a unit to its modules; holds no reference to them, so that deleting a model frees it at once.

    Several modules may form one unit. It is unsharded before the first of them runs and resharded once all have run.
    Modules whose parameters are cut over several meshes have a unit for each: `beside` are the hooks of the others.
    """

    def __init__(self, modules: Sequence[nn.Module], unit: Unit, beside: Sequence[UnitHooks] = ()) -> None:
        self.unit = unit
        self.beside = beside
        self.policy = unit.memory.config.policy
        self.runtime: Runtime | None = None
        self._all = frozenset(id(module) for module in modules)
        self._running: list[int] = []  # the modules whose forwards run, one twice that has called itself
        for other in beside:
            # Several units of the same modules: one list of running forwards.
            other._running = self._running
        self.handles: tuple[list[Any], list[Any]] = [], []  # of the hooks before forwards, and of those after them
        for module in modules:
            module.__dict__["_unit_hooks"] = self
            # Before hooks that users have put there, which may read the parameters.
            before = module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            after = module.register_forward_hook(self.after_forward, prepend=False)
            self.handles[0].append(before)
            self.handles[1].append(after)
            module.register_forward_hook(self._after_exception, always_call=True)
        on_gradient = self._begins_backward()
        for param in unit.memory.params:
            param.on_gradient = on_gradient
        self._watches_parts = False
        for module in dict.fromkeys([*modules, *self._modules_with_parameters()]):
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
        unit = self.unit
        runtime = self.runtime or bind_root(module)  # the first unit to run is the root
        if unit is runtime.root and torch.is_grad_enabled():
            runtime.check_before_training(module)
        if self.policy.cast_forward_inputs and self.policy.param_dtype:
            args, kwargs = cast_floats((args, kwargs), self.policy.param_dtype)
        if id(module) in self._running or runtime.recomputes(unit):
            # The module calls itself, or is computed a second time: this is no new forward of the unit.
            runtime.unshard_again(unit)
            return args, kwargs
        is_first = len(self._all) == 1 or id(module) not in unit.to_run  # of the unit's modules
        if is_first:
            runtime.before_forward(unit)
            unit.to_run, unit.hidden = set(self._all), False
        device = unit.memory.config.device
        if unit is runtime.root and device.type != "cpu":  # as PyTorch's FSDP2: a batch may come from the host
            args, kwargs = map_tensors((args, kwargs), lambda tensor: tensor.to(device))
        if is_first and torch.is_grad_enabled():  # the inputs of the first module have their gradients last
            args, kwargs = self._plant(args, kwargs)
        return args, kwargs

    @compat.not_compiled
    def after_forward(self, module: nn.Module, args: tuple, output: Any) -> Any:
        """Reshard the unit once all its modules ran, and ask to be called before its backward."""
        unit = self.unit
        records = torch.is_grad_enabled()
        if not self.bound.recomputes(unit):  # a recomputation is a part of the backward that has begun already
            has_backward = False
            for tensor in tensors_in(output):
                if self._is_parameter(tensor):
                    unit.hidden = True  # the caller computes with it, so it must stay
                elif tensor.requires_grad:
                    has_backward = True
                    # The first gradient that arrives at one of the outputs unshards the unit for its backward.
                    self._ask(tensor)
            if records and compat.is_transformed():
                output = map_tensors(output, self._ask_through)
            elif records and not has_backward:
                # No output announces the backward, but a loss may be computed from elsewhere.
                unit.hidden = unit.hidden or self._trains(args)
            # Still running: this was the end of a call that the module made of itself.
            if id(module) not in self._running:
                unit.to_run.discard(id(module))
                if not unit.to_run:
                    self.bound.after_forward(unit, will_backward=records)
        if self.policy.output_dtype:
            return cast_floats(output, self.policy.output_dtype)
        return output

    def _modules_with_parameters(self) -> list[nn.Module]:
        """Return the modules that show parameters of the unit."""
        modules: dict[nn.Module, None] = {}
        for param in self.unit.memory.params:
            for module, _ in param.sites():
                modules[module] = None
        return list(modules)

    def _is_parameter(
        self,
        output: torch.Tensor,  # any shape
    ) -> bool:
        """Whether `output` is an unsharded parameter of the unit, or a view of one."""
        base = output._base if output._is_view() else output
        if type(base) is not nn.Parameter:  # what nearly all outputs are: the rest takes longer
            return False
        return any(base is param.gathered for param in self.unit.memory.params)

    def watch_parts(self) -> None:
        """Notice backwards that begin inside the unit, if it is resharded before them; else its weights are there."""
        if self._watches_parts or not self.unit.reshard_after_forward:
            return
        self._watches_parts = True
        for module in self._modules_with_parameters():
            # The outputs of a unit's own module are asked already, and torch's layers keep nothing else.
            if id(module) not in self._all or not type(module).__module__.startswith("torch.nn."):
                module.register_forward_hook(self._after_part)

    def _after_part(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Ask to be called before the backward of a module that shows parameters of the unit.

        A loss may be computed from what the module has returned, or keeps as an attribute.
        """
        if not self.unit.reshard_after_forward or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if compat.inside_backward() or compat.is_transformed():
            return
        for tensor in tensors_in(output):
            self._ask_part(tensor)
        for value in vars(module).values():
            if type(value) not in _NO_TENSORS and isinstance(value, torch.Tensor):  # the first is ten times as fast
                self._ask_part(value)

    def _ask_part(
        self,
        tensor: torch.Tensor,  # any shape
    ) -> None:
        """Be called before the backward of `tensor`, once: a module may keep a tensor for many forwards."""
        if not tensor.requires_grad or tensor.is_leaf:
            return
        hooks = tensor._backward_hooks
        if not hooks or self._before_backward_of_part not in hooks.values():
            tensor.register_hook(self._before_backward_of_part)

    def _before_backward_of_part(
        self,
        gradient: torch.Tensor,  # any shape, not looked at
    ) -> None:
        """Unshard the unit, unless one of its outputs has announced this backward."""
        if self.unit.backward is not RUNNING:
            self.bound.before_backward(self.unit)

    def _begins_backward(self) -> Callable[[], None]:
        """Return what a parameter calls when autograd leaves a gradient on it; it holds no reference to this."""
        reference = weakref.ref(self)

        def on_gradient() -> None:
            hooks = reference()
            if hooks is not None and hooks.runtime is not None and not hooks.runtime.in_backward:
                hooks.runtime._queue_end()

        return on_gradient

    def _trains(self, args: tuple) -> bool:
        """Whether the unit's weights may be read in a backward: an input or a parameter needs a gradient."""
        if any(tensor.requires_grad for tensor in tensors_in(args)):
            return True
        return any(param.at_rest.requires_grad for param in self.unit.memory.params)

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
        # `after_forward` would have taken it out.
        if id(module) in self.unit.to_run:
            self.runtime.raised = self.unit

    def _ask(
        self,
        output: torch.Tensor,  # any shape, with a gradient to come
    ) -> None:
        """Be called before the backward of `output`, with the number of replacements so far."""
        before_backward = partial(self._before_backward, self.unit.memory.replacements)
        output.register_hook(before_backward)
        # A view that is written to in place gets another node, and loses its hook; the node of its base stays.
        if output._is_view():
            node = output._base.grad_fn
            if node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction):
                node.register_prehook(self._before_backward_of_base)

    def ask_second(
        self,
        gradient: torch.Tensor | None,  # of an input, any shape; None: it has none
    ) -> None:
        """Be called before the backward of `gradient`, which reads the parameters that have computed it."""
        if gradient is not None and gradient.requires_grad:
            gradient.register_hook(self._before_second_backward)

    @compat.not_compiled
    def _before_second_backward(
        self,
        gradient: torch.Tensor,  # any shape, not looked at
    ) -> None:
        """Unshard the unit, and the root: nothing announces that one where its own inputs have no gradients."""
        self.bound.before_backward(self.bound.root)
        self.bound.before_backward(self.unit)

    def _ask_through(
        self,
        output: torch.Tensor,  # any shape, any dtype
    ) -> torch.Tensor:
        """Do as `_ask` where `torch.func` hides that an output needs a gradient: a hook would never be called."""
        if output.requires_grad or not (output.is_floating_point() or output.is_complex()):
            return output
        return _BeginOfBackward.apply(self, output)

    @compat.not_compiled
    def _before_backward_of_base(
        self,
        gradients: tuple[torch.Tensor, ...],  # any shapes, not looked at
    ) -> None:
        """Unshard the unit before the backward of the tensor that an output is a view of."""
        if not self.bound.in_backward or self.unit.backward is not DONE:  # it may come after the view's backward
            self.bound.before_backward(self.unit)

    @compat.not_compiled
    def _before_backward(
        self,
        replacements: int,
        gradient: torch.Tensor,  # any shape, returned as it is
    ) -> torch.Tensor:
        """Unshard the unit; raise if its shards were replaced since the forward, which counted `replacements`."""
        if self.unit.memory.replacements != replacements:
            raise RuntimeError(
                f"the parameters of unit {self.unit.name!r} were replaced, and another forward has used the new ones,"
                " before the backward of a forward that used the old ones; call that backward first"
            )
        self.bound.before_backward(self.unit)
        return gradient

    def after_backward(self) -> None:
        """End the backward of the unit: the gradients of its inputs are complete."""
        self.bound.after_backward(self.unit)

    def _before_state_dict(self, *_: Any) -> None:
        """Reshard the unit: a state dict reads and writes shards, also when a forward has left the unit unsharded."""
        self.unit.reshard_by_hand()

    def _plant(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Pass the inputs that need a gradient through `_EndOfBackward`, all at once."""
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not inputs:
            return args, kwargs
        # One function of all of them: its backward runs once, when the last of their gradients is there.
        planted = iter(_EndOfBackward.apply(self, *inputs))

        def in_place_of(
            tensor: torch.Tensor,  # any shape
        ) -> torch.Tensor:
            return next(planted) if tensor.requires_grad else tensor

        return map_tensors((args, kwargs), in_place_of)


class _Identity(torch.autograd.Function):
    """An identity whose backward calls a unit's hooks. `torch.func` may transform it: it has a rule for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        """Keep the hooks, and how often the unit's shards had been replaced at the forward."""
        ctx.hooks, ctx.replacements = inputs[0], inputs[0].unit.memory.replacements


class _EndOfBackward(_Identity):
    """The identity on a unit's inputs: its backward ends that of the unit. Tangents pass as they are."""

    @staticmethod
    def forward(
        hooks: UnitHooks,
        *inputs: torch.Tensor,  # any shapes, returned as they are
    ) -> tuple[torch.Tensor, ...]:
        """Return the inputs themselves."""
        return inputs

    @staticmethod
    def jvp(
        ctx: Any,
        _: object,
        *tangents: torch.Tensor,  # any shapes, returned as they are
    ) -> tuple[torch.Tensor, ...]:
        """Return the tangents themselves."""
        return tangents

    @staticmethod
    def backward(
        ctx: Any,
        *gradients: torch.Tensor,  # any shapes, returned as they are; `hooks` has none
    ) -> tuple:
        """End the unit's backward: all gradients of its inputs are there."""
        ctx.hooks.after_backward()
        if torch.is_grad_enabled():  # create_graph=True: a loss may be computed from these gradients
            for gradient in gradients:
                ctx.hooks.ask_second(gradient)
        return None, *gradients


class _BeginOfBackward(_Identity):
    """The identity on an output, and on its tangent: its backward unshards the unit first."""

    @staticmethod
    def forward(
        hooks: UnitHooks,
        output: torch.Tensor,  # any shape, returned as it is
    ) -> torch.Tensor:
        """Return the output itself."""
        return output

    @staticmethod
    def jvp(
        ctx: Any,
        _: object,
        tangent: torch.Tensor | None,  # any shape, as the output; None: it has none
    ) -> torch.Tensor | None:
        """Plant the same identity on the tangent: a backward may come through it."""
        return None if tangent is None else _BeginOfBackward.apply(ctx.hooks, tangent)

    @staticmethod
    def backward(
        ctx: Any,
        gradient: torch.Tensor,  # any shape, returned as it is; `hooks` has none
    ) -> tuple:
        """Begin the unit's backward."""
        return None, ctx.hooks._before_backward(ctx.replacements, gradient)


def hooks_of(module: nn.Module) -> UnitHooks | None:
    """Return the hooks that sharding put on `module`, or None if it is no unit."""
    return module.__dict__.get("_unit_hooks")


def all_hooks_of(module: nn.Module) -> list[UnitHooks]:
    """Return the hooks of every unit of `module`: one, or several where its parameters are cut over several meshes."""
    hooks = hooks_of(module)
    if hooks is None:
        return []
    return [hooks, *hooks.beside]


@compat.not_compiled
def before_forward(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Do what the hooks of `module` do before its forward."""
    for hooks in all_hooks_of(module):
        args, kwargs = hooks.before_forward(module, args, kwargs)
    return args, kwargs


@compat.not_compiled
def after_forward(module: nn.Module, args: tuple, output: Any) -> Any:
    """Do what the hooks of `module` do after its forward; the first to begin ends last."""
    for hooks in reversed(all_hooks_of(module)):
        output = hooks.after_forward(module, args, output)
    return output


def bind_root(root: nn.Module, prefetch: int = 1) -> Runtime:
    """Make `root`, the first unit to run, the root of all units below it, and name them by their place."""
    names_of: dict[UnitHooks, list[str]] = {}  # of the modules of each unit
    for name, module in root.named_modules():
        for hooks in all_hooks_of(module):
            names_of.setdefault(hooks, []).append(name)
    for hooks, names in names_of.items():
        if hooks.runtime is not None:
            raise RuntimeError(
                f"FSDP state has already been lazily initialized for {names[0]}\nFSDP requires running forward through"
                f" the root module first: unit {names[0]!r} already ran under another root; run the outermost sharded"
                " module first, so that it becomes the root of all units"
            )
        hooks.unit.memory.module_names = names
        title = "+".join(names)  # "blocks.0", or "embedding+head" of two modules that form one unit
        if not title:
            title = "(root)" if ["root"] in names_of.values() else "root"  # a module may be called root
        hooks.unit.memory.name = title
    for hooks in names_of:
        # "blocks.0" over the unit's mesh, "blocks.0 (mesh 2)" for its parameters that are cut over another one.
        for number, other in enumerate(hooks.beside, 2):
            other.unit.memory.name = f"{hooks.unit.name} (mesh {number})"
    top: UnitHooks = root._unit_hooks
    runtime = Runtime({hooks.unit.name: hooks.unit for hooks in names_of}, prefetch)
    for hooks in names_of:
        hooks.runtime = runtime
        if hooks.unit.reshard_after_forward is None:  # all but the root, whose backward comes at once
            hooks.unit.reshard_after_forward = hooks not in (top, *top.beside)
        hooks.watch_parts()
    return runtime


def units_under(module: nn.Module, recurse: bool) -> list[Unit]:
    """Return the unit of `module`, with `recurse` those below it too."""
    units: dict[Unit, None] = {}  # several modules may form one
    for part in module.modules() if recurse else [module]:
        for hooks in all_hooks_of(part):
            units[hooks.unit] = None
    return list(units)

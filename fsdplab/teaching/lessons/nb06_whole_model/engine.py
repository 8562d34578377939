"""The engine of lessons 05 and 06: it calls the learner's functions around the forward and the backward of every unit.

Nothing here unshards, reshards or reduces: the six functions in `Parts` do that. A unit's parameters become views of
one flat tensor, `whole`, so that one message has them all and one storage is allocated and freed. Units take and
give one tensor each, as the blocks of a GPT do.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdplab.teaching.core.comm_log import WireLog

Wanted = Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class Parts:
    """The learner's functions: five of notebook 05, and `hooks` of 06."""

    shard: Callable[..., torch.Tensor]
    unshard: Callable[..., Any]
    reshard: Callable[..., Any]
    guarded: Callable[..., torch.Tensor]
    reduce: Callable[..., torch.Tensor]
    hooks: Callable[..., Any]


@dataclass
class Log:
    """The events in order: one row a call of the learner's unshard, reshard or reduce. Bytes are this rank's."""

    step: int = 0
    phase: str = "forward"
    rows: list[dict[str, Any]] = field(default_factory=list)


class MiniUnit:
    """The parameters of one unit: `mine`, the shard that the optimizer updates, and `whole`, with memory or without."""

    def __init__(self, name: str, parameters: list[nn.Parameter], parts: Parts) -> None:
        self.name, self.is_root = name, name == "root"
        self._parameters = parameters
        self.whole = torch.cat([parameter.detach().flatten() for parameter in parameters])  # [P]
        # views of `whole`, one a parameter: what is unsharded into it is in the parameters
        pieces = self.whole.split([parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.data = piece.view(parameter.shape)  # autograd keeps such views: they must stay valid
        self.mine = nn.Parameter(parts.shard(self.whole, dist.get_rank(), dist.get_world_size()))  # [ceil(P / n)]
        parts.reshard(self.whole)

    @property
    def gathered_bytes(self) -> int:
        """Return the bytes of `whole` that have memory now, without padding that an unshard may have put there."""
        return min(self.whole.nbytes, self.whole.untyped_storage().nbytes())

    def take_gradient(self) -> torch.Tensor:
        """Return the unsharded gradient that autograd left on this rank, flat [P]; the parameters keep none of it.

        RuntimeError where there is none.
        """
        # frozen parameters of a unit never have a gradient
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        # without this a second call would return zeros
        if all(parameter.grad is None for parameter in trained):
            raise RuntimeError(f"unit {self.name} has no gradient: take_gradient() comes after its backward, once")
        gradients = []
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:  # a frozen parameter, or one that the forward did not use
                gradient = parameter.new_zeros(parameter.shape)
            gradients.append(gradient.flatten())
            parameter.grad = None
        return torch.cat(gradients)


class MiniFSDP:
    """A model under the learner's engine. `is_unit(name, module)` chooses the units; what is left is the root's."""

    def __init__(self, model: nn.Module, is_unit: Wanted, parts: Parts) -> None:
        self.model, self.parts, self.log = model, parts, Log()
        self._named = list(model.named_parameters())
        self._unfinished: dict[str, Callable[[], None]] = {}  # what ends the backward of a unit that has begun it
        self._attaching = False  # the learner's `hooks` runs, and none of its functions may yet
        self.units: list[MiniUnit] = []
        modules = list(chosen(model, is_unit))
        for name, _, parameters in modules:
            self.units.append(MiniUnit(name, parameters, parts))
        for unit, (_, module, _) in zip(self.units, modules, strict=True):
            self._attach(unit, module)

    def parameters(self) -> list[nn.Parameter]:
        """Return the shards: all that the optimizer sees."""
        return [unit.mine for unit in self.units]

    def _attach(self, unit: MiniUnit, module: nn.Module) -> None:
        """Call the learner's four functions around this unit's forward and backward."""
        watched = [self._watched(unit, name) for name in ("unshard", "reshard", "reduce")]
        self._attaching = True
        functions = self.parts.hooks(unit, *watched)
        self._attaching = False
        before_forward, after_forward, before_backward, after_backward = four(functions)

        def forward_begins(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            self._run("forward", before_forward)
            self._require(unit, "before_forward")
            return tuple(EndOfBackward.apply(backward_ends, x) if wants_gradient(x) else x for x in inputs)

        def forward_ends(module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            self._run("forward", after_forward)
            if output.requires_grad:
                output.register_hook(backward_begins)

        def backward_begins(gradient: torch.Tensor) -> None:
            self._unfinished[unit.name] = backward_ends
            self._run("backward", before_backward)
            self._require(unit, "before_backward")

        def backward_ends() -> None:
            if self._unfinished.pop(unit.name, None):
                self._run("backward", after_backward)

        module.register_forward_pre_hook(forward_begins)
        module.register_forward_hook(forward_ends)

    def finish_backward(self) -> None:
        """Call `after_backward` of the units whose inputs carry no gradient, the root above all.

        It is called after `loss.backward()`.
        """
        for backward_ends in list(self._unfinished.values()):
            backward_ends()

    def _run(self, phase: str, function: Callable[[], Any]) -> None:
        """Call one of the learner's hooks, and note in which phase."""
        self.log.phase = phase
        with torch.no_grad():
            function()

    def _require(self, unit: MiniUnit, hook: str) -> None:
        """Call the learner's guard: reading a tensor without memory would end the process."""
        try:
            self.parts.guarded(unit.whole, f"unit {unit.name}")
        except RuntimeError as error:
            raise RuntimeError(f"after {hook}: {error}") from None

    def _watched(self, unit: MiniUnit, name: str) -> Callable[..., Any]:
        """Return one of the learner's functions, checked for its arguments and followed by a row of the log."""
        function = getattr(self.parts, name)
        parameters = inspect.signature(function)

        def called(*given: Any, **named: Any) -> Any:
            if self._attaching:
                raise RuntimeError(
                    f"{name} was called before any forward: return the four functions without calling them"
                )
            arguments = given
            if named:
                # names of arguments are the learner's own: their order is what counts
                arguments = parameters.bind(*given, **named).args
            require_arguments(unit, name, arguments)
            with WireLog() as wire:
                returned = function(*arguments)
            self.log.rows.append(
                {
                    "step": self.log.step,
                    "phase": self.log.phase,
                    "unit": unit.name,
                    "what": name,
                    "calls": [(call.kind, call.nbytes) for call in wire.calls],
                    "bytes": unit.mine.nbytes,
                    "unsharded": {other.name: other.gathered_bytes for other in self.units},
                }
            )
            return returned

        return called

    @torch.no_grad()
    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """Return every parameter of the model, whole: unsharded a unit at a time."""
        for unit in self.units:
            # all units at once, as nothing is trained meanwhile
            self.parts.unshard(unit.mine, unit.whole)
        values = {name: parameter.detach().clone() for name, parameter in self._named}
        for unit in self.units:
            self.parts.reshard(unit.whole)
        return values


class EndOfBackward(torch.autograd.Function):
    """Identity on a unit's input; its own backward runs once the unit's backward is over."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], x: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.call()
        return None, gradient


def chosen(model: nn.Module, is_unit: Wanted) -> Iterator[tuple[str, nn.Module, list[nn.Parameter]]]:
    """Yield (name, module, parameters that no unit below holds) of every unit, the root last.

    Units without parameters are none.
    """
    modules = [(name, module) for name, module in model.named_modules() if name and is_unit(name, module)]
    held_below: set[nn.Parameter] = set()
    # inner modules first: a unit inside a unit takes its own parameters, and the root what is left
    for name, module in [*reversed(modules), ("root", model)]:
        if type(module).forward is nn.Module.forward:
            raise ValueError(
                f"{name} is a {type(module).__name__}, which is never called, so nothing would unshard it; "
                "choose the modules in it"
            )
        parameters = [parameter for parameter in module.parameters() if parameter not in held_below]
        held_below.update(parameters)
        if parameters:
            yield name, module, parameters


def four(functions: Any) -> tuple[Callable[[], Any], ...]:
    """Return the four functions that `hooks` returned; TypeError that says what was returned instead."""
    got = type(functions).__name__
    if isinstance(functions, (list, tuple)):
        if len(functions) == 4 and all(map(callable, functions)):
            return tuple(functions)
        got = f"{len(functions)} things ({_kinds(functions)})"
    raise TypeError(
        f"hooks returned {got}; return before_forward, after_forward, before_backward, after_backward (without calling"
        " them)"
    )


def _kinds(things: Iterable[object]) -> str:
    """Return what kinds there are: `"3 function, 1 None"`."""
    counts = Counter("None" if thing is None else type(thing).__name__ for thing in things)
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def wants_gradient(x: Any) -> bool:
    """Return whether `x` is a tensor that a backward will reach."""
    return isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()


def require_arguments(unit: MiniUnit, name: str, arguments: tuple[Any, ...]) -> None:
    """Raise TypeError where a hook passes other arguments than the unit's own tensors.

    A swap would read freed memory.
    """
    attributes = {"unshard": ("mine", "whole"), "reshard": ("whole",)}.get(name)
    if attributes is None:
        return
    # by identity: a copy of `whole` would be filled in its place
    tensors = [getattr(unit, attribute) for attribute in attributes]
    are_own = all(argument is tensor for argument, tensor in zip(arguments, tensors))
    if len(arguments) != len(tensors) or not are_own:
        call = ", ".join(f"unit.{attribute}" for attribute in attributes)
        raise TypeError(f"{name} was called with other arguments; write {name}({call})")

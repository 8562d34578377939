"""Looks at the gradients of one step: what is left of the step before, which are stepped, and which no unit shards.

A job whose gradients are lost on their way trains something else than it should, and no time tells.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from fsdplab.recording.subject import all_holding_state, fsdp2_units, parameters_of


class _Lost(NamedTuple):
    """Counts the elements of this rank's parameters whose updates were lost to rounding in one step."""

    updated_elements: int = 0  # of parameters in bf16 or fp16, that have a gradient
    lost_elements: int = 0  # of these, that the step has left as they were
    trained_elements_here: int = 0  # of all parameters that are stepped
    short_type: str = ""  # "bfloat16" or "float16"


class Gradients:
    """Told of the step whose memory is measured: `before_backward`, `before_update` by an optimizer, `end`."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Any]) -> None:
        self._model = model
        self._optimizers = optimizers
        self._kept_bytes: int | None = None  # when a backward begins, the fewest
        self._never_zeroed = False
        self._without_gradient = 0  # parameters
        self._updates_seen = 0
        self._had_gradients = False  # at any update, or after the step
        self._idle_bytes = 0  # of gradients that no optimizer steps
        self._lost = _Lost()
        # by the id of an optimizer: whether it had gradients when each backward since its last step began
        self._had_at = defaultdict[int, list[bool]](list)
        self._adding: dict[int, int] = {}  # backwards that added to the gradients of its step
        # of each parameter a few values before the step, by its id
        self._before = {id(parameter): _some_values(parameter) for parameter in model.parameters()}

    def before_backward(self) -> None:
        """Look at the gradients to which a backward will add: those of the step before that are still there, as far as
        no backward of the step finds fewer.

        Where one of several optimizers has none, the others keep theirs for a reason: a GAN trains in turns.
        """
        kept = [_gradients(parameters_of([optimizer])) for optimizer in self._optimizers]
        have_values = [_has_values(gradients) for gradients in kept]
        for optimizer, has_values in zip(self._optimizers, have_values):
            self._had_at[id(optimizer)].append(has_values)
        kept_bytes = sum(local_bytes(gradients) for gradients in kept) if all(kept) else 0
        if self._kept_bytes is None:
            self._never_zeroed = bool(kept_bytes) and all(have_values)
            self._kept_bytes = kept_bytes
        self._kept_bytes = min(self._kept_bytes, kept_bytes)

    def before_update(self, optimizer: Any) -> None:
        """Look at what an optimizer is about to step."""
        self._updates_seen += 1
        self._had_gradients = self._had_gradients or bool(_gradients(parameters_of([optimizer])))
        had = self._had_at.pop(id(optimizer), [])
        if had:
            self._note_backwards(id(optimizer), had)

    def _note_backwards(self, number: int, had: Sequence[bool]) -> None:
        """Note whether an optimizer had gradients when each backward before its step began."""
        self._adding[number] = max(self._adding.get(number, 0), _adding(had))
        # another model's backward comes first, and they are set to zero before their own
        self._never_zeroed = self._never_zeroed and False not in had

    def end(self) -> None:
        """Look at the gradients after the step."""
        trained = [parameter for parameter in parameters_of(self._optimizers) if parameter.requires_grad]
        gradients = _gradients(trained)
        self._without_gradient = len(trained) - len(gradients)
        # a closure calls backward inside of the optimizer's step
        self._had_gradients = self._had_gradients or bool(gradients)
        for number, had in self._had_at.items():
            # a closure calls backward when the step has begun
            if number not in self._adding:
                self._note_backwards(number, had)
        self._idle_bytes = local_bytes(_gradients(self._not_stepped()))
        self._lost = self._lost_in_the_step()

    def as_report(self) -> dict[str, Any]:
        """Return everything, for the rank's report."""
        outside = self._outside_of_units()
        return {
            "kept_gradient_bytes": self._kept_bytes or 0,
            "never_zeroed": self._never_zeroed,
            "adding_backwards": max(self._adding.values(), default=0),
            "unused_parameters": self._without_gradient,
            "updates_nothing": self._updates_seen > 0 and not self._had_gradients,
            "has_model": any(True for _ in self._model.parameters()),
            "idle_gradient_bytes": self._idle_bytes,
            "outside_parameters": len(outside),
            "outside_bytes": local_bytes(outside),
            **self._lost._asdict(),
        }

    def _lost_in_the_step(self) -> _Lost:
        """Estimate, by a few elements of each parameter in a short type, how many have a gradient and are after the
        step what they were before it.

        Only optimizers of torch are looked at: another one may keep elsewhere what it could not add.
        """
        updated, lost, trained, kind = 0.0, 0.0, 0, ""
        for optimizer in all_holding_state(self._optimizers):
            for parameter in parameters_of([optimizer]):
                trained += local(parameter.detach()).numel()
                before = self._before.get(id(parameter))
                is_short = parameter.dtype in (torch.bfloat16, torch.float16)
                is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
                if before is None or not before.numel() or parameter.grad is None or not (is_short and is_of_torch):
                    continue
                after, gradient = _some_values(parameter), _some_values(parameter.grad)
                # an engine may hold another part of a parameter by now
                if not before.shape == after.shape == gradient.shape:
                    continue
                has_gradient, is_as_before = gradient != 0, after == before
                # of 64 elements that are looked at, each stands for a 64th of the parameter
                stands_for = local(parameter.detach()).numel() / before.numel()
                updated += stands_for * int(has_gradient.sum())
                lost += stands_for * int((has_gradient & is_as_before).sum())
                kind = str(parameter.dtype).removeprefix("torch.")
        return _Lost(round(updated), round(lost), trained, kind)

    def _not_stepped(self) -> list[torch.Tensor]:
        """Return the model's parameters that no living optimizer has, and that nothing else has changed in the step."""
        stepped = {id(parameter) for parameter in parameters_of(self._optimizers)}
        for thing in gc.get_objects():
            # not isinstance: lazy proxies would load
            if issubclass(type(thing), Optimizer):
                stepped.update(id(parameter) for parameter in parameters_of([thing]))
        not_stepped = []
        for parameter in self._model.parameters():
            before = self._before.get(id(parameter))
            is_as_before = before is not None and torch.equal(before, _some_values(parameter))
            if id(parameter) not in stepped and is_as_before:
                not_stepped.append(parameter)
        return not_stepped

    def _outside_of_units(self) -> list[torch.Tensor]:
        """Return the parameters to train that none of FSDP2's units has sharded, of a model that has units."""
        if not fsdp2_units(self._model):
            return []
        outside = []
        for parameter in parameters_of(self._optimizers):
            if parameter.requires_grad and not hasattr(parameter, "to_local"):
                outside.append(parameter)
        return outside


def _adding(had: Sequence[bool]) -> int:
    """Count the backwards that add to gradients of the same step, by whether there were any when each of them began.

    >>> _adding([False, True, True])  # three micro-batches
    2
    >>> _adding([True, False])  # they were set to zero between the two, so that the second one alone counts
    0
    >>> _adding([True, True])  # the first one adds to those of the step before
    1
    """
    adding = 0
    for had_gradients in had:
        adding = adding + 1 if had_gradients else 0
    return adding if False in had else max(0, adding - 1)


def _gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients that are there; some engines keep theirs under names of their own."""
    gradients = []
    for parameter in parameters:
        for name in ("grad", "main_grad", "decoupled_grad"):
            gradient = getattr(parameter, name, None)
            if isinstance(gradient, torch.Tensor):
                gradients.append(gradient)
                break
    return gradients


def _some_values(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of the first values that this rank holds."""
    return local(parameter.detach()).flatten()[:64].clone()


def _has_values(gradients: Iterable[torch.Tensor]) -> bool:
    """Return whether any of these gradients was not set to zero."""
    return any(bool(local(gradient).any()) for gradient in gradients)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sum the bytes of what this rank holds of some tensors."""
    held = [local(tensor) for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)

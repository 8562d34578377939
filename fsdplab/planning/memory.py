"""Peak memory of a step in closed form: what is alive at each of the moments at which a peak can lie.

The bytes of a rank grow through the forward (activations) and then change hands in the backward (activations go,
gradient slices come), unit by unit and in equal parts. So a peak lies at an end: at the loss, in the backward of the
last block, in that of the first, when the root's gradients are reduced, or in the optimizer's step. Each is a sum over
the categories of `fsdplab compare`; the largest sum is the peak.

Where only the first blocks are recomputed, a peak can also lie in the backward of the last of these.

Sources: model states, Rajbhandari et al. 2020, section 3.1; activations, activations.py; gathered units and the
buffers of collectives, DESIGN.md 2.1 (at most prefetch depth + 1 units and the root); a unit that is resharded to
fewer ranks, engine/features/partial_reshard.py (PyTorch's `reshard_after_forward=m`); the first blocks recomputed,
Megatron-LM's `--recompute-method block`; the optimizer on the CPU, Ren et al. 2021 (ZeRO-Offload), section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fsdplab.common.names import CATEGORIES

from .activations import (
    backward_per_token,
    computed_per_token,
    kept_per_token,
    loss_bytes,
    recomputed_per_token,
    root_kept_per_token,
)
from .plan_spec import PlanSpec
from .unit_bytes import UnitBytes, unit_bytes

# An assumption, not measured here: the CUDA context and its kernels (some 0.5 GiB) and NCCL's channels (as much).
# The allocator knows nothing of them.
FRAMEWORK_BYTES = 2**30
# Reserved bytes over bytes in use, of the one published run that prints both (torchtitan PR #165, FSDP2, eager:
# 59.41 GiB reserved, 49.54 active). Expandable segments come closer to 1.
RESERVED_OVER_USED = 59.41 / 49.54


@dataclass(frozen=True)
class Moment:
    """Bytes by category on one rank at one instant of a step."""

    name: str
    by_category: dict[str, float]

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(self.by_category.values())


@dataclass(frozen=True)
class Memory:
    """The moments of a step; the peak is the largest."""

    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The moment with most bytes."""
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def used_bytes(self) -> float:
        """Bytes that the allocator has given out at the peak: without the framework's own."""
        return self.peak.total - FRAMEWORK_BYTES

    @property
    def reserved_bytes(self) -> float:
        """Bytes that the allocator is likely to have taken from the device at the peak."""
        return self.used_bytes * RESERVED_OVER_USED

    def at(self, name: str) -> Moment:
        """The moment of that name."""
        return next(moment for moment in self.moments if moment.name == name)

    @property
    def resting(self) -> Moment:
        """Between two steps: what the model's states take."""
        return self.moments[0]


@dataclass(frozen=True)
class Variant:
    """Choices of a step beside its spec's.

    `ranks_after_forward`: over how many ranks a block stays cut between its forward and its backward; None as the
    strategy says, 1 gathered. `recomputed_blocks`: how many of the first blocks are checkpointed, None for all.
    `optimizer_on_cpu`: the optimizer's state rests in host memory, slices and gradients do not.
    """

    ranks_after_forward: int | None = None
    recomputed_blocks: int | None = None
    optimizer_on_cpu: bool = False


AS_PLANNED = Variant()


def memory_of(spec: PlanSpec, blocks_per_unit: float = 1.0, variant: Variant = AS_PLANNED) -> Memory:
    """The memory of one rank through a step; `blocks_per_unit` blocks travel together (0.25: four units a block).

    What is gathered, and the gradients that wait for their reduction, are a unit's; activations are a block's.
    """
    return _Step(spec, blocks_per_unit, variant).memory()


class _Step:
    """The units of a plan and what each moment adds up."""

    def __init__(self, spec: PlanSpec, blocks_per_unit: float, variant: Variant) -> None:
        self.spec, self.per_unit, self.variant = spec, blocks_per_unit, variant
        every, recomputed = spec.model.layers, variant.recomputed_blocks
        self.recomputed = every if recomputed is None else min(every, recomputed)
        self.together = max(1, round(blocks_per_unit))  # blocks whose backward ends before a reduction
        self.block = unit_bytes(spec.model.block, spec, adapted=True)
        self.unit = self.block.times(blocks_per_unit)
        self.root = unit_bytes(spec.model.root, spec)
        self.all: UnitBytes = self.block.times(spec.model.layers) + self.root
        head = spec.model.root[:1] if spec.model.tied else spec.model.root[-1:]
        self.head = unit_bytes(head, spec)
        self.last = unit_bytes([each for each in spec.model.block if each.name == "down.weight"], spec, adapted=True)
        self.kept, self.computed = kept_per_token(spec) * spec.tokens, computed_per_token(spec) * spec.tokens
        self.loss = loss_bytes(spec)

    def memory(self) -> Memory:
        layers, per_unit = self.spec.model.layers, self.together
        first = layers - per_unit  # blocks behind the first unit
        return Memory(
            (
                self._resting(),
                self._forward(),
                self._loss(),
                self._head(),
                self._block("backward of the last block", saved=layers, reduced=0),
                *([self._block("end of the last unit's backward", first + 1, 0)] if per_unit > 1 else []),
                self._unit_reduction("reduction of the last block", saved=first),
                *self._last_recomputed(),
                *([self._block("backward of the first unit", per_unit, first)] if per_unit > 1 else []),
                self._block("backward of the first block", saved=1, reduced=first),
                self._unit_reduction("reduction of the first block", saved=0),
                self._root(),
                self._moment("optimizer step", reduced=None, other=self._step_scratch()),
            )
        )

    def _resting(self) -> Moment:
        found = dict.fromkeys(CATEGORIES, 0.0)
        if not self.spec.offload:
            found["parameter_slices"] = self.all.parameter_slices
            found["optimizer_state"] = 0.0 if self.variant.optimizer_on_cpu else self.all.optimizer_state
        return Moment("between steps", found | {"other": FRAMEWORK_BYTES})

    def _step_scratch(self) -> float:
        return 0.0 if self.variant.optimizer_on_cpu else self.all.step_scratch

    def _last_recomputed(self) -> list[Moment]:
        """The backward of the last block that is recomputed, where others behind it are not."""
        layers, saved = self.spec.model.layers, self.recomputed
        if self.spec.checkpointing == "none" or not 0 < saved < layers:
            return []
        reduced = (layers - saved) // self.together * self.together
        return [self._block("backward of the last recomputed block", saved, reduced)]

    def _forward(self) -> Moment:
        layers = self.spec.model.layers
        kept, gathered = self._activations(layers) + self.loss.saved, self._gathered(layers, 0)
        return self._moment("end of the forward", activations=kept, gathered_parameters=gathered)

    def _loss(self) -> Moment:
        spec = self.spec
        activations = self._activations(spec.model.layers) + max(self.loss.forward, self.loss.backward)
        return self._moment("loss", activations=activations, gathered_parameters=self._gathered(spec.model.layers, 0))

    def _head(self) -> Moment:
        layers = self.spec.model.layers
        return self._moment(
            "backward of the head",
            activations=self._activations(layers) + self.loss.after,
            gathered_parameters=self._gathered(layers, min(1, self.spec.prefetch)),
            whole_gradients=self.head.whole_gradients,
            communication_buffers=self._received(min(1, self.spec.prefetch)),
        )

    def _block(self, name: str, saved: int, reduced: int) -> Moment:
        """The backward of a block with `saved` blocks' activations left and `reduced` blocks behind its unit, at its
        widest: of its gradients there is that of the last product, and the unit behind may still be reduced.
        """
        spec = self.spec
        again = recomputed_per_token(spec) if saved <= self.recomputed else 0.0
        inside = (again + backward_per_token(spec)) * spec.tokens
        ahead = min(spec.prefetch, self._units(saved) - 1)
        waiting = spec.model.layers - saved - reduced  # blocks of the same unit whose backward has ended
        return self._moment(
            name,
            reduced=reduced,
            activations=self._activations(saved) + inside + self.loss.held,
            gathered_parameters=self._gathered(saved, min(1 + spec.prefetch, self._units(saved))),
            whole_gradients=self.last.whole_gradients
            + self.head.whole_gradients
            + waiting * self.block.whole_gradients,
            communication_buffers=(self.unit.reduction if reduced else 0.0) + self._received(ahead),
        )

    def _unit_reduction(self, name: str, saved: int) -> Moment:
        """Behind the last backward of a unit: all of its gradients are copied into the buffer of their reduction."""
        spec = self.spec
        stream = 2 * spec.model.width * spec.param_bytes / spec.tensor_parallel * spec.tokens
        return self._moment(
            name,
            reduced=spec.model.layers - saved,
            activations=self._activations(saved) + stream + self.loss.held,
            gathered_parameters=self._gathered(saved + self.together, min(spec.prefetch, self._units(saved))),
            whole_gradients=self.unit.whole_gradients + self.head.whole_gradients,
            communication_buffers=self.unit.reduction + self._received(min(spec.prefetch, self._units(saved))),
        )

    def _units(self, blocks: int) -> int:
        """Units of so many blocks."""
        return math.ceil(blocks / self.per_unit - 1e-9)

    def _root(self) -> Moment:
        """The reduction of the root's gradients into their slices, when all blocks' are reduced."""
        own = 0.0 if self.spec.grad_accum > 1 else self.root.gradient_slices  # accumulated: counted with all others
        return self._moment(
            "reduction of the root",
            gradient_slices=own,
            reduced=self.spec.model.layers,
            activations=self.loss.held,
            gathered_parameters=self.root.gathered,
            whole_gradients=self.root.whole_gradients,
            communication_buffers=self.root.reduction,
        )

    def _activations(self, blocks: int) -> float:
        again = min(blocks, self.recomputed)
        return again * self.kept + (blocks - again) * self.computed + root_kept_per_token(self.spec) * self.spec.tokens

    def _gathered(self, blocks: int, in_use: int) -> float:
        """The root, and the units in use; all that are left where none is dropped after its forward, and the slices of
        all that are left where these are cut over fewer ranks until their backward has ended.
        """
        few, left = self.variant.ranks_after_forward, self._units(blocks)
        keeps_all = few == 1 or self.spec.row.keeps_gathered
        slices = left / few if few and not keeps_all else 0.0
        return self.root.gathered + self.unit.gathered * ((left if keeps_all else in_use) + slices)

    def _received(self, units: float) -> float:
        """The buffers of gathers that are under way from slices over fewer ranks: these do not arrive in place."""
        few = self.variant.ranks_after_forward
        return units * self.unit.gathered if few and few > 1 else 0.0

    def _moment(
        self, name: str, *, reduced: int | None = 0, whole_gradients: float = 0.0, other: float = 0.0, **more: float
    ) -> Moment:
        """A sum by category; `reduced`: blocks whose gradients have been reduced, None for all and the root's."""
        spec, every = self.spec, self.all
        complete = reduced is None or spec.grad_accum > 1
        slices = every.gradient_slices if complete else self.block.gradient_slices * (reduced or 0)
        kept = every.kept_gradients if complete else self.block.kept_gradients * (reduced or 0)
        found = self._resting().by_category | more
        found["gradient_slices"] += 0.0 if spec.offload else slices
        found["whole_gradients"] += whole_gradients + (0.0 if spec.offload else kept)
        found["other"] += 0.0 if spec.offload else other
        return Moment(name, found)


def host_bytes(spec: PlanSpec) -> float:
    """Bytes of host memory that one rank's offloaded states take; 0 without offload."""
    if not spec.offload:
        return 0.0
    every = unit_bytes(spec.model.block, spec, adapted=True).times(spec.model.layers) + unit_bytes(
        spec.model.root, spec
    )
    return every.parameter_slices + every.gradient_slices + every.optimizer_state


def host_crossing(spec: PlanSpec) -> float:
    """Bytes of a rank over the host's link in a step whose states rest in host memory: slices go to the card for every
    gather of a micro-batch, cast where they rest; gradients come back.
    """
    states = memory_of(replace(spec, offload=False)).at("optimizer step").by_category
    cast = 1.0 if spec.lora_rank else spec.param_bytes / spec.rest_bytes
    gathers = 2 if spec.row.reshards_after_forward else 1
    return spec.grad_accum * (gathers * cast * states["parameter_slices"] + states["gradient_slices"])

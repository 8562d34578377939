"""Peak memory of a step: the bytes of every buffer that the engine's own order of a step takes and gives back.

`planning/program` runs that order and notes the buffers; here each has its size, and activations are added to what is
alive while a unit computes. So there is a moment for the forward of every block, its backward and its reduction, beside
those of the loss, the head, the root and the optimizer; the moment with most bytes is the peak.

Sources: model states, Rajbhandari et al. 2020, section 3.1; activations, activations.py; a unit that is resharded to
fewer ranks, engine/core/fewer_ranks.py (PyTorch's `reshard_after_forward=m`); the first blocks recomputed,
Megatron-LM's `--recompute-method block`; the optimizer on the CPU, Ren et al. 2021 (ZeRO-Offload), section 3.

First comes what one unit needs on one rank, state by state: the table of DESIGN.md 2.1 in numbers. Slices have the
padding of `torch.chunk` (engine/core/layout.py), so the figures are the engine's and FSDP2's, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

from fsdplab.common.names import CATEGORIES
from fsdplab.engine.core.layout import Layout
from fsdplab.workloads.shapes import Parameter

from . import program as buffers
from .activations import Activations
from .bands import Band
from .plan_spec import BASE_BYTES, ITEMSIZES, PlanSpec
from .program import BLOCK, ROOT, Change, Compute, Holds, Program, record_step
from .stages import stages, waiting
from .traffic import first_rank_bytes

# ---- a unit


@dataclass(frozen=True)
class UnitBytes:
    """Of one unit on one rank: its states at rest, and the buffers that come and go (planning/program.py)."""

    sharded_parameters: float = 0.0
    optimizer_state: float = 0.0
    step_scratch: float = 0.0  # of the optimizer, while it steps
    gathered: float = 0.0
    unsharded_gradients: float = 0.0
    kept_gradients: float = 0.0
    reduction: float = 0.0
    sharded_gradients: float = 0.0
    restored: float = 0.0  # the largest of its quantised matrices, restored while it computes
    cast: float = 0.0  # of its matrices as autocast computes with them

    def __add__(self, other: UnitBytes) -> UnitBytes:
        return UnitBytes(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def times(self, count: float) -> UnitBytes:
        """Return the bytes of `count` such units, or of a part of one."""
        return UnitBytes(*(getattr(self, field.name) * count for field in fields(self)))


def all_units(spec: PlanSpec) -> UnitBytes:
    """Sum the bytes of all units."""
    block = unit_bytes(spec.model.block, spec, adapted=True)
    root = unit_bytes(spec.model.root, spec)
    dense = spec.model.mixture.dense_layers if spec.model.mixture else 0
    if dense:  # of what rests alone: a step's blocks are taken as alike
        root += unit_bytes(spec.model.dense_block.block, spec, adapted=True).times(dense)
    return block.times(spec.model.layers - dense) + root


def unit_bytes(parameters: Sequence[Parameter], spec: PlanSpec, *, adapted: bool = False) -> UnitBytes:
    """Return what a unit of these parameters needs.

    `adapted`: LoRA trains adapters beside its matrices and freezes the rest. The root is frozen under LoRA, and not
    quantised.
    """
    held = spec.held(parameters)
    states = _states(held, spec, adapted)
    if spec.autocast and "parameters" not in spec.sharing.cuts:
        # autocast keeps its casts of parameters until its region ends, and none of views into what was gathered
        cast = spec.param_bytes * sum(parameter.count for parameter in held if parameter.is_matrix)
        return UnitBytes(cast=cast) + states
    return states


def _states(held: Sequence[Parameter], spec: PlanSpec, adapted: bool) -> UnitBytes:
    states = UnitBytes()
    if spec.lora_rank:
        for frozen, itemsize in frozen_parts(held, spec, adapted):
            states += _frozen(frozen, itemsize, spec)
        trained = adapters(held, spec.lora_rank) if adapted else []
        return states + _trained(trained, spec, spec.shards)
    for part, among in sharers(held, spec):
        states += _trained(part, spec, among)
    if adapted and spec.optimizer == "muon":  # which has one moment of a matrix, where AdamW has two
        matrices = _trained([parameter for parameter in held if parameter.is_matrix], spec, spec.shards)
        one_moment = matrices.optimizer_state / spec.optimizer_bytes * ITEMSIZES[spec.master_dtype]
        return replace(states, optimizer_state=states.optimizer_state - one_moment)
    return states


def sharers(held: Sequence[Parameter], spec: PlanSpec) -> Iterator[tuple[Sequence[Parameter], int]]:
    """Yield parameters with the ranks over which their states are cut: an expert's among those that hold it."""
    if spec.expert_parallel == 1:
        yield held, spec.shards
        return
    yield [parameter for parameter in held if not parameter.experts], spec.shards
    yield [parameter for parameter in held if parameter.experts], max(1, spec.shards // spec.expert_parallel)


def frozen_parts(
    held: Sequence[Parameter], spec: PlanSpec, adapted: bool
) -> Iterator[tuple[Sequence[Parameter], float]]:
    """Yield what LoRA freezes of a unit, with the bytes of an element: matrices that have adapters, and the rest."""
    matrices = [parameter for parameter in held if parameter.is_matrix and adapted]
    yield matrices, BASE_BYTES[spec.base_dtype or spec.param_dtype]
    yield [parameter for parameter in held if parameter not in matrices], spec.gather_bytes


def frozen_bytes(parameters: Sequence[Parameter], itemsize: float) -> int:
    """Return the whole bytes of them all, packed."""
    return math.ceil(sum(parameter.count for parameter in parameters) * itemsize)


def adapters(parameters: Iterable[Parameter], rank: int) -> list[Parameter]:
    """Return LoRA's two factors of each matrix among them (Hu et al. 2021): rank x (in + out) elements."""
    factors = []
    for parameter in parameters:
        if parameter.is_matrix:
            rows, columns = parameter.shape[0], parameter.shape[1]
            factors.append(Parameter(f"{parameter.name}.lora_a", (rank * max(1, parameter.experts), columns)))
            factors.append(Parameter(f"{parameter.name}.lora_b", (rows, rank)))
    return factors


def _trained(parameters: Sequence[Parameter], spec: PlanSpec, among: int) -> UnitBytes:
    """The states and buffers of parameters that are trained, cut over `among` ranks."""
    if not parameters:
        return UnitBytes()
    sharing = spec.sharing
    entries = tuple((parameter.name, parameter.shape, 1) for parameter in parameters)
    # in elements, since an item of the layout has one byte
    layout = _layout(entries, among if sharing.cuts else 1)
    whole = sum(parameter.count for parameter in parameters)
    padded, piece = layout.total_bytes, layout.shard_bytes
    updated = first_rank_bytes(layout)
    sharded = 0 if sharing.aliased else piece * spec.rest_bytes
    if sharing.keeps_whole:
        sharded += whole * spec.gather_bytes
    scratch = 0.0
    if spec.optimizer == "adamw-foreach":
        scratch = updated * ITEMSIZES[spec.master_dtype]
    return UnitBytes(
        sharded_parameters=sharded,
        optimizer_state=updated * spec.optimizer_bytes,
        step_scratch=scratch,
        gathered=padded * spec.gather_bytes,
        unsharded_gradients=whole * spec.gather_bytes,
        kept_gradients=whole * (spec.reduce_bytes if sharing.no_sync else spec.rest_bytes),
        reduction=padded * spec.reduce_bytes,
        sharded_gradients=piece * spec.rest_bytes,
    )


_layout = lru_cache(maxsize=256)(Layout.of)  # of a block and of a root, whatever the plan's other settings are


def _frozen(parameters: Sequence[Parameter], itemsize: float, spec: PlanSpec) -> UnitBytes:
    """Parameters without gradients and optimizer state; a quantised matrix is computed with one at a time."""
    whole = frozen_bytes(parameters, itemsize)
    restored = 0
    if itemsize != spec.param_bytes:
        restored = spec.param_bytes * max((parameter.count for parameter in parameters), default=0)
    if "parameters" in spec.sharing.cuts and (spec.sharing.shards or spec.offload):
        shard = -(-whole // spec.shards)  # rounded up
        return UnitBytes(sharded_parameters=shard, gathered=whole, restored=restored)
    return UnitBytes(sharded_parameters=whole, restored=restored)


# ---- a step


# An assumption, not measured here: the CUDA context and its kernels (some 0.5 GiB) and NCCL's channels (as much).
# The allocator knows nothing of them.
FRAMEWORK_BYTES = 2**30
# Reserved bytes over bytes in use, of the one published run that prints both (torchtitan PR #165, FSDP2, eager:
# 59.41 GiB reserved, 49.54 active). Expandable segments come closer to 1.
RESERVED_OVER_USED = 59.41 / 49.54


class Moment(NamedTuple):
    """Bytes by category on one rank at one instant of a step. `place`: that of the last operation before it in the last
    micro-batch; -1 before the step. `notable`: whether it is one of the few at which most peaks lie.
    """

    name: str
    by_category: dict[str, float]
    place: int = -1
    notable: bool = True

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(self.by_category.values())


def reserved_bytes(peak: float) -> float:
    """Return the bytes that the allocator is likely to have taken from the device at a peak of so many."""
    return (peak - FRAMEWORK_BYTES) * RESERVED_OVER_USED


def needed_bytes(peak: float, band: Band) -> float:
    """Return the bytes that a card must have to hold a peak for certain.

    It must hold what is likely to be reserved beside the framework's own, and the upper end of the band.
    """
    return max(reserved_bytes(peak) + FRAMEWORK_BYTES, band.around(peak)[1])


@dataclass(frozen=True)
class Memory:
    """The moments of a step in their order; the peak is the largest."""

    moments: tuple[Moment, ...]

    @cached_property
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
        return reserved_bytes(self.peak.total)

    def fitness(self, card_bytes: float, band: Band) -> str:
        """Say whether a card holds it.

        `yes`: it holds what the allocator is likely to reserve beside the framework's own, and the upper end of the
        band; `likely`: it holds the peak; else `no`.
        """
        if self.peak.total > card_bytes:
            return "no"
        return "yes" if needed_bytes(self.peak.total, band) <= card_bytes else "likely"

    def at(self, name: str) -> Moment:
        """Return the moment of that name."""
        return next(moment for moment in self.moments if moment.name == name)

    @property
    def resting(self) -> Moment:
        """Between two steps: what the model's states take."""
        return self.moments[0]


def memory_of(spec: PlanSpec) -> Memory:
    """Predict the memory of one rank through a step.

    Of a pipeline: the stage that needs most.
    """
    if spec.pipeline_parallel > 1:
        by_stage = (_of_stage(spec, index, stage) for index, stage in stages(spec))
        return max(by_stage, key=lambda memory: memory.peak.total)
    has_root = bool(spec.model.root)  # a stage in the middle has none
    root = (ROOT, Holds(has_root, has_root and not spec.lora_rank))
    blocks = [(name, Holds()) for name in _units(spec)]
    # micro-batches between the first and the last are alike
    program = record_step((root, *blocks), spec.sharing, spec.prefetch, min(spec.grad_accum, 3))
    return memory_of_program(program, spec)


def _of_stage(spec: PlanSpec, index: int, stage: PlanSpec) -> Memory:
    """A stage's own step, and beside it what the micro-batches keep that wait for their backward."""
    layers = stage.model.layers
    kept = waiting(spec, index) * Activations(stage, layers).saved(layers, 0.0)
    resting, *passing, stepping = memory_of(stage).moments
    beside = []
    for moment in passing:
        activations = moment.by_category["activations"] + kept
        beside.append(moment._replace(by_category=moment.by_category | {"activations": activations}))
    return Memory((resting, *beside, stepping))


def memory_of_program(program: Program, spec: PlanSpec) -> Memory:
    """Predict the memory for the operations of each micro-batch of a step; moments are those of the last."""
    return Memory(tuple(_Step(spec).moments(program)))


def _units(spec: PlanSpec) -> dict[str, int]:
    """The units below the root, and the number of each one's block."""
    return {f"{BLOCK}s.{number}": number for number in range(spec.model.layers)}


_LAST_PRODUCTS = ("down.weight", "experts.down.weight")


def _head_of(spec: PlanSpec) -> tuple[Parameter, ...]:
    """The table that the head multiplies with; none where a stage of a pipeline has no head."""
    begins, ends = spec.model.ends
    if not ends:
        return ()
    return spec.model.root[:1] if spec.model.tied and begins else spec.model.root[-1:]


class _Step:
    """The sizes of a plan's buffers and activations, and what is alive."""

    def __init__(self, spec: PlanSpec) -> None:
        self.spec = spec
        layers = spec.model.layers
        recomputed = layers  # blocks: all, unless the plan says how many
        if spec.recomputed_blocks is not None:
            recomputed = min(layers, spec.recomputed_blocks)
        self.activations = Activations(spec, recomputed)
        self.block = unit_bytes(spec.model.block, spec, adapted=True)
        root = unit_bytes(spec.model.root, spec)
        self.all: UnitBytes = self.block.times(layers) + root
        self.units = _units(spec)
        # by unit, category and bytes of each of its buffers; blocks share theirs
        self.sizes = dict.fromkeys(self.units, self._buffers(self.block))
        self.sizes[ROOT] = self._buffers(root)
        # gradients of the root, of its head, and of a block's last product
        self.root = root.unsharded_gradients
        self.head = unit_bytes(_head_of(spec), spec).unsharded_gradients
        last = [parameter for parameter in spec.model.block if parameter.name in _LAST_PRODUCTS]
        self.last = unit_bytes(last, spec, adapted=True).unsharded_gradients
        self.names = {1: "the second block", layers - 2: "the last block but one", 0: "the first block"}
        if spec.checkpointing != "none" and 0 < recomputed < layers:
            self.names[recomputed - 1] = "the last recomputed block"
        self.names[layers - 1] = "the last block"
        self.now = _resting(spec, self.all)  # bytes by category
        self.place = -1
        self.cast = 0.0  # bytes of what autocast has cast since the forward began

    def _buffers(self, unit: UnitBytes) -> dict[str, tuple[str, int]]:
        """Category and bytes of each buffer that a unit takes."""
        reduced = "sharded_gradients" if self.spec.sharing.cuts else "unsharded_gradients"
        gathered = round(unit.gathered)
        over_fewer = round(unit.gathered / (self.spec.ranks_after_forward or 1))
        return {
            buffers.GATHERED: ("unsharded_parameters", gathered),
            buffers.FEWER: ("unsharded_parameters", over_fewer),
            buffers.ARRIVING: ("communication_buffers", gathered),
            buffers.GRADIENTS: ("unsharded_gradients", round(unit.unsharded_gradients)),
            buffers.KEPT: ("unsharded_gradients", round(unit.kept_gradients)),
            buffers.SENT: ("communication_buffers", round(unit.reduction)),
            buffers.REDUCED: (reduced, round(unit.sharded_gradients)),
        }

    def moments(self, program: Program) -> Iterator[Moment]:
        """Yield those of the last micro-batch, between one before the step and one while the optimizer steps."""
        yield self._moment("between steps")
        for operation in chain.from_iterable(program[:-1]):
            if isinstance(operation, Change):
                self._change(operation)
        for self.place, operation in enumerate(program[-1]):
            if isinstance(operation, Change):
                self._change(operation)
                if operation.buffer == buffers.REDUCED and operation.sign > 0:
                    yield self._reduction(operation.unit)
            elif isinstance(operation, Compute):
                if operation.unit == ROOT:
                    yield from self._in_root(operation.phase)
                else:
                    yield from self._in_unit(operation.unit, operation.phase)
        self.now["activations"] = 0.0
        scratch = 0.0 if self.spec.offload else self.all.step_scratch
        yield self._moment("optimizer step", other=scratch)

    def _change(self, change: Change) -> None:
        category, nbytes = self.sizes[change.unit][change.buffer]
        self.now[category] += change.sign * nbytes

    def _moment(self, name: str, notable: bool = True, **more: float) -> Moment:
        """What is alive, and more of some categories."""
        alive = dict(self.now)
        for category, nbytes in more.items():
            alive[category] += nbytes
        return Moment(name, alive, self.place, notable)

    def _of_block(self, what: str, block: int, notable: bool, **more: float) -> Moment:
        name = self.names.get(block)
        if name is None:
            return self._moment(f"{what} of block {block}", False, **more)
        return self._moment(f"{what} of {name}", notable, **more)

    def _in_root(self, phase: str) -> Iterator[Moment]:
        """What the root computes: embeddings, and behind the blocks the head and the loss."""
        loss, batch = self.activations.loss, self.activations.batch
        if phase == "begin":
            self.now["activations"] = batch
        elif phase == "forward":
            self.now["activations"] += self.activations.last_norm
            yield self._moment("end of the forward", activations=loss.saved)
            yield self._moment("loss", activations=max(loss.forward, loss.backward))
        elif phase == "backward":
            self.now["unsharded_parameters"] -= self.cast  # autocast drops its casts at the end of the forward
            self.cast = 0.0
            self.now["unsharded_gradients"] += self.head
            yield self._moment("backward of the head", activations=loss.after)
        else:
            second = self.root - self.head
            if self.spec.model.tied and all(self.spec.model.ends):
                second += self.head  # the embedding's own gradient of the table, beside the head's
                if self.spec.loss == "eager" and not self.spec.autocast:
                    # the head's is a view, into which autograd does not add: their sum is a third one
                    second += self.head
            yield self._moment("backward of the embeddings", unsharded_gradients=second)
            self.now["unsharded_gradients"] -= self.head
            self.now["activations"] = batch + loss.held

    def _in_unit(self, unit: str, phase: str) -> Iterator[Moment]:
        """The block of a unit: a backward at its widest, when of the gradients there is that of the last product."""
        activations, block = self.activations, self.units[unit]
        if phase == "forward":
            self.now["activations"] = activations.saved(block, 1.0)
            self.now["unsharded_parameters"] += self.block.cast
            self.cast += self.block.cast
            yield self._of_block("forward", block, False)
            return
        held = activations.loss.held
        self.now["activations"] = activations.saved(block, 1.0) + held
        yield self._of_block(
            "backward",
            block,
            True,
            activations=activations.inside(block),
            unsharded_parameters=self.block.restored + self.block.cast,
            unsharded_gradients=self.last,
        )
        # of its own activations nothing is left but the gradient of its input
        self.now["activations"] = activations.saved(block, 0.0) + activations.stream + held
        yield self._of_block("end of the backward", block, False, unsharded_gradients=self.block.unsharded_gradients)

    def _reduction(self, unit: str) -> Moment:
        """Packed gradients and what they are reduced to, beside the gradients themselves."""
        if unit == ROOT:
            return self._moment("reduction of the root")
        return self._of_block("reduction", self.units[unit], True)


def fits_card(spec: PlanSpec) -> bool:
    """Return whether the peak is within the card."""
    card = spec.gpu.memory_bytes
    if spec.pipeline_parallel == 1 and resting_bytes(spec) > card:
        return False  # what rests is the least that a peak can be, and takes no step to know
    return memory_of(spec).peak.total <= card


def resting_bytes(spec: PlanSpec) -> float:
    """Return what a rank holds between two steps: the least that its peak can be."""
    return sum(_resting(spec, all_units(spec)).values())


def _resting(spec: PlanSpec, units: UnitBytes) -> dict[str, float]:
    resting = dict.fromkeys(CATEGORIES, 0.0) | {"other": float(FRAMEWORK_BYTES)}
    if not spec.offload:
        resting["sharded_parameters"] = units.sharded_parameters
        resting["optimizer_state"] = units.optimizer_state
    return resting


def host_bytes(spec: PlanSpec) -> float:
    """Return the bytes of host memory that one rank's offloaded states take; 0 without offload."""
    if not spec.offload:
        return 0.0
    states = all_units(spec)
    return states.sharded_parameters + states.sharded_gradients + states.optimizer_state

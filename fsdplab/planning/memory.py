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
        return UnitBytes(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def times(self, count: float) -> UnitBytes:
        """Of `count` such units, or of a part of one."""
        return UnitBytes(*(getattr(self, each.name) * count for each in fields(self)))


def all_units(spec: PlanSpec) -> UnitBytes:
    """Of all units together."""
    block, root = unit_bytes(spec.model.block, spec, adapted=True), unit_bytes(spec.model.root, spec)
    dense = spec.model.mixture.dense_layers if spec.model.mixture else 0
    if dense:  # of what rests alone: a step's blocks are taken as alike
        root += unit_bytes(spec.model.dense_block.block, spec, adapted=True).times(dense)
    return block.times(spec.model.layers - dense) + root


def unit_bytes(parameters: Sequence[Parameter], spec: PlanSpec, *, adapted: bool = False) -> UnitBytes:
    """What a unit of these parameters needs; `adapted`: LoRA trains adapters beside its matrices and freezes the rest.

    The root is frozen under LoRA, and not quantised.
    """
    held = spec.held(parameters)
    # autocast keeps its casts of parameters until its region ends, and none of views into what was gathered
    casts = spec.autocast and "parameters" not in spec.sharing.cuts
    cast = UnitBytes(cast=spec.param_bytes * sum(each.count for each in held if each.is_matrix) if casts else 0.0)
    return cast + _states(held, spec, adapted)


def _states(held: Sequence[Parameter], spec: PlanSpec, adapted: bool) -> UnitBytes:
    if not spec.lora_rank:
        found = UnitBytes()
        for part, among in sharers(held, spec):
            found += _trained(part, spec, among)
        if adapted and spec.optimizer == "muon":  # which has one moment of a matrix
            matrices = _trained([each for each in held if each.is_matrix], spec, spec.shards)
            one = matrices.optimizer_state / spec.optimizer_bytes * ITEMSIZES[spec.master_dtype]
            return replace(found, optimizer_state=found.optimizer_state - one)
        return found
    base = UnitBytes()
    for frozen, itemsize in frozen_parts(held, spec, adapted):
        base += _frozen(frozen, itemsize, spec)
    return base + _trained(adapters(held, spec.lora_rank) if adapted else [], spec, spec.shards)


def sharers(held: Sequence[Parameter], spec: PlanSpec) -> Iterator[tuple[Sequence[Parameter], int]]:
    """Parameters with the ranks over which their states are cut: an expert's are cut among those that hold it."""
    if spec.expert_parallel == 1:
        yield held, spec.shards
        return
    yield [each for each in held if not each.experts], spec.shards
    yield [each for each in held if each.experts], max(1, spec.shards // spec.expert_parallel)


def frozen_parts(
    held: Sequence[Parameter], spec: PlanSpec, adapted: bool
) -> Iterator[tuple[Sequence[Parameter], float]]:
    """What LoRA freezes of a unit, with the bytes of an element: matrices that have adapters, and the rest."""
    matrices = [each for each in held if each.is_matrix and adapted]
    yield matrices, BASE_BYTES[spec.base_dtype or spec.param_dtype]
    yield [each for each in held if each not in matrices], spec.gather_bytes


def frozen_bytes(parameters: Sequence[Parameter], itemsize: float) -> int:
    """Whole bytes of them all, packed."""
    return math.ceil(sum(each.count for each in parameters) * itemsize)


def adapters(parameters: Iterable[Parameter], rank: int) -> list[Parameter]:
    """LoRA's two factors of each matrix among them (Hu et al. 2021): rank x (in + out) elements."""
    found = []
    for each in parameters:
        if each.is_matrix:
            found.append(Parameter(f"{each.name}.lora_a", (rank * max(1, each.experts), each.shape[1])))
            found.append(Parameter(f"{each.name}.lora_b", (each.shape[0], rank)))
    return found


def _trained(parameters: Sequence[Parameter], spec: PlanSpec, among: int) -> UnitBytes:
    if not parameters:
        return UnitBytes()
    sharing, entries = spec.sharing, tuple((each.name, each.shape, 1) for each in parameters)
    layout = _layout(entries, among if sharing.cuts else 1)
    whole, padded, piece = sum(each.count for each in parameters), layout.total_bytes, layout.shard_bytes
    own = sum((slot.span(0)[1] - slot.span(0)[0]) * slot.row_bytes for slot in layout.slots)
    resting = 0 if sharing.aliased else piece * spec.rest_bytes
    return UnitBytes(
        sharded_parameters=resting + (whole * spec.gather_bytes if sharing.keeps_whole else 0),
        optimizer_state=own * spec.optimizer_bytes,
        step_scratch=own * ITEMSIZES[spec.master_dtype] if spec.optimizer == "adamw-foreach" else 0.0,
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
    largest = max((each.count for each in parameters), default=0)
    restored = largest * spec.param_bytes if itemsize != spec.param_bytes else 0
    if "parameters" in spec.sharing.cuts and (spec.sharing.shards or spec.offload):
        return UnitBytes(sharded_parameters=-(-whole // spec.shards), gathered=whole, restored=restored)
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
    """Bytes that the allocator is likely to have taken from the device at a peak of so many."""
    return (peak - FRAMEWORK_BYTES) * RESERVED_OVER_USED


def needed_bytes(peak: float, band: Band) -> float:
    """What a card must have to hold a peak for certain: what is likely to be reserved beside the framework's own, and
    the upper end of the band.
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
        """`yes`: a card holds what the allocator is likely to reserve beside the framework's own, and the upper end of
        the band; `likely`: it holds the peak; else `no`.
        """
        if self.peak.total > card_bytes:
            return "no"
        return "yes" if needed_bytes(self.peak.total, band) <= card_bytes else "likely"

    def at(self, name: str) -> Moment:
        """The moment of that name."""
        return next(moment for moment in self.moments if moment.name == name)

    @property
    def resting(self) -> Moment:
        """Between two steps: what the model's states take."""
        return self.moments[0]


def memory_of(spec: PlanSpec) -> Memory:
    """The memory of one rank through a step.

    Of a pipeline: the stage that needs most.
    """
    if spec.pipeline_parallel > 1:
        each = (_of_stage(spec, index, stage) for index, stage in stages(spec))
        return max(each, key=lambda memory: memory.peak.total)
    has = bool(spec.model.root)
    units = ((ROOT, Holds(has, has and not spec.lora_rank)), *((name, Holds()) for name in _units(spec)))
    return memory_of_program(record_step(units, spec.sharing, spec.prefetch, min(spec.grad_accum, 3)), spec)


def _of_stage(spec: PlanSpec, index: int, stage: PlanSpec) -> Memory:
    """A stage's own step, and beside it what the micro-batches keep that wait for their backward."""
    kept = waiting(spec, index) * Activations(stage, stage.model.layers).saved(stage.model.layers, 0.0)
    resting, *passing, stepping = memory_of(stage).moments
    alive = (each.by_category | {"activations": each.by_category["activations"] + kept} for each in passing)
    more = (each._replace(by_category=found) for each, found in zip(passing, alive))
    return Memory((resting, *more, stepping))


def memory_of_program(program: Program, spec: PlanSpec) -> Memory:
    """The same for the operations of each micro-batch of a step; moments are those of the last."""
    return Memory(tuple(_Step(spec).moments(program)))


def _units(spec: PlanSpec) -> dict[str, int]:
    """The units below the root, and the number of each one's block."""
    return {f"{BLOCK}s.{number}": number for number in range(spec.model.layers)}


class _Step:
    """The sizes of a plan's buffers and activations, and what is alive."""

    def __init__(self, spec: PlanSpec) -> None:
        self.spec = spec
        layers, recomputed = spec.model.layers, spec.recomputed_blocks
        recomputed = layers if recomputed is None else min(layers, recomputed)
        self.activations = Activations(spec, recomputed)
        self.block, root = unit_bytes(spec.model.block, spec, adapted=True), unit_bytes(spec.model.root, spec)
        self.all: UnitBytes = self.block.times(layers) + root
        self.units = _units(spec)
        self.sizes = dict.fromkeys(self.units, self._buffers(self.block))
        self.sizes[ROOT] = self._buffers(root)
        head = spec.model.root[:1] if spec.model.tied and spec.model.ends[0] else spec.model.root[-1:]
        head = head if spec.model.ends[1] else ()
        self.root, self.head = root.unsharded_gradients, unit_bytes(head, spec).unsharded_gradients
        last = [each for each in spec.model.block if each.name in ("down.weight", "experts.down.weight")]
        self.last = unit_bytes(last, spec, adapted=True).unsharded_gradients
        self.names = {1: "the second block", layers - 2: "the last block but one", 0: "the first block"}
        if spec.checkpointing != "none" and 0 < recomputed < layers:
            self.names[recomputed - 1] = "the last recomputed block"
        self.names[layers - 1] = "the last block"
        self.now, self.place, self.cast = _resting(spec, self.all), -1, 0.0

    def _buffers(self, unit: UnitBytes) -> dict[str, tuple[str, int]]:
        """Category and bytes of each buffer that a unit takes."""
        reduced = "sharded_gradients" if self.spec.sharing.cuts else "unsharded_gradients"
        return {
            buffers.GATHERED: ("unsharded_parameters", round(unit.gathered)),
            buffers.FEWER: ("unsharded_parameters", round(unit.gathered / (self.spec.ranks_after_forward or 1))),
            buffers.ARRIVING: ("communication_buffers", round(unit.gathered)),
            buffers.GRADIENTS: ("unsharded_gradients", round(unit.unsharded_gradients)),
            buffers.KEPT: ("unsharded_gradients", round(unit.kept_gradients)),
            buffers.SENT: ("communication_buffers", round(unit.reduction)),
            buffers.REDUCED: (reduced, round(unit.sharded_gradients)),
        }

    def moments(self, program: Program) -> Iterator[Moment]:
        """Those of the last micro-batch, between one before the step and one while the optimizer steps."""
        yield self._moment("between steps")
        for each in chain.from_iterable(program[:-1]):
            if isinstance(each, Change):
                self._change(each)
        for self.place, each in enumerate(program[-1]):
            if isinstance(each, Change):
                self._change(each)
                if each.buffer == buffers.REDUCED and each.sign > 0:
                    yield self._reduction(each.unit)
            elif isinstance(each, Compute):
                yield from self._in_root(each.phase) if each.unit == ROOT else self._in_unit(each.unit, each.phase)
        self.now["activations"] = 0.0
        yield self._moment("optimizer step", other=0.0 if self.spec.offload else self.all.step_scratch)

    def _change(self, each: Change) -> None:
        category, nbytes = self.sizes[each.unit][each.buffer]
        self.now[category] += each.sign * nbytes

    def _moment(self, name: str, notable: bool = True, **more: float) -> Moment:
        """What is alive, and more of some categories."""
        found = dict(self.now)
        for category, nbytes in more.items():
            found[category] += nbytes
        return Moment(name, found, self.place, notable)

    def _of_block(self, what: str, block: int, notable: bool, **more: float) -> Moment:
        name = self.names.get(block)
        return self._moment(f"{what} of {name or f'block {block}'}", notable and name is not None, **more)

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
            second = self.root - (0 if self.spec.model.tied else self.head)  # a tied table has two, which are added
            yield self._moment("backward of the embeddings", unsharded_gradients=second)
            self.now["unsharded_gradients"] -= self.head
            self.now["activations"] = batch + loss.held

    def _in_unit(self, unit: str, phase: str) -> Iterator[Moment]:
        """The block of a unit: a backward at its widest, when of the gradients there is that of the last product."""
        alive, block = self.activations, self.units[unit]
        if phase == "forward":
            self.now["activations"] = alive.saved(block, 1.0)
            self.now["unsharded_parameters"] += self.block.cast
            self.cast += self.block.cast
            yield self._of_block("forward", block, False)
            return
        held = alive.loss.held
        self.now["activations"] = alive.saved(block, 1.0) + held
        yield self._of_block(
            "backward", block, True, activations=alive.inside(block),
            unsharded_parameters=self.block.restored + self.block.cast, unsharded_gradients=self.last,
        )  # fmt: skip
        self.now["activations"] = alive.saved(block, 0.0) + alive.stream + held
        yield self._of_block("end of the backward", block, False, unsharded_gradients=self.block.unsharded_gradients)

    def _reduction(self, unit: str) -> Moment:
        """Packed gradients and what they are reduced to, beside the gradients themselves."""
        if unit == ROOT:
            return self._moment("reduction of the root")
        return self._of_block("reduction", self.units[unit], True)


def fits_card(spec: PlanSpec) -> bool:
    """Whether the peak is within the card; what rests is less than that, and takes no step to know."""
    card = spec.gpu.memory_bytes
    at_rest = spec.pipeline_parallel > 1 or resting_bytes(spec) <= card
    return at_rest and memory_of(spec).peak.total <= card


def resting_bytes(spec: PlanSpec) -> float:
    """What a rank holds between two steps: the least that its peak can be."""
    return sum(_resting(spec, all_units(spec)).values())


def _resting(spec: PlanSpec, units: UnitBytes) -> dict[str, float]:
    found = dict.fromkeys(CATEGORIES, 0.0) | {"other": float(FRAMEWORK_BYTES)}
    if not spec.offload:
        found["sharded_parameters"] = units.sharded_parameters
        found["optimizer_state"] = units.optimizer_state
    return found


def host_bytes(spec: PlanSpec) -> float:
    """Bytes of host memory that one rank's offloaded states take; 0 without offload."""
    if not spec.offload:
        return 0.0
    every = all_units(spec)
    return every.sharded_parameters + every.sharded_gradients + every.optimizer_state

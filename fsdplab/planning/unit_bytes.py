"""Bytes that one unit needs on one rank, state by state: the table of DESIGN.md 2.1 in numbers.

Slices have the padding of `torch.chunk` (engine/core/layout.py), so the figures are the engine's and FSDP2's, byte for
byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from fsdplab.engine.core.layout import Layout
from fsdplab.workloads.shapes import Parameter

from .plan_spec import BASE_BYTES, ITEMSIZES, PlanSpec


@dataclass(frozen=True)
class UnitBytes:
    """Of one unit on one rank: its states at rest, and the buffers that come and go (planning/program/memory.py)."""

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

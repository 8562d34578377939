"""Bytes that one unit needs on one rank, state by state: the table of DESIGN.md 2.1 in numbers.

Slices have the padding of `torch.chunk` (engine/core/layout.py), so the figures are the engine's and FSDP2's, byte for
byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from fsdplab.engine.core.layout import Layout
from fsdplab.workloads.shapes import Parameter

from .plan_spec import BASE_BYTES, ITEMSIZES, PlanSpec


@dataclass(frozen=True)
class UnitBytes:
    """Of one unit on one rank: what rests, what is gathered to compute with, gradients and their way to the slices."""

    parameter_slices: float = 0.0
    gathered: float = 0.0  # beside the slices, while it is gathered
    gradient_slices: float = 0.0
    whole_gradients: float = 0.0  # from its backward to its reduction
    kept_gradients: float = 0.0  # of those, what stays until the step ends: no_shard's and zero1's
    optimizer_state: float = 0.0
    reduction: float = 0.0  # the buffer that a reduction reads
    step_scratch: float = 0.0  # of the optimizer, while it steps

    def __add__(self, other: UnitBytes) -> UnitBytes:
        return UnitBytes(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def times(self, count: float) -> UnitBytes:
        """Of `count` such units, or of a part of one."""
        return UnitBytes(*(getattr(self, each.name) * count for each in fields(self)))


def unit_bytes(parameters: Sequence[Parameter], spec: PlanSpec, *, adapted: bool = False) -> UnitBytes:
    """What a unit of these parameters needs; `adapted`: LoRA trains adapters beside its matrices and freezes the rest.

    The root is frozen under LoRA, and not quantised.
    """
    held = [each.on(spec.tensor_parallel) for each in parameters]
    if not spec.lora_rank:
        return _trained(held, spec)
    matrices = [each for each in held if each.is_matrix and adapted]
    others = [each for each in held if each not in matrices]
    base = _frozen(matrices, BASE_BYTES[spec.base_dtype or spec.param_dtype], spec)
    return base + _frozen(others, spec.param_bytes, spec) + _trained(adapters(matrices, spec.lora_rank), spec)


def adapters(matrices: Iterable[Parameter], rank: int) -> list[Parameter]:
    """LoRA's two factors of each matrix (Hu et al. 2021): rank x (in + out) elements."""
    found = []
    for each in matrices:
        found.append(Parameter(f"{each.name}.lora_a", (rank, each.shape[1])))
        found.append(Parameter(f"{each.name}.lora_b", (each.shape[0], rank)))
    return found


def _trained(parameters: Sequence[Parameter], spec: PlanSpec) -> UnitBytes:
    cuts = spec.row.cuts
    layout = _layout(tuple((each.name, each.shape, 1) for each in parameters), spec.shards)
    whole, padded, piece = sum(each.count for each in parameters), layout.total_bytes, layout.slice_bytes
    own = sum((slot.span(0)[1] - slot.span(0)[0]) * slot.row_bytes for slot in layout.slots)
    updated = own if "optimizer" in cuts else whole
    state = dict(
        optimizer_state=updated * spec.optimizer_bytes,
        step_scratch=updated * ITEMSIZES[spec.master_dtype] if spec.optimizer == "adamw-foreach" else 0.0,
        whole_gradients=float(whole * spec.param_bytes),
        reduction=float((padded if cuts else whole) * spec.reduce_bytes) if spec.shards * spec.replicas > 1 else 0.0,
    )
    if "parameters" in cuts:
        gathered = padded * spec.param_bytes if spec.shards > 1 or spec.mixed else 0
        return UnitBytes(piece * spec.rest_bytes, gathered, piece * spec.rest_bytes, **state)
    return _with_whole_parameters(whole, piece, cuts, spec, state)


_layout = lru_cache(maxsize=256)(Layout.of)  # of a block and of a root, whatever the plan's other settings are


def _with_whole_parameters(
    whole: int, piece: int, cuts: tuple[str, ...], spec: PlanSpec, state: dict[str, float]
) -> UnitBytes:
    """no_shard, zero1 and zero2: parameters rest whole, under the latter two in the dtype that is computed with."""
    if not cuts:
        copy, grown = whole * spec.param_bytes if spec.mixed else 0, float(whole * spec.rest_bytes)
        return UnitBytes(whole * spec.rest_bytes, copy, **state, kept_gradients=grown)
    slices = whole * spec.param_bytes + (piece * spec.rest_bytes if spec.mixed else 0)
    kept = 0.0 if "gradients" in cuts else float(whole * spec.rest_bytes)  # accumulated in the dtype of the slices
    reduced = piece * spec.rest_bytes if "gradients" in cuts or spec.masters == "slices" else 0
    return UnitBytes(slices, 0.0, reduced, **state, kept_gradients=kept)


def _frozen(parameters: Sequence[Parameter], itemsize: float, spec: PlanSpec) -> UnitBytes:
    """Parameters without gradients and optimizer state; a quantised matrix is computed with one at a time."""
    whole = math.ceil(sum(each.count for each in parameters) * itemsize)
    largest = max((each.count for each in parameters), default=0)
    computed = largest * spec.param_bytes if itemsize != spec.param_bytes else 0
    if spec.row.gathers_once or spec.shards == 1:
        return UnitBytes(whole, computed)
    return UnitBytes(-(-whole // spec.shards), whole + computed)

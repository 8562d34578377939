"""Computes what a run must send in one step by the formula of its strategy, which the ledger is compared with."""

from __future__ import annotations

from typing import Any

from fsdplab.common.names import IN_GROUPS, STRATEGY_ROWS
from fsdplab.planning import Traffic, UnitShapes, step_traffic
from fsdplab.planning.lab_memory import LabRun, StepChoices, unit_parameters
from fsdplab.planning.muon import OwnersStep, state_bytes
from fsdplab.sessions.spec import RunSpec
from fsdplab.workloads.shapes import preset


def formula_bytes(spec: RunSpec) -> int | None:
    """Return the bytes that one rank should send in one step, by the textbook's formula for the strategy; None for the
    twin, which sends nothing, and for a model whose shapes are not known.
    """
    if spec.engine == "twin" or spec.own_model:
        return None
    return sum(entry.step_bytes for entry in traffic_of(spec, spec.strategy))


def traffic_of(spec: RunSpec, strategy: str) -> list[Traffic]:
    """Return the collectives of one step of this run under `strategy`, by the formula."""
    run = lab_run(spec)
    units = []
    for unit, parameters in unit_parameters(run).items():
        shapes = tuple((parameter.name, parameter.shape) for parameter in parameters)
        units.append(UnitShapes(unit, shapes))
    rows = step_traffic(
        units,
        strategy,
        spec.world_size,
        param_itemsize=run.itemsize,
        # gradients are reduced in float32 under bf16 too
        reduce_itemsize=4,
        micro_batches=spec.micro_batches,
        replicas=spec.replicas if strategy in IN_GROUPS else 1,
    )
    if spec.optimizer == "muon":
        # Muon's step communicates too: momentum to the owners of matrices, where shards are cut, and updates back
        rows += owners_step(spec, strategy).traffic()
    return rows


def owners_step(spec: RunSpec, strategy: str) -> OwnersStep:
    """Return Muon's step of a run: over the ranks of a shard group, or over all that hold whole matrices."""
    ranks = spec.world_size
    if strategy in IN_GROUPS:
        ranks //= spec.replicas
    whole = not STRATEGY_ROWS[strategy].cuts
    return OwnersStep.of(preset(spec.model), ranks, whole)


def lab_run(spec: RunSpec) -> LabRun:
    """Return the run as the planner's models of the lab's engine take it."""
    return LabRun(
        shape=preset(spec.model),
        batch=spec.batch_size,
        sequence=spec.sequence_length,
        checkpoint=spec.checkpoint,
        units="block" if spec.units == "auto" else spec.units,
        **vars(step_choices(spec)) | _of_muon(spec),
    )


def step_choices(spec: RunSpec) -> StepChoices:
    """Return what of a run counts for its memory whatever it trains, under AdamW."""
    # 8 ranks in 2 groups: 4 shards, 2 replicas; a strategy that cuts nothing has 1 shard, 8 replicas
    shards = spec.world_size // spec.replicas if spec.row.cuts else 1
    return StepChoices(
        strategy=spec.strategy,
        shards=shards,
        replicas=spec.world_size // shards,
        # bytes of an element as it is gathered and computed with
        itemsize=2 if spec.precision == "bf16" else 4,
        micro_batches=spec.micro_batches,
        prefetch=spec.prefetch,
        offloads=spec.offload != "none",
        foreach=spec.optimizer == "adamw-foreach",
    )


def _of_muon(spec: RunSpec) -> dict[str, Any]:
    if spec.optimizer != "muon":
        return {}
    shape = preset(spec.model)
    packed, other = owners_step(spec, spec.strategy).held
    return {"state_bytes": state_bytes(shape), "step_buffers": packed, "step_scratch": other}

"""What a run must send in one step, by the formula of its strategy: the number that the ledger is held to."""

from __future__ import annotations

from typing import Any

from fsdplab.common.names import IN_GROUPS, STRATEGY_ROWS
from fsdplab.planning import Traffic, UnitShapes, step_traffic
from fsdplab.planning.lab_memory import LabRun, StepChoices, unit_parameters
from fsdplab.planning.muon import OwnersStep, state_bytes
from fsdplab.sessions.spec import RunSpec
from fsdplab.workloads.shapes import preset


def formula_bytes(spec: RunSpec) -> int | None:
    """Bytes that one rank should send in one step, by the textbook's formula for the strategy; None for the twin, which
    sends nothing, and for a model whose shapes are not known.
    """
    if spec.engine == "twin" or spec.own_model:
        return None
    return sum(entry.step_bytes for entry in traffic_of(spec, spec.strategy))


def traffic_of(spec: RunSpec, strategy: str) -> list[Traffic]:
    """The collectives of one step of this run under `strategy`, by the formula."""
    run = lab_run(spec)
    units = [
        UnitShapes(name, tuple((each.name, each.shape) for each in own)) for name, own in unit_parameters(run).items()
    ]
    rows = step_traffic(
        units,
        strategy,
        spec.world_size,
        param_itemsize=run.itemsize,
        reduce_itemsize=4,
        micro_batches=spec.micro_batches,
        replicas=spec.replicas if strategy in IN_GROUPS else 1,
    )
    return rows + owners_step(spec, strategy).traffic() if spec.optimizer == "muon" else rows


def owners_step(spec: RunSpec, strategy: str) -> OwnersStep:
    """Muon's step of a run: over the ranks of a shard group, or over all that hold whole matrices."""
    cut, ranks = bool(STRATEGY_ROWS[strategy].cuts), spec.world_size
    return OwnersStep.of(preset(spec.model), ranks // (spec.replicas if strategy in IN_GROUPS else 1), not cut)


def lab_run(spec: RunSpec) -> LabRun:
    """The run as the planner's models of the lab's engine take it."""
    return LabRun(
        shape=preset(spec.model),
        batch=spec.batch_size,
        sequence=spec.sequence_length,
        checkpoint=spec.checkpoint,
        units="block" if spec.units == "auto" else spec.units,
        **vars(step_choices(spec)) | _of_muon(spec),
    )


def step_choices(spec: RunSpec) -> StepChoices:
    """What of a run counts for its memory whatever it trains, under AdamW."""
    shards = spec.world_size // spec.replicas if spec.row.cuts else 1
    return StepChoices(
        strategy=spec.strategy,
        shards=shards,
        replicas=spec.world_size // shards,
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

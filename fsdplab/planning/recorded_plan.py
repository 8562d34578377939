"""A plan of any model on GPUs that are not here, from a recording of one of its micro-batches.

Memory is the recording played around the engine's order, with the buffers of a GPU; seconds are the recording's
arithmetic at the part of the data sheet's FLOP/s that products reach, and the bytes of its other operators at the
memory's rate. The operators are those of the CPU: what a GPU's kernels save or keep as scratch may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdplab.workloads.shapes import ModelShape

from .hardware import find_gpu
from .host import copies, host_optimizer_s
from .lab_memory import MicroBatch, StepChoices, rest_and_peak
from .memory import FRAMEWORK_BYTES, Memory, Moment
from .muon import OwnersStep
from .plan_spec import CHECKPOINTINGS, ITEMSIZES, PlanError, PlanSpec, flag_of
from .plan_traffic import AxisTraffic, on_axis
from .planner import Plan
from .program import Holds, StepWork, Transfer
from .step_time import GpuRates, has_known_flops, launch_s, planned_work, rates_of, slowed_s, time_of, unit_work
from .traffic import Traffic, UnitShapes, step_traffic

PROVENANCE = "predicted from a recording of one micro-batch"
# choices of a plan that change what a unit computes, or that the engine's own mixed precision does not have
_FIXED = (
    "seq",
    "micro_batch",
    "tensor_parallel",
    "context_parallel",
    "compile",
    "flash",
    "lora_rank",
    "base_dtype",
    "reduce_dtype",
    "master_dtype",
    "masters",
)
_ANSWERED = (
    "model",
    "parameters",
    "gpu",
    "gpus",
    "strategy",
    "memory_bytes",
    "card_bytes",
    "fits",
    "comm_bytes_per_step",
    "step_time_s",
    "compute_s",
    "communication_s",
    "exposed_s",
    "provenance",
)


def recorded_spec(name: str, gpu: str, **choices: Any) -> PlanSpec:
    """Make the spec of a recorded model called `name`; PlanError for a choice that a recording cannot answer."""
    defaults = PlanSpec.__dataclass_fields__
    for fixed in _FIXED:
        given = choices.pop(fixed, None)
        if given is not None and given != defaults[fixed].default:
            raise PlanError(
                f"{flag_of(fixed)} is {given!r}, but {name} is planned from a recording of its own micro-batch; leave"
                " it out, and change the file instead"
            )
    spec = PlanSpec(model=named_shape(name), gpu=find_gpu(gpu), seq=1, **choices)
    if spec.checkpointing not in CHECKPOINTINGS or spec.param_dtype not in ("fp32", "bf16"):
        raise PlanError(
            f"--checkpoint {spec.checkpointing} --precision {spec.param_dtype} cannot be recorded; expected"
            f" {', '.join(CHECKPOINTINGS)}, and fp32 or bf16"
        )
    return spec


def named_shape(name: str) -> ModelShape:
    """Make a shape of which only the name is used: a PlanSpec wants one."""
    return ModelShape(name=name, layers=1, width=1, heads=1, kv_heads=1, head_width=1, ffn=1, vocabulary=1, context=1)


def recorded_traffic(
    recording: MicroBatch, strategy: str, ranks: int, replicas: int = 1, micro_batches: int = 1
) -> list[Traffic]:
    """List the collectives of a step by the formula: all parameters are gathered, trained ones are reduced."""
    traffic: list[Traffic] = []
    for name, unit in recording.units.items():
        trained = [stored for stored in unit if stored.trained]
        # of the formula's rows the all-gathers of all parameters, and the reductions of those that are trained
        for parameters, gathers in ((unit, True), (trained, False)):
            shapes = UnitShapes(name, tuple((stored.name, stored.shape) for stored in parameters))
            rows = step_traffic(
                [shapes],
                strategy,
                ranks,
                param_itemsize=max((stored.computes for stored in unit), default=4),
                micro_batches=micro_batches,
                replicas=replicas,
            )
            for row in rows:
                if (row.kind == "all_gather") == gathers and row.wire_bytes:
                    traffic.append(row)
    return traffic


def recorded_muon(recording: MicroBatch, ranks: int, whole: bool) -> OwnersStep:
    """Return Muon's step of the matrices in a recorded model's blocks."""
    return OwnersStep.of_matrices(recording.matrices, ranks, whole)


def recorded_state_bytes(recording: MicroBatch, itemsize: int = 4) -> float:
    """Return bytes of Muon's state a trained element, on average: one moment for matrices, two for the rest."""
    in_matrices = sum(rows * columns for rows, columns in recording.matrices)
    return itemsize * (2 - in_matrices / _trained_elements(recording))


def _trained_elements(recording: MicroBatch) -> int:
    return sum(stored.count for unit in recording.units.values() for stored in unit if stored.trained)


def _muon(spec: PlanSpec, recording: MicroBatch) -> OwnersStep | None:
    """The step of Muon; None under another optimizer."""
    if spec.optimizer != "muon":
        return None
    cut = bool(spec.row.cuts)
    return recorded_muon(recording, spec.shards if cut else spec.replicas, not cut)


@dataclass(frozen=True)
class RecordedPlan(Plan):
    """The plan of a step of a recorded model: its memory has two moments, between steps and at the peak."""

    recording: MicroBatch

    @property
    def parameters(self) -> int:
        """Elements of all units."""
        return sum(stored.count for unit in self.recording.units.values() for stored in unit)

    def as_dict(self, tokens: float | None = None) -> dict[str, Any]:
        """Return for `--json` what is not of tokens, nor of a model's shape."""
        answer = super().as_dict() | {"parameters": self.parameters, "provenance": PROVENANCE}
        return {name: answer[name] for name in _ANSWERED}


def recorded_plan(spec: PlanSpec, recording: MicroBatch) -> RecordedPlan:
    """Plan a step of a recorded model; its seconds are None for a GPU of unknown FLOP/s."""
    traffic = _traffic(spec, recording)
    time = None
    if has_known_flops(spec.gpu):
        time = time_of(spec, recorded_work(spec, recording), traffic)
    return RecordedPlan(spec, _memory(spec, recording), traffic, time, recording)


def _traffic(spec: PlanSpec, recording: MicroBatch) -> tuple[AxisTraffic, ...]:
    rows = recorded_traffic(recording, spec.strategy, spec.shards * spec.replicas, spec.replicas, spec.grad_accum)
    muon = _muon(spec, recording)
    if muon is not None:
        rows += muon.traffic()
    return tuple(on_axis(row, row.unit, 1, spec) for row in rows)


def _memory(spec: PlanSpec, recording: MicroBatch) -> Memory:
    shards, replicas = spec.shards, spec.replicas
    if not spec.row.cuts:
        shards, replicas = 1, spec.shards
    choices = StepChoices(
        strategy=spec.strategy,
        shards=shards,
        replicas=replicas,
        itemsize=spec.param_bytes,
        micro_batches=spec.grad_accum,
        prefetch=spec.prefetch,
        offloads=spec.offload,
        foreach=spec.optimizer == "adamw-foreach",
        state_bytes=spec.optimizer_bytes,
        on_card=True,
    )
    muon = _muon(spec, recording)
    if muon is not None:
        packed, other = muon.held
        state = recorded_state_bytes(recording, ITEMSIZES[spec.master_dtype])
        choices = replace(choices, state_bytes=state, step_buffers=packed, step_scratch=other)
    moments = []
    for name, held in zip(("between steps", "largest moment of the step"), rest_and_peak(choices, recording)):
        moments.append(Moment(name, {**held, "other": held["other"] + FRAMEWORK_BYTES}))
    return Memory(tuple(moments))


def recorded_work(spec: PlanSpec, recording: MicroBatch, efficiency: float | None = None) -> StepWork:
    """Return what the units compute and send; `efficiency` replaces the fitted one."""
    rates, traffic = rates_of(spec, efficiency), _traffic(spec, recording)
    units = []
    for name, stored in recording.units.items():
        trained = [parameter for parameter in stored if parameter.trained]
        computes_s = _computes_s(recording, name, rates)
        copied: Mapping[str, Transfer] = {}
        if spec.offload:
            in_shard, in_gradients = (sum(parameter.count for parameter in held) for held in (stored, trained))
            copied = copies(
                spec, spec.rest_bytes * in_shard / spec.shards, spec.rest_bytes * in_gradients / spec.shards
            )
        holds = Holds(bool(stored), bool(trained))
        units.append(unit_work(spec, traffic, name, computes_s, holds, copied))
    longer_s = 0.0
    if efficiency is None:
        # collectives of a GPU take its kernels' place; the steady card, whose efficiency is given, has none
        longer_s = sum(slowed_s(spec, traffic, unit) for unit in units)
    return planned_work(spec, traffic, units, _optimizer_s(spec, recording, efficiency), longer_s)


def _computes_s(recording: MicroBatch, unit: str, rates: GpuRates) -> tuple[float, float]:
    """Seconds of a unit's forward and backward: those of its operators, or of their launches where these are more."""
    launches_s = launch_s(len(recording.units[unit]))
    by_phase = []
    for phase, least_s in (("forward", launches_s), ("backward", 2 * launches_s)):
        products_s = recording.flops.get((unit, phase), 0) / rates.flops
        moved_s = recording.moved.get((unit, phase), 0) / rates.bytes_per_s
        by_phase.append(max(products_s + moved_s, least_s))
    forward_s, backward_s = by_phase
    return forward_s, backward_s


def _optimizer_s(spec: PlanSpec, recording: MicroBatch, efficiency: float | None) -> float:
    """Seconds of the optimizer, which reads gradient, parameter and state of what a rank updates, and writes parameter
    and state; Muon's products are in bfloat16.
    """
    shards = spec.shards if spec.row.cuts else 1
    updated = _trained_elements(recording) / shards
    moved = (2 * spec.optimizer_bytes + 3 * ITEMSIZES[spec.master_dtype]) * updated
    if spec.optimizer == "adamw-foreach":  # its operators are not fused: each reads and writes
        moved = 3 * moved
    seconds = moved / rates_of(spec, efficiency).bytes_per_s
    if spec.offload:
        seconds = host_optimizer_s(spec, moved)
    muon = _muon(spec, recording)
    if muon is not None:
        seconds += muon.flops / rates_of(replace(spec, param_dtype="bf16"), efficiency).flops
    return seconds

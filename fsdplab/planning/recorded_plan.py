"""A plan of any model on GPUs that are not here, from a recording of one of its micro-batches.

Memory is the recording played around the engine's order, with the buffers of a GPU; seconds are the recording's
arithmetic at the part of the data sheet's FLOP/s that products reach, and the bytes of its other operators at the
memory's rate. The operators are those of the CPU: what a GPU's kernels save or keep as scratch may differ.
"""

from __future__ import annotations

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
from .program import Holds, StepWork
from .step_time import has_known_flops, launch_s, planned_work, rates_of, slowed_s, time_of, unit_work
from .traffic import Traffic, UnitShapes, step_traffic

PROVENANCE = "predicted from a recording of one micro-batch"
# choices of a plan that change what a unit computes, or that the engine's own mixed precision does not have
_FIXED = (
    "seq", "micro_batch", "tensor_parallel", "context_parallel", "compile", "flash", "lora_rank", "base_dtype",
    "reduce_dtype", "master_dtype", "masters",
)  # fmt: skip
_ANSWERED = (
    "model", "parameters", "gpu", "gpus", "strategy", "memory_bytes", "card_bytes", "fits", "comm_bytes_per_step",
    "step_time_s", "compute_s", "communication_s", "exposed_s", "provenance",
)  # fmt: skip


def recorded_spec(name: str, gpu: str, **choices: Any) -> PlanSpec:
    """What is planned of a recorded model called `name`; PlanError for a choice that a recording cannot answer."""
    defaults = PlanSpec.__dataclass_fields__
    for each in _FIXED:
        given = choices.pop(each, None)
        if given is not None and given != defaults[each].default:
            raise PlanError(
                f"{flag_of(each)} is {given!r}, but {name} is planned from a recording of its own micro-batch; leave it"
                " out, and change the file instead"
            )
    spec = PlanSpec(model=named_shape(name), gpu=find_gpu(gpu), seq=1, **choices)
    if spec.checkpointing not in CHECKPOINTINGS or spec.param_dtype not in ("fp32", "bf16"):
        raise PlanError(
            f"--checkpoint {spec.checkpointing} --precision {spec.param_dtype} cannot be recorded; expected"
            f" {', '.join(CHECKPOINTINGS)}, and fp32 or bf16"
        )
    return spec


def named_shape(name: str) -> ModelShape:
    """A shape of which only the name is used: a PlanSpec wants one."""
    return ModelShape(name=name, layers=1, width=1, heads=1, kv_heads=1, head_width=1, ffn=1, vocabulary=1, context=1)


def recorded_traffic(
    recording: MicroBatch, strategy: str, ranks: int, replicas: int = 1, micro_batches: int = 1
) -> list[Traffic]:
    """The collectives of a step by the formula: all parameters are gathered, those that are trained are reduced."""
    found: list[Traffic] = []
    for name, unit in recording.units.items():
        trained = [each for each in unit if each.trained]
        for parameters, gathers in ((unit, True), (trained, False)):
            shapes = UnitShapes(name, tuple((each.name, each.shape) for each in parameters))
            rows = step_traffic(
                [shapes], strategy, ranks, param_itemsize=max((each.computes for each in unit), default=4),
                micro_batches=micro_batches, replicas=replicas,
            )  # fmt: skip
            found += [row for row in rows if (row.kind == "all_gather") == gathers and row.wire_bytes]
    return found


def recorded_muon(recording: MicroBatch, ranks: int, whole: bool) -> OwnersStep:
    """Muon's step of the matrices in a recorded model's units, the root's left out."""
    return OwnersStep.of_matrices(_matrices_in(recording), ranks, whole)


def recorded_state_bytes(recording: MicroBatch, itemsize: int = 4) -> float:
    """Bytes of Muon's state an element that is trained, on average: one moment for matrices, two for the rest."""
    trained = sum(each.count for unit in recording.units.values() for each in unit if each.trained)
    return itemsize * (2 - sum(rows * columns for rows, columns in _matrices_in(recording)) / trained)


def _matrices_in(recording: MicroBatch) -> list[tuple[int, int]]:
    _, *units = recording.units.values()
    trained = [each.shape for unit in units for each in unit if each.trained]
    return [(shape[0], shape[1]) for shape in trained if len(shape) == 2]


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
        return sum(each.count for unit in self.recording.units.values() for each in unit)

    def as_dict(self, tokens: float | None = None) -> dict[str, Any]:
        """For `--json`: what is not of tokens, nor of a model's shape."""
        found = super().as_dict() | {"parameters": self.parameters, "provenance": PROVENANCE}
        return {name: found[name] for name in _ANSWERED}


def recorded_plan(spec: PlanSpec, recording: MicroBatch) -> RecordedPlan:
    """The plan of a step; its seconds are None for a GPU of unknown FLOP/s."""
    traffic = _traffic(spec, recording)
    time = time_of(spec, recorded_work(spec, recording), traffic) if has_known_flops(spec.gpu) else None
    return RecordedPlan(spec, _memory(spec, recording), traffic, time, recording)


def _traffic(spec: PlanSpec, recording: MicroBatch) -> tuple[AxisTraffic, ...]:
    rows = recorded_traffic(recording, spec.strategy, spec.shards * spec.replicas, spec.replicas, spec.grad_accum)
    muon = _muon(spec, recording)
    return tuple(on_axis(row, row.unit, 1, spec) for row in [*rows, *(muon.traffic() if muon else [])])


def _memory(spec: PlanSpec, recording: MicroBatch) -> Memory:
    sharded = bool(spec.row.cuts)
    choices = StepChoices(
        strategy=spec.strategy, shards=spec.shards if sharded else 1,
        replicas=spec.replicas if sharded else spec.shards, itemsize=spec.param_bytes,
        micro_batches=spec.grad_accum, prefetch=spec.prefetch, offloads=spec.offload,
        foreach=spec.optimizer == "adamw-foreach", state_bytes=spec.optimizer_bytes, on_card=True,
    )  # fmt: skip
    if muon := _muon(spec, recording):
        packed, other = muon.held
        state = recorded_state_bytes(recording, ITEMSIZES[spec.master_dtype])
        choices = replace(choices, state_bytes=state, step_buffers=packed, step_scratch=other)
    moments = zip(("between steps", "largest moment of the step"), rest_and_peak(choices, recording))
    return Memory(tuple(Moment(name, {**each, "other": each["other"] + FRAMEWORK_BYTES}) for name, each in moments))


def recorded_work(spec: PlanSpec, recording: MicroBatch, efficiency: float | None = None) -> StepWork:
    """What the units compute and send; `efficiency` replaces the fitted one. The optimizer reads gradient, parameter
    and state of what a rank updates, and writes parameter and state; Muon's products are in bfloat16.
    """
    rates, traffic, muon = rates_of(spec, efficiency), _traffic(spec, recording), _muon(spec, recording)

    def seconds(key: tuple[str, str]) -> float:
        moved_s = recording.moved.get(key, 0) / rates.bytes_per_s
        least = launch_s(len(recording.units[key[0]])) * (1 if key[1] == "forward" else 2)
        return max(recording.flops.get(key, 0) / rates.flops + moved_s, least)

    units = []
    for name, stored in recording.units.items():
        holds = Holds(bool(stored), any(each.trained for each in stored))
        computes_s = seconds((name, "forward")), seconds((name, "backward"))
        held = (sum(each.count for each in stored), sum(each.count for each in stored if each.trained))
        copied = copies(spec, *(spec.rest_bytes * count / spec.shards for count in held)) if spec.offload else {}
        units.append(unit_work(spec, traffic, name, computes_s, holds, copied))
    trained = sum(each.count for unit in recording.units.values() for each in unit if each.trained)
    own = trained / (spec.shards if spec.row.cuts else 1)
    once = (2 * spec.optimizer_bytes + 3 * ITEMSIZES[spec.master_dtype]) * own
    moved = 3 * once if spec.optimizer == "adamw-foreach" else once
    low = rates_of(replace(spec, param_dtype="bf16"), efficiency)
    moved_s = host_optimizer_s(spec, moved) if spec.offload else moved / rates.bytes_per_s
    optimizer_s = moved_s + (muon.flops / low.flops if muon else 0.0)
    # collectives of a GPU take its kernels' place; the steady card, whose efficiency is given, has none
    longer_s = sum(slowed_s(spec, traffic, unit) for unit in units) if efficiency is None else 0.0
    return planned_work(spec, traffic, units, optimizer_s, longer_s)

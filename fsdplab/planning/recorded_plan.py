"""A plan of any model on GPUs that are not here, from a recording of one of its micro-batches.

Memory is the recording played around the engine's order, with the buffers of a GPU; seconds are the recording's
arithmetic at the part of the data sheet's FLOP/s that products reach, and the bytes of its other operators at the
memory's rate. The operators are those of the CPU: what a GPU's kernels save or keep as scratch may differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fsdplab.common.names import CATEGORIES
from fsdplab.workloads.shapes import ModelShape

from .efficiency import Efficiency, efficiency_of
from .hardware import find_gpu
from .lab_memory import MicroBatch, StepChoices, rest_and_peak
from .memory import FRAMEWORK_BYTES, Memory, Moment
from .plan_spec import ITEMSIZES, PlanError, PlanSpec, flag_of
from .plan_traffic import AxisTraffic, bytes_by_axis, on_axis
from .program import Holds, StepWork
from .step_time import StepTime, has_known_flops, planned_work, rates_of, time_of, unit_work
from .traffic import Traffic, UnitShapes, step_traffic

PROVENANCE = "predicted from a recording of one micro-batch"
# choices of a plan that change what a unit computes, or that the engine's own mixed precision does not have
_FIXED = (
    "seq", "micro_batch", "tensor_parallel", "context_parallel", "compile", "flash", "lora_rank", "base_dtype",
    "reduce_dtype", "master_dtype", "masters",
)  # fmt: skip
_CHECKPOINTINGS = ("none", "selective", "full")


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
    # a spec wants a model's shape, of which only the name is used here
    shape = ModelShape(name=name, layers=1, width=1, heads=1, kv_heads=1, head_width=1, ffn=1, vocabulary=1, context=1)
    spec = PlanSpec(model=shape, gpu=find_gpu(gpu), seq=1, **choices)
    if spec.checkpointing not in _CHECKPOINTINGS or spec.param_dtype not in ("fp32", "bf16"):
        raise PlanError(
            f"--checkpoint {spec.checkpointing} --precision {spec.param_dtype} cannot be recorded; expected"
            f" {', '.join(_CHECKPOINTINGS)}, and fp32 or bf16"
        )
    return spec


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


@dataclass(frozen=True)
class RecordedPlan:
    """Memory, traffic and seconds of a step on one rank of `spec`; seconds are None for a GPU of unknown FLOP/s."""

    spec: PlanSpec
    recording: MicroBatch

    @cached_property
    def memory(self) -> Memory:
        """Between steps and at the peak."""
        spec, sharded = self.spec, bool(self.spec.row.cuts)
        choices = StepChoices(
            strategy=spec.strategy, shards=spec.shards if sharded else 1,
            replicas=spec.replicas if sharded else spec.shards, itemsize=spec.param_bytes,
            micro_batches=spec.grad_accum, prefetch=spec.prefetch, offloads=spec.offload,
            foreach=spec.optimizer == "adamw-foreach", state_bytes=spec.optimizer_bytes, on_card=True,
        )  # fmt: skip
        names = "between steps", "largest moment of the step"
        found = [
            Moment(
                name, {key: float(each[key]) for key in CATEGORIES} | {"other": float(each["other"] + FRAMEWORK_BYTES)}
            )
            for name, each in zip(names, rest_and_peak(choices, self.recording))
        ]
        return Memory(tuple(found))

    @property
    def fits(self) -> bool:
        """Whether the peak is within the card."""
        return self.memory.peak.total <= self.spec.gpu.memory_bytes

    @property
    def parameters(self) -> int:
        """Elements of all units."""
        return sum(each.count for unit in self.recording.units.values() for each in unit)

    @cached_property
    def traffic(self) -> tuple[AxisTraffic, ...]:
        """Collectives of a step, a row a unit and kind."""
        spec = self.spec
        found = recorded_traffic(
            self.recording, spec.strategy, spec.shards * spec.replicas, spec.replicas, spec.grad_accum
        )
        return tuple(on_axis(row, row.unit, 1, spec) for row in found)

    @cached_property
    def time(self) -> StepTime | None:
        """Seconds of a step."""
        if not has_known_flops(self.spec.gpu):
            return None
        return time_of(self.spec, self.work(), self.traffic)

    @property
    def efficiency(self) -> Efficiency | None:
        """What part of the data sheet's FLOP/s products are taken to reach, and where that is from."""
        return efficiency_of(self.spec.gpu) if has_known_flops(self.spec.gpu) else None

    def work(self) -> StepWork:
        """What the units compute and send."""
        spec, recording, rates = self.spec, self.recording, rates_of(self.spec)

        def seconds(key: tuple[str, str]) -> float:
            return recording.flops.get(key, 0) / rates.flops + recording.moved.get(key, 0) / rates.bytes_per_s

        units = []
        for name, stored in recording.units.items():
            holds = Holds(bool(stored), any(each.trained for each in stored))
            computes_s = seconds((name, "forward")), seconds((name, "backward"))
            units.append(unit_work(spec, self.traffic, name, computes_s, holds))
        return planned_work(spec, self.traffic, units, self._optimizer_s(rates.bytes_per_s))

    def _optimizer_s(self, bytes_per_s: float) -> float:
        """Gradient, parameter and state read, parameter and state written, of what a rank updates."""
        state, ranks = self.spec.optimizer_bytes, self.spec.shards if self.spec.row.cuts else 1
        trained = sum(each.count for unit in self.recording.units.values() for each in unit if each.trained)
        once = (2 * state + 3 * ITEMSIZES[self.spec.master_dtype]) * trained / ranks
        return (3 if self.spec.optimizer == "adamw-foreach" else 1) * once / bytes_per_s

    def as_dict(self) -> dict[str, Any]:
        """For `--json`: bytes, seconds and shares of one rank."""
        peak, time = self.memory.peak, self.time
        return {
            "model": self.spec.model.name, "parameters": self.parameters, "gpu": self.spec.gpu.name,
            "gpus": self.spec.gpus, "strategy": self.spec.strategy,
            "memory_bytes": {
                "total": round(peak.total),
                "by_category": {name: round(nbytes) for name, nbytes in peak.by_category.items()},
            },
            "card_bytes": self.spec.gpu.memory_bytes, "fits": self.fits,
            "comm_bytes_per_step": bytes_by_axis(self.traffic), "step_time_s": time and time.step_s,
            "compute_s": time and time.compute_s, "communication_s": time and time.communication_s,
            "exposed_s": time and time.exposed_s, "provenance": PROVENANCE,
        }  # fmt: skip

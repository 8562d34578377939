"""`plan(...)`: what one step of a job needs and takes, before anybody rents a GPU.

Memory by category against the card, traffic by mesh axis, step time with its exposed share, tokens/s, MFU and
GPU-hours; and how far one choice can go: the largest micro-batch, the fewest GPUs, and a choice swept over values.
What to choose together is searched in `planning/search`, and what makes a plan fit in `planning/remedies`.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from fsdplab.common.words import did_you_mean
from fsdplab.workloads.model_files import model_named
from fsdplab.workloads.shapes import ModelShape

from .bands import memory_band, speed_band
from .efficiency import Efficiency, efficiency_of
from .hardware import gpu_named
from .host import host_crossing, host_link
from .memory import Memory, fits_card, host_bytes, memory_of
from .plan_spec import CHECKPOINTINGS, PlanError, PlanSpec, changed, flag_of, under_each_strategy
from .plan_traffic import AxisTraffic, bytes_by_axis, part_of_network, plan_traffic
from .stages import bubble
from .step_time import StepTime, has_known_flops, model_flops, peak_flops, step_time

_USUAL_SEQUENCE = 4096
_MOST_GPUS = 2**16  # of a suggestion


@dataclass(frozen=True)
class Plan:
    """The answer; `time` is None where no FLOP/s of the GPU are known."""

    spec: PlanSpec
    memory: Memory
    traffic: tuple[AxisTraffic, ...]
    time: StepTime | None

    @property
    def fits(self) -> bool:
        """Whether the peak is within the card: `fitness` is not no."""
        return self.fitness != "no"

    @property
    def fitness(self) -> str:
        """Whether it fits, with the band and what the allocator reserves: yes, likely or no."""
        return self.memory.fitness(self.spec.gpu.memory_bytes, memory_band(self.spec))

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        """Tokens of the data, over all GPUs."""
        if self.time is None:
            return None
        return self.spec.step_tokens / self.time.step_s / self.spec.gpus

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s over the data sheet's."""
        if self.time is None:
            return None
        return model_flops(self.spec) / (self.time.step_s * self.spec.gpus * peak_flops(self.spec.gpu))

    @property
    def efficiency(self) -> Efficiency | None:
        """What part of the data sheet's FLOP/s products are taken to reach, and where that is from."""
        return efficiency_of(self.spec.gpu) if self.time else None

    def _network(self) -> dict[str, Any] | None:
        """What joins the nodes, for `--json`; None in one node."""
        reached, fabric = part_of_network(self.spec), self.spec.fabric
        if reached is None or fabric is None:
            return None
        nodes, part = reached
        return {
            "name": fabric.name,
            "assumed": fabric.assumed,
            "bytes_per_s_a_gpu": fabric.bytes_per_s,
            "nodes": nodes,
            "part": part,
        }

    def hours(self, tokens: float) -> float | None:
        """Return the hours of training on so many tokens."""
        if self.time is None:
            return None
        return tokens / self.spec.step_tokens * self.time.step_s / 3600

    def as_dict(self, tokens: float | None = None) -> dict[str, Any]:
        """Return for `--json` the bytes, seconds and shares of one rank."""
        spec, peak, time, speed = self.spec, self.memory.peak, self.time, self.tokens_per_s_per_gpu
        answer: dict[str, Any] = {
            "model": spec.model.name,
            "parameters": spec.model.parameters,
            "gpu": spec.gpu.name,
            "gpus": spec.gpus,
            "strategy": spec.strategy,
            "micro_batch": spec.micro_batch,
            "seq": spec.seq,
            "memory_bytes": {
                "total": round(sum(map(round, peak.by_category.values()))),
                "by_category": {name: round(nbytes) for name, nbytes in peak.by_category.items()},
            },
            "memory_band_bytes": [round(nbytes) for nbytes in memory_band(spec).around(peak.total)],
            "reserved_bytes": round(self.memory.reserved_bytes),
            "loss": spec.loss,
            "peak_moment": peak.name,
            "card_bytes": spec.gpu.memory_bytes,
            "host_bytes": round(host_bytes(spec)),
            "host_crossing_bytes_per_step": round(host_crossing(spec)),
            "fits": self.fitness,
            "comm_bytes_per_step": bytes_by_axis(self.traffic),
            "network": self._network(),
            "bubble": bubble(spec) if spec.pipeline_parallel > 1 else 0.0,
            "step_time_s": time and time.step_s,
            "compute_s": time and time.compute_s,
            "communication_s": time and time.communication_s,
            "exposed_s": time and time.exposed_s,
        }
        if time and spec.offload:
            answer |= _host_times(spec, time)
        answer |= {
            "tokens_per_s_per_gpu": speed,
            "tokens_per_s_band": speed and list(speed_band(spec).around(speed)),
            "mfu": self.mfu,
            "efficiency": self.efficiency and asdict(self.efficiency),
            "provenance": "predicted in closed form",
        }
        hours = self.hours(tokens) if tokens else None
        if hours:
            answer |= {"hours": hours, "gpu_hours": hours * spec.gpus}
        return answer


def _host_times(spec: PlanSpec, time: StepTime) -> dict[str, Any]:
    """What states in host memory take of a step, for `--json`."""
    link = host_link(spec)
    return {
        "host_link": {"name": link.name, "bytes_per_s": link.bytes_per_s, "assumed": spec.gpu.host_link is None},
        "copies_s": time.copies_s,
        "exposed_copies_s": time.exposed_copies_s,
        "host_optimizer_s": time.host_optimizer_s,
    }


def plan_spec(model: str | ModelShape, gpu: str, **choices: Any) -> PlanSpec:
    """Make a plan's spec from names; without `seq` it is 4,096, or the model's context where that is shorter."""
    shape = model if isinstance(model, ModelShape) else model_named(model)
    if choices.get("seq") is None:
        choices["seq"] = min(_USUAL_SEQUENCE, shape.context)
    return PlanSpec(model=shape, gpu=gpu_named(gpu), **choices)


def plan(model: str | ModelShape, gpu: str, **choices: Any) -> Plan:
    """Plan one step; raises ModelError, HardwareError or PlanError, each one line.

    >>> found = plan("llama-3.1-70b", "h100-80gb", gpus=16, checkpointing="full")
    >>> found.fits, round(found.memory.resting.by_category["sharded_parameters"] / 1e9, 1)
    (False, 17.6)
    """
    return plan_of(plan_spec(model, gpu, **choices))


def plan_of(spec: PlanSpec) -> Plan:
    """Make the plan of a spec."""
    time = step_time(spec) if has_known_flops(spec.gpu) else None
    return Plan(spec, memory_of(spec), tuple(plan_traffic(spec)), time)


# ---- how far one choice can go


def least_gpus(spec: PlanSpec) -> int | None:
    """Return the fewest GPUs on which the same choices fit: whole nodes beyond the first; None where no number does.

    Memory falls with GPUs, so it is found by halving: up to a rank a row of the model's matrices, beyond which padding
    grows.
    """
    # what the mesh cuts GPUs into
    step = spec.tensor_parallel * spec.context_parallel * spec.pipeline_parallel * (spec.shard_size or 1)
    per_node = spec.gpus_per_node
    counts = list(range(step, min(per_node, _MOST_GPUS) + 1, step))
    if spec.fabric:
        whole = math.lcm(per_node, step)
        rows = spec.model.width * spec.tensor_parallel
        most = min(_MOST_GPUS, max(2 * per_node, rows))
        counts += range(max(whole, 2 * per_node), most + 1, whole)
    if not counts or not _fits_on(counts[-1], spec):
        return None
    return counts[bisect_left(counts, True, key=lambda gpus: _fits_on(gpus, spec))]


def _fits_on(gpus: int, spec: PlanSpec) -> bool:
    other = changed(spec, gpus=gpus)
    return other is not None and fits_card(other)


_MOST_SEQUENCES = 2**12
# the fields whose values a sweep tries, as numbers and as words: what each is called in a table and a title, and the
# unit of its values
SWEPT = {
    "gpus": ("world size", "GPUs"),
    "seq": ("sequence length", "tokens"),
    "micro_batch": ("batch size", "sequences of a rank's micro-batch"),
    "grad_accum": ("micro-batches a step", ""),
    "tensor_parallel": ("tensor-parallel group", "GPUs"),
    "prefetch": ("prefetch", "units"),
    "lora_rank": ("LoRA rank", "0: all parameters are trained"),
}
SWEPT_WORDS = {
    "model": ("model", ""),
    "gpu": ("GPU", ""),
    "network": ("network", "between nodes"),
    "strategy": ("strategy", ""),
    "checkpointing": ("recomputation", ""),
    "loss": ("loss", ""),
    "optimizer": ("optimizer", ""),
    "reduce_dtype": ("reduce dtype", "of gradients"),
}
_FIELDS = {flag_of(name)[2:].replace("-", "_"): name for name in (*SWEPT, *SWEPT_WORDS)}  # by what the flag is called
_MOST_VALUES = 64


def largest_micro_batch(spec: PlanSpec) -> PlanSpec | None:
    """Return `spec` with the largest micro-batch that fits; None where not even one sequence does."""
    most = largest_that_fits(lambda count: fits_card(replace(spec, micro_batch=count)), _MOST_SEQUENCES)
    return replace(spec, micro_batch=most) if most else None


def largest_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """Search by doubling and halving the largest count up to `most` that fits, where smaller ones do too; 0 for none.

    >>> largest_that_fits(lambda count: count < 14, 100), largest_that_fits(lambda count: True, 100)
    (13, 100)
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:  # `low` fits, `high` does not
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def fewest_gpus(spec: PlanSpec) -> Plan | None:
    """Return the plan on the fewest GPUs on which some strategy and recomputation fits with one sequence a rank.

    Of several it is the one with most tokens/s; None where no number of GPUs fits.
    """
    plans = []
    for under in under_each_strategy(replace(spec, micro_batch=1)):
        if under.row.in_groups:
            continue
        for checkpointing in CHECKPOINTINGS:
            other = replace(under, checkpointing=checkpointing)
            gpus = least_gpus(other)
            if gpus is not None:
                plans.append(plan_of(replace(other, gpus=gpus)))
    return min(plans, key=lambda plan: (plan.spec.gpus, -(plan.tokens_per_s_per_gpu or 0)), default=None)


# ---- sweeps


Value: TypeAlias = "int | str"


def parse_sweep(text: str) -> tuple[str, list[Value]]:
    """Read the field and the values of `world-size=8..1024` (doubling), `seq=1024,4096` or `loss=eager,fused`.

    Raises PlanError.

    >>> parse_sweep("world-size=8..64")
    ('gpus', [8, 16, 32, 64])
    >>> parse_sweep("network=ib400,eth100")
    ('network', ['ib400', 'eth100'])
    """
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    name = _FIELDS.get(name, name)
    if not equals or name not in (*SWEPT, *SWEPT_WORDS):
        known = [flag_of(field)[2:] for field in (*SWEPT, *SWEPT_WORDS)]
        meant = did_you_mean(name, known)
        raise PlanError(
            f"sweep is {text[:60]!r}{meant}; expected one of {', '.join(known)} and its values, such as"
            " world-size=8..1024 or loss=eager,fused"
        )
    if name in SWEPT_WORDS:
        return name, [*_words(values)]
    return name, [*_numbers(values)]


def _words(values: str) -> list[str]:
    words = [part.strip() for part in values.split(",")]
    if not all(words) or len(words) > _MOST_VALUES:
        raise PlanError(f"sweep has values {values[:60]!r}; expected 1 to {_MOST_VALUES} words with commas between")
    return words


def _numbers(values: str) -> list[int]:
    """The numbers of `8..1024`, each twice the one before, or of `8,16,64`."""
    span = re.fullmatch(r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*", values, re.ASCII)
    parts = [part.strip() for part in values.split(",")]
    numbers = []
    if span:
        numbers = _doubled(int(span[1]), int(span[2]))
    elif all(re.fullmatch(r"\d{1,9}", part, re.ASCII) for part in parts):
        numbers = [int(part) for part in parts]
    if not numbers or len(numbers) > _MOST_VALUES:
        raise PlanError(
            f"sweep has values {values[:60]!r}; expected 1 to {_MOST_VALUES} whole numbers: 8..1024 (doubling) or"
            " 8,16,64"
        )
    return numbers


def _doubled(low: int, high: int) -> list[int]:
    numbers = []
    while 0 < low <= high:
        numbers.append(low)
        low *= 2
    return numbers


def swept_name(name: str) -> str:
    """Return what a swept field is called in a table and a title: `swept_name("gpus") == "world size"`."""
    words, _ = (SWEPT | SWEPT_WORDS)[name]
    return words


def swept_axis(name: str) -> str:
    """Return the title of an axis of a swept field's values: `swept_axis("gpus") == "world size (GPUs)"`."""
    words, unit = (SWEPT | SWEPT_WORDS)[name]
    return f"{words} ({unit})" if unit else words


def sweep(spec: PlanSpec, name: str, values: Sequence[Value]) -> list[Plan]:
    """Plan each value of one choice; raises PlanError for a value that contradicts the others."""
    return [plan_of(with_value(spec, name, value)) for value in values]


def with_value(spec: PlanSpec, name: str, value: Any) -> PlanSpec:
    """Return the plan with another value of one choice; raises ModelError, HardwareError, LinkError or PlanError."""
    if name == "model":
        return replace(spec, model=model_named(value))
    if name == "gpu":
        return replace(spec, gpu=gpu_named(value))
    if name == "strategy":
        return replace(spec, strategy=value, shard_size=None)
    return replace(spec, **{name: value})

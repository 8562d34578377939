"""`plan(...)`: what one step of a job needs and takes, before anybody rents a GPU.

Memory by category against the card, traffic by mesh axis, step time with its exposed share, tokens/s, MFU and
GPU-hours; and where it does not fit, what is missing and what would fit.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fsdplab.common.sizes import size
from fsdplab.workloads.model_files import model_named
from fsdplab.workloads.shapes import ModelShape

from .bands import memory_band, speed_band
from .efficiency import Efficiency, efficiency_of
from .memory import Memory, fits_card, host_bytes, host_crossing, memory_of
from .own_gpu import gpu_named
from .plan_spec import PlanSpec, changed
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
        return self.spec.step_tokens / self.time.step_s / self.spec.gpus if self.time else None

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
        rate = {"bytes_per_s_a_gpu": fabric.bytes_per_s, "nodes": reached[0], "part": reached[1]}
        return {"name": fabric.name, "assumed": fabric.assumed, **rate}

    def hours(self, tokens: float) -> float | None:
        """Hours of training on so many tokens."""
        return tokens / self.spec.step_tokens * self.time.step_s / 3600 if self.time else None

    def as_dict(self, tokens: float | None = None) -> dict[str, Any]:
        """For `--json`: bytes, seconds and shares of one rank."""
        peak, time, speed = self.memory.peak, self.time, self.tokens_per_s_per_gpu
        found: dict[str, Any] = {
            "model": self.spec.model.name,
            "parameters": self.spec.model.parameters,
            "gpu": self.spec.gpu.name,
            "gpus": self.spec.gpus,
            "strategy": self.spec.strategy,
            "micro_batch": self.spec.micro_batch,
            "seq": self.spec.seq,
            "memory_bytes": {
                "total": round(sum(map(round, peak.by_category.values()))),
                "by_category": {name: round(nbytes) for name, nbytes in peak.by_category.items()},
            },
            "memory_band_bytes": [round(nbytes) for nbytes in memory_band(self.spec).around(peak.total)],
            "reserved_bytes": round(self.memory.reserved_bytes),
            "loss": self.spec.loss,
            "peak_moment": peak.name,
            "card_bytes": self.spec.gpu.memory_bytes,
            "host_bytes": round(host_bytes(self.spec)),
            "host_crossing_bytes_per_step": round(host_crossing(self.spec)) if self.spec.offload else 0,
            "fits": self.fitness,
            "comm_bytes_per_step": bytes_by_axis(self.traffic),
            "network": self._network(),
            "bubble": bubble(self.spec) if self.spec.pipeline_parallel > 1 else 0.0,
            "step_time_s": time and time.step_s,
            "compute_s": time and time.compute_s,
            "communication_s": time and time.communication_s,
            "exposed_s": time and time.exposed_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "tokens_per_s_band": speed and list(speed_band(self.spec).around(speed)),
            "mfu": self.mfu,
            "efficiency": self.efficiency and asdict(self.efficiency),
            "provenance": "predicted in closed form",
        }
        hours = self.hours(tokens) if tokens else None
        return found | ({"hours": hours, "gpu_hours": hours * self.spec.gpus} if hours else {})


def plan_spec(model: str | ModelShape, gpu: str, **choices: Any) -> PlanSpec:
    """A plan's spec from names; `seq` is 4,096 or the model's context where that is shorter, unless it is given."""
    shape = model if isinstance(model, ModelShape) else model_named(model)
    seq = choices.pop("seq", None)
    return PlanSpec(
        model=shape, gpu=gpu_named(gpu), seq=min(_USUAL_SEQUENCE, shape.context) if seq is None else seq, **choices
    )


def plan(model: str | ModelShape, gpu: str, **choices: Any) -> Plan:
    """The plan of one step; raises ModelError, HardwareError or PlanError, each one line.

    >>> found = plan("llama-3.1-70b", "h100-80gb", gpus=16, checkpointing="full")
    >>> found.fits, round(found.memory.resting.by_category["sharded_parameters"] / 1e9, 1)
    (False, 17.6)
    """
    return plan_of(plan_spec(model, gpu, **choices))


def plan_of(spec: PlanSpec) -> Plan:
    """The plan of a spec."""
    time = step_time(spec) if has_known_flops(spec.gpu) else None
    return Plan(spec, memory_of(spec), tuple(plan_traffic(spec)), time)


# ---- where it does not fit


def shortfall(found: Plan) -> str | None:
    """What is missing, by how much, and what would fit, in one line; None for a plan that fits.

    `35.3 GB of sharded parameters on a 25.8 GB card, 152 GB too much in all; needs 44 cards for the states, or CPU
    offload of 141 GB a rank, or ...`
    """
    if found.fits:
        return None
    peak, card = found.memory.peak, found.spec.gpu.memory_bytes
    alone = next((name for name, nbytes in peak.by_category.items() if nbytes > card), None)
    what = f"{size(peak.by_category[alone])} of {alone.replace('_', ' ')}" if alone else f"{size(peak.total)}"
    advice = ", or ".join(_ways(found.spec)) or "a smaller model or larger cards: no other choice tried would fit"
    return f"{what} on a {size(card)} card, {size(peak.total - card)} too much in all; needs {advice}"


# what need not be said beside something simpler: the cut of products that send; offload under another strategy
_SIMPLER = {"tensor": "recompute", "offload": "shard"}


def _ways(spec: PlanSpec) -> Iterator[str]:
    """Changes that make it fit, each tried: more GPUs, host memory, recomputation, smaller pieces, adapters."""
    gpus = least_gpus(spec)
    if gpus is not None and gpus > spec.gpus:
        yield f"{gpus} cards"
    elif states := _cards_for_states(spec):
        yield states
    found = set[str]()
    for kind, words, changes in _changes(spec):
        simpler = _SIMPLER.get(kind) in found and not (kind == "offload" and spec.row.can_offload)
        other = None if simpler or kind in found else changed(spec, **changes)
        if other is not None and other != spec and fits_card(other):
            found.add(kind)
            yield words.format(f"of {size(host_bytes(other))} a rank")


def _cards_for_states(spec: PlanSpec) -> str | None:
    """How many cards could hold the states, where more of them are known to be of no help or cannot be joined."""
    stepping = memory_of(spec).moments[-1].by_category
    states = [stepping[name] for name in ("sharded_parameters", "sharded_gradients", "optimizer_state")]
    card = spec.gpu.memory_bytes
    if spec.row.gathers_once or spec.replicas > 1 or sum(states) <= card:
        return None
    slices, every = (math.ceil(nbytes * spec.gpus / card) for nbytes in (states[0], sum(states)))
    return f"{slices} cards for the sharded parameters and {every} for all states"


def _changes(spec: PlanSpec) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """What to try, of each kind the least change first; `{}` in its words stands for the host memory."""
    full: dict[str, Any] = {"checkpointing": "full"}
    sharded: dict[str, Any] = {"strategy": "full_shard", "shard_size": None}
    small, least = full, "--checkpoint full"
    if spec.micro_batch > 1:
        small, least = full | {"micro_batch": 1}, f"{least} and --batch-size 1"
    for loss in ("fused", "chunked"):
        yield "loss", f"--loss {loss}", {"loss": loss}
    yield "recompute", "--checkpoint full", full
    yield "recompute", least, small
    if not spec.row.saves_most:
        yield "shard", "--strategy full_shard", sharded
        yield "shard", "--strategy full_shard with --checkpoint full", sharded | full
    moved, there = sharded | {"offload": True}, "CPU offload {} under --strategy full_shard"
    if spec.row.can_offload:
        moved, there = {"offload": True}, "CPU offload {}"
    yield "offload", there, moved
    yield "offload", f"{there} with {least}", moved | small
    if not spec.lora_rank:
        base, words = {"lora_rank": 16, "base_dtype": "nf4"}, "a frozen base in nf4 (--base-dtype nf4 --lora-rank 16)"
        yield "adapters", words, base
        yield "adapters", f"{words} with {least}", base | small
    more = "" if spec.checkpointing == "full" else " with --checkpoint full"
    for ways in (2, 4, 8):
        if ways > spec.tensor_parallel:
            yield "tensor", f"--tp {ways}{more}", full | {"tensor_parallel": ways}


def least_gpus(spec: PlanSpec) -> int | None:
    """The fewest GPUs on which the same choices fit: whole nodes beyond the first; None where no number does.

    Memory falls with GPUs, so it is found by halving: up to a rank a row of the model's matrices, beyond which padding
    grows.
    """
    step = spec.tensor_parallel * spec.context_parallel * spec.pipeline_parallel * (spec.shard_size or 1)
    per_node = spec.gpus_per_node
    counts, whole = [*range(step, min(per_node, _MOST_GPUS) + 1, step)], math.lcm(per_node, step)
    if spec.fabric:
        most = min(_MOST_GPUS, max(2 * per_node, spec.model.width * spec.tensor_parallel))
        counts += range(max(whole, 2 * per_node), most + 1, whole)
    if not counts or not _fits_on(counts[-1], spec):
        return None
    return counts[bisect_left(counts, True, key=lambda gpus: _fits_on(gpus, spec))]


def _fits_on(gpus: int, spec: PlanSpec) -> bool:
    found = changed(spec, gpus=gpus)
    return found is not None and fits_card(found)

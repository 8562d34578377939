"""Simulates a run's step on the steady card and its link, with the same times on every machine and under any load.

How long this machine computes depends on its cores and on who else uses them, so what is first said of a strategy's
time, and all that a lesson judges, does not rest on it. The steady card computes at a fixed rate behind the run's own
link. Its steps come from the planner's simulation, in the engine's own order for ranks on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields, replace

from fsdplab.engine.core.step import Schedule
from fsdplab.planning.hardware import Gpu, sheet_rate
from fsdplab.planning.links import parse_link
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.plan_traffic import LINK_EFFICIENCY
from fsdplab.planning.recorded_plan import named_shape
from fsdplab.planning.simulation import simulate
from fsdplab.records import RunRecord
from fsdplab.records.summary import Link, Peak, Steady
from fsdplab.sessions.spec import RunSpec, SpecError
from fsdplab.workloads.model_files import model_named
from fsdplab.workloads.own.sources import is_own, name_of

STEADY_CARD = "steady card"
GIGAFLOPS = 60.0  # in fp32, about what a core or two reach
MEMORY_BYTES_PER_S = 15e9
_BF16_OVER_FP32 = 2.0  # the planner's ratio
_ROOMY = 10**12  # bytes: whether a run fits is asked of its peak, not of this card


class SteadyCardError(ValueError):
    """A run that the steady card cannot show: it has blocks as units, and a link."""


def steady(spec: RunSpec, gigaflops: float = GIGAFLOPS, schedule: Callable[[int], Schedule] = Schedule) -> RunRecord:
    """Return a simulated step of `spec` on the steady card, behind the spec's own link: a record that every figure
    draws.

    `schedule` makes the rule that says what to gather ahead, from the prefetch depth. Times and memory are simulated.
    """
    if (why := why_not_steady(spec)) or spec.link is None:
        raise SteadyCardError(why)
    link = parse_link(spec.link)
    found = simulate(
        plan_of(spec, gigaflops), communicators=spec.link_queues, efficiency=1.0, schedule=schedule, streams=False
    )
    split = {name: part for name, part in found.summary.peak_memory_bytes.split.items() if name != "other"}
    summary = replace(
        found.summary,
        peak_memory_bytes=Peak(sum(split.values()), split),  # without a GPU's own context
        link=Link(spec.link, link.bytes_per_s, link.latency_s),
    )
    return replace(found, spec={**asdict(spec), "gpu": STEADY_CARD}, summary=summary)


def why_not_steady(spec: RunSpec) -> str:
    """Return why the steady card cannot show a run; "" where it can."""
    if spec.own_model:
        return "the steady card simulates presets, whose shapes are known, and not a model of one's own"
    if spec.link is None or spec.units not in ("auto", "block"):
        return (
            f"the steady card got link={spec.link!r} and units={spec.units!r}; expected a link such as '400MB/s' and"
            " units 'auto': give the run a link, or look at the run itself"
        )
    return ""


def steady_step(spec: RunSpec) -> Steady:
    """Return the step of one of the lab's runs between CPU ranks, for its summary; all None where it cannot be shown.

    Nor is it where it would mislead: other engines follow rules of their own, a GPU computes a thousand times as fast,
    and a wind tunnel's link is chosen for the speed of this machine.
    """
    strange = spec.engine != "lab" or spec.device_type != "cpu" or spec.emulate or spec.offload != "none"
    if strange or spec.compile != "none" or why_not_steady(spec):
        return Steady()
    found = steady(spec)
    comm = found.summary.comm
    worst = max(found.table("breakdown"), key=lambda row: row["exposed_ns"])  # as in `comm`
    return Steady(found.summary.step_time_s.median, comm.exposed_s, comm.overlap, worst["overlapped_ns"] / 1e9)


def spec_of(record: RunRecord) -> RunSpec | None:
    """Return the spec of a recorded run, on Python's sources where its text is another; None where it could not run
    here.

    A record names a model of one's own, and nothing is read by that name.
    """
    if is_own(str(record.spec.get("model"))):
        return None
    names = [each.name for each in fields(RunSpec) if each.name in record.spec]
    try:
        return RunSpec(**{name: record.spec[name] for name in names} | {"text": None})
    except SpecError:
        return None


def plan_of(spec: RunSpec, gigaflops: float = GIGAFLOPS) -> PlanSpec:
    """Return the step of a run with a link as the planner's spec: every rank has its own end of each link. Of a model
    of one's own it holds the name, and a recording has the rest.
    """
    link = parse_link(spec.link or "")
    # a plan reaches a part of a link's rate; divided by it before, the run's link is reached in full
    reached = replace(link, bytes_per_s=link.bytes_per_s / LINK_EFFICIENCY)
    # 8 ranks with a shard size of 4: 2 groups
    groups = spec.world_size // (spec.shard_size or spec.world_size)
    across = sheet_rate(parse_link(spec.link_across).bytes_per_s, groups) if spec.link_across else None
    flops = _BF16_OVER_FP32 * gigaflops * 1e9
    card = Gpu(STEADY_CARD, _ROOMY, flops, MEMORY_BYTES_PER_S, reached, across, "chosen to be the same everywhere")
    if spec.own_model:
        shape, sequence, batch = named_shape(name_of(spec.model)), 1, 1
    else:
        shape, sequence, batch = model_named(spec.model), spec.sequence_length, spec.batch_size
    return PlanSpec(
        model=shape,
        gpu=card,
        gpus=spec.world_size,
        # a shard group is a node, so `across` is what its groups meet
        gpus_per_node=spec.shard_size if across and spec.shard_size else spec.world_size,
        strategy=spec.strategy,
        shard_size=spec.shard_size,
        seq=sequence,
        micro_batch=batch,
        grad_accum=spec.micro_batches,
        checkpointing=spec.checkpoint,
        param_dtype=spec.precision,
        prefetch=spec.prefetch,
        optimizer=spec.optimizer,
        fused_norms=False,
    )

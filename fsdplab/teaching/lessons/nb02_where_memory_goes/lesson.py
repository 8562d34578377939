"""Lesson 02 in the notebook's process: bytes counted by hand, predicted in closed form, and measured on two ranks.

The closed form is the planner's (`fsdplab plan`). It adds 1 GiB for CUDA and NCCL on a GPU; on the CPU there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import size
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import titled
from fsdplab.planning.memory import FRAMEWORK_BYTES, memory_of
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.planner import plan_of, plan_spec
from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec

MB, GB = 1e6, 1e9
BIG, BIG_GPU, SEQUENCE = "llama-3.1-8b", "h100-80gb", 4096
# Rajbhandari et al. 2020, arXiv 1910.02054, table 1: GB of model states for 7.5 billion parameters, by ranks
ZERO_TABLE = {1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88)}
ZERO_STAGES = ("zero1", "zero2", "full_shard")


def stacked(bars: Mapping[str, Mapping[str, float]], card: float | None, title: str, subtitle: str) -> go.Figure:
    """Draw stacked bars of bytes by category; what exceeds the card is named in the alarm colour.

    `bars` has bytes by category for each name; without a `card` (bytes) there is no line and no alarm.
    """
    totals = {name: sum(split.values()) for name, split in bars.items()}
    # one unit for all bars: GB where any bar, or the card, has a GB
    widest = max(*totals.values(), card or 0)
    scale, unit = (1e9, "GB") if widest >= 1e9 else (1e6, "MB")

    parts = []
    for category in CATEGORY_ROWS.values():
        values = [split[category.name] for split in bars.values()]
        if max(values) > widest / 1000:  # a thinner part would not be seen
            scaled = [value / scale for value in values]
            parts.append(Part(category.title, category.colour, scaled))

    ends: dict[str, str] = {}
    over = []
    for name, total in totals.items():
        ends[name] = f"<b>{size(total)}</b>"
        if card and total > card:
            over.append(name)
            ends[name] = f"{ends[name]} · over the card"

    described = [f"{name} {size(total)}" for name, total in totals.items()]
    alt = f"Bars of memory by category: {'; '.join(described)}."
    levels: dict[str, float] = {}
    if card:
        levels[f"card {size(card)}"] = card / scale
        alt = f"{alt} The card holds {size(card)}."
    axis = f"peak memory of a rank ({unit})"
    figure = stacked_bars(ends, parts, axis, f"%{{x:.1f}} {unit}", levels=levels, alarming=over)
    return titled(figure, title, subtitle, alt, 100 + 48 * len(bars))


# ---- a large model, planned


def stack(ranks: int, sequences: int, checkpointing: str) -> go.Figure:
    """Draw the predicted peak of Llama 3.1 8B under every strategy, by category, under the line of an H100."""
    strategies = ("no_shard", "zero1", "zero2", "shard_grad_op", "full_shard")
    choices = {"micro_batch": sequences, "checkpointing": checkpointing, "gpus_per_node": 8}
    spec = plan_spec(BIG, BIG_GPU, gpus=ranks, seq=SEQUENCE, **choices)
    card = spec.gpu.memory_bytes
    peaks, fitting = {}, []
    for name in strategies:
        peaks[name] = plan_of(replace(spec, strategy=name)).memory.peak.by_category
        if sum(peaks[name].values()) <= card:
            fitting.append(name)
    verdict = "no strategy fits"
    if fitting:
        verb = "fits" if len(fitting) == 1 else "fit"
        verdict = f"{', '.join(fitting)} {verb}"
    plural = "s" if sequences > 1 else ""
    title = f"On {ranks} GPUs, {sequences} sequence{plural} each: {verdict} the card"
    subtitle = (
        f"Predicted for {spec.model.name} on {spec.gpu.name}, sequences of {SEQUENCE:,} tokens, bf16 with fp32 masters,"
        f" checkpointing {checkpointing}; each bar at its own highest instant"
    )
    return stacked(peaks, card, title, subtitle)


# ---- a small run, predicted and measured


def planned(job: RunSpec) -> PlanSpec:
    """Return the plan of a run of the lesson on a CPU.

    The GPU is a stand-in, memory does not depend on it.
    """
    choices = {"gpus": job.world_size, "seq": job.sequence_length, "micro_batch": job.batch_size}
    return plan_spec(job.model, BIG_GPU, strategy=job.strategy, param_dtype="fp32", **choices)


def predicted(job: RunSpec) -> dict[str, float]:
    """Return the bytes by category at the planned peak, without what only a GPU needs."""
    by_category = dict(memory_of(planned(job)).peak.by_category)
    # a CUDA context and its kernels, which a CPU rank does not have
    by_category["other"] -= FRAMEWORK_BYTES
    return by_category


def predicted_beside(record: RunRecord) -> go.Figure:
    """Draw two bars: the planner's peak and the run's, by category."""
    measured: dict[str, float] = dict(record.summary.peak_memory_bytes.split)
    names = ("model", "strategy", "world_size", "batch_size", "sequence_length")
    by_plan = predicted(RunSpec(**{name: record.spec[name] for name in names}))
    predicted_total, measured_total = sum(by_plan.values()), sum(measured.values())
    part = f"{100 * predicted_total / measured_total:.1f} %"
    title = f"Predicted {size(predicted_total)}, measured {size(measured_total)}: {part} of it"
    subtitle = (
        "Worst of two CPU ranks, full_shard, fp32, each bar at its own highest instant; predicted in closed form,"
        " measured by the record"
    )
    return stacked({"predicted": by_plan, "measured": measured}, record.spec["card"], title, subtitle)


# ---- the batch that fits


def instants(job: RunSpec) -> list[tuple[str, float, float]]:
    """Return the notable instants of a run's step: (name, MB that stay, MB a sequence)."""
    return [(name, fixed / MB, per_sequence / MB) for name, fixed, per_sequence in _instants(job, notable=True)]


def moments(job: RunSpec | PlanSpec) -> list[tuple[float, float]]:
    """Return for each instant at which the peak may lie: (MB that do not depend on the batch, MB a sequence).

    A `RunSpec` is of a run on the CPU, a `PlanSpec` of a GPU.
    """
    return [(fixed / MB, per_sequence / MB) for _, fixed, per_sequence in _instants(job)]


def _instants(job: RunSpec | PlanSpec, notable: bool = False) -> list[tuple[str, float, float]]:
    """Return (name, bytes that stay, bytes a sequence) of every instant, or of the notable ones.

    The planner is linear in the batch, so that plans of one and of two sequences give both numbers.
    """
    if isinstance(job, RunSpec):
        spec, framework_bytes = planned(job), FRAMEWORK_BYTES
    else:
        spec, framework_bytes = job, 0
    with_one = memory_of(replace(spec, micro_batch=1)).moments
    with_two = memory_of(replace(spec, micro_batch=2)).moments
    found = []
    for one, two in zip(with_one, with_two, strict=True):
        if one.notable or not notable:
            # total = fixed + sequences x per_sequence: of totals 5 and 7 GB, 2 a sequence and 3 fixed
            per_sequence = two.total - one.total
            found.append((one.name, 2 * one.total - two.total - framework_bytes, per_sequence))
    return found

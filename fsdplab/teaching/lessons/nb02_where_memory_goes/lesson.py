"""Lesson 02 in the notebook's process: bytes counted by hand, predicted in closed form, and measured on two ranks.

The closed form is the planner's (`fsdplab plan`). It adds 1 GiB for CUDA and NCCL on a GPU; on the CPU there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdplab.common.names import CATEGORIES, CATEGORY_ROWS
from fsdplab.common.sizes import size, three_digits
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import titled
from fsdplab.planning.memory import FRAMEWORK_BYTES, memory_of
from fsdplab.planning.plan_spec import CHECKPOINTINGS, PlanSpec
from fsdplab.planning.planner import largest_micro_batch, plan_of, plan_spec
from fsdplab.records import RunRecord, known
from fsdplab.sessions import RunSpec
from fsdplab.teaching.core.display import Note, Table, table

MB, GB = 1e6, 1e9
CARD = 320e6  # bytes of the emulated card
JOB = {
    "model": "gpt-20m",
    "world_size": 2,
    "batch_size": 2,
    "sequence_length": 64,
    "steps": 1,
    "device": "cpu",
    "time_limit": 300.0,
}
BIG, BIG_GPU, SEQUENCE = "llama-3.1-8b", "h100-80gb", 4096
Moments = Sequence[tuple[float, float]]
StateBytes = Callable[[str, float, int, str], float]

# Rajbhandari et al. 2020, arXiv 1910.02054, table 1: GB of model states for 7.5 billion parameters, by ranks
ZERO_TABLE = {1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88)}
ZERO_PARAMETERS, ZERO_STAGES = 7.5e9, ("zero1", "zero2", "full_shard")


def states_table(held: Mapping[str, int], count: int) -> Table:
    """Return the counted bytes of each state, and how many those are for each of `count` parameters."""
    rows = []
    for name, nbytes in {**held, "together": sum(held.values())}.items():
        rows.append([name, f"{nbytes / MB:.2f}", f"{nbytes / count:.2f}"])
    return table(["state", "MB", "bytes a parameter"], rows, "Counted on this machine, after one step.")


def beside_zero(model_state_bytes: StateBytes) -> Table:
    """Return a function of model states beside the published table of the ZeRO paper, in GB."""
    rows = []
    for ranks, published_row in ZERO_TABLE.items():
        cells = []
        for stage, published in zip(ZERO_STAGES, published_row):
            computed = model_state_bytes(stage, ZERO_PARAMETERS, ranks, "bf16") / GB
            cells.append(f"{three_digits(computed)} | {published:g}")
        rows.append([ranks, *cells])
    caption = (
        "GB on a rank for 7.5 billion parameters: your function | published (Rajbhandari et al. 2020, arXiv 1910.02054,"
        " table 1). Both are computed. full_shard is the paper's third stage."
    )
    return table(["ranks", *ZERO_STAGES], rows, caption)


def stacked(bars: Mapping[str, Mapping[str, float]], card: float | None, title: str, subtitle: str) -> go.Figure:
    """Draw stacked bars of bytes by category; what exceeds the card is named in the alarm colour.

    `bars` has bytes by category for each name; without a `card` (bytes) there is no line and no alarm.
    """
    totals = {name: sum(split.values()) for name, split in bars.items()}
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


def job(**choices: Any) -> RunSpec:
    """Return the lesson's run: the lab's GPT of 21.6 million parameters in fp32, `full_shard` on two ranks."""
    return RunSpec(**{**JOB, "strategy": "full_shard", **choices})


def peak(record: RunRecord) -> float:
    """Return the MB at the peak of the worst rank."""
    return known(record.summary.peak_memory_bytes.total) / MB


def planned(batch: int) -> PlanSpec:
    """Return the plan of the lesson's run with so many sequences.

    The GPU is a stand-in, memory does not depend on it.
    """
    choices = {"gpus": JOB["world_size"], "seq": JOB["sequence_length"], "param_dtype": "fp32"}
    return plan_spec(str(JOB["model"]), BIG_GPU, micro_batch=batch, **choices)


def _predicted(batch: int) -> dict[str, float]:
    """Return the bytes by category at the planned peak, without what only a GPU needs."""
    by_category = dict(memory_of(planned(batch)).peak.by_category)
    by_category["other"] -= FRAMEWORK_BYTES
    return by_category


def predicted_beside(record: RunRecord) -> go.Figure:
    """Draw two bars: the planner's peak and the run's, by category."""
    measured: dict[str, float] = dict(record.summary.peak_memory_bytes.split)
    predicted = _predicted(record.spec["batch_size"])
    predicted_total, measured_total = sum(predicted.values()), sum(measured.values())
    part = f"{100 * predicted_total / measured_total:.1f} %"
    title = f"Predicted {size(predicted_total)}, measured {size(measured_total)}: {part} of it"
    subtitle = (
        "Worst of two CPU ranks, full_shard, fp32, each bar at its own highest instant; predicted in closed form,"
        " measured by the record"
    )
    return stacked({"predicted": predicted, "measured": measured}, record.spec["card"], title, subtitle)


def gap(record: RunRecord) -> Note:
    """Return what states by hand leave out, and the category in which the plan is furthest from the run."""
    predicted, measured = _predicted(record.spec["batch_size"]), record.summary.peak_memory_bytes.split
    states = ("sharded_parameters", "sharded_gradients", "optimizer_state")
    state_bytes = sum(measured[name] for name in states)
    furthest = max(CATEGORIES, key=lambda name: abs(measured[name] - predicted[name]))
    return Note(
        (
            f"Seen here: the peak is {size(sum(measured.values()))}, of which {size(state_bytes)} are shards of model"
            " states. The rest passes: activations, parameters unsharded for a moment, gradients on their way to their"
            " shards.",
            f"The plan is furthest off in {furthest.replace('_', ' ')}: {size(predicted[furthest])} predicted,"
            f" {size(measured[furthest])} measured. A plan adds the activations of whole blocks, a run those of every"
            " operator.",
        )
    )


# ---- the batch that fits


def moments() -> list[tuple[float, float]]:
    """Return for each instant at which the peak may lie: (MB that do not depend on the batch, MB a sequence)."""
    instants = _instants(planned(1), FRAMEWORK_BYTES)
    return [(fixed / MB, per_sequence / MB) for _, fixed, per_sequence in instants]


def _instants(spec: PlanSpec, without: float = 0.0, notable: bool = False) -> list[tuple[str, float, float]]:
    """Return (name, bytes that stay, bytes a sequence) of every instant of a plan, or of the notable ones.

    The planner is linear in the batch, so that plans of one and of two sequences give both numbers.
    """
    with_one = memory_of(replace(spec, micro_batch=1)).moments
    with_two = memory_of(replace(spec, micro_batch=2)).moments
    instants = []
    for one, two in zip(with_one, with_two, strict=True):
        if one.notable or not notable:
            per_sequence = two.total - one.total
            instants.append((one.name, 2 * one.total - two.total - without, per_sequence))
    return instants


def moments_table() -> Table:
    """Return the same with names: what each instant holds at 1 and at 16 sequences."""
    rows = []
    for name, fixed, per_sequence in _instants(planned(1), FRAMEWORK_BYTES, notable=True):
        values = (fixed, per_sequence, fixed + per_sequence, fixed + 16 * per_sequence)
        rows.append([name, *(f"{value / MB:.1f}" for value in values)])
    header = ["instant", "MB that stay", "MB a sequence", "with 1 sequence", "with 16"]
    return table(header, rows, "Predicted for one rank of the run above, sequences of 64 tokens.")


def on_the_card(batch: int) -> RunSpec:
    """Return the lesson's run with so many sequences a rank, on an emulated card of 320 MB."""
    return job(batch_size=int(batch), card=int(CARD))


def real_batches(largest_batch: Callable[[float, Moments], float]) -> Table:
    """Return the largest batch of Llama 3.1 8B on 8 H100 by a function, beside the planner's own search."""
    rows = []
    for checkpointing in CHECKPOINTINGS:
        spec = plan_spec(BIG, BIG_GPU, gpus=8, seq=SEQUENCE, checkpointing=checkpointing)
        instants = [(fixed / MB, per_sequence / MB) for _, fixed, per_sequence in _instants(spec)]
        by_learner = largest_batch(spec.gpu.memory_bytes / MB, instants)
        planned = largest_micro_batch(spec)
        rows.append([checkpointing, f"{by_learner:g}", planned.micro_batch if planned else 0])
    caption = f"Predicted: full_shard, sequences of {SEQUENCE:,} tokens, bf16 with fp32 masters, a card of 85.9 GB."
    return table(["activations recomputed", "your largest batch", "the planner's"], rows, caption)

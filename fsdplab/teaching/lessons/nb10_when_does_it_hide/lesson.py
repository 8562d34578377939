"""Lesson 10 in the notebook's process: messages against compute of one block, planned for real machines and imitated.

Ratios are T_comm / T_compute. Plans come from data sheets (planning/overlap.py), the run from the wind tunnel, whose
link gives a small model the ratio of a large job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdplab.common.sizes import seconds, three_digits
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import STEP_COLOURS, titled
from fsdplab.planning.efficiency import efficiency_of
from fsdplab.planning.links import LinkSpec
from fsdplab.planning.overlap import PHASES, overlap_of, overlap_point
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.plan_traffic import LINK_EFFICIENCY
from fsdplab.planning.planner import plan_spec
from fsdplab.planning.step_time import peak_flops
from fsdplab.records import RunRecord, known
from fsdplab.sessions import RunSpec
from fsdplab.sessions.spec import Network
from fsdplab.teaching.core.display import Note, Table, table

MODEL, SEQUENCE = "llama-3.1-8b", 256
NVLINK_STEP = 3.4e-6  # seconds of latency of a ring's step (planning/links.py)
JOB = {
    "model": "gpt-20m",
    "strategy": "full_shard",
    "world_size": 2,
    "batch_size": 2,
    "sequence_length": 64,
    "steps": 1,
    "warmup": 1,
    "memory": False,
    "profile": 1,
    "device": "cpu",
    "time_limit": 300.0,
}
Crossover = Callable[[float, int, float, float, float, float], float]


def _spec(gpu: str, gpus: int, tokens: int = SEQUENCE) -> PlanSpec:
    """Return the plan of the lesson's model on some GPUs, with whole sequences and at least one."""
    return plan_spec(MODEL, gpu, gpus=gpus, seq=SEQUENCE, micro_batch=max(1, tokens // SEQUENCE))


def machines() -> dict[str, PlanSpec]:
    """Return the machines of the notebook's figure: Llama 3.1 8B under full_shard on each."""
    return {
        "8 x H100": _spec("h100", 8),
        "64 x H100": _spec("h100", 64),
        "8 x A100": _spec("a100", 8),
        "8 x RTX 4090": _spec("4090", 8),
    }


def target() -> PlanSpec:
    """Return the plan of Llama 3.1 8B on 8 H100."""
    return machines()["8 x H100"]


def planned_crossover() -> float:
    """Return from how many tokens of a rank's micro-batch on the planner hides all of a block's messages on 8 H100."""
    return overlap_of(target()).crossover_tokens


# ---- the learner's formula beside the planner


def reached(spec: PlanSpec) -> tuple[float, float]:
    """Return the FLOP/s and bytes a second that the planner takes a machine of one node to reach."""
    flops = efficiency_of(spec.gpu).part * peak_flops(spec.gpu)
    bandwidth = LINK_EFFICIENCY * spec.gpu.link.bytes_per_s
    return flops, bandwidth


def beside_planner(crossover: Crossover) -> Table:
    """Return `crossover(parameters, ranks, flops, bandwidth, 2, 4)` beside the planner, for machines of one node."""
    rows = []
    for name, spec in machines().items():
        if spec.gpus > spec.gpus_per_node:
            continue
        flops, bandwidth = reached(spec)
        by_learner = crossover(spec.model.block_parameters, spec.gpus, flops, bandwidth, 2, 4)
        by_planner = overlap_of(spec).crossover_tokens
        reaches = [f"{flops / 1e12:.0f}", f"{bandwidth / 1e9:.0f}"]
        rows.append([name, *reaches, f"{by_learner:,.0f}", f"{by_planner:,.0f}"])
    caption = (
        "Computed for a block of Llama 3.1 8B, all-gathers in bf16, reductions in fp32. The planner adds latency,"
        " attention, norms and other operators that move bytes: more compute than the products alone, so fewer tokens."
    )
    return table(["machine", "TFLOP/s reached", "GB/s reached", "your tokens", "planner's tokens"], rows, caption)


# ---- one block under sliders


def block(gigabytes_per_second: int, tokens: int) -> go.Figure:
    """Draw compute and messages of one block on 8 H100 behind a link of that rate, in forward and backward.

    A message hides as far as compute reaches.
    """
    link = LinkSpec("slider", gigabytes_per_second * 1e9, NVLINK_STEP)
    overlap = overlap_of(_spec("h100", 8, tokens), link)
    # a phase has two bars, that of compute and that of messages; a part is 0 in the other's bar
    ends: dict[str, str] = {}
    computing, hidden, exposed = [], [], []
    phases, exposed_phases = [], []
    for phase in PHASES:
        compute, sent = overlap.compute_s[phase], overlap.communication_s[phase]
        under_compute = min(sent, compute)
        ends |= {f"{phase}: compute": "", f"{phase}: messages": ""}
        computing += [1e3 * compute, 0.0]
        hidden += [0.0, 1e3 * under_compute]
        exposed += [0.0, 1e3 * (sent - under_compute)]
        phases.append(f"{phase} computes {seconds(compute)}, its messages take {seconds(sent)}")
        if sent - under_compute:
            exposed_phases.append(f"{phase} {seconds(sent - under_compute)}")
    parts = [
        Part("compute", "#6b7380", computing),
        Part("messages, hidden", STEP_COLOURS["overlapped"], hidden),
        Part("messages, exposed", STEP_COLOURS["exposed"], exposed),
    ]
    figure = stacked_bars(ends, parts, "one block (ms)", "%{x:.2f} ms", lambda ms: seconds(ms / 1e3))
    verdict = "everything hides"
    if exposed_phases:
        verdict = f"exposed a block: {', '.join(exposed_phases)}"
    title = f"{gigabytes_per_second} GB/s, {tokens:,} tokens a rank: {verdict}"
    subtitle = "Predicted for Llama 3.1 8B on 8 H100 behind this link, full_shard, unsharding one block ahead"
    return titled(figure, title, subtitle, f"Bars of one block: {'; '.join(phases)}. {title}.", 270)


# ---- the wind tunnel


def tunnel(**choices: Any) -> RunSpec:
    """Return the lab's GPT on two ranks, behind the link that imitates Llama 3.1 8B on 8 H100."""
    return RunSpec(**{**JOB, "emulate": "8xH100", "as_model": MODEL, **choices})


def asked(record: RunRecord) -> float:
    """Time of messages in % of that of compute, as the wind tunnel asks for it: the large job's, on any machine."""
    target = Network(emulate=record.spec["emulate"], as_model=record.spec["as_model"]).target
    return 100 * known(target).ratio


def hundredths(record: RunRecord) -> float:
    """Time of messages on the link in the profiled step, in % of the time for which a rank computed."""
    return 100 * overlap_point(record).measured


def tunnel_seen(record: RunRecord) -> Note:
    """Return the link that was chosen, the ratio asked for and reached, and what of the messages was exposed."""
    link, comm = known(record.summary.link), record.summary.comm
    carried, exposed = _carried(record), known(comm.on_link_s)
    hidden = 1 - exposed / carried
    return Note(
        (
            f"Seen here: a link of {three_digits(known(link.bytes_per_s) / 1e6)} MB/s gave the machine the ratio of"
            f" the real job. Asked for: {asked(record):.1f} % over the whole step, computing measured in the run's"
            f" first steps. Reached in the profiled step: {hundredths(record):.1f} %.",
            f"The link carried messages for {seconds(carried)} of a step, {hidden:.0%} of it under computing and"
            f" {seconds(exposed)} exposed.",
        )
    )


def _carried(record: RunRecord) -> float:
    """Return the seconds of a profiled step for which the emulated link was busy with the messages of one rank."""
    steps = {row["step"] for row in record.table("breakdown")}
    busy_ns = 0
    for row in record.table("ledger"):
        if row["rank"] == 0 and row["step"] in steps:
            busy_ns += row["end_ns"] - row["start_ns"]
    return busy_ns / 1e9 / max(1, len(steps))

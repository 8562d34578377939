"""Lesson 10 in the notebook's process: messages against compute of one block, planned for real machines and imitated.

Ratios are T_comm / T_compute. Plans come from data sheets (planning/overlap.py), the run from the wind tunnel, whose
link gives a small model the ratio of a large job.
"""

from __future__ import annotations

from fsdplab.common.sizes import seconds
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import STEP_COLOURS, titled
from fsdplab.planning.efficiency import efficiency_of
from fsdplab.planning.links import LinkSpec
from fsdplab.planning.overlap import PHASES, overlap_of
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.plan_traffic import LINK_EFFICIENCY
from fsdplab.planning.planner import plan_spec
from fsdplab.planning.step_time import peak_flops
from fsdplab.records import RunRecord, known
from fsdplab.sessions.spec import Network

MODEL, SEQUENCE = "llama-3.1-8b", 256
NVLINK_STEP = 3.4e-6  # seconds of latency of a ring's step (planning/links.py)


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


def reached(spec: PlanSpec) -> tuple[float, float]:
    """Return the FLOP/s and bytes a second that the planner takes a machine of one node to reach."""
    flops = efficiency_of(spec.gpu).part * peak_flops(spec.gpu)
    bandwidth = LINK_EFFICIENCY * spec.gpu.link.bytes_per_s
    return flops, bandwidth


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
        # what is sent longer than the phase computes is exposed
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


def asked(record: RunRecord) -> float:
    """Time of messages in % of that of compute, as the wind tunnel asks for it: the large job's, on any machine."""
    target = Network(emulate=record.spec["emulate"], as_model=record.spec["as_model"]).target
    return 100 * known(target).ratio

"""Questions about what ranks send each other: strategies, groups, prefetch, precision, accumulation, meshes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fsdplab.common.sizes import size, three_digits
from fsdplab.planning.memory import fits_card, memory_of
from fsdplab.planning.overlap import PHASES, overlap_of
from fsdplab.planning.plan_spec import PlanError, PlanSpec, changed, under_each_strategy
from fsdplab.planning.plan_traffic import plan_traffic
from fsdplab.planning.step_time import step_time

from .answer import ACTIVATIONS, ALIKE, EXPOSED, FITS, GATHERED, PEAK, SENT, SPEED, STEP, Case, Panel, Question, fastest

# ---- strategies


def _of_strategies(spec: PlanSpec, rows: Sequence[Case]) -> str:
    fitting, least = [row for row in rows if row.fits], min(rows, key=lambda row: row.number(PEAK))
    if not fitting:
        return f"No strategy fits; {least['strategy']} needs least: {least[PEAK]} at the peak"
    *names, last = [row["strategy"] for row in fitting]
    said, best = " and ".join(filter(None, [", ".join(names), last])), fastest(rows)
    return (
        f"Of those that fit ({said}) none is over a percent faster than {best['strategy']}, with {best[SPEED]}"
        f" tokens/s a GPU and {best[PEAK]} at the peak; {least['strategy']} needs least: {least[PEAK]}"
    )


STRATEGY = Question(
    asked="Which of the model's states should be sharded?",
    columns=("strategy", PEAK, SENT, STEP, EXPOSED, SPEED, FITS),
    variants=lambda spec: [Case(each.strategy, each) for each in under_each_strategy(spec)],
    sentence=_of_strategies,
    beside=(SPEED,),
)


# ---- groups

FULL, HYBRID = BOTH = ("full_shard", "hybrid_shard")
_NETWORK = "network of a GPU"


def _over_nodes(spec: PlanSpec) -> tuple[PlanSpec, str]:
    """At least two nodes: in one, both strategies are the same."""
    if spec.fabric is None:
        raise PlanError(
            f"hybrid_shard is for several nodes, and {spec.gpu.name} has no known network; give another GPU"
        )
    base = replace(spec.under(FULL), gpus=max(spec.gpus, 2 * spec.gpus_per_node))
    full, groups = (size(memory_of(each).peak.total) for each in map(base.under, BOTH))
    note = f"at the peak a rank holds {full} under full_shard and {groups} under hybrid_shard"
    if base.gpus > spec.gpus:
        note = f"{spec.gpus:,} GPUs are one node, where both are the same, so two nodes are planned; {note}"
    return base, note


def _of_networks(spec: PlanSpec) -> list[Case]:
    """Networks of different speed, and the one where the two strategies cross."""
    crossing = _crossing_rate(spec)
    rates = sorted({*_networks(spec), *([crossing] if crossing else [])})
    return [Case(rate, spec, known=_steps_of_both(spec, rate)) for rate in rates]


def _networks(spec: PlanSpec) -> list[float]:
    return [_rate_here(spec) * 2.0**power for power in range(-4, 3)]


def _rate_here(spec: PlanSpec) -> float:
    """Bytes a second of a GPU's share of the network."""
    return spec.fabric.bytes_per_s if spec.fabric else 0.0


def _steps_of_both(spec: PlanSpec, network: float) -> dict[str, float]:
    """Seconds of a step under both, where the network gives each GPU so many bytes a second."""
    at = replace(spec, oversubscription=spec.oversubscription * _rate_here(spec) / network)
    return {name: step_time(at.under(name)).step_s for name in BOTH}


def _crossing_rate(spec: PlanSpec) -> float | None:
    """The rate below which hybrid_shard's step is shorter by a percent; None where there is none."""

    def pays(rate: float) -> bool:
        steps = _steps_of_both(spec, rate)
        return steps[HYBRID] < ALIKE * steps[FULL]

    low, high = 1e8, 1e12
    if not pays(low) or pays(high):
        return None
    for _ in range(30):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def _where_hybrid_pays(spec: PlanSpec, rows: Sequence[Case]) -> str:
    """Where it pays, and whether that helps: groups whose slices no card holds pay nowhere."""
    fits = fits_card(spec.under(HYBRID))
    pays = "pays" if fits else "would pay"
    where = _where(spec, rows)
    return f"hybrid_shard {pays} {where}{'' if fits else ', but does not fit a card'}"


def _where(spec: PlanSpec, rows: Sequence[Case]) -> str:
    usual = _networks(spec)
    crossing = next((row for row in rows if row.number(_NETWORK) not in usual), None)
    if crossing is not None:
        return f"where the network gives a GPU less than {crossing[_NETWORK]}"
    pays = [row for row in rows if row.number(HYBRID) < ALIKE * row.number(FULL)]
    if 0 < len(pays) < len(rows):
        return f"at {len(pays)} of the {len(rows)} rates of the network that were tried"
    return f"at {'every' if pays else 'no'} rate of the network that was tried"


def _here(spec: PlanSpec, rows: Sequence[Case]) -> str:
    here = next(row for row in rows if row.value(_NETWORK) == _rate_here(spec))
    return (
        f"On {spec.gpus:,} GPUs in {spec.gpus // spec.gpus_per_node:,} nodes {_where_hybrid_pays(spec, rows)}; at this"
        f" one's {here[_NETWORK]} a step takes {here[FULL]} under full_shard and {here[HYBRID]} under hybrid_shard"
    )


GROUPS = Question(
    asked="When does hybrid sharding make sense?",
    columns=(_NETWORK, *BOTH),
    variants=_of_networks,
    sentence=_here,
    base=_over_nodes,
    on_card="",
    beside=(Panel(BOTH, kind="lines", title="step"),),
)


# ---- how far ahead

PREFETCH = Question(
    asked="How far ahead should units be gathered?",
    columns=("units ahead", PEAK, GATHERED, STEP, EXPOSED, SPEED, FITS),
    variants=lambda spec: [Case(depth, replace(spec, prefetch=depth)) for depth in (0, 1, 2, 4)],
    sentence=(
        "Without prefetch {rows[0][exposed]} of a step is exposed communication, with one unit gathered ahead"
        " {rows[1][exposed]}, with four {rows[3][exposed]}, for which a rank gathers at most {rows[0][most gathered]},"
        " {rows[1][most gathered]} and {rows[3][most gathered]}"
    ),
    beside=(STEP,),
)


def _of_tokens(spec: PlanSpec) -> list[Case]:
    """Communication over compute of a block, around the tokens where it is 1."""
    found = overlap_of(spec)
    middle = found.crossover_tokens or spec.tokens
    tokens = sorted({middle * 2.0**power for power in range(-3, 4)} | {float(spec.tokens)})
    return [Case(each, spec, known={phase: found.ratio(phase, each) for phase in PHASES}) for each in tokens]


def _hides_from(spec: PlanSpec, rows: Sequence[Case]) -> str:
    crossover = overlap_of(spec).crossover_tokens
    if not crossover:
        return "Nothing is sent for a block, so there is nothing to hide"
    mine = next(row for row in rows if row.value("tokens") == spec.tokens)
    return (
        f"Communication of a block hides behind its compute from {three_digits(crossover)} tokens a micro-batch on; at"
        f" this plan's {mine['tokens']} its ratio to compute is {mine['forward']} forward and {mine['backward']}"
        f" backward: {'hidden' if spec.tokens >= crossover else 'exposed'}"
    )


OVERLAP = Question(
    asked="From which batch on does communication hide behind compute?",
    columns=("tokens", *PHASES),
    variants=_of_tokens,
    sentence=_hides_from,
    base=lambda spec: (spec, "" if spec.prefetch else "without prefetch no gather is hidden, whatever the ratio"),
    on_card="",
    beside=(Panel(PHASES, "lines", (1.0, "as long as compute"), "communication / compute"),),
)


# ---- what is sent

REDUCTION = Question(
    asked="What does gradient reduction in fp32 do to the memory?",
    columns=("reduced in", PEAK, "largest buffer", "sent in reductions", FITS),
    variants=lambda spec: [Case(dtype, replace(spec, reduce_dtype=dtype)) for dtype in ("bf16", "fp32")],
    sentence=(
        "Reducing gradients in fp32 instead of bf16 takes {rows[1][largest buffer]} instead of {rows[0][largest"
        " buffer]} for the largest reduction's buffer, and the peak is {rows[1][peak]} instead of {rows[0][peak]}"
        " ({rows[1].verdict}); a rank's reductions send {rows[1][sent in reductions]} instead of {rows[0][sent in"
        " reductions]}"
    ),
    beside=("largest buffer",),
    timed=False,
)

_PRECISIONS = {  # parameters, reductions, masters
    "fp32": ("fp32", "fp32", "fp32"),
    "bf16, fp32 reduction": ("bf16", "fp32", "fp32"),
    "bf16, bf16 reduction": ("bf16", "bf16", "fp32"),
    "bf16 without masters": ("bf16", "bf16", "bf16"),
}


def _in_dtypes(spec: PlanSpec, param: str, reduced: str, master: str) -> PlanSpec:
    return replace(spec, masters="slices", param_dtype=param, reduce_dtype=reduced, master_dtype=master)


PRECISION = Question(
    asked="What does another mixed precision policy do to the peak memory?",
    columns=("precision", PEAK, SENT, STEP, SPEED, FITS),
    variants=lambda spec: [Case(name, _in_dtypes(spec, *kinds)) for name, kinds in _PRECISIONS.items()],
    sentence=(
        "The peak is {rows[0][peak]} in fp32, {rows[1][peak]} computing in bf16 over fp32 masters, {rows[2][peak]}"
        " where gradients are reduced in bf16 too and {rows[3][peak]} without masters; a step takes {rows[0][step]},"
        " {rows[1][step]}, {rows[2][step]} and {rows[3][step]}"
    ),
    beside=(STEP,),
)

_BY_ZERO1 = "sent by zero1"


def _accumulated(spec: PlanSpec) -> list[Case]:
    """So many micro-batches a step, of the same size, beside what zero1 would send."""
    every = [replace(spec, grad_accum=count) for count in (1, 2, 4, 8)]
    once = [plan_traffic(replace(each, offload=False).under("zero1")) for each in every]
    sent = [sum(row.step_bytes for row in rows) for rows in once]
    return [Case(each.grad_accum, each, known={_BY_ZERO1: nbytes}) for each, nbytes in zip(every, sent)]


ACCUMULATION = Question(
    asked="What does gradient accumulation change?",
    columns=("micro-batches", PEAK, SENT, _BY_ZERO1, STEP, SPEED, FITS),
    variants=_accumulated,
    sentence=(
        "From 1 to 8 micro-batches a step {spec.strategy} sends {rows[0][sent]} and {rows[3][sent]}, where zero1 sends"
        " {rows[0][sent by zero1]} and {rows[3][sent by zero1]}; throughput goes from {rows[0][tokens/s a GPU]} to"
        " {rows[3][tokens/s a GPU]} tokens/s a GPU and the peak from {rows[0][peak]} to {rows[3][peak]}"
    ),
    on_card="",
    beside=(Panel((SENT, _BY_ZERO1), title="sent a step"), SPEED),
)

_WAYS = "ranks of a group"


def _of_tensor_groups(spec: PlanSpec) -> list[Case]:
    """Tensor parallelism inside a node at the same micro-batch of each group, where it divides heads and GPUs."""
    return [Case(ways, found) for ways in (1, 2, 4, 8) if (found := changed(spec, tensor_parallel=ways))]


def _largest_group(spec: PlanSpec, rows: Sequence[Case]) -> str:
    first, last = rows[0], rows[-1]
    if len(rows) == 1:
        return f"Tensor parallelism cannot cut these heads over these GPUs; with groups of 1 the peak is {first[PEAK]}"
    best = max([row for row in rows if row.fits] or rows, key=lambda row: row.number(SPEED))
    return (
        f"Groups of {last[_WAYS]} lower the peak from {first[PEAK]} to {last[PEAK]}, and throughput goes from"
        f" {first[SPEED]} to {last[SPEED]} tokens/s a GPU; groups of {best[_WAYS]} are the fastest"
        f" {'that fit' if best.fits else 'of these, and none fits'}"
    )


TENSOR = Question(
    asked="Does tensor parallelism inside a node help?",
    columns=(_WAYS, PEAK, ACTIVATIONS, STEP, EXPOSED, SPEED, FITS),
    variants=_of_tensor_groups,
    sentence=_largest_group,
    beside=(SPEED,),
)

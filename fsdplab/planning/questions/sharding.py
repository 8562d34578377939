"""Questions about what ranks send each other: strategies, groups, units, prefetch, precision, accumulation, meshes.

Each function answers for a plan's spec; the sentence is made from the rows of its own table.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.planning.memory import memory_of
from fsdplab.planning.overlap import PHASES, overlap_of
from fsdplab.planning.plan_spec import PlanError, PlanSpec, under_each_strategy
from fsdplab.planning.plan_traffic import plan_traffic
from fsdplab.planning.planner import plan_of
from fsdplab.planning.step_time import step_time

from . import facts
from .answer import Answer, Column, Panel, Row, rate


def strategy(spec: PlanSpec) -> Answer:
    """Every strategy with the same choices: memory, traffic, throughput."""
    rows = [facts.row(each, strategy=each.strategy) for each in under_each_strategy(spec)]
    columns, table = facts.tabled(
        Column("strategy"), rows, (facts.PEAK, facts.SENT, facts.STEP, facts.EXPOSED, facts.SPEED, facts.FITS)
    )
    fitting, least = [row for row in rows if row[facts.FITS]], min(rows, key=lambda row: facts.number(row, facts.PEAK))
    if not fitting:
        sentence = f"No strategy fits; {least['strategy']} needs least: {facts.peak(least)} at the peak"
    else:
        best, names = facts.fastest(rows), facts.joined([str(row["strategy"]) for row in fitting])
        sentence = (
            f"Of those that fit ({names}) none is over a percent faster than {best['strategy']}, with"
            f" {facts.speed(best)} tokens/s a GPU and {facts.peak(best)} at the peak; {least['strategy']} needs least:"
            f" {facts.peak(least)}"
        )
    return Answer("strategy", "", spec, sentence, columns, table, (facts.memory_panel(spec), Panel((facts.SPEED,))))


# ---- groups

_BOTH = ("full_shard", "hybrid_shard")


def hybrid(spec: PlanSpec) -> Answer:
    """full_shard and hybrid_shard in groups of a node over networks of different speed, and where they cross."""
    own = spec.gpu.nic_bytes_per_s
    if own is None:
        raise PlanError(
            f"hybrid_shard is for several nodes, and {spec.gpu.name} has no known network; give another GPU"
        )
    over_nodes = replace(spec.under("full_shard"), gpus=max(spec.gpus, 2 * spec.gpus_per_node))
    crossing = _crossing_rate(over_nodes)
    rates = sorted({own * 2.0**power for power in range(-4, 3)} | ({crossing} if crossing else set()))
    rows = [_both(over_nodes, each) for each in rates]
    columns, table = facts.tabled(Column("network of a GPU", "rate"), rows, [Column(name, "seconds") for name in _BOTH])
    here = next(row for row in rows if row["network of a GPU"] == own)
    nodes = over_nodes.gpus // over_nodes.gpus_per_node
    sentence = (
        f"On {over_nodes.gpus:,} GPUs in {nodes:,} nodes {_where_hybrid_pays(crossing, rows)}; at this one's"
        f" {rate(own)} a step takes {seconds(facts.number(here, 'full_shard'))} under full_shard and"
        f" {seconds(facts.number(here, 'hybrid_shard'))} under hybrid_shard"
    )
    panels = (Panel(_BOTH, kind="lines", title="step"),)
    memory = [plan_of(each).memory.peak.total for each in map(over_nodes.under, _BOTH)]
    note = f"at the peak a rank holds {size(memory[0])} under full_shard and {size(memory[1])} under hybrid_shard"
    if over_nodes.gpus > spec.gpus:
        note = f"{spec.gpus:,} GPUs are one node, where both are the same, so two nodes are planned; {note}"
    return Answer("hybrid", "", over_nodes, sentence, columns, table, panels, note=note)


def _both(spec: PlanSpec, network: float) -> Row:
    """Seconds of a step under both, where the network gives each GPU so many bytes a second."""
    at = replace(spec, gpu=replace(spec.gpu, nic_bytes_per_s=network))
    return {"network of a GPU": network} | {name: step_time(at.under(name)).step_s for name in _BOTH}


def _crossing_rate(spec: PlanSpec) -> float | None:
    """The rate below which hybrid_shard's step is shorter by a percent; None where there is none."""

    def pays(network: float) -> bool:
        row = _both(spec, network)
        return facts.number(row, "hybrid_shard") < facts.ALIKE * facts.number(row, "full_shard")

    low, high = 1e8, 1e12
    if not pays(low) or pays(high):
        return None
    for _ in range(30):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def _where_hybrid_pays(crossing: float | None, rows: list[Row]) -> str:
    if crossing is not None:
        return f"hybrid_shard pays where the network gives a GPU less than {rate(crossing)}"
    pays = [row for row in rows if facts.number(row, "hybrid_shard") < facts.ALIKE * facts.number(row, "full_shard")]
    if 0 < len(pays) < len(rows):
        return f"hybrid_shard pays at {len(pays)} of the {len(rows)} rates of the network that were tried"
    return f"hybrid_shard pays at {'every' if pays else 'no'} rate of the network that was tried"


# ---- how far ahead


def prefetch(spec: PlanSpec) -> Answer:
    """Units gathered ahead: none, one, two, four."""
    rows = [facts.row(replace(spec, prefetch=depth), **{"units ahead": depth}) for depth in (0, 1, 2, 4)]
    columns, table = facts.tabled(
        Column("units ahead", "count"),
        rows,
        (facts.PEAK, facts.GATHERED, facts.STEP, facts.EXPOSED, facts.SPEED, facts.FITS),
    )
    none, one, _, four = rows
    sentence = (
        f"Without prefetch {facts.exposed(none)} of a step is exposed communication, with one unit gathered ahead"
        f" {facts.exposed(one)}, with four {facts.exposed(four)}, for which a rank gathers at most"
        f" {', '.join(facts.nbytes(row, facts.GATHERED) for row in (none, one))} and"
        f" {facts.nbytes(four, facts.GATHERED)}"
    )
    panels = (facts.memory_panel(spec), Panel((facts.STEP,)))
    return Answer("prefetch", "", spec, sentence, columns, table, panels)


def overlap(spec: PlanSpec) -> Answer:
    """Communication over compute of a block against the tokens of a micro-batch, and where it is 1."""
    found = overlap_of(spec)
    crossover = found.crossover_tokens
    base = crossover or spec.tokens
    tokens = sorted({base * 2.0**power for power in range(-3, 4)} | {float(spec.tokens)})
    rows: list[Row] = [{"tokens": each, **{phase: found.ratio(phase, each) for phase in PHASES}} for each in tokens]
    columns, table = facts.tabled(Column("tokens", "number"), rows, [Column(phase, "number") for phase in PHASES])
    mine = next(row for row in rows if row["tokens"] == spec.tokens)
    if not crossover:
        sentence = "Nothing is sent for a block, so there is nothing to hide"
    else:
        verdict = "hidden" if spec.tokens >= crossover else "exposed"
        sentence = (
            f"Communication of a block hides behind its compute from {three_digits(crossover)} tokens a micro-batch"
            f" on; at this plan's {three_digits(spec.tokens)} its ratio to compute is"
            f" {three_digits(facts.number(mine, 'forward'))} forward and"
            f" {three_digits(facts.number(mine, 'backward'))} backward: {verdict}"
        )
    panels = (Panel(PHASES, "lines", (1.0, "as long as compute"), "communication / compute"),)
    note = "" if spec.prefetch else "without prefetch no gather is hidden, whatever the ratio"
    return Answer("overlap", "", spec, sentence, columns, table, panels, note=note)


# ---- what travels


def reduction(spec: PlanSpec) -> Answer:
    """Gradients reduced in bf16 and in fp32: the buffer that the largest reduction reads, the peak, the bytes sent."""
    rows = [_reduced(replace(spec, reduce_dtype=dtype)) for dtype in ("bf16", "fp32")]
    columns, table = facts.tabled(
        Column("reduced in"), rows, (facts.PEAK, Column(_BUFFER, "bytes"), Column(_REDUCED, "bytes"), facts.FITS)
    )
    narrow, wide = rows
    sentence = (
        f"Reducing gradients in fp32 instead of bf16 takes {facts.nbytes(wide, _BUFFER)} instead of"
        f" {facts.nbytes(narrow, _BUFFER)} for the largest reduction's buffer, and the peak is {facts.peak(wide)}"
        f" instead of {facts.peak(narrow)} ({facts.verdict(wide)}); a rank's reductions send"
        f" {facts.nbytes(wide, _REDUCED)} instead of {facts.nbytes(narrow, _REDUCED)}"
    )
    return Answer("reduction", "", spec, sentence, columns, table, (facts.memory_panel(spec), Panel((_BUFFER,))))


_BUFFER, _REDUCED = "largest buffer", "sent in reductions"


def _reduced(spec: PlanSpec) -> Row:
    memory = memory_of(spec)
    axes = [row for row in plan_traffic(spec) if row.axis in ("shard", "replicate")]
    return {
        "reduced in": spec.reduce_dtype, **facts.of_memory(memory, spec),
        _BUFFER: max(each.by_category["communication_buffers"] for each in memory.moments),
        _REDUCED: sum(row.step_bytes for row in axes if row.kind != "all_gather"),
    }  # fmt: skip


def precision(spec: PlanSpec) -> Answer:
    """What is computed with and reduced in: float32, bf16 with float32 masters, bf16 throughout."""
    kinds = {
        "fp32": dict(param_dtype="fp32", reduce_dtype="fp32", master_dtype="fp32"),
        "bf16, fp32 reduction": dict(param_dtype="bf16", reduce_dtype="fp32", master_dtype="fp32"),
        "bf16, bf16 reduction": dict(param_dtype="bf16", reduce_dtype="bf16", master_dtype="fp32"),
        "bf16 without masters": dict(param_dtype="bf16", reduce_dtype="bf16", master_dtype="bf16"),
    }
    rows = [
        facts.row(replace(spec, masters="slices", **kind), precision=name)  # type: ignore[arg-type]
        for name, kind in kinds.items()
    ]
    columns, table = facts.tabled(
        Column("precision"), rows, (facts.PEAK, facts.SENT, facts.STEP, facts.SPEED, facts.FITS)
    )
    single, mixed, narrow, pure = rows
    sentence = (
        f"The peak is {facts.peak(single)} in fp32, {facts.peak(mixed)} computing in bf16 over fp32 masters,"
        f" {facts.peak(narrow)} where gradients are reduced in bf16 too and {facts.peak(pure)} without masters; a step"
        f" takes {facts.step(single)}, {facts.step(mixed)}, {facts.step(narrow)} and {facts.step(pure)}"
    )
    return Answer("precision", "", spec, sentence, columns, table, (facts.memory_panel(spec), Panel((facts.STEP,))))


def accumulation(spec: PlanSpec) -> Answer:
    """Micro-batches a step, of the same size: bytes a step, and throughput, beside what zero1 would send."""
    rows = []
    for count in (1, 2, 4, 8):
        each = replace(spec, grad_accum=count)
        once = plan_of(each.under("zero1"))
        rows.append(facts.row(each, **{"micro-batches": count, "sent by zero1": facts.of_plan(once)[facts.SENT]}))
    columns, table = facts.tabled(
        Column("micro-batches", "count"),
        rows,
        (facts.PEAK, facts.SENT, Column("sent by zero1", "bytes"), facts.STEP, facts.SPEED, facts.FITS),
    )
    one, *_, eight = rows
    sentence = (
        f"From 1 to 8 micro-batches a step {spec.strategy} sends {facts.sent(one)} and {facts.sent(eight)}, where"
        f" zero1 sends {facts.nbytes(one, 'sent by zero1')} and {facts.nbytes(eight, 'sent by zero1')}; throughput"
        f" goes from {facts.speed(one)} to {facts.speed(eight)} tokens/s a GPU and the peak from {facts.peak(one)} to"
        f" {facts.peak(eight)}"
    )
    return Answer(
        "accumulation",
        "",
        spec,
        sentence,
        columns,
        table,
        (Panel((facts.SENT, "sent by zero1"), title="sent a step"), Panel((facts.SPEED,))),
    )


def tensor(spec: PlanSpec) -> Answer:
    """Tensor parallelism inside a node at the same micro-batch of each group: memory and throughput."""
    rows = []
    for ways in (1, 2, 4, 8):
        try:
            rows.append(facts.row(replace(spec, tensor_parallel=ways), **{"ranks of a group": ways}))
        except PlanError:  # heads or GPUs that it does not divide
            continue
    columns, table = facts.tabled(
        Column("ranks of a group", "count"),
        rows,
        (facts.PEAK, facts.ACTIVATIONS, facts.STEP, facts.EXPOSED, facts.SPEED, facts.FITS),
    )
    first, last = rows[0], rows[-1]
    if len(rows) == 1:
        sentence = (
            "Tensor parallelism cannot cut these heads over these GPUs; with groups of 1 the peak is"
            f" {facts.peak(first)}"
        )
    else:
        best = max([row for row in rows if row[facts.FITS]] or rows, key=lambda row: facts.number(row, facts.SPEED))
        sentence = (
            f"Groups of {last['ranks of a group']} lower the peak from {facts.peak(first)} to {facts.peak(last)}, and"
            f" throughput goes from {facts.speed(first)} to {facts.speed(last)} tokens/s a GPU; groups of"
            f" {best['ranks of a group']} are the fastest"
            f" {'that fit' if best[facts.FITS] else 'of these, and none fits'}"
        )
    return Answer("tensor", "", spec, sentence, columns, table, (facts.memory_panel(spec), Panel((facts.SPEED,))))

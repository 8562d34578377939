"""Questions about memory: what is held at the peak, and how far batch, sequence and number of GPUs can go.

Each function answers for a plan's spec; the sentence is made from the rows of its own table.
"""

from __future__ import annotations

from dataclasses import replace

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.planning.fit import largest_micro_batch, largest_that_fits
from fsdplab.planning.links import PRESETS
from fsdplab.planning.memory import host_bytes, memory_of
from fsdplab.planning.plan_spec import CHECKPOINTINGS, PlanError, PlanSpec
from fsdplab.planning.planner import Plan, least_gpus, plan_memory_fits, plan_of, shortfall

from .answer import (
    ACTIVATIONS,
    EXPOSED,
    FITS,
    PEAK,
    SPEED,
    STEP,
    Answer,
    Column,
    Panel,
    Row,
    Value,
    facts,
    fastest,
    memory_panel,
    number,
    share,
    tabled,
)  # fmt: skip

_MOST_GPUS = 1024
_SEQUENCE_STEP = 256  # the longest sequence is found to this many tokens


def peak(spec: PlanSpec) -> Answer:
    """The bytes of a rank at the peak by category, and whether they fit."""
    found = plan_of(spec)
    moment, card = found.memory.peak, spec.gpu.memory_bytes
    rows: list[dict[str, Value]] = [
        {"memory of a rank": CATEGORY_ROWS[name].words, "at the peak": nbytes, "of the card": nbytes / card}
        for name, nbytes in moment.by_category.items()
        if nbytes
    ]
    most = max(rows, key=lambda row: row["at the peak"] or 0)
    rows.append({"memory of a rank": "total", "at the peak": moment.total, "of the card": moment.total / card})
    columns, table = tabled(
        Column("memory of a rank"), rows, (Column("at the peak", "bytes"), Column("of the card", "share"))
    )
    verdict = "it fits" if found.fits else "it does not fit"
    sentence = (
        f"A rank holds {size(moment.total)} at its peak ({moment.name}), {share(moment.total / card)} of the card, most"
        f" of it {most['memory of a rank']} ({size(float(most['at the peak'] or 0))}): {verdict}"
    )
    panels = (memory_panel(spec, "at the peak"),)
    return Answer("peak", "", spec, sentence, columns, table, panels, note=shortfall(found) or "")


def batch(spec: PlanSpec) -> Answer:
    """Micro-batches up to the first that does not fit: memory and throughput."""
    largest = largest_micro_batch(spec)
    most = largest.micro_batch if largest else 0
    counts = _doubled(1, most) + [most + 1]
    rows = [_row("micro-batch", count, replace(spec, micro_batch=count)) for count in counts]
    columns, table = tabled(Column("micro-batch", "count"), rows, (PEAK, ACTIVATIONS, STEP, EXPOSED, SPEED, FITS))
    if not most:
        sentence = f"No micro-batch fits: one sequence of {spec.seq:,} tokens peaks at {_size(rows[0])}"
    else:
        best = max((row for row in rows if row[FITS]), key=lambda row: number(row, SPEED))
        which = (
            "it is also the fastest"
            if best is rows[-2]
            else f"the fastest of those that fit is {best['micro-batch']:,}"
        )
        sentence = (
            f"The largest micro-batch that fits is {most:,}, with {_size(rows[-2])} at the peak; {which}, with"
            f" {_speed(best)} tokens/s a GPU against {_speed(rows[0])} with 1"
        )
    return Answer("batch", "", spec, sentence, columns, table, (memory_panel(spec), Panel((SPEED,))))


def sequence(spec: PlanSpec) -> Answer:
    """Sequences up to the longest that fits, or to the model's context."""
    step = _SEQUENCE_STEP * spec.context_parallel

    def of(count: int) -> PlanSpec:
        return replace(spec, seq=count * step)

    most = largest_that_fits(lambda count: plan_memory_fits(of(count)), max(1, spec.model.context // step))
    beyond = (most + 1) * step
    asked = {spec.seq, *(step * count for count in _doubled(1, most)[-6:])}
    asked |= {beyond} if beyond <= spec.model.context else set()
    rows = [_row("sequence", tokens, replace(spec, seq=tokens)) for tokens in sorted(asked)]
    columns, table = tabled(Column("sequence", "count"), rows, (PEAK, ACTIVATIONS, STEP, SPEED, FITS))
    panels = (memory_panel(spec), Panel((SPEED,)))
    if not most:
        sentence = f"No sequence fits: one of {rows[0]['sequence']:,} tokens peaks at {_size(rows[0])}"
        return Answer("sequence", "", spec, sentence, columns, table, panels)
    longest = next(row for row in rows if row["sequence"] == most * step)
    why = "" if beyond in asked else ", the model's whole context"
    sentence = (
        f"The longest sequence that fits has {most * step:,} tokens{why}: {_size(longest)} at the peak, of which"
        f" {size(number(longest, ACTIVATIONS))} are activations"
    )
    return Answer("sequence", "", spec, sentence, columns, table, panels)


def world_size(spec: PlanSpec) -> Answer:
    """Numbers of GPUs, each a doubling, and the fewest that hold the plan."""
    fewest = least_gpus(spec)
    tried = {spec.gpus, *([fewest] if fewest else []), *(2**power for power in range(_MOST_GPUS.bit_length()))}
    plans = [found for gpus in sorted(tried) if (found := _tried(spec, gpus))]
    rows = [{"GPUs": found.spec.gpus, **facts(found)} for found in plans]
    columns, table = tabled(Column("GPUs", "count"), rows, (PEAK, STEP, EXPOSED, SPEED, FITS))
    panels = (memory_panel(spec), Panel((SPEED,)))
    if fewest is None:
        sentence = f"No number of these GPUs holds it: on {rows[-1]['GPUs']:,} the peak is still {_size(rows[-1])}"
        return Answer("world_size", "", spec, sentence, columns, table, panels)
    first = next(row for row in rows if row["GPUs"] == fewest)
    best, last = max((row for row in rows if row[FITS]), key=lambda row: number(row, SPEED)), rows[-1]
    sentence = (
        f"It fits on {fewest:,} GPUs or more, with {_size(first)} at the peak; throughput a GPU is highest on"
        f" {best['GPUs']:,} ({_speed(best)} tokens/s), and on {last['GPUs']:,} it is {_speed(last)}"
    )
    return Answer("world_size", "", spec, sentence, columns, table, panels)


def checkpointing(spec: PlanSpec) -> Answer:
    """None, selective and full recomputation: what each saves and what it costs."""
    rows = [_row("checkpointing", name, replace(spec, checkpointing=name)) for name in CHECKPOINTINGS]
    columns, table = tabled(Column("checkpointing"), rows, (PEAK, ACTIVATIONS, STEP, SPEED, FITS))
    none, full = rows[0], rows[-1]
    fitting = [row for row in rows if row[FITS]]
    choice = (
        f"the fastest that fits is --checkpointing {fastest(rows)['checkpointing']}" if fitting else "none of them fits"
    )
    sentence = (
        f"Full checkpointing lowers the peak from {_size(none)} to {_size(full)} and lengthens the step from"
        f" {seconds(number(none, STEP))} to {seconds(number(full, STEP))}; {choice}"
    )
    return Answer("checkpointing", "", spec, sentence, columns, table, (memory_panel(spec), Panel((SPEED,))))


def offload(spec: PlanSpec) -> Answer:
    """States on the card, and in host memory: what the card saves, and what must cross the host's link each step."""
    rows = []
    for where, each in (("card", False), ("host memory", True)):
        changed = replace(spec, offload=each)
        crossing = _crossing_bytes(changed)
        rows.append(
            {"states rest on": where, **facts(plan_of(changed)), "host memory of a rank": host_bytes(changed),
             "crosses a step": crossing, "on the host's link": crossing / _HOST_LINK.bytes_per_s or None}
        )  # fmt: skip
    columns, table = tabled(
        Column("states rest on"), rows,
        (PEAK, FITS, Column("host memory of a rank", "bytes"), Column("crosses a step", "bytes"),
         Column("on the host's link", "seconds")),
    )  # fmt: skip
    card, host = rows
    verdict = "it fits" if host[FITS] else "it does not fit"
    sentence = (
        f"CPU offload lowers the peak from {_size(card)} to {_size(host)} ({verdict}), takes"
        f" {size(number(host, 'host memory of a rank'))} of host memory a rank, and sends"
        f" {size(number(host, 'crosses a step'))} over the host's link each step: {seconds(number(host, _CROSSING))}"
    )
    note = f"the host's link is assumed to be {_HOST_LINK.name} ({_HOST_LINK.words}); the CPU's optimizer is not timed"
    panels = (memory_panel(spec), Panel(("host memory of a rank",)))
    return Answer("offload", "", spec, sentence, columns, table, panels, note=note)


_HOST_LINK, _CROSSING = PRESETS["pcie4"], "on the host's link"


def _crossing_bytes(spec: PlanSpec) -> float:
    """A rank's slices go to the card for every gather of a micro-batch, cast where they rest; gradients come back."""
    if not spec.offload:
        return 0.0
    states = memory_of(replace(spec, offload=False)).at("optimizer step").by_category
    cast = 1.0 if spec.lora_rank else spec.param_bytes / spec.rest_bytes
    gathers = 2 if spec.strategy in ("full_shard", "hybrid_shard") else 1
    return spec.grad_accum * (gathers * cast * states["parameter_slices"] + states["gradient_slices"])


# ---- shared


def _row(name: str, value: Value, spec: PlanSpec) -> dict[str, Value]:
    return {name: value, **facts(plan_of(spec))}


def _tried(spec: PlanSpec, gpus: int) -> Plan | None:
    """The plan on so many GPUs; None where they form no mesh."""
    try:
        return plan_of(replace(spec, gpus=gpus))
    except PlanError:
        return None


def _doubled(first: int, last: int) -> list[int]:
    """1, 2, 4, ... up to `last`, and `last` itself: `_doubled(1, 5) == [1, 2, 4, 5]`; nothing below `first`."""
    found = [first * 2**power for power in range(max(0, last).bit_length()) if first * 2**power < last]
    return [*found, last] if last >= first else []


def _size(row: Row) -> str:
    return size(number(row, PEAK))


def _speed(row: Row) -> str:
    return three_digits(number(row, SPEED))

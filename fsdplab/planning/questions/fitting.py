"""Questions about memory: what is held at the peak, and how far batch, sequence and number of GPUs can go.

Each function answers for a plan's spec; the sentence is made from the rows of its own table.
"""

from __future__ import annotations

from dataclasses import replace

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import seconds, size
from fsdplab.planning.fit import largest_micro_batch, largest_that_fits
from fsdplab.planning.links import HOST_LINK
from fsdplab.planning.memory import Variant, host_bytes, host_crossing, memory_of
from fsdplab.planning.plan_spec import PlanError, PlanSpec
from fsdplab.planning.planner import least_gpus, plan_memory_fits, plan_of, shortfall
from fsdplab.planning.unit_bytes import unit_bytes

from . import facts
from .answer import Answer, Column, Panel, Row, Value, share

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
    columns, table = facts.tabled(
        Column("memory of a rank"), rows, (Column("at the peak", "bytes"), Column("of the card", "share"))
    )
    verdict = "it fits" if found.fits else "it does not fit"
    sentence = (
        f"A rank holds {size(moment.total)} at its peak ({moment.name}), {share(moment.total / card)} of the card, most"
        f" of it {most['memory of a rank']} ({size(float(most['at the peak'] or 0))}): {verdict}"
    )
    panels = (facts.memory_panel(spec, "at the peak"),)
    return Answer("peak", "", spec, sentence, columns, table, panels, note=shortfall(found) or "")


def batch(spec: PlanSpec) -> Answer:
    """Micro-batches up to the first that does not fit: memory and throughput."""
    largest = largest_micro_batch(spec)
    most = largest.micro_batch if largest else 0
    counts = _doubled(1, most) + [most + 1]
    rows = [facts.row(replace(spec, micro_batch=count), **{"micro-batch": count}) for count in counts]
    columns, table = facts.tabled(
        Column("micro-batch", "count"),
        rows,
        (facts.PEAK, facts.ACTIVATIONS, facts.STEP, facts.EXPOSED, facts.SPEED, facts.FITS),
    )
    if not most:
        sentence = f"No micro-batch fits: one sequence of {spec.seq:,} tokens peaks at {facts.peak(rows[0])}"
    else:
        best = max((row for row in rows if row[facts.FITS]), key=lambda row: facts.number(row, facts.SPEED))
        which = (
            "it is also the fastest"
            if best is rows[-2]
            else f"the fastest of those that fit is {best['micro-batch']:,}"
        )
        sentence = (
            f"The largest micro-batch that fits is {most:,}, with {facts.peak(rows[-2])} at the peak; {which}, with"
            f" {facts.speed(best)} tokens/s a GPU against {facts.speed(rows[0])} with 1"
        )
    return Answer("batch", "", spec, sentence, columns, table, (facts.memory_panel(spec), Panel((facts.SPEED,))))


def sequence(spec: PlanSpec) -> Answer:
    """Sequences up to the longest that fits, or to the model's context."""
    step = _SEQUENCE_STEP * spec.context_parallel

    def of(count: int) -> PlanSpec:
        return replace(spec, seq=count * step)

    most = largest_that_fits(lambda count: plan_memory_fits(of(count)), max(1, spec.model.context // step))
    beyond = (most + 1) * step
    asked = {spec.seq, *(step * count for count in _doubled(1, most)[-6:])}
    asked |= {beyond} if beyond <= spec.model.context else set()
    rows = [facts.row(replace(spec, seq=tokens), sequence=tokens) for tokens in sorted(asked)]
    columns, table = facts.tabled(
        Column("sequence", "count"), rows, (facts.PEAK, facts.ACTIVATIONS, facts.STEP, facts.SPEED, facts.FITS)
    )
    panels = (facts.memory_panel(spec), Panel((facts.SPEED,)))
    if not most:
        sentence = f"No sequence fits: one of {rows[0]['sequence']:,} tokens peaks at {facts.peak(rows[0])}"
        return Answer("sequence", "", spec, sentence, columns, table, panels)
    longest = next(row for row in rows if row["sequence"] == most * step)
    why = "" if beyond in asked else ", the model's whole context"
    sentence = (
        f"The longest sequence that fits has {most * step:,} tokens{why}: {facts.peak(longest)} at the peak, of which"
        f" {facts.nbytes(longest, facts.ACTIVATIONS)} are activations"
    )
    return Answer("sequence", "", spec, sentence, columns, table, panels)


def world_size(spec: PlanSpec) -> Answer:
    """Numbers of GPUs, each a doubling: the states that they share, all else, and the fewest that hold it."""
    fewest = least_gpus(spec)
    tried = {spec.gpus, *([fewest] if fewest else []), *(2**power for power in range(_MOST_GPUS.bit_length()))}
    rows = [row for gpus in sorted(tried) if (row := _on(spec, gpus))]
    columns, table = facts.tabled(
        Column("GPUs", "count"), rows, (facts.PEAK, Column(_STATES, "bytes"), Column(_ELSE, "bytes"), facts.FITS)
    )
    first, last = rows[0], rows[-1]
    least = "1 GPU" if fewest == 1 else f"{fewest or 0:,} GPUs"
    where = f"it fits on {least} or more" if fewest else "it fits on no number of these GPUs"
    sentence = (
        f"From {first['GPUs']:,} to {last['GPUs']:,} GPUs the peak goes from {facts.peak(first)} to"
        f" {facts.peak(last)}: the model's states from {facts.nbytes(first, _STATES)} to"
        f" {facts.nbytes(last, _STATES)}, all else from {facts.nbytes(first, _ELSE)} to {facts.nbytes(last, _ELSE)};"
        f" {where}"
    )
    panels = (facts.memory_panel(spec), Panel((_ELSE,)))
    note = "every GPU keeps its micro-batch"
    return Answer("world_size", "", spec, sentence, columns, table, panels, note=note)


_STATES, _ELSE = "states", "all else"


def _on(spec: PlanSpec, gpus: int) -> Row | None:
    """The peak on so many GPUs, in two parts; None where they form no mesh."""
    try:
        changed = replace(spec, gpus=gpus)
    except PlanError:
        return None
    memory = memory_of(changed)
    held = memory.peak.by_category
    states = held["parameter_slices"] + held["gradient_slices"] + held["optimizer_state"]
    return {"GPUs": gpus, **facts.of_memory(memory, changed), _STATES: states, _ELSE: memory.peak.total - states}


def optimizer_on_cpu(spec: PlanSpec) -> Answer:
    """The optimizer's state, or all states, in host memory: what the card saves, and what crosses the host's link."""
    on_card = replace(spec, offload=False)
    rows = [_placed(name, on_card) for name in (_CARD, _OPTIMIZER, _ALL)]
    columns, table = facts.tabled(
        Column("on the CPU"), rows,
        (facts.PEAK, facts.FITS, Column("saved", "bytes"), Column("host memory of a rank", "bytes"),
         Column("crosses a step", "bytes"), Column(_CROSSING, "seconds")),
    )  # fmt: skip
    card, optimizer, every = rows
    sentence = (
        f"The optimizer on the CPU saves {facts.nbytes(optimizer, 'saved')} of {facts.peak(card)} at the peak"
        f" ({facts.verdict(optimizer)}) and sends {facts.nbytes(optimizer, 'crosses a step')} over the host's link each"
        f" step: {seconds(facts.number(optimizer, _CROSSING))}; all states there save {facts.nbytes(every, 'saved')}"
        f" ({facts.verdict(every)}) and send {facts.nbytes(every, 'crosses a step')}"
    )
    note = f"the host's link is assumed to be {HOST_LINK.name} ({HOST_LINK.words}); the CPU's optimizer is not timed"
    panels = (facts.memory_panel(spec), Panel(("host memory of a rank",)))
    return Answer("optimizer_on_cpu", "", on_card, sentence, columns, table, panels, note=note)


_CROSSING = "on the host's link"
_CARD, _OPTIMIZER, _ALL = "nothing", "optimizer", "all states"


def _placed(name: str, spec: PlanSpec) -> Row:
    """The row of what is on the CPU, for a spec whose states rest on the card."""
    changed = replace(spec, offload=name == _ALL)
    memory = memory_of(changed, variant=Variant(optimizer_on_cpu=name == _OPTIMIZER))
    states = memory_of(spec).at("optimizer step").by_category
    host = states["optimizer_state"] if name == _OPTIMIZER else host_bytes(changed)
    crossing = {_CARD: 0.0, _OPTIMIZER: _optimizer_crossing(spec), _ALL: host_crossing(spec)}[name]
    return {
        "on the CPU": name, **facts.of_memory(memory, changed), "host memory of a rank": host,
        "saved": memory_of(spec).peak.total - memory.peak.total, "crosses a step": crossing,
        _CROSSING: crossing / HOST_LINK.bytes_per_s or None,
    }  # fmt: skip


def _optimizer_crossing(spec: PlanSpec) -> float:
    """Once a step the gradients of what this rank updates go to the CPU, and as many bytes of parameters come back:
    ZeRO-Offload's 4 bytes a parameter in 16 bits (Ren et al. 2021, section 3.2); nothing where there is no state.
    """
    if not spec.optimizer_bytes:
        return 0.0
    trained = unit_bytes(spec.model.block, spec, adapted=True).times(spec.model.layers)
    trained += unit_bytes(spec.model.root, spec)
    return 2 * spec.rest_bytes * trained.optimizer_state / spec.optimizer_bytes


# ---- shared


def _doubled(first: int, last: int) -> list[int]:
    """1, 2, 4, ... up to `last`, and `last` itself: `_doubled(1, 5) == [1, 2, 4, 5]`; nothing below `first`."""
    found = [first * 2**power for power in range(max(0, last).bit_length()) if first * 2**power < last]
    return [*found, last] if last >= first else []

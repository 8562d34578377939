"""Questions about memory: what is held at the peak, and how far batch, sequence and number of GPUs can go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import seconds
from fsdplab.planning.fit import largest_micro_batch, largest_that_fits
from fsdplab.planning.links import HOST_LINK
from fsdplab.planning.memory import Variant, host_bytes, host_crossing, memory_of
from fsdplab.planning.plan_spec import PlanError, PlanSpec
from fsdplab.planning.planner import least_gpus, plan_memory_fits, plan_of, shortfall
from fsdplab.planning.unit_bytes import all_units

from . import facts
from .answer import Cells, Column, Panel, Question, Row
from .facts import ACTIVATIONS, EXPOSED, FITS, PEAK, SPEED, STEP

_MOST_GPUS = 1024
_SEQUENCE_STEP = 256  # the longest sequence is found to this many tokens


def _doubled(first: int, last: int) -> list[int]:
    """1, 2, 4, ... up to `last`, and `last` itself: `_doubled(1, 5) == [1, 2, 4, 5]`; nothing below `first`."""
    found = [first * 2**power for power in range(max(0, last).bit_length()) if first * 2**power < last]
    return [*found, last] if last >= first else []


# ---- the peak

_OF, _HELD, _PART = "memory of a rank", "at the peak", "of the card"


def _by_category(spec: PlanSpec) -> list[Row]:
    moment = memory_of(spec).peak
    held = {CATEGORY_ROWS[name].words: nbytes for name, nbytes in moment.by_category.items() if nbytes}
    held["total"] = moment.total
    return [{_OF: name, _HELD: nbytes, _PART: nbytes / spec.gpu.memory_bytes} for name, nbytes in held.items()]


def _most(spec: PlanSpec, rows: Sequence[Cells]) -> str:
    *categories, total = rows
    most = max(categories, key=lambda row: row.number(_HELD))
    return (
        f"A rank holds {total[_HELD]} at its peak ({memory_of(spec).peak.name}), {total[_PART]} of the card, most of it"
        f" {most[_OF]} ({most[_HELD]}): {'it fits' if plan_memory_fits(spec) else 'it does not fit'}"
    )


PEAK_MEMORY = Question(
    asked="What is the peak memory with this configuration, and does it fit?",
    columns=facts.columns(Column(_OF), Column(_HELD, "bytes"), Column(_PART, "share")),
    rows=_by_category,
    sentence=_most,
    base=lambda spec: (spec, shortfall(plan_of(spec)) or ""),
    on_card=(_HELD,),
    timed=False,
)


# ---- batch and sequence


def _batches(spec: PlanSpec) -> list[Row]:
    """Micro-batches up to the first that does not fit."""
    largest = largest_micro_batch(spec)
    most = largest.micro_batch if largest else 0
    counts = [*_doubled(1, most), most + 1]
    return [facts.row(replace(spec, micro_batch=count), **{"micro-batch": count}) for count in counts]


def _largest_batch(spec: PlanSpec, rows: Sequence[Cells]) -> str:
    *fitting, _ = rows
    if not fitting:
        return f"No micro-batch fits: one sequence of {spec.seq:,} tokens peaks at {rows[0][PEAK]}"
    most, best = fitting[-1], max((row for row in rows if row.fits), key=lambda row: row.number(SPEED))
    which = "it is also the fastest" if best is most else f"the fastest of those that fit is {best['micro-batch']}"
    return (
        f"The largest micro-batch that fits is {most['micro-batch']}, with {most[PEAK]} at the peak; {which}, with"
        f" {best[SPEED]} tokens/s a GPU against {rows[0][SPEED]} with 1"
    )


BATCH = Question(
    asked="Which batch is the largest that fits, and which is the fastest?",
    columns=facts.columns(Column("micro-batch", "count"), PEAK, ACTIVATIONS, STEP, EXPOSED, SPEED, FITS),
    rows=_batches,
    sentence=_largest_batch,
    beside=(Panel((SPEED,)),),
)


def _sequences(spec: PlanSpec) -> list[Row]:
    """Sequences up to the longest that fits, or to the model's context."""
    step = _SEQUENCE_STEP * spec.context_parallel

    def holds(count: int) -> bool:
        return plan_memory_fits(replace(spec, seq=count * step))

    most = largest_that_fits(holds, max(1, spec.model.context // step))
    tried = {spec.seq, *(step * count for count in _doubled(1, most)[-6:])}
    tried |= {(most + 1) * step} if (most + 1) * step <= spec.model.context else set()
    return [facts.row(replace(spec, seq=tokens), sequence=tokens) for tokens in sorted(tried)]


def _longest_sequence(spec: PlanSpec, rows: Sequence[Cells]) -> str:
    step = _SEQUENCE_STEP * spec.context_parallel
    fitting = [row for row in rows if row.fits and row.number("sequence") % step == 0]
    if not fitting:
        return f"No sequence fits: one of {rows[0]['sequence']} tokens peaks at {rows[0][PEAK]}"
    longest = fitting[-1]
    why = ", the model's whole context" if longest.number("sequence") + step > spec.model.context else ""
    return (
        f"The longest sequence that fits has {longest['sequence']} tokens{why}: {longest[PEAK]} at the peak, of which"
        f" {longest[ACTIVATIONS]} are activations"
    )


SEQUENCE = Question(
    asked="How long can sequences be with this configuration?",
    columns=facts.columns(Column("sequence", "count"), PEAK, ACTIVATIONS, STEP, SPEED, FITS),
    rows=_sequences,
    sentence=_longest_sequence,
    beside=(Panel((SPEED,)),),
    timed=False,
)


# ---- GPUs

_STATES, _ELSE = "states", "all else"


def _on_numbers(spec: PlanSpec) -> list[Row]:
    """Numbers of GPUs, each a doubling: the states that they share, all else, and the fewest that hold it."""
    fewest = least_gpus(spec)
    tried = {spec.gpus, *([fewest] if fewest else []), *(2**power for power in range(_MOST_GPUS.bit_length()))}
    return [row for gpus in sorted(tried) if (row := _on(spec, gpus))]


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


def _from_few_to_many(spec: PlanSpec, rows: Sequence[Cells]) -> str:
    first, last, fewest = rows[0], rows[-1], least_gpus(spec)
    least = "1 GPU" if fewest == 1 else f"{fewest or 0:,} GPUs"
    where = f"it fits on {least} or more" if fewest else "it fits on no number of these GPUs"
    return (
        f"From {first['GPUs']} to {last['GPUs']} GPUs the peak goes from {first[PEAK]} to {last[PEAK]}: the model's"
        f" states from {first[_STATES]} to {last[_STATES]}, all else from {first[_ELSE]} to {last[_ELSE]}; {where}"
    )


WORLD_SIZE = Question(
    asked="How does the number of data-parallel ranks affect the peak memory?",
    columns=facts.columns(Column("GPUs", "count"), PEAK, Column(_STATES, "bytes"), Column(_ELSE, "bytes"), FITS),
    rows=_on_numbers,
    sentence=_from_few_to_many,
    base=lambda spec: (spec, "every GPU keeps its micro-batch"),
    beside=(Panel((_ELSE,)),),
    timed=False,
)


# ---- host memory

_SAVED, _HOST, _CROSSES, _CROSSING = "saved", "host memory of a rank", "crosses a step", "on the host's link"
_CARD, _OPTIMIZER, _ALL = "nothing", "optimizer", "all states"
_ASSUMED = f"the host's link is assumed to be {HOST_LINK.name} ({HOST_LINK.words}); the CPU's optimizer is not timed"


def _placed(name: str, spec: PlanSpec) -> Row:
    """The row of what is on the CPU, for a spec whose states rest on the card."""
    changed = replace(spec, offload=name == _ALL)
    memory = memory_of(changed, variant=Variant(optimizer_on_cpu=name == _OPTIMIZER))
    states = memory_of(spec).at("optimizer step").by_category
    host = states["optimizer_state"] if name == _OPTIMIZER else host_bytes(changed)
    crossing = {_CARD: 0.0, _OPTIMIZER: _optimizer_crossing(spec), _ALL: host_crossing(spec)}[name]
    return {
        "on the CPU": name, **facts.of_memory(memory, changed), _HOST: host, _CROSSES: crossing,
        _SAVED: memory_of(spec).peak.total - memory.peak.total, _CROSSING: crossing / HOST_LINK.bytes_per_s or None,
    }  # fmt: skip


def _optimizer_crossing(spec: PlanSpec) -> float:
    """Once a step the gradients of what this rank updates go to the CPU, and as many bytes of parameters come back:
    ZeRO-Offload's 4 bytes a parameter in 16 bits (Ren et al. 2021, section 3.2); nothing where there is no state.
    """
    if not spec.optimizer_bytes:
        return 0.0
    return 2 * spec.rest_bytes * all_units(spec).optimizer_state / spec.optimizer_bytes


def _saved_on_card(spec: PlanSpec, rows: Sequence[Cells]) -> str:
    card, optimizer, *every = rows
    also = [f"; all states there save {row[_SAVED]} ({row.verdict}) and send {row[_CROSSES]}" for row in every]
    return (
        f"The optimizer on the CPU saves {optimizer[_SAVED]} of {card[PEAK]} at the peak ({optimizer.verdict})"
        f" and sends {optimizer[_CROSSES]} over the host's link each step: {seconds(optimizer.number(_CROSSING))}"
        f"{''.join(also) or f'; {spec.strategy} keeps parameters whole, so all states cannot rest there'}"
    )


OPTIMIZER_ON_CPU = Question(
    asked="How much memory does the optimizer on the CPU save?",
    columns=facts.columns(
        Column("on the CPU"), PEAK, FITS, Column(_SAVED, "bytes"), Column(_HOST, "bytes"), Column(_CROSSES, "bytes"),
        Column(_CROSSING, "seconds"),
    ),
    rows=lambda spec: [_placed(name, spec) for name in (_CARD, _OPTIMIZER, _ALL)[: 2 + spec.row.can_offload]],
    sentence=_saved_on_card,
    base=lambda spec: (replace(spec, offload=False), _ASSUMED),
    beside=(Panel((_HOST,)),),
    timed=False,
)  # fmt: skip

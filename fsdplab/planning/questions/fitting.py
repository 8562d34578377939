"""Questions about memory: what is held at the peak, and how far batch, sequence and number of GPUs can go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import seconds
from fsdplab.planning.fit import largest_micro_batch, largest_that_fits
from fsdplab.planning.links import HOST_LINK
from fsdplab.planning.memory import fits_card, memory_of
from fsdplab.planning.plan_spec import PlanSpec, changed
from fsdplab.planning.planner import least_gpus, plan_of, shortfall

from .answer import ACTIVATIONS, EXPOSED, FITS, PEAK, SPEED, STEP, Case, Question

_MOST_GPUS = 1024
_SEQUENCE_STEP = 256  # the longest sequence is found to this many tokens


def _doubled(first: int, last: int) -> list[int]:
    """1, 2, 4, ... up to `last`, and `last` itself: `_doubled(1, 5) == [1, 2, 4, 5]`; nothing below `first`."""
    found = [first * 2**power for power in range(max(0, last).bit_length()) if first * 2**power < last]
    return [*found, last] if last >= first else []


def _by_category(spec: PlanSpec) -> list[Case]:
    moment = memory_of(spec).peak
    held = {CATEGORY_ROWS[name].title: nbytes for name, nbytes in moment.by_category.items() if nbytes}
    held["total"] = moment.total
    card = spec.gpu.memory_bytes
    return [
        Case(name, spec, known={"at the peak": nbytes, "of the card": nbytes / card}) for name, nbytes in held.items()
    ]


def _most(spec: PlanSpec, rows: Sequence[Case]) -> str:
    *categories, total = rows
    most = max(categories, key=lambda row: row.number("at the peak"))
    return (
        f"A rank holds {total['at the peak']} at its peak ({memory_of(spec).peak.name}), {total['of the card']} of the"
        f" card, most of it {most['memory of a rank']} ({most['at the peak']}):"
        f" {'it fits' if fits_card(spec) else 'it does not fit'}"
    )


PEAK_MEMORY = Question(
    asked="What is the peak memory with this configuration, and does it fit?",
    columns=("memory of a rank", "at the peak", "of the card"),
    variants=_by_category,
    sentence=_most,
    base=lambda spec: (spec, shortfall(plan_of(spec)) or ""),
    on_card="at the peak",
    beside=(),
    timed=False,
)


def _batches(spec: PlanSpec) -> list[Case]:
    """Micro-batches up to the first that does not fit."""
    largest = largest_micro_batch(spec)
    most = largest.micro_batch if largest else 0
    return [Case(count, replace(spec, micro_batch=count)) for count in (*_doubled(1, most), most + 1)]


def _largest_batch(spec: PlanSpec, rows: Sequence[Case]) -> str:
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
    columns=("micro-batch", PEAK, ACTIVATIONS, STEP, EXPOSED, SPEED, FITS),
    variants=_batches,
    sentence=_largest_batch,
    beside=(SPEED,),
)


def _sequences(spec: PlanSpec) -> list[Case]:
    """Sequences up to the longest that fits, or to the model's context."""
    step = _SEQUENCE_STEP * spec.context_parallel
    most = largest_that_fits(
        lambda count: fits_card(replace(spec, seq=count * step)), max(1, spec.model.context // step)
    )
    tried = {spec.seq, *(step * count for count in _doubled(1, most)[-6:]), (most + 1) * step}
    return [Case(tokens, replace(spec, seq=tokens)) for tokens in sorted(tried) if tokens <= spec.model.context]


def _longest_sequence(spec: PlanSpec, rows: Sequence[Case]) -> str:
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
    columns=("sequence", PEAK, ACTIVATIONS, STEP, SPEED, FITS),
    variants=_sequences,
    sentence=_longest_sequence,
    beside=(SPEED,),
    timed=False,
)


def _on_numbers(spec: PlanSpec) -> list[Case]:
    """Numbers of GPUs that form a mesh, each a doubling, with the fewest that hold it."""
    tried = {spec.gpus, *(2**power for power in range(_MOST_GPUS.bit_length()))} | {least_gpus(spec) or spec.gpus}
    return [Case(gpus, found) for gpus in sorted(tried) if (found := changed(spec, gpus=gpus))]


def _from_few_to_many(spec: PlanSpec, rows: Sequence[Case]) -> str:
    first, last, fewest = rows[0], rows[-1], least_gpus(spec)
    least = "1 GPU" if fewest == 1 else f"{fewest or 0:,} GPUs"
    where = f"it fits on {least} or more" if fewest else "it fits on no number of these GPUs"
    return (
        f"From {first['GPUs']} to {last['GPUs']} GPUs the peak goes from {first[PEAK]} to {last[PEAK]}: the model's"
        f" states from {first['states']} to {last['states']}, all else from {first['all else']} to"
        f" {last['all else']}; {where}"
    )


WORLD_SIZE = Question(
    asked="How does the number of data-parallel ranks affect the peak memory?",
    columns=("GPUs", PEAK, "states", "all else", FITS),
    variants=_on_numbers,
    sentence=_from_few_to_many,
    base=lambda spec: (spec, "every GPU keeps its micro-batch"),
    beside=("all else",),
    timed=False,
)


def _placed(spec: PlanSpec) -> list[Case]:
    """Nothing on the CPU, the optimizer, and all states, where what rests is shards alone."""
    found = [Case("nothing", spec), Case("optimizer", replace(spec, optimizer_on_cpu=True))]
    if spec.row.can_offload:
        found.append(Case("all states", replace(spec, offload=True)))
    on_card = found[0].memory.peak.total
    return [replace(each, known={"saved": on_card - each.memory.peak.total}) for each in found]


def _saved_on_card(spec: PlanSpec, rows: Sequence[Case]) -> str:
    card, optimizer, *every = rows
    also = [f"all states there save {row['saved']} ({row.verdict}) and send {row['crosses a step']}" for row in every]
    also = also or [f"{spec.strategy} keeps parameters whole, so all states cannot rest there"]
    return (
        f"The optimizer on the CPU saves {optimizer['saved']} of {card[PEAK]} at the peak ({optimizer.verdict})"
        f" and sends {optimizer['crosses a step']} over the host's link each step:"
        f" {seconds(optimizer.number(_ON_LINK))}; {also[0]}"
    )


_ON_LINK = "on the host's link"
OPTIMIZER_ON_CPU = Question(
    asked="How much memory does the optimizer on the CPU save?",
    columns=("on the CPU", PEAK, FITS, "saved", "host memory of a rank", "crosses a step", _ON_LINK),
    variants=_placed,
    sentence=_saved_on_card,
    base=lambda spec: (
        replace(spec, offload=False),
        f"the host's link is assumed to be {HOST_LINK.name} ({HOST_LINK.words}); the CPU's optimizer is not timed",
    ),
    beside=("host memory of a rank",),
    timed=False,
)  # fmt: skip

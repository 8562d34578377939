"""Questions about memory: what is held at the peak, how far batch, sequence and number of GPUs can go, how many blocks
a unit has, what it keeps of its forward, and whether it stays unsharded between its forward and its backward.

Steps whose units differ are simulated with the engine's own schedule. A part of a block stands for a linear layer:
equal parts, where real layers differ in size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import seconds
from fsdplab.planning.host import host_link
from fsdplab.planning.memory import fits_card, memory_of
from fsdplab.planning.plan_spec import CHECKPOINTINGS, POLICIES, PlanError, PlanSpec, changed
from fsdplab.planning.plan_traffic import plan_traffic
from fsdplab.planning.planner import largest_micro_batch, largest_that_fits, least_gpus, plan_of, shortfall
from fsdplab.planning.program import StepWork
from fsdplab.planning.step_time import work_of

from .answer import (
    ACTIVATIONS,
    EXPOSED,
    FITS,
    GATHERED,
    PEAK,
    SENT,
    SPEED,
    STEP,
    Case,
    Question,
    fastest,
    near_the_fastest,
)

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
        f"the host's link is {host_link(spec).name} ({host_link(spec).words}); the CPU's optimizer is not timed here",
    ),
    beside=("host memory of a rank",),
    timed=False,
)  # fmt: skip


# ---- how many blocks


def _wrapped(spec: PlanSpec) -> list[Case]:
    """Units from a linear layer to the whole stack of blocks."""
    layers, work = spec.model.layers, work_of(spec)
    counts = [1 / _parts_of_a_block(spec), *(count for count in (1, 2, 4, 8) if layers % count == 0 and count < layers)]
    return [
        Case(_named(count, layers), replace(spec, blocks_per_unit=count), work=rewrapped(work, count))
        for count in [*counts, layers]
    ]


def _parts_of_a_block(spec: PlanSpec) -> int:
    return sum(each.is_matrix for each in spec.model.block)


def _named(count: float, layers: int) -> str:
    if count < 1:
        return "a linear layer"
    return "all blocks" if count == layers else "a block" if count == 1 else f"{count:.0f} blocks"


def rewrapped(work: StepWork, blocks_per_unit: float) -> StepWork:
    """The same step of alike blocks in other units: several blocks in one, or a block in equal parts; the root stays as
    it is.

    Bytes and compute are the same, the latency is a collective's each: half as many units wait half as often. What
    stands between a block's products stays with its first part.
    """

    first, parts, together = work.blocks[0], round(1 / blocks_per_unit), round(blocks_per_unit)
    unit = replace(
        first, forward_s=blocks_per_unit * first.forward_s, backward_s=blocks_per_unit * first.backward_s,
        sent={kind: replace(each, wire_bytes=blocks_per_unit * each.wire_bytes) for kind, each in first.sent.items()},
        inline_forward=together * first.inline_forward, inline_backward=together * first.inline_backward,
    )  # fmt: skip
    units = [unit] * (len(work.blocks) // max(1, together))
    if not together:
        inline = replace(unit, inline_forward=first.inline_forward, inline_backward=first.inline_backward)
        units = [each for _ in work.blocks for each in (inline, *[unit] * (parts - 1))]
    return replace(work, blocks=tuple(replace(each, name=f"blocks.{place}") for place, each in enumerate(units)))


def _by_block_and_whole(spec: PlanSpec, rows: Sequence[Case]) -> str:
    block, whole, best = rows[1] if len(rows) > 2 else rows[-1], rows[-1], fastest(rows[::-1])
    return (
        f"Units of {block['a unit']} peak at {block[PEAK]} and take {block[STEP]} a step; all blocks in one unit peak"
        f" at {whole[PEAK]} and take {whole[STEP]}; {near_the_fastest(best)} units of {best['a unit']} need least"
        " memory"
    )


WRAPPING = Question(
    asked="What does another wrapping do to the peak memory?",
    columns=("a unit", "units", "gathered at once", PEAK, STEP, "exposed time", FITS),
    variants=_wrapped,
    sentence=_by_block_and_whole,
    base=lambda spec: (
        spec,
        f"a linear layer is taken as 1/{_parts_of_a_block(spec)} of a block; the host's time to launch collectives is"
        " left out, so that small units look better than they are",
    ),
    beside=(STEP,),
    simulated=(STEP, "exposed time"),
)


# ---- what a block keeps

_OF_A_POLICY = (PEAK, ACTIVATIONS, STEP, SPEED, FITS)


def _under(names: Sequence[str]) -> Callable[[PlanSpec], list[Case]]:
    return lambda spec: [Case(name, replace(spec, checkpointing=name)) for name in names]


def _saved_and_paid(spec: PlanSpec, rows: Sequence[Case]) -> str:
    none, full = rows[0], rows[-1]
    choice = f"the fastest that fits is --checkpoint {fastest(rows)['checkpointing']}"
    return (
        f"Full checkpointing lowers the peak from {none[PEAK]} to {full[PEAK]} and lengthens the step from"
        f" {none[STEP]} to {full[STEP]}; {choice if any(row.fits for row in rows) else 'none of them fits'}"
    )


CHECKPOINTING = Question(
    asked="Which activation checkpointing policy should be used?",
    columns=("checkpointing", *_OF_A_POLICY),
    variants=_under(CHECKPOINTINGS),
    sentence=_saved_and_paid,
    beside=(SPEED,),
)


def _compared(spec: PlanSpec, rows: Sequence[Case]) -> str:
    none, products, every_other, attention, _ = rows
    best = fastest(rows)
    return (
        f"Keeping all matrix products peaks at {products[PEAK]} and takes {products[STEP]} a step, every other one"
        f" {every_other[PEAK]} and {every_other[STEP]}, attention alone {attention[PEAK]} and {attention[STEP]},"
        f" against {none[PEAK]} and {none[STEP]} without checkpointing; {near_the_fastest(best)} --checkpoint"
        f" {best['policy']} needs least memory"
    )


# what a block keeps of its matrix products: all, every other one, none; beside keeping everything and nothing
SELECTIVE = Question(
    asked="How do selective checkpointing policies compare?",
    columns=("policy", *_OF_A_POLICY),
    variants=_under(POLICIES),
    sentence=_compared,
    base=lambda spec: (
        spec,
        "products and attention are for PyTorch's create_selective_checkpoint_contexts; this engine has the other"
        " three",
    ),
    beside=(STEP,),
)


def _recomputing(spec: PlanSpec) -> tuple[PlanSpec, str]:
    policy = "full" if spec.checkpointing == "none" else spec.checkpointing
    return replace(spec, checkpointing=policy), f"a block that is recomputed has --checkpoint {policy}"


def _first_blocks(spec: PlanSpec) -> list[Case]:
    """The first k blocks recomputed and the others not, around the fewest that fit."""
    layers = spec.model.layers
    kept = largest_that_fits(lambda count: fits_card(replace(spec, recomputed_blocks=layers - count)), layers)
    least = layers - kept
    counts = {0, layers // 4, layers // 2, 3 * layers // 4, layers, least, max(0, least - 1)}
    keeping, again = work_of(replace(spec, checkpointing="none")), work_of(spec).blocks
    mixed = {count: replace(keeping, blocks=(*again[:count], *keeping.blocks[count:])) for count in sorted(counts)}
    return [Case(count, replace(spec, recomputed_blocks=count), work=work) for count, work in mixed.items()]


def _fewest_blocks(spec: PlanSpec, rows: Sequence[Case]) -> str:
    none, every = rows[0], rows[-1]
    count = every["blocks recomputed"]
    if not every.fits:
        return f"Even with all {count} blocks recomputed it does not fit: {every[PEAK]} at the peak"
    least, beside = next(row for row in rows if row.fits), f"{every[PEAK]} and {every[STEP]} with all {count}"
    if least is none:
        return (
            f"No block needs to be recomputed: without, the peak is {none[PEAK]} and a step takes {none[STEP]}, against"
            f" {beside}"
        )
    return (
        f"Recomputing the first {least['blocks recomputed']} blocks is the least that fits: {least[PEAK]} at the peak"
        f" and {least[STEP]} a step, against {beside} and {none[PEAK]} with none"
    )


MIXED = Question(
    asked="What do different checkpointing policies on different units do?",
    columns=("blocks recomputed", *_OF_A_POLICY),
    variants=_first_blocks,
    sentence=_fewest_blocks,
    base=_recomputing,
    beside=(STEP,),
    simulated=(STEP, SPEED),
)


# ---- between the forward and the backward


def _resharded(spec: PlanSpec) -> tuple[PlanSpec, str]:
    """A spec that reshards after the forward, and what was changed for it."""
    if spec.row.reshards_after_forward:
        return spec, ""
    note = f"{spec.strategy} reshards nothing after the forward, so full_shard is planned"
    return spec.under("full_shard"), note


def _with_smaller_meshes(spec: PlanSpec) -> tuple[PlanSpec, str]:
    base, note = _resharded(spec)
    if len(_meshes(base)) < 2:
        raise PlanError(
            f"{base.shards} ranks that shard have no smaller mesh of 2 ranks or more; give at least 4 GPUs that shard"
        )
    return base, note


def _meshes(spec: PlanSpec) -> list[int]:
    """All ranks, halves of them down to 2, and a node's."""
    found = [spec.shards]
    while found[-1] % 2 == 0 and found[-1] > 2:
        found.append(found[-1] // 2)
    node = _of_a_node(spec)
    return sorted({*found, *([node] if node > 1 and spec.shards % node == 0 else [])}, reverse=True)


def _of_a_node(spec: PlanSpec) -> int:
    return max(1, min(spec.gpus, spec.gpus_per_node) // spec.tensor_parallel)


def _over_meshes(spec: PlanSpec) -> list[Case]:
    """Over all ranks as planned; over fewer, these are neighbours: their gather is hybrid_shard's in such groups."""
    planned, found = memory_of(spec).peak.total, []
    for ranks in _meshes(spec):
        case = Case(ranks, replace(spec, ranks_after_forward=None if ranks == spec.shards else ranks))
        near = Case(ranks, replace(spec, strategy="hybrid_shard", shard_size=ranks))
        more = case.memory.peak.total / planned - 1
        found.append(replace(case, known={"more at the peak": more, _GATHER: near.value(_GATHER)}))
    return found


_RANKS, _MORE, _GATHER = "ranks", "more at the peak", "gather of a block"
_LITTLE = 0.05  # of the peak: less is not substantial


def _over_fewer(spec: PlanSpec, rows: Sequence[Case]) -> str:
    """Over a node's ranks where they are fewer than all, else over the next smaller mesh."""
    whole, *smaller = rows
    near = next((row for row in smaller if row.number(_RANKS) == _of_a_node(spec)), smaller[0])
    little = [row for row in smaller if row.number(_MORE) < _LITTLE]
    smallest = (
        f"the smallest mesh that raises it by less than a twentieth has {little[-1][_RANKS]} ranks"
        if little
        else "every smaller mesh raises it by a twentieth or more"
    )
    return (
        f"With slices over {near[_RANKS]} of {whole[_RANKS]} ranks from forward to backward the peak goes from"
        f" {whole[PEAK]} to {near[PEAK]}, {near[_MORE]} more ({near.verdict}), and a block is gathered for its"
        f" backward in {near[_GATHER]} instead of {whole[_GATHER]}; {smallest}"
    )


SMALLER_MESH = Question(
    asked="Can units be resharded to a smaller mesh without a much higher peak?",
    columns=(_RANKS, PEAK, _MORE, GATHERED, _GATHER, FITS),
    variants=_over_meshes,
    sentence=_over_fewer,
    base=_with_smaller_meshes,
    beside=(_GATHER,),
    timed=False,
)


def _between(spec: PlanSpec) -> list[Case]:
    """Resharded after the forward, or kept: then a block is not gathered again for its backward."""
    work, traffic = work_of(spec), plan_traffic(spec)
    again = [row for row in traffic if (row.unit, row.kind, row.axis) == ("block", "all_gather", "shard")]
    sent = sum(row.step_bytes for row in traffic) - sum(row.step_bytes / 2 for row in again)
    keeps = replace(spec, ranks_after_forward=1)
    beside = work_of(spec if spec.row.in_groups else spec.under("shard_grad_op"))
    kept = replace(beside, sharing=keeps.sharing)
    return [Case("resharded", spec, work=work), Case("kept whole", keeps, work=kept, known={SENT: sent})]


NO_RESHARD = Question(
    asked="Can the reshard after the forward be disabled without running out of memory?",
    columns=("after the forward", PEAK, GATHERED, SENT, STEP, FITS),
    variants=_between,
    sentence=(
        "Without reshard after the forward a rank peaks at {rows[1][peak]} instead of {rows[0][peak]}"
        " ({rows[1].verdict}), with up to {rows[1][most gathered]} of unsharded parameters instead of {rows[0][most"
        " gathered]}; it sends {rows[1][sent]} instead of {rows[0][sent]}, and a step takes {rows[1][step]} instead"
        " of {rows[0][step]}"
    ),
    base=_resharded,
    beside=(SENT,),
    simulated=(STEP,),
)

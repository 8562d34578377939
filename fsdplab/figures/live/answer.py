"""What the planner's page shows for a choice: pieces of HTML by the id of their place, all from one plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import TypedDict

from fsdplab.common.errors import UserError
from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.common.words import MISSING
from fsdplab.planning.advice import plan_json
from fsdplab.planning.bands import Band, memory_band, speed_band
from fsdplab.planning.copy_as import accelerate_yaml, of_plan, pytorch
from fsdplab.planning.elsewhere import elsewhere, sentences
from fsdplab.planning.host import OPTIMIZER_SOURCE, host_link
from fsdplab.planning.peers import peerless_band
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.planner import Plan, plan_of
from fsdplab.planning.remedies import Remedy, in_cards, in_words, lacking, remedies
from fsdplab.planning.simulation import simulate
from fsdplab.planning.step_time import MOST_PASSES, StepTime
from fsdplab.records import RunRecord

from .controls import command_of, offered, spec_of
from .drawings import memory_drawing, step_drawing

_LEAST, _MOST = 280, 1400  # pixels of a drawing


# what the page's script puts where: an id of the page -> HTML; of a plan that cannot be made `error` alone
# in this form and not as a class, as "step-words" is no name of Python
Places = TypedDict(
    "Places",
    {
        "error": str,
        "verdict": str,
        "remedies": str,
        "quantities": str,
        "memory": str,
        "categories": str,
        "step": str,
        "step-words": str,
        "pytorch": str,
        "accelerate": str,
        "command": str,
        "json": str,
    },
    total=False,
)


def answer(choice: Mapping[str, str], width: int) -> Places:
    """Return id of a place -> its HTML, for drawings of so many pixels; {"error": sentence} for a plan that cannot be
    made.

    "json" is what `fsdplab plan --json` writes for the same choice.
    """
    # sliders pass through choices that contradict each other: the page shows why and keeps its last figures
    try:
        spec = spec_of(choice)
        found = plan_of(spec)
        record = simulate(spec) if found.time and _is_simulated(spec) else None
    except UserError as error:
        return {"error": escape(str(error))}
    # whatever width a page reports (0 while it is hidden), a drawing stays readable
    pixels = max(_LEAST, min(_MOST, width))
    # a band of 0.9 to 1.22 and a peak of 50 GB: 45 to 61 GB
    band = memory_band(spec)
    low, high = band.around(found.memory.peak.total)
    # searched only where the plan does not fit, since many variants are planned for it
    remedies_of_plan = "" if found.fits else "".join(_remedies(found, choice))
    quantities = [_quantity(name, value, beside) for name, value, beside in _quantities(found, band)]
    drawing_of_step = step_drawing(_first_rank(record), pixels) if record else ""
    pytorch_lines, accelerate_lines = _copies(spec)
    return {
        "error": "",
        "verdict": _verdict(found, high),
        "remedies": remedies_of_plan,
        "quantities": "".join(quantities),
        "memory": memory_drawing(found, (low, high), pixels),
        "categories": _categories(found),
        "step": drawing_of_step,
        "step-words": escape(_step_words(found, record)),
        "pytorch": escape(pytorch_lines),
        "accelerate": escape(accelerate_lines),
        "command": escape(command_of(choice)),
        "json": escape(json.dumps(plan_json(found), indent=2)),
    }


# a pipeline and a step of many passes are predicted in closed form alone
def _is_simulated(spec: PlanSpec) -> bool:
    return spec.pipeline_parallel == 1 and spec.model.layers * spec.grad_accum <= MOST_PASSES


def answered(choice: str, width: int) -> str:
    """Return `answer` for texts of JSON, which pass between JavaScript and Python as they are."""
    return json.dumps(answer(json.loads(choice), width))


def _verdict(found: Plan, high: float) -> str:
    """Say whether it fits, and why; `high` is the upper end of the peak's band in bytes."""
    words = lacking(found) or _room_words(found, high)
    return f'<b class="{found.fitness}">fits: {found.fitness}</b> {escape(words)}'


def _room_words(found: Plan, high: float) -> str:
    """Say how much of the card is needed at the peak, and whether the card holds what may come on top of it."""
    peak = size(found.memory.peak.total)
    card = size(found.spec.gpu.memory_bytes)
    # "likely": the peak fits, but not with the band's upper end and what the allocator reserves
    also = "also" if found.fitness == "yes" else "not"
    reserved = size(found.memory.reserved_bytes)
    more = f"the upper end of the band ({size(high)}) and what the allocator is likely to reserve ({reserved})"
    return f"{peak} of {card} at the peak; {also} with {more}"


def _remedies(found: Plan, choice: Mapping[str, str]) -> Iterator[str]:
    """Yield what makes the plan fit, each with a button that chooses it where the controls offer it."""
    ways = remedies(found.spec)
    for remedy in ways:
        yield f"<li>{_remedy(remedy, choice)}</li>"
    if not ways:
        yield "<li>No change tried makes it fit; take a smaller model or larger cards.</li>"
    cards = in_cards(found.spec)
    if cards:
        yield f"<li>In cards alone: {escape(cards)}.</li>"


def _remedy(remedy: Remedy, choice: Mapping[str, str]) -> str:
    """Return a button with the flags, and the figures behind it."""
    flags = f"<code>{escape(remedy.words)}</code>"
    # `in_words` begins with the flags, which the button shows already, and puts the rest in brackets
    words = escape(in_words(remedy).removeprefix(remedy.words).strip(" ()"))
    chosen = offered(choice, dict(remedy.changes))
    # what the controls do not offer, such as more GPUs than the slider has, stays text without a button
    if chosen is not None:
        values = escape(json.dumps(chosen))
        flags = f'<button type="button" class="remedy" data-choice="{values}">{flags}</button>'
    return f"{flags} {words}; fits: {remedy.fitness}"


_Quantity = tuple[str, str, str]  # its name, its value, and its band or why there is none


def _quantities(found: Plan, memory: Band) -> Iterator[_Quantity]:
    """Yield the figures of the plan, in the page's order."""
    peak = found.memory.peak.total
    low, high = memory.around(peak)
    yield "peak memory", size(peak), f"{size(low)} to {size(high)} {memory.words}"
    # one row for each axis of the mesh, kind of unit and collective
    sent = sum(row.step_bytes for row in found.traffic)
    yield "sent by a rank a step", size(sent) if sent else "nothing", "counted, not estimated"
    if found.time is None:
        yield "step", MISSING, f"no bf16 FLOP/s are known for {found.spec.gpu.name}"
        return
    yield from _speeds(found, found.time)
    if found.spec.offload:
        yield from _of_offloading(found.spec, found.time)
    for name, words in sentences(elsewhere(found.spec)):
        # "96.4 GB in all, 48.2 GB a node: ...": number, unit, and what stands beside them
        number, _, rest = words.partition(" ")
        unit, _, beside = rest.partition(" ")
        yield name, f"{number} {unit}", beside
    name = "exposed communication"
    if found.spec.offload:
        name += " and copies"
    # a difference of two times, which rounding may leave below zero
    exposed_s = max(0.0, found.time.exposed_s)
    share = exposed_s / found.time.step_s
    beside = f"{seconds(exposed_s)} of a step; {_exposed_words(found.spec)}"
    yield name, f"{share:.1%}", beside


def _speeds(found: Plan, time: StepTime) -> Iterator[_Quantity]:
    """Yield tokens a second, the step and MFU: one band, as they are one measurement."""
    band = speed_band(found.spec)
    by = "by the band of tokens/s"
    speed = found.tokens_per_s_per_gpu or 0.0
    slow, fast = band.around(speed)
    yield "tokens/s a GPU", three_digits(speed), f"{three_digits(slow)} to {three_digits(fast)} {band.words}"
    # a fast step is a short one
    shortest, longest = seconds(time.step_s / band.high), seconds(time.step_s / band.low)
    yield "step", seconds(time.step_s), f"{shortest} to {longest}, {by}"
    # MFU is in proportion to tokens/s, so the same factors hold
    mfu = found.mfu or 0.0
    least, most = mfu * band.low, mfu * band.high
    yield "MFU", f"{mfu:.1%}", f"{least:.1%} to {most:.1%}, {by}"


def _of_offloading(spec: PlanSpec, time: StepTime) -> Iterator[_Quantity]:
    yield "optimizer on the CPU", seconds(time.host_optimizer_s), f"of the step's compute; {OPTIMIZER_SOURCE}"
    copies = f"{seconds(time.exposed_copies_s)} exposed, {seconds(time.copies_s)} alone"
    yield "copies to and from the host", copies, f"over {host_link(spec).name}, at its specification's rate"


def _exposed_words(spec: PlanSpec) -> str:
    """Return the band of exposed time on cards whose collectives go through host memory, or why there is none."""
    peers = peerless_band(spec)
    return peers.words if peers else "no published run says it, so no band is known"


def _quantity(name: str, value: str, beside: str) -> str:
    figures = f"<b>{escape(value)}</b><span>{escape(beside)}</span>"
    return f"<div><dt>{escape(name)}</dt><dd>{figures}</dd></div>"


def _categories(found: Plan) -> str:
    """Return the drawing's legend, with the bytes at the peak."""
    by_category = found.memory.peak.by_category
    entries = ""
    for name, row in CATEGORY_ROWS.items():
        nbytes = by_category[name]
        # 0 for what this plan does not have; bytes are floats here
        if nbytes < 1:
            continue
        sign = f'<i style="background:{row.colour}"></i>'
        words = f"{escape(row.title)} <b>{size(nbytes)}</b>"
        entries += f'<li title="{escape(row.sentence)}">{sign}{words}</li>'
    return entries


def _copies(spec: PlanSpec) -> tuple[str, str]:
    """Return the plan as lines of (PyTorch, Accelerate)."""
    # the lines to copy shard over the data-parallel axis alone
    if spec.tensor_parallel * spec.context_parallel * spec.pipeline_parallel * spec.expert_parallel > 1:
        no_lines = "# no lines are known for the mesh's other axes"
        return no_lines, no_lines
    what = of_plan(spec)
    return pytorch(what), accelerate_yaml(what)


def _first_rank(record: RunRecord) -> list[dict[str, object]]:
    rows = record.table("timeline")
    # ranks of a simulated plan are alike, so one is drawn
    first = rows[0]["rank"]
    return [row for row in rows if row["rank"] == first]


def _step_words(found: Plan, record: RunRecord | None) -> str:
    if found.time is None:
        return f"No bf16 FLOP/s are known for {found.spec.gpu.name}, so no step is drawn."
    if record is None and found.spec.pipeline_parallel == 1:
        return "A step of so many micro-batches is predicted in closed form, and none is drawn."
    if record is None:
        return "A pipeline's step is predicted in closed form, and not simulated event by event, so none is drawn."
    simulated = seconds(record.summary.step_time_s.median)
    closed_form = seconds(found.time.step_s)
    words = f"Simulated event by event with the engine's own schedule: {simulated}; the closed form says {closed_form}."
    if found.time.slowed_s > 1e-8:  # less would read as 0.00 µs
        slowed = seconds(found.time.slowed_s)
        words += f" Compute beside collectives is drawn longer by the {slowed} that these take of it."
    return words

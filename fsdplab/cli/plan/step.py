"""`fsdplab plan step`, or `plan` alone: memory by category beside the card, traffic, time and throughput of a job; and
`fsdplab plan sweep`: a table of many plans, and a figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fsdplab.cli.answer import Answer, Line, Part, Table
from fsdplab.cli.errors import refuse
from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.common.words import MISSING, plural
from fsdplab.figures.plots.plans import page_of, sweep_figure
from fsdplab.planning.advice import hiding_sentence, hybrid_sentence, plan_json
from fsdplab.planning.bands import ADAPTERS_OFFLOADED, memory_band, speed_band
from fsdplab.planning.host import OPTIMIZER_SOURCE, host_crossing, host_link
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.plan_traffic import latency_s, part_of_network
from fsdplab.planning.planner import Plan, parse_sweep, plan_of, plan_spec, shortfall, sweep
from fsdplab.planning.recorded_plan import PROVENANCE, RecordedPlan
from fsdplab.planning.stages import bubble
from fsdplab.planning.step_time import StepTime, peak_flops

PREDICTED = "all figures are predicted, in closed form"


def reached_words(found: Plan) -> str:
    """`0.485 of 989 TFLOP/s: fitted on 5 published runs`: what all predicted times rest on."""
    return found.efficiency.of(peak_flops(found.spec.gpu)) if found.efficiency else "unknown"


def provenance(plans: Sequence[Plan], what: str = PREDICTED) -> Line:
    """Where the figures of plans on one kind of GPU are from."""
    reached = f"; matrix products reach {reached_words(plans[0])}" if plans and plans[0].efficiency else ""
    return Line(f"{what}{reached}", "provenance")


_BAR = 30  # columns of a whole card
_NOTHING_S = 1e-9  # what is exposed below this is a rounding error
_MUCH = 0.1  # part of all communication from which on latency is told


def check_tokens(tokens: float | None) -> None:
    """Refuse a number of tokens that no training has."""
    if tokens is not None and not 1 <= tokens <= 1e18:
        refuse(f"--tokens is {tokens!r}; expected a number from 1 to 1e18, such as 15e12")


def step_answer(settings: dict[str, Any], tokens: float | None) -> Answer:
    """The plan of one step."""
    check_tokens(tokens)
    if settings["model"].endswith(".py"):
        return _recorded_answer(settings, tokens)
    found = plan_of(plan_spec(**settings))
    times = Table(("name", "value"), [*_times(found, tokens)], ("name", "value"), folds=("value",), header=False)
    parts = (Line(_headline(found), mood="bold"), _memory_table(found), _card(found), times)
    return Answer(parts, plan_json(found, tokens))


def _recorded_answer(settings: dict[str, Any], tokens: float | None) -> Answer:
    """The same for a model in a Python file, of which one micro-batch is recorded."""
    from fsdplab.sessions.recorded_model import plan_of_file  # torch

    if tokens is not None:
        refuse("--tokens counts the tokens of a language model; leave it out for a Python file")
    found = plan_of_file(**settings)
    spec, recording = found.spec, found.recording
    units = plural(len(recording.units) - 1, "unit")
    headline = (
        f"{spec.model.name}, {found.parameters:,} parameters in {units} beside the root, {spec.strategy} on"
        f" {spec.gpus} x {spec.gpu.name}; gathers in {spec.param_dtype}, reductions in {spec.reduce_dtype}"
    )
    peak, card = found.memory.peak.total, spec.gpu.memory_bytes
    verdict = (
        Line(f"{size(card - peak)} of {size(card)} are left at the peak", "fits", "good")
        if found.fits
        else Line(f"needs {size(peak)}, has {size(card)}", "does not fit", "bad")
    )
    times = Table(("name", "value"), [*_recorded_times(found)], ("name", "value"), folds=("value",), header=False)
    return Answer((Line(headline, mood="bold"), _memory_table(found), verdict, times), found.as_dict())


def _recorded_times(found: RecordedPlan) -> Iterator[tuple[str, str]]:
    yield "sent by a rank a step", _sent(found.as_dict())
    time, tensors = found.time, "real" if found.recording.real else "fake"
    if time is None:
        yield "step time", f"unknown: no bf16 FLOP/s are known for {found.spec.gpu.name}"
    else:
        yield "step", f"{seconds(time.step_s)}: compute {seconds(time.compute_s)}, exposed {_exposed(time)}"
        yield "matrix products reach", reached_words(found)
    yield "provenance", f"{PROVENANCE} on {tensors} tensors; operators are the CPU's"


def _sent(answer: dict[str, Any]) -> str:
    by_axis = answer["comm_bytes_per_step"].items()
    return ", ".join(f"{axis} {size(nbytes)}" for axis, nbytes in by_axis) or "nothing"


def _exposed(time: StepTime) -> str:
    return seconds(time.exposed_s) if time.exposed_s > _NOTHING_S else "none"


def _headline(found: Plan) -> str:
    spec = found.spec
    groups = f" in {spec.replicas} groups of {spec.shards}" if spec.row.in_groups else ""
    active = f" ({spec.model.active_parameters / 1e9:.3g} B active)" if spec.model.mixture else ""
    return (
        f"{spec.model.name}, {spec.model.parameters / 1e9:.3f} B parameters{active}, {spec.strategy}{groups} on"
        f" {spec.gpus} x {spec.gpu.name}{_mesh(spec)}: {spec.micro_batch} x {spec.seq} tokens a micro-batch,"
        f" {spec.grad_accum} a step; gathers in {spec.param_dtype}, reductions in {spec.reduce_dtype}; {spec.loss} loss"
    )


def _mesh(spec: PlanSpec) -> str:
    """The axes beside those of states, where they have more than one rank."""
    ways = {"tensor": spec.tensor_parallel, "context": spec.context_parallel, "expert": spec.expert_parallel}
    found = "".join(f", {count}-way {name} parallel" for name, count in ways.items() if count > 1)
    if spec.pipeline_parallel == 1:
        return found
    parts = f" of {spec.virtual_stages} parts each" if spec.virtual_stages > 1 else ""
    return f"{found}, {spec.pipeline_parallel} stages{parts} ({spec.schedule})"


def _memory_table(found: Plan) -> Table:
    """Categories at the peak and between steps."""
    peak, resting, card = found.memory.peak, found.memory.resting, found.spec.gpu.memory_bytes
    rows = []
    for name, row in CATEGORY_ROWS.items():
        here, rests = peak.by_category[name], resting.by_category[name]
        bar = "#" * min(_BAR, round(_BAR * here / card))
        rows.append((row.title, size(rests) if rests else MISSING, size(here) if here else MISSING, bar))
    rows.append(("total", size(resting.total), size(peak.total), f"{peak.total / card:.0%}"))
    columns = ("memory of a rank", "between steps", "at the peak", "of the card")
    return Table(columns, rows, words=("memory of a rank", "of the card"))


def _card(found: Plan) -> Line:
    memory, card = found.memory, found.spec.gpu.memory_bytes
    if missing := shortfall(found):
        return Line(missing, "does not fit", "bad")
    peak, band = memory.peak, memory_band(found.spec)
    low, high = band.around(peak.total)
    words = (
        f"{size(peak.total)} of {size(card)} at the peak, in the {peak.name}; {size(low)} to {size(high)} {band.words};"
        f" the allocator is likely to reserve {size(memory.reserved_bytes)}"
    )
    return Line(words, f"fits: {found.fitness}", "good" if found.fitness == "yes" else "")


def _times(found: Plan, tokens: float | None) -> Iterator[tuple[str, str]]:
    yield "sent by a rank a step", _sent(found.as_dict())
    reached, fabric = part_of_network(found.spec), found.spec.fabric
    if reached and fabric:
        named = "; --network names another" if fabric.assumed else ""
        yield "network", f"{fabric.words}{named}; rings over {reached[0]} nodes reach {reached[1]:.0%} of it"
    time = found.time
    if time is None:
        yield "step time", f"unknown: no bf16 FLOP/s are known for {found.spec.gpu.name}"
        yield "provenance", PREDICTED
        return
    yield "step", f"{seconds(time.step_s)}: compute {seconds(time.compute_s)}, exposed {_exposed(time)}"
    yield "communication alone", _communication(found, time)
    yield from _advice(found.spec).items()
    if found.spec.pipeline_parallel > 1:
        yield "bubble of the pipeline", f"{bubble(found.spec):.1%} of a stage's compute, counted as exposed"
    if found.spec.offload:
        yield "copies to and from the host", _copies(found.spec, time)
        yield "optimizer on the CPU", f"{seconds(time.host_optimizer_s)} of the compute; {OPTIMIZER_SOURCE}"
    speed, mfu = found.tokens_per_s_per_gpu or 0.0, found.mfu or 0.0
    yield "tokens/s a GPU", f"{three_digits(speed)} (MFU {mfu:.1%})"
    band = speed_band(found.spec)
    low, high = map(three_digits, band.around(speed))
    unlike = ", none of which offloads" if found.spec.offload and band.kind != ADAPTERS_OFFLOADED else ""
    yield "", f"{low} to {high} {band.words}{unlike}"
    hours = found.hours(tokens) if tokens else None
    if hours:
        yield f"{tokens:,.0f} tokens", f"{hours:,.1f} hours, {hours * found.spec.gpus:,.0f} GPU-hours"
    yield "matrix products reach", reached_words(found)
    yield "provenance", PREDICTED


def _advice(spec: PlanSpec) -> dict[str, str]:
    """Where communication hides, and whether hybrid sharding pays, as far as there is something to say."""
    sentences = {"a block's hides": hiding_sentence(spec), "hybrid sharding": hybrid_sentence(spec)}
    return {name: sentence for name, sentence in sentences.items() if sentence}


def _communication(found: Plan, time: StepTime) -> str:
    """All of it as if alone, with the part that no bandwidth shortens where that is large, and what is exposed."""
    if not found.traffic:
        return "none: no rank sends anything"
    latency = latency_s(found.spec, found.traffic)
    rings = f" ({seconds(latency)} of it the latency of rings)" if latency > _MUCH * time.communication_s else ""
    return f"{seconds(time.communication_s)}{rings}, exposed {max(0.0, time.exposed_s) / time.step_s:.1%} of a step"


def _copies(spec: PlanSpec, time: StepTime) -> str:
    """Bytes over the host's link and their seconds as if alone, and by how much a step is longer for them."""
    link, assumed = host_link(spec), ", assumed" if spec.gpu.host_link is None else ""
    longer = seconds(time.exposed_copies_s) if time.exposed_copies_s > _NOTHING_S else "nothing"
    took = seconds(time.copies_s)
    return (
        f"{size(host_crossing(spec))} over {link.name} ({size(link.bytes_per_s)}/s each way, of its"
        f" specification{assumed}): {took} alone, {longer} of it exposed"
    )


# ---- sweeps


def sweep_answer(settings: dict[str, Any], values: str) -> Answer:
    """Plan for each value of one choice; the figure shows memory and throughput."""
    name, tried = parse_sweep(values)
    if name == "gpus":
        settings = settings | {"gpus": tried[0]}
    plans = sweep(plan_spec(**settings), name, tried)
    labelled = [(f"{name} {value:,}", each) for value, each in zip(tried, plans)]
    lacking = [(label, shortfall(each)) for label, each in labelled]
    missing = [Line(words, f"{label}: does not fit", "bad") for label, words in lacking if words]
    rows = [{name: value} | each.as_dict() for value, each in zip(tried, plans)]
    parts: list[Part] = [_table(labelled), *missing, provenance(plans)]
    return Answer(parts, {"sweep": name, "rows": rows}, lambda: page_of(sweep_figure(name, tried, plans)))


def _table(labelled: Sequence[tuple[str, Plan]]) -> Table:
    columns = ("plan", "peak", "of the card", "sent", "step", "exposed", "tokens/s a GPU", "MFU")
    return Table(columns, [_row(label, each) for label, each in labelled], words=("plan",))


def _row(label: str, found: Plan) -> Sequence[str]:
    time, speed, mfu = found.time, found.tokens_per_s_per_gpu, found.mfu
    peak, card = found.memory.peak.total, found.spec.gpu.memory_bytes
    return (
        label,
        size(peak),
        f"{peak / card:.0%}",
        size(sum(found.as_dict()["comm_bytes_per_step"].values())),
        seconds(time.step_s if time else None),
        f"{time.exposed_s / time.step_s:.0%}" if time else MISSING,
        three_digits(speed) if speed else MISSING,
        f"{mfu:.1%}" if mfu else MISSING,
    )

"""Answers `fsdplab plan step`, or `plan` alone: memory by category beside the card, traffic, time and throughput of a
job; and `fsdplab plan sweep`: a table of many plans, and a figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fsdplab.cli.answer import Answer, Line, Part, Table
from fsdplab.cli.errors import refuse
from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.common.words import MISSING, plural
from fsdplab.planning.advice import hiding_sentence, hybrid_sentence, plan_json
from fsdplab.planning.bands import ADAPTERS_OFFLOADED, memory_band, speed_band
from fsdplab.planning.elsewhere import elsewhere, sentences
from fsdplab.planning.host import OPTIMIZER_SOURCE, host_crossing, host_link
from fsdplab.planning.memory import memory_of
from fsdplab.planning.peers import peerless_band
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.plan_traffic import latency_s, part_of_network
from fsdplab.planning.planner import (
    Plan,
    Value,
    largest_micro_batch,
    parse_sweep,
    plan_of,
    plan_spec,
    sweep,
    swept_name,
)
from fsdplab.planning.recorded_plan import PROVENANCE, RecordedPlan
from fsdplab.planning.remedies import Remedy, in_cards, lacking, remedies
from fsdplab.planning.stages import bubble
from fsdplab.planning.step_time import StepTime, peak_flops

PREDICTED = "all figures are predicted, in closed form"
_TF32 = 'torch.set_float32_matmul_precision("high")'


def reached_words(plan: Plan) -> str:
    """Say what all predicted times rest on: `0.485 of 989 TFLOP/s: fitted on 5 published runs`; in fp32 that TF32 is
    assumed, too.
    """
    if plan.efficiency is None:
        return "unknown"
    words = plan.efficiency.of(peak_flops(plan.spec.gpu))
    if plan.spec.param_dtype == "fp32":
        words += f"; in fp32 half of that, as TF32: with {_TF32}, which is not PyTorch's default"
    return words


def provenance(plans: Sequence[Plan], what: str = PREDICTED) -> Line:
    """Say where the figures of plans on one kind of GPU are from."""
    if plans and plans[0].efficiency:
        what = f"{what}; matrix products reach {reached_words(plans[0])}"
    return Line(what, "provenance")


_BAR = 30  # columns of a whole card
_NOTHING_S = 1e-9  # what is exposed below this is a rounding error
_MUCH = 0.1  # part of all communication from which on latency is told
_UNKNOWN_TIME = "unknown: no bf16 FLOP/s are known for {}"


def check_tokens(tokens: float | None) -> None:
    """Refuse a number of tokens that no training has."""
    if tokens is not None and not 1 <= tokens <= 1e18:
        refuse(f"--tokens is {tokens!r}; expected a number from 1 to 1e18, such as 15e12")


def check_price(price: float | None) -> None:
    """Refuse a price that no GPU-hour has."""
    if price is not None and not 0 < price < 1e6:
        refuse(f"--price is {price!r}; expected dollars of a GPU-hour above 0, such as 2.5")


def step_answer(settings: dict[str, Any], tokens: float | None, price: float | None) -> Answer:
    """Plan one step of a model that is known by name or by its `config.json`, or of one in a Python file."""
    check_tokens(tokens)
    check_price(price)
    if price is not None and tokens is None:
        refuse("--price is of the GPU-hours of a training; give its --tokens too, such as 15e12")
    if settings["model"].endswith(".py"):
        return _recorded_answer(settings, tokens)
    plan = plan_of(plan_spec(**settings))
    headline = Line(_headline(plan), mood="bold")
    card = Line(plan.spec.gpu.memory_words, "card", "dim")
    ways: Iterable[Part] = ()
    if not plan.fits:
        ways = remedy_parts(plan.spec, f"fsdplab plan --model {settings['model']} --gpu {settings['gpu']}")
    times = _named_values(_times(plan, tokens, price))
    parts = (headline, card, _memory_table(plan), _card(plan), *ways, times)
    return Answer(parts, plan_json(plan, tokens))


def _recorded_answer(settings: dict[str, Any], tokens: float | None) -> Answer:
    """Plan one step of a model in a Python file, of which one micro-batch is recorded."""
    from fsdplab.sessions.recorded_model import plan_of_file  # torch

    if tokens is not None:
        refuse("--tokens counts the tokens of a language model; leave it out for a Python file")
    plan = plan_of_file(**settings)
    spec = plan.spec
    # the recording's units include the root
    units = plural(len(plan.recording.units) - 1, "unit")
    headline = (
        f"{spec.model.name}, {plan.parameters:,} parameters in {units} beside the root, {spec.strategy} on"
        f" {spec.gpus} x {spec.gpu.name}; gathers in {spec.param_dtype}, reductions in {spec.reduce_dtype}"
    )
    peak = plan.memory.peak.total
    card = spec.gpu.memory_bytes
    if plan.fits:
        verdict = Line(f"{size(card - peak)} of {size(card)} are left at the peak", "fits", "good")
    else:
        verdict = Line(f"needs {size(peak)}, has {size(card)}", "does not fit", "bad")
    times = _named_values(_recorded_times(plan))
    return Answer((Line(headline, mood="bold"), _memory_table(plan), verdict, times), plan.as_dict())


def _named_values(rows: Iterator[tuple[str, str]]) -> Table:
    """Lay out names and values as a table without a header."""
    columns = ("name", "value")
    return Table(columns, [*rows], words=columns, folds=("value",), header=False)


def _recorded_times(plan: RecordedPlan) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of the traffic and the times of a recorded model."""
    yield "sent by a rank a step", _sent(plan.as_dict())
    if plan.time is None:
        yield "step time", _UNKNOWN_TIME.format(plan.spec.gpu.name)
    else:
        yield "step", _step_words(plan.time)
        yield "matrix products reach", reached_words(plan)
    tensors = "real" if plan.recording.real else "fake"
    yield "provenance", f"{PROVENANCE} on {tensors} tensors; operators are the CPU's"


def _sent(answer: dict[str, Any]) -> str:
    by_axis = answer["comm_bytes_per_step"].items()
    return ", ".join(f"{axis} {size(nbytes)}" for axis, nbytes in by_axis) or "nothing"


def _step_words(time: StepTime) -> str:
    """Say how long a step is, and which part of it computes or waits for communication."""
    exposed = "none"
    if time.exposed_s > _NOTHING_S:
        exposed = seconds(time.exposed_s)
    return f"{seconds(time.step_s)}: compute {seconds(time.compute_s)}, exposed {exposed}"


def _headline(plan: Plan) -> str:
    spec = plan.spec
    groups = ""
    if spec.row.in_groups:
        groups = f" in {spec.replicas} groups of {spec.shards}"
    active = ""
    if spec.model.mixture:
        active = f" ({spec.model.active_parameters / 1e9:.3g} B active)"
    sequences = plural(spec.micro_batch, "sequence")
    passes = plural(spec.grad_accum, "micro-batch", "micro-batches")
    return (
        f"{spec.model.name}, {spec.model.parameters / 1e9:.3f} B parameters{active}, {spec.strategy}{groups} on"
        f" {spec.gpus} x {spec.gpu.name}{_mesh(spec)}: {sequences} of {spec.seq:,} tokens a micro-batch, {passes} a"
        f" step; gathers in {spec.param_dtype}, reductions in {spec.reduce_dtype}; {spec.loss} loss"
    )


def _mesh(spec: PlanSpec) -> str:
    """Name the axes beside those of states, where they have more than one rank."""
    words = ""
    ways = {"tensor": spec.tensor_parallel, "context": spec.context_parallel, "expert": spec.expert_parallel}
    for name, count in ways.items():
        if count > 1:
            words += f", {count}-way {name} parallel"
    # one stage: there is no schedule to name
    if spec.pipeline_parallel == 1:
        return words
    stages = f"{spec.pipeline_parallel} stages"
    if spec.virtual_stages > 1:
        stages += f" of {spec.virtual_stages} parts each"
    return f"{words}, {stages} ({spec.schedule})"


def _memory_table(plan: Plan | RecordedPlan) -> Table:
    """Tabulate the categories at the peak and between steps; each bar is a category's part of the card."""
    peak, resting = plan.memory.peak, plan.memory.resting
    card = plan.spec.gpu.memory_bytes
    rows = []
    for name, row in CATEGORY_ROWS.items():
        at_peak = peak.by_category[name]
        # 24 GB of a card of 80: 9 of 30 signs; no bar is longer than the card
        bar = "#" * min(_BAR, round(_BAR * at_peak / card))
        rows.append((row.title, _size_or_missing(resting.by_category[name]), _size_or_missing(at_peak), bar))
    rows.append(("total", size(resting.total), size(peak.total), f"{peak.total / card:.0%}"))
    columns = ("memory of a rank", "between steps", "at the peak", "of the card")
    return Table(columns, rows, words=("memory of a rank", "of the card"))


def _size_or_missing(nbytes: float) -> str:
    return size(nbytes) if nbytes else MISSING


def _card(plan: Plan) -> Line:
    """Say whether the plan fits the card, and how far its peak may be from what is predicted."""
    missing = lacking(plan)
    if missing is not None:
        return Line(missing, "does not fit", "bad")
    memory, peak, card = plan.memory, plan.memory.peak, plan.spec.gpu.memory_bytes
    band = memory_band(plan.spec)
    # how far measured peaks were from predicted ones, as a part of them
    low, high = band.around(peak.total)
    words = (
        f"{size(peak.total)} of {size(card)} at the peak, in the {peak.name}; {size(low)} to {size(high)} {band.words};"
        f" the allocator is likely to reserve {size(memory.reserved_bytes)}"
    )
    mood = "good" if plan.fitness == "yes" else ""
    return Line(words, f"fits: {plan.fitness}", mood)


def remedy_parts(spec: PlanSpec, begin: str, kept: frozenset[str] = frozenset()) -> Iterator[Part]:
    """Yield what makes a plan fit that does not: a table, and the command of each row behind `begin`."""
    ways = remedies(spec, kept)
    if ways:
        columns = ("what makes it fit", "peak", "fits", "tokens/s a GPU", "beside that")
        rows = [_remedy_row(remedy) for remedy in ways]
        yield Table(columns, rows, words=("what makes it fit", "fits", "beside that"), folds=("beside that",))
    else:
        yield Line("no change tried makes it fit; take a smaller model or larger cards", "remedies", "bad")
    for remedy in ways:
        # below the table, as a command is too long for a column
        yield Line(f"{begin} {remedy.as_dict()['flags']}", "  command", "dim")
    cards = in_cards(spec)
    if cards:
        yield Line(cards, "in cards alone")


def _remedy_row(remedy: Remedy) -> Sequence[str]:
    speed = remedy.tokens_per_s
    shown = three_digits(speed) if speed else MISSING
    return remedy.words, size(remedy.peak), remedy.fitness, shown, "; ".join(remedy.notes)


def _times(plan: Plan, tokens: float | None, price: float | None) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of the traffic, the times and the throughput, as far as they are known."""
    spec, time = plan.spec, plan.time
    yield "sent by a rank a step", _sent(plan.as_dict())
    reached, fabric = part_of_network(spec), spec.fabric
    if reached and fabric:
        named = "; --network names another" if fabric.assumed else ""
        yield "network", f"{fabric.words}{named}; rings over {reached[0]} nodes reach {reached[1]:.0%} of it"
    if time is None:
        yield "step time", _UNKNOWN_TIME.format(spec.gpu.name)
        yield "provenance", PREDICTED
        return
    yield "step", _step_words(time)
    yield "communication alone", _communication(plan, time)
    peers = peerless_band(spec)
    if peers:
        yield "its rate", peers.words
    yield from _advice(spec)
    if spec.pipeline_parallel > 1:
        yield "bubble of the pipeline", f"{bubble(spec):.1%} of a stage's compute, counted as exposed"
    if spec.offload:
        yield "copies to and from the host", _copies(spec, time)
        yield "optimizer on the CPU", f"{seconds(time.host_optimizer_s)} of the compute; {OPTIMIZER_SOURCE}"
    speed = plan.tokens_per_s_per_gpu or 0.0
    yield "tokens/s a GPU", f"{three_digits(speed)} (MFU {plan.mfu or 0.0:.1%})"
    yield "", _speed_band(spec, speed)
    if plan.fits:
        yield "largest micro-batch", _largest(spec)
    yield from sentences(elsewhere(spec))
    hours = plan.hours(tokens) if tokens else None
    if hours:
        # 8 GPUs for 100 hours: 800 GPU-hours
        gpu_hours = hours * spec.gpus
        dollars = f", ${gpu_hours * price:,.0f}" if price else ""
        yield f"{tokens:,.0f} tokens", f"{hours:,.1f} hours, {gpu_hours:,.0f} GPU-hours{dollars}"
    yield "matrix products reach", reached_words(plan)
    yield "provenance", PREDICTED


def _speed_band(spec: PlanSpec, speed: float) -> str:
    """Say between which speeds a run may be, and on which published runs that rests."""
    band = speed_band(spec)
    low, high = map(three_digits, band.around(speed))
    words = f"{low} to {high} {band.words}"
    if spec.offload and band.kind != ADAPTERS_OFFLOADED:
        words += "; none of them offloads"
    return words


def _largest(spec: PlanSpec) -> str:
    """Say how far the micro-batch can grow."""
    most = largest_micro_batch(spec)
    assert most is not None, "a plan that fits has a micro-batch that does"
    count = most.micro_batch
    largest = "this one is the largest"
    if count > spec.micro_batch:
        largest = f"--batch-size {count} is the largest that fits"
    return f"{largest}: {size(memory_of(most).peak.total)} at the peak"


def _advice(spec: PlanSpec) -> Iterator[tuple[str, str]]:
    """Yield where communication hides, and whether hybrid sharding pays, as far as there is something to say."""
    hiding = hiding_sentence(spec)
    if hiding:
        yield "a block's hides", hiding
    hybrid = hybrid_sentence(spec)
    if hybrid:
        yield "hybrid sharding", hybrid


def _communication(plan: Plan, time: StepTime) -> str:
    """Say how long all of it takes as if alone, which part of that no bandwidth shortens, and what is exposed."""
    if not plan.traffic:
        return "none: no rank sends anything"
    alone = seconds(time.communication_s)
    latency = latency_s(plan.spec, plan.traffic)
    # what no bandwidth shortens is worth a word only where it is a large part
    if latency > _MUCH * time.communication_s:
        alone += f" ({seconds(latency)} of it the latency of rings)"
    # what was hidden may exceed what was sent by a rounding error
    exposed = max(0.0, time.exposed_s)
    return f"{alone}, exposed {exposed / time.step_s:.1%} of a step"


def _copies(spec: PlanSpec, time: StepTime) -> str:
    """Say how many bytes cross the host's link, how long that takes alone, and how much longer a step is for it."""
    link = host_link(spec)
    assumed = ", assumed" if spec.gpu.host_link is None else ""
    longer = "nothing"
    if time.exposed_copies_s > _NOTHING_S:
        longer = seconds(time.exposed_copies_s)
    return (
        f"{size(host_crossing(spec))} over {link.name} ({size(link.bytes_per_s)}/s each way, of its"
        f" specification{assumed}): {seconds(time.copies_s)} alone, {longer} of it exposed"
    )


# ---- sweeps

_COLUMNS = ("plan", "peak", "of the card", "fits", "sent", "step", "exposed", "tokens/s", "tokens/s a GPU", "MFU")


def sweep_answer(settings: dict[str, Any], values: str) -> Answer:
    """Plan for each value of one choice; the figure shows memory and throughput."""
    # "world-size=8..64" -> the setting's name, and 8, 16, 32, 64
    name, tried = parse_sweep(values)
    plans = sweep(plan_spec(**settings | {name: tried[0]}), name, tried)
    shown, too_large, rows = [], [], []
    for value, plan in zip(tried, plans):
        label = f"{swept_name(name)} {_readable(value)}"
        shown.append(_row(label, plan))
        rows.append({name: value} | plan.as_dict())
        missing = lacking(plan)
        if missing:
            too_large.append(Line(missing, f"{label}: does not fit", "bad"))
    if too_large:
        too_large.append(Line("fsdplab plan with the flags of a row says what makes it fit", "remedies"))
    parts: list[Part] = [Table(_COLUMNS, shown, words=("plan", "fits")), *too_large, provenance(plans)]

    def page() -> str:
        # which other plans need not load
        from fsdplab.figures.plots.plans import sweep_figure
        from fsdplab.figures.report.parts import page_of

        return page_of(sweep_figure(name, tried, plans))

    return Answer(parts, {"sweep": name, "rows": rows}, page)


def _readable(value: Value) -> str:
    return f"{value:,}" if isinstance(value, int) else value


def _row(label: str, plan: Plan) -> Sequence[str]:
    """Return the cells of `_COLUMNS`; times are missing where the GPU's FLOP/s are not known."""
    peak = plan.memory.peak.total
    step, exposed, speed, of_all, mfu = None, MISSING, MISSING, MISSING, MISSING
    if plan.time:
        step = plan.time.step_s
        exposed = f"{plan.time.exposed_s / step:.0%}"
    if plan.tokens_per_s_per_gpu:
        speed = three_digits(plan.tokens_per_s_per_gpu)
        of_all = f"{plan.tokens_per_s_per_gpu * plan.spec.gpus:,.0f}"
    if plan.mfu:
        mfu = f"{plan.mfu:.1%}"
    sent = size(sum(plan.as_dict()["comm_bytes_per_step"].values()))
    of_the_card = f"{peak / plan.spec.gpu.memory_bytes:.0%}"
    return (label, size(peak), of_the_card, plan.fitness, sent, seconds(step), exposed, of_all, speed, mfu)

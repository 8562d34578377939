"""Answers `fsdplab plan fit`: the fastest, the cheapest and the safest plan, why, and the best single change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fsdplab.cli.answer import Answer, Line, Part, Table
from fsdplab.cli.plan.step import check_price, check_tokens, provenance, remedy_parts
from fsdplab.common.sizes import percent, seconds, size, three_digits
from fsdplab.common.words import MISSING
from fsdplab.planning.as_flags import changes_in_words, flags, in_short
from fsdplab.planning.elsewhere import HOST, elsewhere, sentences
from fsdplab.planning.planner import fewest_gpus, plan_spec
from fsdplab.planning.remedies import Remedy, lacking, remedies
from fsdplab.planning.search import WHY, Candidate, Fit, fit

_BILLION = 1e9


@dataclass(frozen=True)
class Asked:
    """Holds what a search was asked: tokens of the training and dollars of a GPU-hour, if they were given."""

    tokens: float | None
    price: float | None

    def gpu_hours(self, candidate: Candidate) -> float | None:
        """Return the GPU-hours of the training, or of a billion tokens; None where the step time is not known."""
        time, spec = candidate.plan.time, candidate.spec
        if time is None:
            return None
        # a billion tokens at 4 million a step: 250 steps
        steps = (self.tokens or _BILLION) / spec.step_tokens
        hours = steps * time.step_s / 3600
        return hours * spec.gpus


def fit_answer(
    settings: dict[str, Any], tokens: float | None, price: float | None, global_batch: int | None, keep: str
) -> Answer:
    """Search around the settings: three answers and the best single change."""
    check_tokens(tokens)
    check_price(price)
    # "--tp, batch-size" -> "tp", "batch-size"
    names = [part.strip().lstrip("-") for part in keep.split(",")]
    spec, asked = plan_spec(**settings), Asked(tokens, price)
    result = fit(spec, global_batch, [name for name in names if name])
    command = f"fsdplab plan --model {settings['model']} --gpu {settings['gpu']}"
    ways: Iterable[Part] = ()
    if not result.own.fits:
        ways = remedy_parts(result.own.spec, command, frozenset(result.kept))
    parts: list[Part] = [
        _table(result, asked),
        *_reasons(result, f"{command} --sequence-length {spec.seq}"),
        *ways,
        *_single(result),
        Line(_fewest_gpus(result), "fewest GPUs"),
        *_host(result),
        *_tried(result),
        Line(spec.gpu.memory_words, "card", "dim"),
        provenance([result.own.plan]),
    ]
    return Answer(parts, _as_dict(result, asked))


def _host(result: Fit) -> Iterator[Line]:
    """Yield what offloaded states take of a node's host memory, and the question for it where it is not known."""
    for name, words in sentences(elsewhere(result.own.spec)):
        if name == HOST:
            yield Line(words, name)


def _tried(result: Fit) -> Iterator[Line]:
    """Yield the batch that all plans have, and how many plans were tried."""
    tokens = result.sequences * result.own.spec.seq
    as_given = ""
    if result.kept:
        as_given = f"; kept as given: {', '.join(result.kept)}"
    yield Line(f"{result.sequences:,} sequences, {tokens:,} tokens, a step{as_given}", "global batch")
    yield Line(f"{result.planned:,} plans, of which {result.fitting:,} fit", "tried")


def _picks(result: Fit) -> dict[str, Candidate]:
    """Return the answers by name: fastest, cheapest, safest; none where nothing fits."""
    candidates = {name: getattr(result, name) for name in WHY}
    return {name: candidate for name, candidate in candidates.items() if candidate is not None}


def _table(result: Fit, asked: Asked) -> Table:
    unit = "$" if asked.price else "GPU-hours"
    what = f"{asked.tokens:,.0f} tokens" if asked.tokens else "a billion tokens"
    columns = ["", "GPUs", "plan", "peak", "fits", "step", "tokens/s a GPU"]
    if asked.tokens:
        columns.append("hours")
    columns.append(f"{unit} of {what}")
    named = {"as given": result.own, **_picks(result)}
    rows = [_row(name, candidate, asked) for name, candidate in named.items()]
    return Table(columns, rows, words=("", "plan", "fits"), folds=("plan",))


def _row(name: str, candidate: Candidate, asked: Asked) -> tuple[str, ...]:
    """Return the cells of a candidate. A plan that does not fit costs nothing, as it cannot be run."""
    plan, spec = candidate.plan, candidate.spec
    step, speed, cost = None, MISSING, MISSING
    if plan.time is not None:
        step = plan.time.step_s
    if plan.tokens_per_s_per_gpu:
        speed = three_digits(plan.tokens_per_s_per_gpu)
    hours, long = asked.gpu_hours(candidate), MISSING
    if hours and plan.fits:
        # GPU-hours, or dollars where a price is given; divided by the GPUs they are the hours of the training
        cost, long = f"{hours * (asked.price or 1):,.0f}", f"{hours / spec.gpus:,.1f}"
    last = (long, cost) if asked.tokens else (cost,)
    return (name, str(spec.gpus), in_short(spec), size(candidate.peak), plan.fitness, seconds(step), speed, *last)


def _reasons(result: Fit, begin: str) -> Iterator[Line]:
    """Yield why each answer was chosen, and its command, which begins with `begin`."""
    if result.fastest is None:
        yield from _nothing_fits(result.own)
        return
    for name, chosen in _picks(result).items():
        yield Line(f"{WHY[name](result, chosen)}.", name, "good")
        # the cheapest plan is often the fastest one: its command is shown once
        if name == "fastest" or chosen.spec != result.fastest.spec:
            yield Line(f"{begin} {flags(chosen.spec)}", "  command", "dim")


def _nothing_fits(given: Candidate) -> Iterator[Line]:
    """Yield what the plan that was given lacks."""
    yield Line(f"nothing fits on {given.spec.gpus} GPUs or fewer, whatever was tried", mood="bad")
    missing = lacking(given.plan)
    if missing:
        yield Line(missing, "as given")


def _fewest_gpus(result: Fit) -> str:
    """Name the fewest GPUs: of strategies and recomputation at any number of GPUs, and of the plans that were found."""
    spec = result.own.spec
    plan = fewest_gpus(spec)
    holding = [] if plan is None else [plan.spec]
    # tensor parallelism may hold on 64 GPUs what no number holds without it
    holding += [candidate.spec for candidate in _picks(result).values()]
    if holding:
        least = min(holding, key=lambda each: each.gpus)
        return f"{least.gpus} with {in_short(least)}"
    if spec.fabric:
        return "no number of these GPUs holds it"
    return f"no number of these GPUs holds it in one node, and no network between nodes is known for {spec.gpu.name}"


def _single(result: Fit) -> Iterator[Line]:
    """Yield the best single change of a plan that fits; another one has remedies."""
    given, single = result.own, result.single
    label = "best single change"
    if not given.fits:
        return
    if single is None:
        yield Line("none is faster", label)
        return
    # 10 s now and 8 s then: 25 % faster
    gain = given.expected_s / single.candidate.expected_s - 1
    peak = f"{size(single.candidate.peak)} at the peak"
    yield Line(f"{changes_in_words(single.changes)}: {percent(gain)} faster, {peak}", label)


def _as_dict(result: Fit, asked: Asked) -> dict[str, Any]:
    answers = {}
    for name, chosen in _picks(result).items():
        answers[name] = _candidate(chosen, asked) | {"reason": WHY[name](result, chosen)}
    single = result.single
    return {
        "as_given": _candidate(result.own, asked),
        "answers": answers,
        "best_single_change": single and {"changes": single.changes, **_candidate(single.candidate, asked)},
        "remedies": [remedy.as_dict() for remedy in _remedies(result)],
        "global_batch": result.sequences,
        "kept": list(result.kept),
        "tried": {"plans": result.planned, "fit": result.fitting},
    }


def _remedies(result: Fit) -> tuple[Remedy, ...]:
    if result.own.fits:
        return ()
    return remedies(result.own.spec, frozenset(result.kept))


def _candidate(candidate: Candidate, asked: Asked) -> dict[str, Any]:
    spec, hours = candidate.spec, asked.gpu_hours(candidate)
    dollars = None
    if hours and asked.price:
        dollars = hours * asked.price
    return candidate.plan.as_dict() | {
        "checkpointing": spec.checkpointing,
        "grad_accum": spec.grad_accum,
        "flags": flags(spec),
        "gpu_hours": hours,
        "dollars": dollars,
        "gpu_hours_of_tokens": asked.tokens or _BILLION,
    }

"""`fsdplab plan fit`: the fastest, the cheapest and the safest plan, why, and the best single change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdplab.cli.answer import Answer, Line, Part, Table
from fsdplab.cli.plan.step import check_price, check_tokens, provenance, remedy_parts
from fsdplab.common.sizes import percent, seconds, size, three_digits
from fsdplab.common.words import MISSING
from fsdplab.planning.as_flags import changes_in_words, flags, in_short
from fsdplab.planning.elsewhere import HOST, elsewhere, sentences
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.planner import fewest_gpus, plan_spec
from fsdplab.planning.remedies import Remedy, lacking, remedies
from fsdplab.planning.search import WHY, Candidate, Fit, fit

_BILLION = 1e9


@dataclass(frozen=True)
class Asked:
    """What a search was asked: tokens of the training and dollars of a GPU-hour, if they were given."""

    tokens: float | None
    price: float | None

    def gpu_hours(self, candidate: Candidate) -> float | None:
        """GPU-hours of the training, or of a billion tokens."""
        time, spec = candidate.plan.time, candidate.spec
        if time is None:
            return None
        return (self.tokens or _BILLION) / spec.step_tokens * time.step_s / 3600 * spec.gpus


def fit_answer(
    settings: dict[str, Any], tokens: float | None, price: float | None, global_batch: int | None, keep: str
) -> Answer:
    """Search around the settings: three answers and the best single change."""
    check_tokens(tokens)
    check_price(price)
    names = [part.strip().lstrip("-") for part in keep.split(",")]
    spec, asked = plan_spec(**settings), Asked(tokens, price)
    found = fit(spec, global_batch, [name for name in names if name])
    model = f"fsdplab plan --model {settings['model']} --gpu {settings['gpu']}"
    begin = f"{model} --sequence-length {spec.seq}"
    ways = () if found.own.fits else remedy_parts(found.own.spec, model, frozenset(found.kept))
    parts: list[Part] = [
        _table(found, asked),
        *_reasons(found, begin),
        *ways,
        *_single(found),
        Line(_fewest_gpus(found.own.spec), "fewest GPUs"),
        *_host(found),
        *_tried(found),
        Line(spec.gpu.memory_words, "card", "dim"),
        provenance([found.own.plan]),
    ]
    return Answer(parts, _as_dict(found, asked))


def _host(found: Fit) -> Iterator[Line]:
    """What offloaded states take of a node's host memory, and the question for it where it is not known."""
    for name, words in sentences(elsewhere(found.own.spec)):
        if name == HOST:
            yield Line(words, name)


def _tried(found: Fit) -> Iterator[Line]:
    tokens = found.sequences * found.own.spec.seq
    kept = ""
    if found.kept:
        kept = f"; kept as given: {', '.join(found.kept)}"
    yield Line(f"{found.sequences:,} sequences, {tokens:,} tokens, a step{kept}", "global batch")
    yield Line(f"{found.planned:,} plans, of which {found.fitting:,} fit", "tried")


def _picks(found: Fit) -> dict[str, Candidate]:
    candidates = {name: getattr(found, name) for name in WHY}
    return {name: candidate for name, candidate in candidates.items() if candidate is not None}


def _table(found: Fit, asked: Asked) -> Table:
    what = f"{asked.tokens:,.0f} tokens" if asked.tokens else "a billion tokens"
    cost = f"{'$' if asked.price else 'GPU-hours'} of {what}"
    columns = ["", "GPUs", "plan", "peak", "fits", "step", "tokens/s a GPU"]
    if asked.tokens:
        columns.append("hours")
    columns.append(cost)
    named = {"as given": found.own, **_picks(found)}
    rows = [_row(name, candidate, asked) for name, candidate in named.items()]
    return Table(columns, rows, words=("", "plan", "fits"), folds=("plan",))


def _row(name: str, candidate: Candidate, asked: Asked) -> tuple[str, ...]:
    plan, spec = candidate.plan, candidate.spec
    step, speed, cost = None, MISSING, MISSING
    if plan.time is not None:
        step = plan.time.step_s
    if plan.tokens_per_s_per_gpu:
        speed = three_digits(plan.tokens_per_s_per_gpu)
    hours, long = asked.gpu_hours(candidate), MISSING
    if hours and plan.fits:
        cost, long = f"{hours * (asked.price or 1):,.0f}", f"{hours / spec.gpus:,.1f}"
    last = (long, cost) if asked.tokens else (cost,)
    return (name, str(spec.gpus), in_short(spec), size(candidate.peak), plan.fitness, seconds(step), speed, *last)


def _reasons(found: Fit, begin: str) -> Iterator[Line]:
    if found.fastest is None:
        yield from _nothing_fits(found.own)
        return
    for name, chosen in _picks(found).items():
        yield Line(f"{WHY[name](found, chosen)}.", name, "good")
        if name == "fastest" or chosen.spec != found.fastest.spec:
            yield Line(f"{begin} {flags(chosen.spec)}", "  command", "dim")


def _nothing_fits(own: Candidate) -> Iterator[Line]:
    """What the plan that was given lacks."""
    yield Line(f"nothing fits on {own.spec.gpus} GPUs or fewer, whatever was tried", mood="bad")
    missing = lacking(own.plan)
    if missing:
        yield Line(missing, "as given")


def _fewest_gpus(spec: PlanSpec) -> str:
    more = fewest_gpus(spec)
    if more is not None:
        return f"{more.spec.gpus} with {in_short(more.spec)}"
    unknown = f" in one node, and no network between nodes is known for {spec.gpu.name}"
    return f"no number of these GPUs holds it{'' if spec.fabric else unknown}"


def _single(found: Fit) -> Iterator[Line]:
    """The best single change of a plan that fits; what makes another one fit is told apart."""
    own, single = found.own, found.single
    label = "best single change"
    if not own.fits:
        return
    if single is None:
        yield Line("none is faster", label)
        return
    gain = own.expected_s / single.candidate.expected_s - 1
    peak = f"{size(single.candidate.peak)} at the peak"
    yield Line(f"{changes_in_words(single.changes)}: {percent(gain)} faster, {peak}", label)


def _as_dict(found: Fit, asked: Asked) -> dict[str, Any]:
    single = found.single
    answers = {}
    for name, chosen in _picks(found).items():
        answers[name] = _candidate(chosen, asked) | {"reason": WHY[name](found, chosen)}
    return {
        "as_given": _candidate(found.own, asked),
        "answers": answers,
        "best_single_change": single and {"changes": single.changes, **_candidate(single.candidate, asked)},
        "remedies": [remedy.as_dict() for remedy in _remedies(found)],
        "global_batch": found.sequences,
        "kept": list(found.kept),
        "tried": {"plans": found.planned, "fit": found.fitting},
    }


def _remedies(found: Fit) -> tuple[Remedy, ...]:
    return () if found.own.fits else remedies(found.own.spec, frozenset(found.kept))


def _candidate(candidate: Candidate, asked: Asked) -> dict[str, Any]:
    spec, hours = candidate.spec, asked.gpu_hours(candidate)
    return candidate.plan.as_dict() | {
        "checkpointing": spec.checkpointing,
        "grad_accum": spec.grad_accum,
        "flags": flags(spec),
        "gpu_hours": hours,
        "dollars": hours * asked.price if hours and asked.price else None,
        "gpu_hours_of_tokens": asked.tokens or _BILLION,
    }

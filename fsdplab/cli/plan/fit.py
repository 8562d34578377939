"""`fsdplab plan fit`: the fastest, the cheapest and the safest plan, why, and what was tried for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdplab.cli.answer import Answer, Line, Part, Table
from fsdplab.cli.errors import refuse
from fsdplab.cli.plan.step import check_tokens, provenance
from fsdplab.common.sizes import percent, seconds, size, three_digits
from fsdplab.common.words import MISSING, plural
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.planner import fewest_gpus, plan_spec
from fsdplab.planning.search import Fit, Pick, fit
from fsdplab.planning.search.answers import NOT_TRIED, WHY, changes_in_words, flags, in_short, runner_up
from fsdplab.planning.search.candidates import Candidate

_BILLION = 1e9


@dataclass(frozen=True)
class Asked:
    """What a search was asked: tokens of the training and dollars of a GPU-hour, if they were given."""

    tokens: float | None
    price: float | None

    def gpu_hours(self, found: Candidate) -> float | None:
        """GPU-hours of the training, or of a billion tokens."""
        if found.step_s is None:
            return None
        return (self.tokens or _BILLION) / found.spec.step_tokens * found.step_s / 3600 * found.spec.gpus


def fit_answer(
    settings: dict[str, Any], tokens: float | None, price: float | None, global_batch: int | None, keep: str
) -> Answer:
    """Search around the settings: three answers, what comes next, and what was tried."""
    check_tokens(tokens)
    if price is not None and not 0 < price < 1e6:
        refuse(f"--price is {price!r}; expected dollars of a GPU-hour above 0, such as 2.5")
    kept = [name for part in keep.split(",") if (name := part.strip().lstrip("-"))]
    spec, asked = plan_spec(**settings), Asked(tokens, price)
    found = fit(spec, global_batch, kept)
    begin = f"fsdplab plan --model {settings['model']} --gpu {settings['gpu']} --sequence-length {spec.seq}"
    parts: list[Part] = [_table(found, asked), *_reasons(found, begin), *_next(found)]
    if found.others:
        note = "the fastest plan with each" + (
            "" if found.instead else ", with the degrees of parallelism of the fastest answer"
        )
        parts += [_others(found), Line(note, mood="dim")]
    parts += [*_tried(found), provenance([found.own.plan])]
    return Answer(parts, _as_dict(found, asked))


def _picks(found: Fit) -> dict[str, Pick]:
    return {name: pick for name in WHY if (pick := getattr(found, name)) is not None}


# ---- the table


def _table(found: Fit, asked: Asked) -> Table:
    what = f"{asked.tokens:,.0f} tokens" if asked.tokens else "a billion tokens"
    cost = f"{'$' if asked.price else 'GPU-hours'} of {what}"
    columns = ("", "GPUs", "plan", "peak", "fits", "step", "tokens/s a GPU", cost)
    rows = [("as given", found.own), *((name, pick.chosen) for name, pick in _picks(found).items())]
    rows += [("bolder", found.bolder)] if found.bolder else []
    return Table(
        columns, [_row(name, each, found, asked) for name, each in rows], words=("", "plan", "fits"), folds=("plan",)
    )


def _row(name: str, each: Candidate, found: Fit, asked: Asked) -> tuple[str, ...]:
    hours = asked.gpu_hours(each)
    cost = f"{hours * (asked.price or 1):,.0f}" if hours and each.plan.fits else MISSING
    return (
        name, str(each.spec.gpus), in_short(each.spec, found.own.spec), size(each.peak), each.plan.fitness,
        seconds(each.step_s), _speed(each), cost,
    )  # fmt: skip


def _speed(each: Candidate) -> str:
    """Tokens/s a GPU."""
    return three_digits(each.spec.step_tokens / each.step_s / each.spec.gpus) if each.step_s else MISSING


# ---- sentences


def _reasons(found: Fit, begin: str) -> Iterator[Line]:
    own = found.own.spec
    if found.fastest is None:
        yield Line(f"nothing fits on {own.gpus} GPUs or fewer, whatever was tried", mood="bad")
        yield from _more_gpus(own)
        return
    if found.instead:
        words = f"nothing fits with the arithmetic as given; the answers change it: {', '.join(found.instead)}"
        yield Line(words, mood="bad")
        yield from _more_gpus(own)
    for name, pick in _picks(found).items():
        yield Line(f"{WHY[name](found, pick)}.", name, "good")
        yield Line(runner_up(pick, own, name == "cheapest"), "  runner-up", "dim")
        if name == "fastest" or pick.chosen.spec != found.fastest.chosen.spec:
            yield Line(f"{begin} {flags(pick.chosen.spec)}", "  command", "dim")
    if found.bolder:
        faster = found.fastest.chosen.expected_s / found.bolder.expected_s - 1
        yield Line(f"{percent(faster)} faster than the fastest, and only likely to fit", "bolder")
    if found.fewest:
        yield Line(f"{found.fewest.spec.gpus} with {in_short(found.fewest.spec, own)}", "fewest GPUs")


def _more_gpus(own: PlanSpec) -> Iterator[Line]:
    """The fewest GPUs on which the arithmetic as given fits, beyond those that were given."""
    more = fewest_gpus(own)
    if more is None:
        unknown = f" in one node, and no network between nodes is known for {own.gpu.name}"
        yield Line(f"no number of these GPUs holds it{'' if own.fabric else unknown}")
    else:
        yield Line(f"{more.spec.gpus} with {in_short(more.spec, own)}", "fewest GPUs")


def _next(found: Fit) -> Iterator[Line]:
    """The best single change of the plan that was given."""
    own, single = found.own, found.single
    if single is None:
        words = "none is faster" if own.fits else "none makes it fit"
    else:
        gain = own.expected_s / single.candidate.expected_s - 1
        effect = f"{percent(gain)} faster" if own.fits else "makes it fit"
        words = f"{changes_in_words(single.changes)}: {effect}, {size(single.candidate.peak)} at the peak"
    yield Line(f"{words} (of {plural(len(found.singles), 'change')} tried)", "best single change")


def _others(found: Fit) -> Table:
    """What changes the arithmetic, beside the fastest answer."""
    base = None if found.instead or found.fastest is None else found.fastest.chosen
    rows = []
    for each in found.others:
        best, words = each.best, each.other.words
        if best is None:
            rows.append((words, "nothing fits", MISSING, MISSING, MISSING))
            continue
        change = f"{base.expected_s / best.expected_s:.2f}" if base else MISSING
        rows.append((words, in_short(best.spec, best.spec), size(best.peak), _speed(best), change))
    columns = ("other arithmetic", "plan", "peak", "tokens/s a GPU", "of the fastest")
    return Table(columns, rows, words=("other arithmetic", "plan"), folds=("plan",))


def _tried(found: Fit) -> Iterator[Line]:
    tried = found.tried
    batch = f"{found.sequences:,} sequences, {found.sequences * found.own.spec.seq:,} tokens, a step"
    kept = f"; kept as given: {', '.join(found.kept)}" if found.kept else ""
    yield Line(f"{batch}{kept}", "global batch")
    more = f", and {sum(each.plans for each in found.others):,} with other arithmetic" if found.others else ""
    yield Line(f"{tried.total:,} plans, of which {tried.fitting:,} fit{more}; {found.timed:,} had to be timed", "tried")
    for label, counted in (
        ("do not fit", tried.too_large), ("contradict themselves", tried.contradictory), ("no better", tried.no_better),
    ):  # fmt: skip
        if total := sum(counted.values()):
            yield Line(_counts(counted), f"  {total:,} {label}", "dim")
    yield Line(", ".join(NOT_TRIED), "not tried", "dim")


def _counts(counted: Counter[str]) -> str:
    return "; ".join(f"{count:,} {reason}" for reason, count in counted.most_common() if count)


# ---- JSON


def _as_dict(found: Fit, asked: Asked) -> dict[str, Any]:
    tried, single = found.tried, found.single
    return {
        "as_given": _candidate(found.own, asked),
        "answers": {
            name: _candidate(pick.chosen, asked)
            | {"reason": WHY[name](found, pick), "runner_up": pick.runner_up and _candidate(pick.runner_up, asked)}
            for name, pick in _picks(found).items()
        },
        "bolder": found.bolder and _candidate(found.bolder, asked),
        "fewest_gpus": found.fewest and _candidate(found.fewest, asked),
        "best_single_change": single and {"changes": single.changes, **_candidate(single.candidate, asked)},
        "other_arithmetic": {
            each.other.words: {"plans": each.plans, "best": each.best and _candidate(each.best, asked)}
            for each in found.others
        },
        "answers_change": list(found.instead),
        "global_batch": found.sequences,
        "kept": list(found.kept),
        "tried": {
            "plans": tried.total, "fit": tried.fitting, "timed": found.timed, "do_not_fit": dict(tried.too_large),
            "contradict_themselves": dict(tried.contradictory), "no_better": dict(tried.no_better),
            "not_tried": list(NOT_TRIED),
        },
    }  # fmt: skip


def _candidate(each: Candidate, asked: Asked) -> dict[str, Any]:
    hours = asked.gpu_hours(each)
    cost = {"gpu_hours": hours, "dollars": hours * asked.price if hours and asked.price else None}
    chosen = {"checkpointing": each.spec.checkpointing, "grad_accum": each.spec.grad_accum, "flags": flags(each.spec)}
    return each.plan.as_dict() | chosen | cost | {"gpu_hours_of_tokens": asked.tokens or _BILLION}

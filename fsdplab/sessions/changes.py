"""Lists changes to one setting of a run, and finds the one that gains most.

`edits` is the one list of them: reports name the best (`best_change`), findings of a comparison that which gains most
against their cause (`gains`), the strategy lab shows all of them. Each is
simulated on the steady card before anything runs. Another strategy is none of them: these stand beside it in a
comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from fsdplab.records.summary import Change
from fsdplab.sessions.prediction import predict
from fsdplab.sessions.spec import RunSpec, SpecError
from fsdplab.sessions.steady_card import steady_step

LEAST_GAIN = 0.03  # of the tokens a second: less is no advice
CLOSE = 0.1  # part of the largest gain: another that is so near is as good
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "prefetch": (0, 1, 2, 3, 4),
    "precision": ("fp32", "bf16"),
    "checkpoint": ("none", "selective", "full"),
    "units": ("auto", "linear", "model"),
    "optimizer": ("adamw", "muon"),
    "link_queues": (1, 2),
}
COSTS = ("nothing", "memory", "precision")  # what a change costs besides, the least first


@dataclass(frozen=True)
class Remedy:
    """What to do in words ("" where a change is shown and not advised), and what it costs besides: one of `COSTS`."""

    words: str = ""
    costs: str = ""


# What may be advised to gain speed. The other values cost speed for memory, or train something else.
_REMEDIES: Mapping[tuple[str, Any], Remedy] = {
    ("prefetch", 1): Remedy("gather the next unit ahead (prefetch 1)", "memory"),
    ("prefetch", 2): Remedy("gather two units ahead (prefetch 2)", "memory"),
    ("precision", "bf16"): Remedy("compute and send in bf16, with fp32 masters", "precision"),
    ("checkpoint", "none"): Remedy("keep all activations", "memory"),
    ("link_queues", 2): Remedy("gathers and reductions on a queue each", "nothing"),
}
_MORE_TOKENS = Remedy("twice the batch", "memory")


@dataclass(frozen=True)
class Edit:
    """One setting at another value. `setting` is a field of RunSpec, or `tokens`: those of a rank in a micro-batch."""

    setting: str
    value: Any
    remedy: Remedy


def edits(now: Mapping[str, Any]) -> Iterator[Edit]:
    """Yield each setting in `now` at its other values, a number at the next ones up and down; and twice the tokens.

    >>> [(edit.setting, edit.value) for edit in edits({"prefetch": 0, "precision": "bf16", "tokens": 256})]
    [('prefetch', 1), ('precision', 'fp32'), ('tokens', 512)]
    """
    for name, values in _VALUES.items():
        if name not in now:
            continue
        for value in values:
            if value == now[name]:
                continue
            # a number goes one up or down: prefetch 1 to 0 and 2; words have no order, so each is tried
            if isinstance(value, int) and abs(value - now[name]) != 1:
                continue
            yield Edit(name, value, _REMEDIES.get((name, value), Remedy()))
    if now.get("tokens"):
        yield Edit("tokens", 2 * now["tokens"], _MORE_TOKENS)


def best_change(spec: RunSpec) -> Change:
    """Return the advised edit that gains most tokens a second on the steady card and fits the run's card, or one that
    costs less and gains nearly as much; an empty one where none gains 3 %.

    >>> change = best_change(RunSpec(strategy="full_shard", sequence_length=128, link="150MB/s"))
    >>> change.words, round(change.gain or 0.0, 1)
    ('compute and send in bf16, with fp32 masters', 0.5)
    """
    worth = [change for change in gains(spec).values() if _gain_of(change) >= LEAST_GAIN]
    if not worth:
        return Change()
    return in_order(worth)[0]


def _gain_of(change: Change) -> float:
    return change.gain or 0.0


def in_order(changes: Iterable[Change]) -> list[Change]:
    """Sort changes: what gains most first; of changes that gain nearly as much, the one that costs least.

    >>> short, ahead = Change("send in bf16", 0.65, costs="precision"), Change("gather ahead", 0.61, costs="memory")
    >>> [change.words for change in in_order([short, ahead])]
    ['gather ahead', 'send in bf16']
    """
    remaining = list(changes)
    ordered: list[Change] = []
    while remaining:
        most = max(_gain_of(change) for change in remaining)
        # gains of 0.65 and 0.61: within 10 % of the largest, so the price decides
        near = [change for change in remaining if _gain_of(change) >= (1 - CLOSE) * most]
        best = min(near, key=lambda change: (_price(change), -_gain_of(change)))
        ordered.append(best)
        remaining.remove(best)
    return ordered


def _price(change: Change) -> int:
    return COSTS.index(change.costs) if change.costs in COSTS else len(COSTS)


@lru_cache(maxsize=64)
def gains(spec: RunSpec) -> Mapping[str, Change]:
    """Return by setting the advised edit that gains most on the steady card, of those that this run can take."""
    before = _speed(spec)
    if not before:
        return {}
    best: dict[str, Change] = {}
    for edit in edits({**asdict(spec), "tokens": spec.tokens_per_rank}):
        # shown in the strategy lab, and never advised
        if not edit.remedy.words:
            continue
        change = _tried(spec, before, edit)
        if not change.words:
            continue
        if edit.setting not in best or _gain_of(change) > _gain_of(best[edit.setting]):
            best[edit.setting] = change
    return best


def _tried(spec: RunSpec, before: float, edit: Edit) -> Change:
    """Simulate the edit; an empty change where the run cannot be, or does not fit the card."""
    changed = {edit.setting: edit.value}
    if edit.setting == "tokens":
        # tokens are no field of a run: twice as many are twice the batch
        changed = {"batch_size": 2 * spec.batch_size}
    try:
        run = replace(spec, **changed)
    except SpecError:
        return Change()
    after, predicted = _speed(run), predict(run)
    if not after or predicted.fits is False:
        return Change()
    return Change(edit.remedy.words, after / before - 1, predicted.peak_bytes, edit.remedy.costs)


def _speed(spec: RunSpec) -> float:
    """Return the tokens a second of all ranks on the steady card; 0 where it cannot show the run."""
    step_s = steady_step(spec).step_time_s
    if not step_s:
        return 0.0
    # 4 ranks of 128 tokens in 0.1 s: 5,120 tokens a second
    return spec.world_size * (spec.tokens_per_rank or 0) / step_s

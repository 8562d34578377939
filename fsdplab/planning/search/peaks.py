"""The peaks of many plans that differ in their micro-batch or their loss, from two short walks through a step.

Only activations depend on the tokens of a rank, and they are proportional to them; so each moment of a step is a line
over tokens, and the peak is the highest of these lines. Along equal blocks a moment's bytes grow or fall evenly from
one block to the next, so that what moments have at the first and the last few blocks follows from models of few blocks:
every block more adds what the last one did. What a loss takes is alive at three moments alone. A test compares these
peaks with those of whole walks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from fsdplab.planning.activations import Activations, LossBytes
from fsdplab.planning.memory import memory_of
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.stages import stages, waiting

_WITHOUT_ACTIVATIONS = ("between steps", "optimizer step")
_FEW = 4  # blocks of the smaller of both models, beside those that a prefetch reaches over at both ends
_AT_LOSS: dict[str, Callable[[LossBytes], float]] = {
    "end of the forward": lambda loss: loss.saved,
    "loss": lambda loss: max(loss.forward, loss.backward),
    "backward of the head": lambda loss: loss.after,
}


class Line(NamedTuple):
    """Bytes of one moment: those that no token changes, and those of a token."""

    fixed: float
    per_token: float

    def at(self, tokens: float) -> float:
        """Bytes with a micro-batch of so many tokens on a rank."""
        return self.fixed + self.per_token * tokens


def peak_of(spec: PlanSpec) -> tuple[float, float]:
    """Bytes at the peak of a plan, and those of them that are no activations."""
    highest = max(peak_lines(spec), key=lambda line: line.at(spec.tokens))
    return highest.at(spec.tokens), highest.fixed


def peak_lines(spec: PlanSpec) -> tuple[Line, ...]:
    """The moments of a step as lines over the tokens of a rank, without those that lie below another everywhere."""
    if spec.pipeline_parallel > 1:
        return _upper(line for index, stage in stages(spec) for line in _lines_of_stage(spec, index, stage))
    return _upper(_lines(_alike(spec)).values())


def _alike(spec: PlanSpec) -> PlanSpec:
    """The plan of one sequence and at most two micro-batches that has the same lines: from the second one on
    micro-batches are alike, and only the tokens of a rank tell of context parallelism.
    """
    return replace(spec, micro_batch=1, context_parallel=1, grad_accum=min(spec.grad_accum, 2))


def _lines_of_stage(spec: PlanSpec, index: int, stage: PlanSpec) -> Iterator[Line]:
    """Those of a stage's own step, with what the micro-batches keep that wait for their backward."""
    alike = _alike(stage)
    kept = waiting(spec, index) * Activations(alike, alike.model.layers).saved(alike.model.layers, 0.0) / alike.tokens
    for (kind, _), line in _lines(alike).items():
        yield line if kind in _WITHOUT_ACTIVATIONS else Line(line.fixed, line.per_token + kept)


@lru_cache(maxsize=4096)
def _lines(spec: PlanSpec) -> dict[tuple[str, int], Line]:
    """The moments that can be the highest: name of their kind, and their place among these -> line."""
    if spec.keeps_logits or spec.keeps_outputs:  # a loss that is alive elsewhere too
        return _walked(spec)
    loss, walked = LossBytes.of(spec), _walked(replace(spec, loss="fused"))
    usual = LossBytes.of(replace(spec, loss="fused"))
    more = {name: (alive(loss) - alive(usual)) / spec.tokens for name, alive in _AT_LOSS.items()}
    return {
        (name, place): Line(line.fixed, line.per_token + more.get(name, 0.0)) for (name, place), line in walked.items()
    }


@lru_cache(maxsize=4096)
def _walked(spec: PlanSpec) -> dict[tuple[str, int], Line]:
    """The same from walks, with a loss that they have."""
    few = _FEW + 2 * spec.prefetch
    beyond = spec.model.layers - few
    if beyond <= 1:
        return _numbered(_by_kind(spec))
    fewer, more = (_by_kind(_with_layers(spec, count)) for count in (few, few + 1))
    return _numbered(
        {
            kind: [
                Line(*(last + beyond * (then - last) for last, then in zip(line, longer)))
                for line, longer in zip(lines, _as_many(more[kind], len(lines)))
            ]
            for kind, lines in fewer.items()
        }
    )


def _numbered(by_kind: dict[str, list[Line]]) -> dict[tuple[str, int], Line]:
    return {(kind, place): line for kind, lines in by_kind.items() for place, line in enumerate(_upper(lines))}


def _with_layers(spec: PlanSpec, layers: int) -> PlanSpec:
    return replace(spec, model=replace(spec.model, layers=layers))


def _by_kind(spec: PlanSpec) -> dict[str, list[Line]]:
    """`backward` -> its moments in order: those of the last block, ..., of the embeddings."""
    found = defaultdict(list)
    for moment in memory_of(spec).moments:
        kind = moment.name if moment.name in _AT_LOSS else moment.name.partition(" of ")[0]
        activations = moment.by_category["activations"]
        found[kind].append(Line(moment.total - activations, activations / spec.tokens))
    return found


def _as_many(lines: Sequence[Line], count: int) -> list[Line]:
    """The first and the last of some lines, `count` in all."""
    first = count // 2
    return [*lines[:first], *lines[len(lines) - (count - first) :]]


def _upper(lines: Iterable[Line]) -> tuple[Line, ...]:
    """The lines that no other one exceeds everywhere.

    >>> _upper([Line(3, 1), Line(2, 1), Line(1, 2)])
    (Line(fixed=3, per_token=1), Line(fixed=1, per_token=2))
    """
    found: list[Line] = []
    for line in sorted(lines, reverse=True):
        if not found or line.per_token > found[-1].per_token:
            found.append(line)
    return tuple(found)

"""The plans that a search considers: which contradict themselves, which do not fit, and what fits.

Bounds come first, so that most plans are never walked through: what rests on a rank is the least of its peak, one
pair of short walks has the peaks of all micro-batches, and the compute of a step is its least time.

Only activations depend on the tokens of a rank, and they are proportional to them; so each moment of a step is a line
over tokens, and the peak is the highest of these lines. Along equal blocks a moment's bytes grow or fall evenly from
one block to the next, so that what moments have at the first and the last few blocks follows from models of few blocks:
every block more adds what the last one did. What a loss takes is alive at three moments alone. A test compares these
peaks with those of whole walks.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple

from fsdplab.planning.activations import Activations, LossBytes
from fsdplab.planning.bands import memory_band, speed_band
from fsdplab.planning.memory import memory_of, needed_bytes, resting_bytes
from fsdplab.planning.plan_spec import PlanError, PlanSpec
from fsdplab.planning.planner import Plan, plan_of
from fsdplab.planning.stages import stages, waiting
from fsdplab.planning.step_time import has_known_flops, least_compute_s, least_step_s, step_time

from .axes import BATCH, DEGREES, IN_A_STEP, MESH, Axis, Changes, has_room, micro_batches

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
    fewer, more = (_by_kind(replace(spec, model=replace(spec.model, layers=count))) for count in (few, few + 1))
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


# ---- a search


AT_REST = "whose states at rest exceed the card"
PASSING = "whose states, unsharded parameters and gradients exceed it before any activation"
ACTIVATIONS = "that exceed it with the activations of a micro-batch"
UNEQUAL = "whose data-parallel ranks and micro-batch do not divide the global batch"
ONE_RANK = "on one rank, where all strategies are the same"
HALVED = "with twice the context parallelism and the micro-batch of another, which has the same tokens and sends less"

BUBBLE = "in a pipeline that computes, with its bubble, for longer than a plan that fits takes"


@dataclass(frozen=True)
class Candidate:
    """The spec of a plan, and its bytes at the peak."""

    spec: PlanSpec
    peak: float

    @cached_property
    def least_s(self) -> float:
        """Seconds that its step takes at least, as `expected_s` has them."""
        return self._expected(least_step_s)

    @cached_property
    def expected_s(self) -> float:
        """Seconds of its step in the middle of the band of its kind, so that a kind of plan whose predictions are known
        to be too fast is not preferred for that; bytes of its peak where no times of the GPU are known.
        """
        return self._expected(lambda spec: step_time(spec).step_s)

    def _expected(self, seconds: Callable[[PlanSpec], float]) -> float:
        if not has_known_flops(self.spec.gpu):
            return self.peak
        return seconds(self.spec) / speed_band(self.spec).middle

    @cached_property
    def plan(self) -> Plan:
        """The plan in full."""
        return plan_of(self.spec)

    @property
    def step_s(self) -> float | None:
        """Seconds of its step as planned."""
        return self.plan.time.step_s if self.plan.time else None

    @property
    def fits(self) -> bool:
        """Whether the card holds its peak."""
        return self.peak <= self.spec.gpu.memory_bytes

    @property
    def certain(self) -> bool:
        """Whether it fits for certain: `fits` of its plan is yes."""
        return self.needed <= self.spec.gpu.memory_bytes

    @property
    def needed(self) -> float:
        """Bytes that a card must have to hold it for certain."""
        return needed_bytes(self.peak, memory_band(self.spec))

    @property
    def family(self) -> tuple[object, ...]:
        """What makes it another kind of plan, beside its batch and its loss."""
        spec = self.spec
        mesh = (getattr(spec, name) for name in ("gpus", "strategy", "shard_size", *DEGREES))
        return (*mesh, spec.checkpointing)


def candidate_of(spec: PlanSpec) -> Candidate:
    """The candidate of any plan."""
    return Candidate(spec, peak_of(spec)[0])


@dataclass
class Tried:
    """How many plans a search considered, and what became of them; reasons with their counts."""

    too_large: Counter[str] = field(default_factory=Counter)
    contradictory: Counter[str] = field(default_factory=Counter)
    no_better: Counter[str] = field(default_factory=Counter)
    fitting: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.fitting + sum(sum(each.values()) for each in (self.too_large, self.contradictory, self.no_better))


class Grid:
    """All plans of the axes around `spec` with `sequences` in a step; choices named in `keep` stay as they are."""

    def __init__(self, spec: PlanSpec, sequences: int, keep: Collection[str]) -> None:
        self._spec, self._sequences, self.tried = spec, sequences, Tried()
        self._batches = [spec.micro_batch] if BATCH in keep else micro_batches(sequences)
        mesh = [each for each in _product(MESH, spec, keep) if has_room(each, spec)]
        self._mesh = sorted(mesh, key=lambda each: each["pipeline_parallel"])
        self._best_s = self._best_gpu_s = math.inf
        self._inner = _product(IN_A_STEP, spec, keep)
        self._cuts_context = "cp" not in keep
        self.fitting = list(self._fitting())
        self.tried.fitting = len(self.fitting)

    def _fitting(self) -> Iterator[Candidate]:
        each_has = len(self._inner) * len(self._batches)
        for changes in self._mesh:
            try:
                mesh = replace(self._spec, micro_batch=1, grad_accum=1, **changes)
            except PlanError as error:
                self.tried.contradictory[_grouped(str(error), self._spec)] += each_has
                continue
            if mesh.shards * mesh.replicas == 1 and mesh.strategy != self._spec.strategy:
                self.tried.no_better[ONE_RANK] += each_has
            elif resting_bytes(mesh) > mesh.gpu.memory_bytes:
                self.tried.too_large[AT_REST] += each_has
            else:
                yield from self._on_mesh(mesh)

    def _on_mesh(self, mesh: PlanSpec) -> Iterator[Candidate]:
        counts = [count for count in self._batches if self._sequences % (mesh.data_ranks * count) == 0]
        self.tried.contradictory[UNEQUAL] += len(self._inner) * (len(self._batches) - len(counts))
        if mesh.context_parallel > 1 and self._cuts_context:
            odd = [count for count in counts if count % 2]
            self.tried.no_better[HALVED] += len(self._inner) * (len(counts) - len(odd))
            counts = odd
        for changes in self._inner if counts else ():
            spec = replace(mesh, **changes)
            if mesh.pipeline_parallel > 1 and self._is_slower(spec, counts):
                self.tried.no_better[BUBBLE] += len(counts)
                continue
            found = list(self._with_batches(spec, counts))
            self._note(found)
            yield from found

    def _is_slower(self, spec: PlanSpec, counts: Sequence[int]) -> bool:
        """Whether computing alone takes longer than a plan that certainly fits, in seconds and in GPU-seconds."""
        if self._best_s == math.inf:
            return False
        passes = {count: self._sequences // (spec.data_ranks * count) for count in (counts[0], counts[-1])}
        each_s = (least_compute_s(replace(spec, micro_batch=count, grad_accum=passes[count])) for count in passes)
        least_s = min(each_s) / speed_band(spec).middle
        return least_s > self._best_s and least_s * spec.gpus > self._best_gpu_s

    def _note(self, found: Sequence[Candidate]) -> None:
        """Time the plan of a mesh that may be the fastest, so that pipelines need not be tried that are slower."""
        certain = [each for each in found if each.certain] if has_known_flops(self._spec.gpu) else []
        best = min(certain, key=lambda each: each.least_s, default=None)
        if best and (best.least_s < self._best_s or best.least_s * best.spec.gpus < self._best_gpu_s):
            self._best_s = min(self._best_s, best.expected_s)
            self._best_gpu_s = min(self._best_gpu_s, best.expected_s * best.spec.gpus)

    def _with_batches(self, spec: PlanSpec, counts: Sequence[int]) -> Iterator[Candidate]:
        card = spec.gpu.memory_bytes
        for count in counts:
            passes = self._sequences // (spec.data_ranks * count)
            tokens = count * spec.seq // spec.context_parallel
            lines = peak_lines(replace(spec, grad_accum=passes))
            highest = max(lines, key=lambda line: line.at(tokens))
            if highest.at(tokens) <= card:
                yield Candidate(replace(spec, micro_batch=count, grad_accum=passes), highest.at(tokens))
            else:
                self.tried.too_large[PASSING if highest.fixed > card else ACTIVATIONS] += 1


def _product(axes: Sequence[Axis], spec: PlanSpec, keep: Collection[str]) -> list[Changes]:
    """All combinations of the values of some axes."""
    values = [each.of(spec)[: 1 if each.name in keep else None] for each in axes]
    return [{name: value for part in parts for name, value in part.items()} for parts in product(*values)]


def _grouped(error: str, spec: PlanSpec) -> str:
    """A contradiction without its numbers: `N heads, not divisible by --tp N`."""
    return re.sub(r"\d[\d,]*", "N", error.partition(";")[0].replace(spec.model.name, "the model"))

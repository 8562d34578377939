"""The plans that a search considers: which contradict themselves, which do not fit, and what fits.

Bounds come first, so that most plans are never walked through: what rests on a rank is the least of its peak, one
pair of short walks has the peaks of all micro-batches (peaks.py), and the compute of a step is its least time.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from fsdplab.planning.bands import memory_band, speed_band
from fsdplab.planning.links import HOST_LINK
from fsdplab.planning.memory import host_crossing, needed_bytes, resting_bytes
from fsdplab.planning.plan_spec import PlanError, PlanSpec
from fsdplab.planning.step_time import has_known_flops, least_compute_s, least_step_s, step_time

from .axes import BATCH, DEGREES, IN_A_STEP, MESH, Axis, Changes, has_room, micro_batches
from .peaks import peak_lines

AT_REST = "whose states at rest exceed the card"
PASSING = "whose states, unsharded parameters and gradients exceed it before any activation"
ACTIVATIONS = "that exceed it with the activations of a micro-batch"
UNEQUAL = "whose data-parallel ranks and micro-batch do not divide the global batch"
ONE_RANK = "on one rank, where all strategies are the same"
HALVED = "with twice the context parallelism and the micro-batch of another, which has the same tokens and sends less"

BUBBLE = "in a pipeline that computes, with its bubble, for longer than a plan that fits takes"


@dataclass(frozen=True)
class Candidate:
    """A plan that fits, and its bytes at the peak."""

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
        return (seconds(self.spec) + copies_s(self.spec)) / speed_band(self.spec).middle

    @property
    def certain(self) -> bool:
        """Whether it fits for certain: `fits` is yes."""
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


def copies_s(spec: PlanSpec) -> float:
    """Seconds of the copies from and to host memory in a step, which a plan's time leaves out: none of them hidden."""
    return host_crossing(spec) / HOST_LINK.bytes_per_s if spec.offload else 0.0


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

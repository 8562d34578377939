"""Searches for what makes a plan fit that does not: single changes of it, and pairs of them, each planned in full.

`ROWS` is the table of changes. Pairs are tried where fewer than three single changes fit. Of what fits, the plans with
most tokens/s a GPU are named first: a change that trains less, or needs other machines, says so beside its figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

from fsdplab.common.names import strategies_that
from fsdplab.common.sizes import size, three_digits

from .as_flags import Changes, changes_in_words, flags
from .bands import memory_band
from .host import holds_offloaded, host_memory_of, node_host_bytes
from .memory import Memory, memory_of, resting_bytes
from .plan_spec import PlanSpec, changed
from .planner import Plan, least_gpus
from .step_time import has_known_flops, step_time

MOST = 3  # remedies that are named
EQUAL = 0.02  # of the speed: a smaller difference tells nothing
_LONG_TOKENS = 16_384  # of a sequence: shorter ones are cut into parts that hide too little communication
_ADAPTERS: dict[str, Any] = {"lora_rank": 16}
_CHUNKED: dict[str, Any] = {"loss": "chunked"}
_FULL: dict[str, Any] = {"checkpointing": "full"}


# ---- the table


def smaller_batches(spec: PlanSpec) -> list[Changes]:
    """Return smaller micro-batches that keep the tokens of a step, the largest first.

    >>> from .planner import plan_spec
    >>> [change["micro_batch"] for change in smaller_batches(plan_spec("gpt2", "h100", micro_batch=12))]
    [6, 4, 3, 2, 1]
    """
    changes: list[Changes] = []
    for count in range(spec.micro_batch - 1, 0, -1):
        times, rest = divmod(spec.micro_batch, count)
        if rest == 0:
            changes.append({"micro_batch": count, "grad_accum": spec.grad_accum * times})
    return changes


def more_recomputation(spec: PlanSpec) -> list[Changes]:
    """Return the policies that keep less of a forward than the plan's."""
    if spec.checkpointing == "full":
        return []
    if spec.checkpointing == "none":
        return [{"checkpointing": "selective"}, _FULL]
    return [_FULL]


def smaller_losses(spec: PlanSpec) -> list[Changes]:
    """Return the losses that need less memory than the plan's."""
    if spec.loss == "eager":
        return [{"loss": "fused"}, _CHUNKED]
    if spec.loss == "fused":
        return [_CHUNKED]
    return []


def smaller_reductions(spec: PlanSpec) -> list[Changes]:
    """Return 16-bit reductions of gradients."""
    return [{"reduce_dtype": "bf16"}] if spec.reduce_dtype == "fp32" else []


def smaller_states(spec: PlanSpec) -> list[Changes]:
    """Return an 8-bit optimizer, and parameters and optimizer state that rest in 16 bits."""
    changes: list[Changes] = []
    if spec.optimizer.startswith("adamw") and spec.optimizer != "adamw-8bit":
        changes.append({"optimizer": "adamw-8bit"})
    if spec.master_dtype == "fp32":
        changes.append({"master_dtype": "bf16"})
    return changes


def adapters(spec: PlanSpec) -> list[Changes]:
    """Return adapters on a frozen base in 16 and 4 bits, alone and with what they are used with: a chunked loss and
    full recomputation.
    """
    if spec.optimizer == "muon" or spec.base_dtype == "nf4":
        return []
    if spec.lora_rank:
        return [{"base_dtype": "nf4"}]
    in_16_bits, in_4_bits = _ADAPTERS | {"base_dtype": "bf16"}, _ADAPTERS | {"base_dtype": "nf4"}
    return [in_16_bits, in_4_bits, in_16_bits | _CHUNKED | _FULL, in_4_bits | _CHUNKED | _FULL]


def more_tensor_ranks(spec: PlanSpec) -> list[Changes]:
    """Return larger tensor-parallel groups inside a node."""
    most = min(8, spec.gpus, spec.gpus_per_node)
    return [{"tensor_parallel": ways} for ways in (2, 4, 8) if spec.tensor_parallel < ways <= most]


def more_context_ranks(spec: PlanSpec) -> list[Changes]:
    """Return larger context-parallel groups inside a node, for long sequences: they cut activations and the loss alike.

    >>> from .planner import plan_spec
    >>> more_context_ranks(plan_spec("llama-3.1-8b", "h100", gpus=4, seq=131_072))
    [{'context_parallel': 2}, {'context_parallel': 4}]
    """
    if spec.seq < _LONG_TOKENS:
        return []
    most = min(8, spec.gpus, spec.gpus_per_node)
    return [{"context_parallel": ways} for ways in (2, 4, 8) if spec.context_parallel < ways <= most]


def more_sharding(spec: PlanSpec) -> list[Changes]:
    """Return the strategies that shard all states, in groups and over all ranks, where the plan's shards less."""
    if spec.row.saves_most:
        return []
    names = [*strategies_that(lambda row: row.saves_most)]
    if not spec.row.in_groups and spec.gpus > spec.gpus_per_node:
        names = [*strategies_that(lambda row: row.in_groups and row.reshards_after_forward), *names]
    return [{"strategy": name, "shard_size": None} for name in names]


def host_memory(spec: PlanSpec) -> list[Changes]:
    """Return states in host memory, under a strategy that can do it."""
    if spec.offload:
        return []
    if spec.row.can_offload:
        return [{"offload": True}]
    sharded = strategies_that(lambda row: row.saves_most)[0]
    return [{"offload": True, "strategy": sharded, "shard_size": None}]


def more_cards(spec: PlanSpec) -> list[Changes]:
    """Return the fewest GPUs on which the same choices fit."""
    gpus = least_gpus(spec)
    return [{"gpus": gpus}] if gpus is not None and gpus > spec.gpus else []


@dataclass(frozen=True)
class Row:
    """A kind of change: its name, and the changes of a plan that are of this kind."""

    kind: str
    changes: Callable[[PlanSpec], list[Changes]]


ROWS = (
    Row("micro-batch", smaller_batches),
    Row("recomputation", more_recomputation),
    Row("loss", smaller_losses),
    Row("reduction", smaller_reductions),
    Row("optimizer", smaller_states),
    Row("adapters", adapters),
    Row("tensor parallelism", more_tensor_ranks),
    Row("context parallelism", more_context_ranks),
    Row("sharding", more_sharding),
    Row("host memory", host_memory),
    Row("cards", more_cards),
)
# Quantised matrices are not cut by tensor parallelism, and 8-bit optimizers step on the GPU, in the libraries that have
# them; more of what another kind takes the place of is no pair.
_APART = (
    {"adapters", "tensor parallelism"},
    {"optimizer", "host memory"},
    {"sharding", "host memory"},
    {"adapters", "optimizer"},
)
# One remedy of these kinds is enough: they train less, or need other machines.
_ONCE = frozenset({"adapters", "host memory", "cards"})
# Choices of `fit --keep`, and the fields that they keep.
_KEPT = {
    "world-size": "gpus",
    "strategy": "strategy",
    "tp": "tensor_parallel",
    "checkpoint": "checkpointing",
    "batch-size": "micro_batch",
}
_NOTES = {
    "reduce_dtype": "gradients are summed in bf16",
    "optimizer": "optimizer state is kept in 8 bits",
    "master_dtype": "parameters and optimizer state rest in bf16",
    "lora_rank": "adapters alone are trained",
}


# ---- the search


@dataclass(frozen=True)
class Remedy:
    """Changes that make a plan fit: their kinds, the plan with them, and its memory."""

    kinds: frozenset[str]
    changes: tuple[tuple[str, Any], ...]
    spec: PlanSpec
    memory: Memory

    @property
    def peak(self) -> float:
        """Bytes of a rank at the peak."""
        return self.memory.peak.total

    @property
    def fitness(self) -> str:
        """Whether it fits: yes or likely."""
        return self.memory.fitness(self.spec.gpu.memory_bytes, memory_band(self.spec))

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second on each GPU; None where no FLOP/s of the GPU are known."""
        return _tokens_per_s(self.spec)

    @property
    def words(self) -> str:
        """The changes as flags: `--reduce-dtype bf16`."""
        return changes_in_words(dict(self.changes))

    @property
    def notes(self) -> list[str]:
        """What changes beside memory and speed, in words."""
        notes = [_NOTES[name] for name, _ in self.changes if name in _NOTES]
        if self.spec.offload:
            asked = "" if host_memory_of(self.spec) else "; --host-memory says what the node has"
            notes.append(f"{size(node_host_bytes(self.spec))} of host memory a node{asked}")
        return notes

    def as_dict(self) -> dict[str, Any]:
        """Return for `--json` the changes, the flags of the whole plan behind its model and GPU, and its figures."""
        return {
            "changes": dict(self.changes),
            "flags": f"--sequence-length {self.spec.seq} {flags(self.spec)}",
            "peak_bytes": round(self.peak),
            "fits": self.fitness,
            "tokens_per_s_per_gpu": self.tokens_per_s,
            "host_bytes_of_a_node": round(node_host_bytes(self.spec)),
            "notes": self.notes,
        }


@lru_cache(maxsize=64)
def _tokens_per_s(spec: PlanSpec) -> float | None:
    if not has_known_flops(spec.gpu):
        return None
    return spec.step_tokens / step_time(spec).step_s / spec.gpus


@lru_cache(maxsize=64)
def remedies(spec: PlanSpec, kept: frozenset[str] = frozenset()) -> tuple[Remedy, ...]:
    """Return the first three remedies of a plan, most tokens/s a GPU first; `kept` names choices that stay, as
    `fit --keep` does.

    >>> from .planner import plan_spec
    >>> found = remedies(plan_spec("llama-3.1-70b", "h100", gpus=16, checkpointing="full"))
    >>> [remedy.words for remedy in found][1]
    '--reduce-dtype bf16'
    """
    singles = _single_changes(spec, kept)
    fitting: list[Remedy] = []
    for single in singles:
        fitting.extend(_tried(spec, [single]))
    if len({remedy.kinds for remedy in fitting}) < MOST:
        # what fits alone needs no second change
        alone = [dict(remedy.changes) for remedy in fitting]
        rest = [(kind, change) for kind, change in singles if change not in alone]
        for first, second in combinations(rest, 2):
            kinds = {first[0], second[0]}
            if len(kinds) == 2 and kinds not in _APART:
                fitting.extend(_tried(spec, [first, second]))
    return tuple(_first_of(fitting))


def _single_changes(spec: PlanSpec, kept: frozenset[str]) -> list[tuple[str, Changes]]:
    """All changes of the table with their kinds, but those of a field that is kept."""
    fields = {_KEPT[name] for name in kept}
    singles = []
    for row in ROWS:
        for change in row.changes(spec):
            if not fields & change.keys():
                singles.append((row.kind, change))
    return singles


def _tried(spec: PlanSpec, changes: Sequence[tuple[str, Changes]]) -> Iterator[Remedy]:
    """Yield the plan with the changes, where it is another one and fits its card and its host."""
    kinds = frozenset(kind for kind, _ in changes)
    fields: dict[str, Any] = {}
    for _, change in changes:
        fields |= change
    other = changed(spec, **fields)
    if other is None or other == spec or not _holds_states(other):
        return
    memory = memory_of(other)
    if memory.peak.total <= other.gpu.memory_bytes:
        yield Remedy(kinds, tuple(fields.items()), other, memory)


def _holds_states(spec: PlanSpec) -> bool:
    """Whether what rests fits the card and the host, which takes no step to know."""
    if not holds_offloaded(spec):
        return False
    return spec.pipeline_parallel > 1 or resting_bytes(spec) <= spec.gpu.memory_bytes


def _first_of(fitting: Sequence[Remedy]) -> Iterator[Remedy]:
    """Yield the best of each set of kinds, the fastest first; one of each kind that is named once, three in all."""
    sets: dict[frozenset[str], list[Remedy]] = {}
    every = [set(remedy.changes) for remedy in fitting]
    for remedy in fitting:
        if any(fewer < set(remedy.changes) for fewer in every):
            continue  # a part of its changes is enough
        sets.setdefault(remedy.kinds, []).append(remedy)
    named: set[str] = set()
    count = 0
    for remedy in sorted(map(_best_of, sets.values()), key=_cost):
        again = named & remedy.kinds & _ONCE
        if not again and count < MOST:
            named |= remedy.kinds
            count += 1
            yield remedy


def _best_of(alike: Sequence[Remedy]) -> Remedy:
    """The remedy with fewest changes, of those that are as fast as any of the same kinds; then the table's first."""
    best = min(alike, key=_cost)
    speed = best.tokens_per_s
    if speed is None:
        return best
    equal = [remedy for remedy in alike if (remedy.tokens_per_s or 0.0) >= (1 - EQUAL) * speed]
    return min(equal, key=lambda remedy: (len(remedy.changes), remedy.fitness != "yes"))


def _cost(remedy: Remedy) -> tuple[float, float]:
    """What is compared: GPU time a token where it is known, then bytes."""
    speed = remedy.tokens_per_s
    a_token_s = 1 / speed if speed else 0.0
    return a_token_s, remedy.peak


# ---- in words


def lacking(plan: Plan) -> str | None:
    """Return what is missing and by how much, in one line; None for a plan that fits.

    `35.3 GB of sharded parameters on a 25.8 GB card, 152 GB too much in all`
    """
    if plan.fits:
        return None
    peak, card = plan.memory.peak, plan.spec.gpu.memory_bytes
    what = size(peak.total)
    for category, nbytes in peak.by_category.items():
        if nbytes > card:  # it alone is too much
            what = f"{size(nbytes)} of {category.replace('_', ' ')}"
            break
    return f"{what} on a {size(card)} card, {size(peak.total - card)} too much in all"


def shortfall(plan: Plan) -> str | None:
    """Return what is missing, and the remedies, in one line; None for a plan that fits."""
    missing = lacking(plan)
    if missing is None:
        return None
    ways = [in_words(remedy) for remedy in remedies(plan.spec)]
    advice = ", or ".join(ways) or "a smaller model or larger cards: no change tried makes it fit"
    parts = [missing, f"needs {advice}"]
    cards = in_cards(plan.spec)
    if cards:
        parts.append(cards)
    return "; ".join(parts)


def in_words(remedy: Remedy) -> str:
    """Return `--reduce-dtype bf16 (84.6 GB, 848 tokens/s a GPU; gradients are summed in bf16)`."""
    figures = [size(remedy.peak)]
    speed = remedy.tokens_per_s
    if speed:
        figures.append(f"{three_digits(speed)} tokens/s a GPU")
    beside = "; ".join([", ".join(figures), *remedy.notes])
    return f"{remedy.words} ({beside})"


def in_cards(spec: PlanSpec) -> str | None:
    """Return how many cards hold a plan without another change, or where no number is known to, how many could hold its
    states; None where more cards do not help.
    """
    more = more_cards(spec)
    if more:
        return f"{more[0]['gpus']} cards hold the same choices"
    return cards_for_states(spec)


def cards_for_states(spec: PlanSpec) -> str | None:
    """Return how many cards could hold the states, where more of them are known to be of no help or cannot be joined;
    else None.
    """
    stepping = memory_of(spec).moments[-1].by_category
    parameters = stepping["sharded_parameters"]
    states = parameters + stepping["sharded_gradients"] + stepping["optimizer_state"]
    card = spec.gpu.memory_bytes
    if spec.row.gathers_once or spec.replicas > 1 or states <= card:
        return None
    for_parameters = math.ceil(parameters * spec.gpus / card)
    for_states = math.ceil(states * spec.gpus / card)
    return f"{for_parameters} cards hold the sharded parameters and {for_states} all states, without activations"

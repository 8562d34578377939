"""What a search varies: one row for each choice, with its values for a plan. A new choice is a new row.

The first rows are a plan's mesh, whose contradictions a `PlanSpec` finds itself; the micro-batch comes last, because
which ones there are depends on the ranks that share the batch. Precision and the like change what is computed, so they
are rows of their own kind: the search answers with the arithmetic as it was given, and tells what each of these would
change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.common.words import did_you_mean
from fsdplab.planning.plan_spec import CHECKPOINTINGS, LOSSES, PlanError, PlanSpec, changed

_MOST_CONTEXT = 16  # ranks that share a sequence
_MOST_STAGES = 16
_MOST_GROUPS = 4  # sizes of a shard group
_MOST_SEQUENCES = 256  # of a micro-batch

DEGREES = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")
Changes = dict[str, Any]  # fields of a PlanSpec and their values


@dataclass(frozen=True)
class Axis:
    """A choice under the name of its flag, and the changes of a plan that its values are."""

    name: str
    values: Callable[[PlanSpec], Sequence[Changes]]

    def of(self, spec: PlanSpec) -> list[Changes]:
        """Its values, the plan's own first."""
        every = self.values(spec)
        own = {name: getattr(spec, name) for name in every[0]}
        return [own, *(each for each in every if each != own)]


def _doubled(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def _gpus(spec: PlanSpec) -> list[Changes]:
    """The plan's, and powers of two below them: parts of a node, or whole nodes."""
    node = spec.gpus_per_node
    fewer = [count for count in _doubled(spec.gpus - 1) if count <= node or count % node == 0]
    return [{"gpus": count} for count in (*fewer, spec.gpus)]


def _strategies(spec: PlanSpec) -> list[Changes]:
    """Every strategy; one with groups of ranks with groups of a node or of some of them, at most half of the ranks."""
    found: list[Changes] = []
    for name, row in STRATEGY_ROWS.items():
        if row.can_offload or not spec.offload:
            found += [{"strategy": name, "shard_size": size} for size in (_groups(spec) if row.in_groups else [None])]
    return found


def _groups(spec: PlanSpec) -> list[int]:
    sizes = [size for size in _doubled(spec.gpus // 2) if size > 1]
    of_nodes = [size for size in sizes if size >= spec.gpus_per_node]
    return (of_nodes or sizes)[:_MOST_GROUPS]


def _stages(spec: PlanSpec) -> int:
    """Up to a stage a node: between nodes links are slow."""
    return min(spec.gpus // min(spec.gpus, spec.gpus_per_node), spec.model.layers, _MOST_STAGES)


def _degree(name: str, field: str, most: Callable[[PlanSpec], int]) -> Axis:
    """A degree of parallelism, in powers of two."""
    return Axis(name, lambda spec: [{field: count} for count in _doubled(most(spec))])


MESH = (
    Axis("world-size", _gpus),
    Axis("strategy", _strategies),
    _degree("tp", "tensor_parallel", lambda spec: min(spec.gpus, spec.gpus_per_node)),  # it needs the link of a node
    _degree("cp", "context_parallel", lambda spec: min(spec.gpus, _MOST_CONTEXT)),
    _degree("pp", "pipeline_parallel", _stages),
    _degree(
        "ep", "expert_parallel", lambda spec: min(spec.gpus, spec.model.mixture.count if spec.model.mixture else 1)
    ),
)
IN_A_STEP = (
    Axis("checkpoint", lambda spec: [{"checkpointing": each} for each in CHECKPOINTINGS]),
    Axis("loss", lambda spec: [{"loss": each} for each in LOSSES]),
)
BATCH = "batch-size"  # the micro-batch, and with it the micro-batches of a step
NAMES = (*(axis.name for axis in (*MESH, *IN_A_STEP)), BATCH)


def has_room(mesh: Changes, spec: PlanSpec) -> bool:
    """Whether there are GPUs for all degrees of a mesh, and at least two shard groups where it has groups."""
    tensor, stages, context = (mesh[f"{name}_parallel"] for name in ("tensor", "pipeline", "context"))
    own = stages == spec.pipeline_parallel and context == spec.context_parallel
    if min(stages, context) > 1 and not own:  # both are not tried together
        return False
    degrees = tensor * stages * max(context, mesh["expert_parallel"])
    grouped = 2 * tensor * stages * (mesh["shard_size"] or 0)
    return max(degrees, grouped) <= mesh["gpus"]


def micro_batches(sequences: int) -> list[int]:
    """Sequences that a micro-batch can have where a step has so many: their divisors.

    >>> micro_batches(24)
    [1, 2, 3, 4, 6, 8, 12, 24]
    """
    return [count for count in range(1, min(sequences, _MOST_SEQUENCES) + 1) if sequences % count == 0]


@dataclass(frozen=True)
class Other:
    """A choice that is not searched with the others, since it changes what is computed, or takes time that a plan does
    not count. `frozen`: it trains adapters alone; `last`: it is a way out where nothing fits without it.
    """

    words: str
    changes: Changes
    frozen: bool = False
    last: bool = False

    def of(self, spec: PlanSpec) -> PlanSpec | None:
        """The plan with it; None where it has it already, or cannot have it."""
        name, value = next(iter(self.changes.items()))
        if getattr(spec, name) == value or name == "fp8" and spec.gpu.name not in _EIGHT_BIT:
            return None
        return changed(spec, **self.changes)


_EIGHT_BIT = ("H100 SXM 80GB", "H100 SXM 96GB", "H200 SXM 141GB", "B200 SXM", "L40S", "RTX 4090")


OTHERS = (
    Other("compiled blocks", {"compile": True}),
    Other("matrix products in 8 bits", {"fp8": True}),
    Other("gradients reduced in bf16", {"reduce_dtype": "bf16"}),
    Other("8-bit AdamW", {"optimizer": "adamw-8bit"}),
    Other("masters and optimizer state in bf16", {"master_dtype": "bf16"}),
    Other("CPU offload", {"offload": True, "strategy": "full_shard", "shard_size": None}, last=True),
    Other("adapters on a frozen base in bf16", {"lora_rank": 16}, frozen=True, last=True),
    Other("adapters on a frozen base in nf4", {"lora_rank": 16, "base_dtype": "nf4"}, frozen=True, last=True),
)


def check_kept(keep: Collection[str]) -> None:
    """Raises PlanError for a name of no choice."""
    for name in keep:
        if name not in NAMES:
            raise PlanError(f"--keep has {name!r}{did_you_mean(name, NAMES)}; expected some of {', '.join(NAMES)}")

"""The strategies and the categories of memory: a row each, with all that is said of them in more than one place.

A request is checked, a help text printed and a figure coloured before torch is loaded, so the rows stand here, without
it. The engine's policy, the planner and the figures read a strategy's row; no code asks for a strategy by its name, so
a new row is a new strategy everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

STATES = ("parameters", "gradients", "optimizer")  # the three model states of ZeRO


@dataclass(frozen=True)
class StrategyRow:
    """A strategy: the states that it shards over the ranks, how, and its colour and names elsewhere.

    `reshards_after_forward`: whether every unit but the root is resharded between its forward and its backward.
    `in_groups`: whether states are sharded inside groups of ranks and replicated over the groups, on a mesh of two
    dimensions. `other_names` are those of published jobs, `torch_fsdp1` is a member of PyTorch's `ShardingStrategy`.
    Raises ValueError for a row that the engine cannot express.
    """

    name: str
    cuts: tuple[str, ...]
    colour: str
    reshards_after_forward: bool = False
    in_groups: bool = False
    known_as: str = ""
    other_names: tuple[str, ...] = ()
    torch_fsdp1: str = ""
    deepspeed_stage: int | None = None

    def __post_init__(self) -> None:
        # A gradient of a sharded parameter, and the optimizer state of a sharded gradient, can only be sharded too.
        stages = [STATES[len(STATES) - stage :] for stage in range(len(STATES) + 1)]
        if self.cuts not in stages:
            raise ValueError(
                f"strategy {self.name!r} shards {self.cuts!r}; expected one of {', '.join(map(repr, stages))}: the"
                " optimizer state is sharded first, then gradients, then parameters"
            )
        if self.reshards_after_forward and not self.can_offload:
            raise ValueError(
                f"strategy {self.name!r} reshards parameters that it does not shard; shard {STATES[0]!r} too, or set"
                " reshards_after_forward=False"
            )
        if self.in_groups and not self.cuts:
            raise ValueError(f"strategy {self.name!r} shards nothing inside its groups; set in_groups=False")

    @property
    def gathers_once(self) -> bool:
        """Whether parameters are gathered once a step, after the optimizer has updated their shards."""
        return "parameters" not in self.cuts

    @property
    def reduces_once(self) -> bool:
        """Whether gradients stay unsharded until the last micro-batch of a step, which alone reduces them."""
        return "gradients" not in self.cuts

    @property
    def can_offload(self) -> bool:
        """Whether all that rests on a rank is shards, which can rest in host memory."""
        return "parameters" in self.cuts

    @property
    def saves_most(self) -> bool:
        """Whether a rank keeps least: all states are sharded over all ranks, and units are resharded."""
        return self.cuts == STATES and self.reshards_after_forward and not self.in_groups


@dataclass(frozen=True)
class CategoryRow:
    """A category of memory: its key, its colour, what it is in one sentence, and its group in a narrow table.

    They are those of PyTorch's FSDP memory tracker, with activations and communication buffers apart.
    """

    name: str
    colour: str
    sentence: str
    group: str = "rest"

    @property
    def title(self) -> str:
        """`sharded parameters` for `sharded_parameters`."""
        return self.name.replace("_", " ")


def category_titles(runs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the title of each category on pages of runs with these specs.

    Of jobs that shard no parameters, sharded parameters are `parameters`.
    """
    titles = {name: row.title for name, row in CATEGORY_ROWS.items()}
    specs = list(runs)
    if specs and all(_keeps_parameters_whole(spec) for spec in specs):
        titles["sharded_parameters"] = "parameters"
    return titles


def _keeps_parameters_whole(spec: Mapping[str, Any]) -> bool:
    """Whether a spec is that of a recorded job under a strategy that shards no parameters."""
    row = STRATEGY_ROWS.get(str(spec.get("strategy")))
    return bool(spec.get("job")) and row is not None and "parameters" not in row.cuts


# in the order of ZeRO's stages
STRATEGY_ROWS = {
    row.name: row
    for row in (
        StrategyRow("no_shard", (), "#7f868f", known_as="DDP", other_names=("ddp", "no_shard"), torch_fsdp1="NO_SHARD"),
        StrategyRow("zero1", STATES[2:], "#d3c1ee", other_names=("zero-1",), deepspeed_stage=1),
        StrategyRow("zero2", STATES[1:], "#ae8fdc", other_names=("zero-2",), deepspeed_stage=2),
        StrategyRow("shard_grad_op", STATES, "#8a5fcb", other_names=("shard_grad_op",), torch_fsdp1="SHARD_GRAD_OP"),
        StrategyRow(
            "full_shard",
            STATES,
            "#6435b0",
            reshards_after_forward=True,
            known_as="ZeRO-3",
            other_names=("full_shard", "zero-3", "full shard", "fsdp"),
            torch_fsdp1="FULL_SHARD",
            deepspeed_stage=3,
        ),
        StrategyRow(
            "hybrid_shard",
            STATES,
            "#c2366f",
            reshards_after_forward=True,
            in_groups=True,
            other_names=("hybrid", "hsdp"),
        ),
    )
}


def strategies_that(fulfil: Callable[[StrategyRow], bool]) -> tuple[str, ...]:
    """Name the strategies whose rows fulfil a condition, in the table's order.

    >>> strategies_that(lambda row: not row.cuts)
    ('no_shard',)
    """
    return tuple(name for name, row in STRATEGY_ROWS.items() if fulfil(row))


STRATEGIES = tuple(STRATEGY_ROWS)
OVER_ALL_RANKS = strategies_that(lambda row: not row.in_groups)
IN_GROUPS = strategies_that(lambda row: row.in_groups)
BEST_KNOWN_FIRST = (*reversed(OVER_ALL_RANKS), *IN_GROUPS)
UNSHARDED = strategies_that(lambda row: not row.cuts)
SAVES_MOST = strategies_that(lambda row: row.saves_most)
STRATEGIES_IN_WORDS = ", ".join(
    f"{row.name} ({row.known_as})" if row.known_as else row.name for row in STRATEGY_ROWS.values()
)

# in the order of a stack, from what rests to what passes
CATEGORY_ROWS = {
    row.name: row
    for row in (
        CategoryRow(
            "sharded_parameters",
            "#0064c8",
            "The parameters that a rank keeps between steps: its shards, or all of them under a strategy that does not"
            " shard parameters.",
            "par",
        ),
        CategoryRow(
            "unsharded_parameters",
            "#6cc4f0",
            "The parameters of the units that are gathered at the moment, for their forward or backward.",
            "par",
        ),
        CategoryRow(
            "sharded_gradients",
            "#b84a0a",
            "The reduced gradients of the rank's own shards, from the reduction to the end of the step.",
            "grad",
        ),
        CategoryRow(
            "unsharded_gradients",
            "#f09a1a",
            "The gradients that the backward has computed, until they are reduced; without sharding, to the end of the"
            " step.",
            "grad",
        ),
        CategoryRow(
            "optimizer_state", "#0aa06c", "What the optimizer keeps of each parameter; for AdamW two moments.", "opt"
        ),
        CategoryRow(
            "activations",
            "#cc7fa8",
            "The tensors that the forward saves for the backward, and intermediate results.",
            "act",
        ),
        CategoryRow("communication_buffers", "#ebdf6a", "The tensors that collectives send from and receive into."),
        CategoryRow("other", "#555b65", "Everything that none of the other categories explains."),
    )
}
CATEGORIES = tuple(CATEGORY_ROWS)

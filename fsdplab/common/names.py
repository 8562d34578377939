"""The strategies and the categories of memory: a row each, with all that is said of them in more than one place.

A request is checked, a help text printed and a figure coloured before torch is loaded, so the rows stand here, without
it. What a strategy does is the engine's own table (`engine/core/policy.py`), and the bytes it must send are written
down independently (`planning/traffic.py`); tests hold all of them to these names.
"""

from __future__ import annotations

from dataclasses import dataclass

STATES = ("parameters", "gradients", "optimizer")  # the three model states of ZeRO


@dataclass(frozen=True)
class StrategyRow:
    """A strategy: the states that it cuts over the ranks, its colour, the name it is known by elsewhere, and whether it
    needs groups of ranks (a mesh of two dimensions).
    """

    name: str
    cuts: tuple[str, ...]
    colour: str
    known_as: str = ""
    in_groups: bool = False


@dataclass(frozen=True)
class CategoryRow:
    """A category of memory: its colour, and the group that a narrow table adds it to."""

    name: str
    colour: str
    group: str = "rest"

    @property
    def words(self) -> str:
        """`parameter slices` for `parameter_slices`."""
        return self.name.replace("_", " ")


# in the order of ZeRO's stages
STRATEGY_ROWS = {
    row.name: row
    for row in (
        StrategyRow("no_shard", (), "#7f868f", "DDP"),
        StrategyRow("zero1", STATES[2:], "#d3c1ee"),
        StrategyRow("zero2", STATES[1:], "#ae8fdc"),
        StrategyRow("shard_grad_op", STATES, "#8a5fcb"),
        StrategyRow("full_shard", STATES, "#6435b0", "ZeRO-3"),
        StrategyRow("hybrid_shard", STATES, "#c2366f", in_groups=True),
    )
}
STRATEGIES = tuple(STRATEGY_ROWS)
OVER_ALL_RANKS = tuple(row.name for row in STRATEGY_ROWS.values() if not row.in_groups)
STRATEGIES_IN_WORDS = ", ".join(
    f"{row.name} ({row.known_as})" if row.known_as else row.name for row in STRATEGY_ROWS.values()
)

# in the order of a stack, from what rests to what passes
CATEGORY_ROWS = {
    row.name: row
    for row in (
        CategoryRow("parameter_slices", "#0064c8", "par"),
        CategoryRow("gathered_parameters", "#6cc4f0", "par"),
        CategoryRow("gradient_slices", "#b84a0a", "grad"),
        CategoryRow("whole_gradients", "#f09a1a", "grad"),
        CategoryRow("optimizer_state", "#0aa06c", "opt"),
        CategoryRow("activations", "#cc7fa8", "act"),
        CategoryRow("communication_buffers", "#ebdf6a"),
        CategoryRow("other", "#555b65"),
    )
}
CATEGORIES = tuple(CATEGORY_ROWS)

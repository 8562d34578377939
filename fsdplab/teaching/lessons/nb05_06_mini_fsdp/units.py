"""Choices of units and their cost by arithmetic: bytes gathered at once, and collectives a step.

A unit is gathered while it runs, and with it the root and every unit around it. So the peak of the gathered bytes is
the largest chain of units, and a step has three collectives a unit (the root has two: it is gathered once).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fsdplab.common.sizes import size
from fsdplab.common.words import MISSING
from fsdplab.planning import UnitShapes, step_traffic
from fsdplab.teaching.core.display import Table, table
from fsdplab.workloads import build_model

from .engine import Wanted, chosen

TARGET = 6_500_000  # bytes gathered, for exercise 06.choose_units
LIMIT = 80  # collectives a step, for the same
FLOAT = 4

CHOICES: dict[str, Wanted] = {
    "the whole model": lambda name, module: False,
    "every block": lambda name, module: type(module).__name__ == "GPTBlock",
    "every Linear": lambda name, module: isinstance(module, nn.Linear),
}


@dataclass(frozen=True)
class Plan:
    """One choice of units: (name, bytes) of each, root last; the bytes of the largest chain without the root;
    collectives.
    """

    units: tuple[tuple[str, int], ...]
    chain: int
    collectives: int
    shapes: tuple[UnitShapes, ...]

    @property
    def root(self) -> int:
        """Bytes of the root unit: gathered from the beginning of the forward to the end of the backward."""
        return dict(self.units).get("root", 0)

    @property
    def peak(self) -> int:
        """Most bytes gathered at once."""
        return self.root + self.chain

    def traffic(self, ranks: int) -> int:
        """Bytes that one rank sends in a step of full_shard, by the textbook's formula."""
        return sum(entry.step_bytes for entry in step_traffic(self.shapes, "full_shard", ranks))


def plan(model_name: str, is_unit: Wanted) -> Plan:
    """The arithmetic of one choice, without a tensor: `plan("gpt-tiny", lambda name, module:
    False).collectives == 2`.
    """
    shapes = {
        name: [(str(index), tuple(parameter.shape)) for index, parameter in enumerate(own)]
        for name, _, own in chosen(build_model(model_name, device="meta"), is_unit)
    }
    held = {name: FLOAT * sum(_product(shape) for _, shape in own) for name, own in shapes.items()}
    below = [name for name in held if name != "root"]
    chain = max(
        (sum(held[other] for other in below if f"{name}.".startswith(f"{other}.")) for name in below), default=0
    )
    units = tuple(UnitShapes(name, tuple(own)) for name, own in shapes.items())
    return Plan(tuple(held.items()), chain, 3 * len(below) + 2 * ("root" in held), units)


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def choices_table(model: str = "gpt-20m", **more: Wanted) -> Table:
    """Ready-made choices of units (and `more`) beside each other, computed."""
    plans = {name: plan(model, is_unit) for name, is_unit in {**CHOICES, **more}.items()}
    rows = [
        [
            name,
            f"{len(each.units):,}",
            size(each.root),
            size(each.chain) if each.chain else MISSING,
            size(each.peak),
            f"{each.collectives:,}",
            size(each.traffic(2) // each.collectives),
        ]
        for name, each in plans.items()
    ]
    header = [
        "units",
        "how many",
        "root",
        "largest other unit",
        "gathered at most",
        "collectives a step",
        "sent by each, on average",
    ]
    return table(header, rows, f"Computed for {model} in fp32 on 2 ranks, with nothing gathered ahead.")


def largest_modules(model: str = "gpt-20m") -> Table:
    """The modules of one block and of the root with their sizes: what can be a unit."""
    built = build_model(model, device="meta")
    rows = []
    for name, module in built.named_modules():
        parameters = sum(parameter.numel() for parameter in module.parameters())
        if parameters and (name.startswith("blocks.0") or "." not in name and name not in ("", "blocks")):
            rows.append([name, type(module).__name__, size(FLOAT * parameters)])
    return table(
        ["name", "class", "gathered"],
        rows,
        f"Computed for {model} in fp32: one of its {built.config.layers} blocks, and what lies outside them.",
    )

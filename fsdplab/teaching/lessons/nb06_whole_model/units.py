"""Choices of units and their cost by arithmetic: bytes unsharded at once, and collectives a step.

A unit is unsharded while it runs, and with it the root and every unit around it. So the peak of the unsharded bytes is
the largest chain of units, and a step has three collectives a unit (the root has two: it is unsharded once).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from fsdplab.common.sizes import size
from fsdplab.common.words import MISSING
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.lines import points
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import DARK_INK, titled
from fsdplab.planning import UnitShapes, step_traffic
from fsdplab.teaching.core.display import Table, table
from fsdplab.workloads import build_model

from .engine import Wanted, chosen

FLOAT = 4
COLOURS = ("#0064c8", "#6cc4f0", "#f09a1a", "#0aa06c", "#cc7fa8", "#ebdf6a", "#b84a0a")  # the root's, then the others'

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
        """Bytes of the root unit: unsharded from the beginning of the forward to the end of the backward."""
        return dict(self.units).get("root", 0)

    @property
    def peak(self) -> int:
        """Most bytes unsharded at once."""
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
    held = {name: FLOAT * sum(math.prod(shape) for _, shape in own) for name, own in shapes.items()}
    below = [name for name in held if name != "root"]
    chain = max(
        (sum(held[other] for other in below if f"{name}.".startswith(f"{other}.")) for name in below), default=0
    )
    units = tuple(UnitShapes(name, tuple(own)) for name, own in shapes.items())
    return Plan(tuple(held.items()), chain, 3 * len(below) + 2 * ("root" in held), units)


def choices_table(model: str = "gpt-20m", **more: Wanted) -> Table:
    """Ready-made choices of units (and `more`) beside each other, computed."""
    plans = {name: plan(model, is_unit) for name, is_unit in {**CHOICES, **more}.items()}
    rows = []
    for name, each in plans.items():
        held = [size(each.root), size(each.chain) if each.chain else MISSING, size(each.peak)]
        sent = size(each.traffic(2) // each.collectives)
        rows.append([name, f"{len(each.units):,}", *held, f"{each.collectives:,}", sent])
    header = ["units", "how many", "root", "largest other unit", "unsharded at most"]
    header += ["collectives a step", "sent by each, on average"]
    return table(header, rows, f"Computed for {model} in fp32 on 2 ranks, with nothing unsharded ahead.")


def largest_modules(model: str = "gpt-20m") -> Table:
    """The modules of one block and of the root with their sizes: what can be a unit."""
    built = build_model(model, device="meta")
    rows = []
    for name, module in built.named_modules():
        parameters = sum(parameter.numel() for parameter in module.parameters())
        if parameters and (name.startswith("blocks.0") or "." not in name and name not in ("", "blocks")):
            rows.append([name, type(module).__name__, size(FLOAT * parameters)])
    caption = f"Computed for {model} in fp32: one of its {built.config.layers} blocks, and what lies outside them."
    return table(["name", "class", "unsharded"], rows, caption)


def choices_figure(
    model: str = "gpt-20m", target: int | None = None, measured: dict[str, float] | None = None, **more: Wanted
) -> go.Figure:
    """Root and largest unit of each choice of units (the whole model left out), with a target line and measured peaks
    (MB).
    """
    asked = {name: is_unit for name, is_unit in {**CHOICES, **more}.items() if name != "the whole model"}
    plans = {name.replace("_", " "): plan(model, is_unit) for name, is_unit in asked.items()}
    ends = {name: f"<b>{size(each.peak)} · {each.collectives} collectives</b>" for name, each in plans.items()}
    parts = [
        Part("root", COLOURS[0], [each.root / 1e6 for each in plans.values()]),
        Part("largest unit, with units around it", COLOURS[1], [each.chain / 1e6 for each in plans.values()]),
    ]
    levels = {f"target {size(target)}": target / 1e6} if target else {}
    figure = stacked_bars(ends, parts, "unsharded parameters at the peak (MB)", "%{x:.3f} MB", levels=levels)
    if measured:
        figure.add_trace(_ticks(measured))
    title = _chosen(plans, target) if more else _extremes(plans)
    return titled(
        figure, title, _conditions(model, measured), _spoken_choices(plans, target), height=140 + 52 * len(plans)
    )


def _conditions(model: str, measured: dict[str, float] | None) -> str:
    return f"Computed for {model} in fp32, nothing unsharded ahead" + (
        "; ticks are measured on CPU ranks" if measured else ""
    )


def _chosen(plans: dict[str, Plan], target: int | None) -> str:
    name, last = list(plans.items())[-1]
    verdict = "" if not target else ", under the target" if last.peak <= target else ", over the target"
    return f"{name}: {size(last.peak)} unsharded in {last.collectives} collectives{verdict}"


def _extremes(plans: dict[str, Plan]) -> str:
    low, high = min(plans, key=lambda name: plans[name].peak), max(plans, key=lambda name: plans[name].peak)
    summary = [f"{name}: {size(plans[name].peak)} and {plans[name].collectives}" for name in (high, low)]
    return " collectives; ".join(summary)


def _spoken_choices(plans: dict[str, Plan], target: int | None) -> str:
    summary = "; ".join(f"{name} {size(each.peak)} with {each.collectives} collectives" for name, each in plans.items())
    return f"Bars of unsharded bytes: {summary}." + (f" Target {size(target)}." if target else "")


def _ticks(measured: dict[str, float]) -> go.Scatter:
    rows, tick = [name.replace("_", " ") for name in measured], dict(color=DARK_INK, width=3)
    look = dict(marker=dict(symbol="line-ns", line=tick), hovertemplate="%{y}<br>measured %{x:.3f} MB<extra></extra>")
    return points("measured", DARK_INK, list(measured.values()), rows, 26, **look)

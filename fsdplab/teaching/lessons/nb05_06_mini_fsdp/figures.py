"""Figures of lessons 05 and 06: one layer's life, which units are gathered when, and what a choice of units costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fsdplab.common.sizes import size
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.lines import points
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import CATEGORY_COLOURS, DARK_INK, titled
from fsdplab.records import RunRecord

from .engine import Wanted
from .units import CHOICES, Plan, plan

MB = 1e6
_HOVER = "%{x:.3f} MB"
UNIT_COLOURS = ("#6cc4f0", "#f09a1a", "#0aa06c", "#cc7fa8", "#ebdf6a", "#b84a0a")
ROOT_COLOUR = "#0064c8"


class LayersLife(Protocol):
    """The fields of `life_of_a_layer` that its figure reads."""

    @property
    def moments(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def ranks(self) -> int: ...


class Trained(Protocol):
    """The fields of `train` that its figure reads."""

    @property
    def rows(self) -> Mapping[str, Sequence[Mapping[str, Any]]]: ...
    @property
    def records(self) -> Mapping[str, RunRecord]: ...
    @property
    def plan(self) -> Plan: ...


def layer_figure(life: LayersLife) -> go.Figure:
    """Bytes of one layer's weight and gradient after each moment of its life, stacked by kind, in time order from the
    top.
    """
    kinds = [name for name in life.moments[0] if name != "moment"]
    names = [moment["moment"] for moment in life.moments]
    totals = [sum(moment[kind] for kind in kinds) for moment in life.moments]
    parts = [
        Part(kind.replace("_", " "), CATEGORY_COLOURS[kind], [moment[kind] / MB for moment in life.moments])
        for kind in kinds
    ]
    whole = 2 * life.weight_bytes
    levels = {f"unsharded: {size(whole)}": whole / MB}
    figure = stacked_bars(_ends(names, totals), parts, "bytes held by one rank (MB)", _HOVER, levels=levels)
    rest, peak = totals[-1], max(totals)
    title = f"A weight of {size(life.weight_bytes)} and its gradient: {size(rest)} at rest, {size(peak)} at the peak"
    summary = "; ".join(f"{name} {size(total)}" for name, total in zip(names, totals))
    subtitle = (
        f"Measured on rank 0 of {life.ranks} CPU ranks: storages after each call; the messages' own buffers are"
        " left out"
    )
    return titled(
        figure,
        title,
        subtitle,
        f"Bars from top to bottom in time order: {summary}. Unsharded {size(whole)}.",
        height=140 + 34 * len(names),
    )


def gathered_figure(training: Trained, engine: str = "my_fsdp") -> go.Figure:
    """Gathered bytes after every unshard and reshard of the last step, stacked by unit, in time order from the top."""
    rows = training.rows[engine]
    rows = [row for row in rows if row["step"] == rows[-1]["step"] and row["what"] != "reduce"]
    names = [f"{number}  {_spoken(row)}" for number, row in enumerate(rows, 1)]
    units = [name for name, _ in reversed(training.plan.units)]
    totals = [sum(row["gathered"].values()) for row in rows]
    parts = [
        Part(unit, _unit_colour(units, unit), [row["gathered"].get(unit, 0) / MB for row in rows]) for unit in units
    ]
    whole = sum(nbytes for _, nbytes in training.plan.units)
    levels = {f"whole model: {size(whole)}": whole / MB}
    figure = stacked_bars(_ends(names, totals), parts, "gathered parameters on one rank (MB)", _HOVER, levels=levels)
    summary = "; ".join(f"{name} {size(total)}" for name, total in zip(names, totals))
    spec, how = (
        training.records[engine].spec,
        ("storages after each call" if engine == "my_fsdp" else "as its events announce"),
    )
    subtitle = f"Measured on rank 0 of {spec['world_size']} CPU ranks, {spec['model']}, last step: {how}"
    title = f"{engine}: at most {size(max(totals))} of {size(whole)} gathered at once"
    return titled(
        figure, title, subtitle, f"Bars from top to bottom in time order: {summary}.", height=140 + 30 * len(names)
    )


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
        Part("root", ROOT_COLOUR, [each.root / MB for each in plans.values()]),
        Part("largest unit, with units around it", UNIT_COLOURS[0], [each.chain / MB for each in plans.values()]),
    ]
    levels = {f"target {size(target)}": target / MB} if target else {}
    figure = stacked_bars(ends, parts, "gathered parameters at the peak (MB)", _HOVER, levels=levels)
    if measured:
        figure.add_trace(_ticks(measured))
    title = _chosen(plans, target) if more else _extremes(plans)
    return titled(
        figure, title, _conditions(model, measured), _spoken_choices(plans, target), height=140 + 52 * len(plans)
    )


def _conditions(model: str, measured: dict[str, float] | None) -> str:
    return f"Computed for {model} in fp32, nothing gathered ahead" + (
        "; ticks are measured on CPU ranks" if measured else ""
    )


def _chosen(plans: dict[str, Plan], target: int | None) -> str:
    name, last = list(plans.items())[-1]
    verdict = "" if not target else ", under the target" if last.peak <= target else ", over the target"
    return f"{name}: {size(last.peak)} gathered in {last.collectives} collectives{verdict}"


def _extremes(plans: dict[str, Plan]) -> str:
    low, high = min(plans, key=lambda name: plans[name].peak), max(plans, key=lambda name: plans[name].peak)
    summary = [f"{name}: {size(plans[name].peak)} and {plans[name].collectives}" for name in (high, low)]
    return " collectives; ".join(summary)


def _spoken_choices(plans: dict[str, Plan], target: int | None) -> str:
    summary = "; ".join(f"{name} {size(each.peak)} with {each.collectives} collectives" for name, each in plans.items())
    return f"Bars of gathered bytes: {summary}." + (f" Target {size(target)}." if target else "")


def _spoken(row: Mapping[str, Any]) -> str:
    return f"{'gather' if row['what'] == 'unshard' else 'drop'} {row['unit']}"


def _unit_colour(units: list[str], unit: str) -> str:
    others = [each for each in units if each != "root"]
    return ROOT_COLOUR if unit == "root" else UNIT_COLOURS[others.index(unit) % len(UNIT_COLOURS)]


def _ends(names: Sequence[str], totals: Sequence[int]) -> dict[str, str]:
    """The words at the bars' ends: their totals."""
    return {name: f"<b>{size(total)}</b>" for name, total in zip(names, totals)}


def _ticks(measured: dict[str, float]) -> go.Scatter:
    rows, tick = [name.replace("_", " ") for name in measured], dict(color=DARK_INK, width=3)
    look = dict(marker=dict(symbol="line-ns", line=tick), hovertemplate="%{y}<br>measured %{x:.3f} MB<extra></extra>")
    return points("measured", DARK_INK, list(measured.values()), rows, 26, **look)

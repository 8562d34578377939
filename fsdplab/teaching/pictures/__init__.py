"""One picture a lesson that can stand on a slide: static SVG, drawn from the rule, with alternative text."""

from __future__ import annotations

from collections.abc import Callable

from fsdplab.teaching.core.display import present

from . import costs, engine
from .sheet import Picture

PICTURES: dict[str, Callable[[], Picture]] = {
    "00": engine.two_ways,
    "01": engine.ring,
    "02": engine.bytes_a_parameter,
    "03": engine.buckets,
    "04": engine.zero_stages,
    "05": engine.life_of_a_unit,
    "06": engine.units_in_turn,
    "07": costs.prefetch,
    "08": costs.four_instants,
    "09": costs.peak_of_a_step,
    "10": costs.crossover,
    "11": costs.choice,
    "12": costs.mesh_of_nodes,
    "13": costs.three_prices,
    "14": costs.evidence,
    "15": costs.other_ranks,
    "16": costs.axes_of_a_mesh,
    "17": costs.dialects,
    "18": costs.statement,
    "19": costs.sizing_a_job,
    "20": engine.two_forms,
    "21": engine.owners,
}


def picture(notebook: str) -> None:
    """Show a lesson's picture: `picture("05")`; ValueError names the lessons that have one."""
    if notebook not in PICTURES:
        raise ValueError(f"no picture of {notebook!r}; expected one of {', '.join(PICTURES)}")
    present(PICTURES[notebook]())

"""Lesson 13 in the notebook's process: what memory can be bought with (digits, work, transfers), and what each price
is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fsdplab.common.names import OVER_ALL_RANKS, STRATEGY_ROWS
from fsdplab.figures import memory_by_category
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import CATEGORY_COLOURS, said_further, titled
from fsdplab.figures.view import RunView, view
from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec, run
from fsdplab.sessions.bf16_speed import bf16_is_slow, bf16_slowdown
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing
from fsdplab.workloads import preset

from .on_ranks import TIED, bf16_run  # noqa: F401 (the notebook calls it)

MB = 1e6
_COLOURS = {
    "working copy": CATEGORY_COLOURS["unsharded_parameters"],
    "gradient": CATEGORY_COLOURS["sharded_gradients"],
    "master": CATEGORY_COLOURS["sharded_parameters"],
    "moments": CATEGORY_COLOURS["optimizer_state"],
}


# ---- runs by their choices


def trained(spec: RunSpec) -> RunRecord:
    """Run a spec; in bf16, where that would take minutes on this processor, return the recorded run and print so."""
    if spec.precision == "bf16" and bf16_is_slow():
        print(
            f"bf16 takes {bf16_slowdown():.0f} times as long as fp32 on this processor: this is a recorded run. Its"
            " memory is the same to the byte; its step is of another machine."
        )
        return bf16_run(spec.checkpoint, spec.offload)
    return run(spec)


def named(runs: Sequence[RunRecord]) -> list[RunView]:
    """Return the runs as figures read them, each under the name of its choices.

    Names are `fp32`, `bf16, full checkpoint` or `fp32, offload`; bars of one name would be drawn as one, so that a name
    that is there already ends with "(again)".
    """
    names: list[str] = []
    views = []
    for record in runs:
        name = choices_of(record)
        views.append(replace(view(record), strategy=name + names.count(name) * " (again)"))
        names.append(name)
    return views


def choices_of(run: RunRecord) -> str:
    """Return the choices of a record as text."""
    words = [run.spec["precision"]]
    if run.spec["checkpoint"] != "none":
        words.append(f"{run.spec['checkpoint']} checkpoint")
    if run.spec["offload"] != "none":
        words.append("offload")
    return ", ".join(words)


def memory_figure(runs: Sequence[RunRecord]) -> go.Figure:
    """Draw the peak of each run split by category, under the name of its choices.

    The subtitle says where offload is emulated.
    """
    figure = memory_by_category(named(runs))
    if any("host_memory_beside_the_card" in run.provenance for run in runs):
        return said_further(figure, ", and so is a host memory beside it")
    return figure


# ---- precision


def cut_by(strategy: str) -> list[str]:
    """Return the states that a strategy cuts: `cut_by("zero1") == ["optimizer"]`."""
    return list(STRATEGY_ROWS[strategy].cuts)


def kept_figure(bytes_each: Callable[[Sequence[str], int], dict[str, float]], ranks: int = 8) -> go.Figure:
    """Draw `bytes_each(cut, n)` of every strategy, stacked: bytes a parameter on one rank.

    Of strategies that cut the same states one is drawn.
    """
    one_for_each_cut = {STRATEGY_ROWS[name].cuts: name for name in OVER_ALL_RANKS}  # the last of them
    by_name = {name: bytes_each(cut_by(name), ranks) for name in one_for_each_cut.values()}
    parts = []
    for state, colour in _COLOURS.items():
        dtype = "bf16" if state == "working copy" else "fp32"
        values = [by_state[state] for by_state in by_name.values()]
        parts.append(Part(f"{state} ({dtype})", colour, values))

    totals, ends, bars = [], {}, []
    for name, by_state in by_name.items():
        total = sum(by_state.values())
        totals.append(total)
        ends[name] = f"<b>{total:g}</b>"
        bars.append(f"{name} {total:g} bytes")
    figure = stacked_bars(ends, parts, "bytes a parameter, on one rank", "%{x:g} bytes")
    title = f"Mixed precision keeps {totals[0]:g} bytes a parameter; full_shard on {ranks} ranks {totals[-1]:g}"
    subtitle = f"Computed for n = {ranks} ranks; activations and unsharded units come on top"
    return titled(figure, title, subtitle, f"Stacked bars: {'; '.join(bars)}.", height=280)


# ---- prices


def bus_bytes(spec: dict[str, Any]) -> float:
    """Return the bytes that a card's bus would carry in a step: shards down for the all-gathers, gradients back.

    In fp32 the shard goes down for each of two all-gathers; in bf16 one cast copy a step does.
    """
    if spec["offload"] == "none":
        return 0.0
    # of a rank's shard
    elements = preset(spec["model"]).parameters / spec["world_size"]
    down = 2 if spec["precision"] == "bf16" else 2 * 4
    up = 4
    return elements * (down + up)


# ---- frozen parameters


@doing("training with and without frozen parameters on 2 ranks")
def frozen_costs() -> dict[str, dict[str, int]]:
    """Train a GPT of 3.3 million parameters whole, then its adapters only, on two real ranks: bytes of rank 0."""
    return dict(LessonRanks(__file__)("frozen_costs")[0])

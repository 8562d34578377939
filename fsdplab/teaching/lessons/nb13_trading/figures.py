"""Figures of lesson 13: peaks under the names of their choices, and the bytes that mixed precision keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdplab.common.names import OVER_ALL_RANKS, STRATEGY_ROWS
from fsdplab.figures import memory_by_category
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import CATEGORY_COLOURS, titled
from fsdplab.figures.view import RunView, view
from fsdplab.records import RunRecord

MB = 1e6
KEPT = {
    "working copy": ("parameters", 2),
    "gradient": ("gradients", 4),
    "master": ("optimizer", 4),
    "moments": ("optimizer", 8),
}
_COLOURS = {
    "working copy": CATEGORY_COLOURS["gathered_parameters"], "gradient": CATEGORY_COLOURS["gradient_slices"],
    "master": CATEGORY_COLOURS["parameter_slices"], "moments": CATEGORY_COLOURS["optimizer_state"],
}  # fmt: skip


def named(runs: Sequence[RunRecord]) -> list[RunView]:
    """The runs as figures read them, each under the name of its choices: `fp32`, `bf16, full checkpoint`, `fp32,
    offload`.
    """
    names = [choices_of(run) for run in runs]
    repeated = [names[:index].count(name) for index, name in enumerate(names)]  # bars of one name would be drawn as one
    return [replace(view(run), strategy=name + again * " (again)") for run, name, again in zip(runs, names, repeated)]


def choices_of(run: RunRecord) -> str:
    """The choices of a record as text."""
    words = [run.spec["precision"]]
    words += [] if run.spec["checkpoint"] == "none" else [f"{run.spec['checkpoint']} checkpoint"]
    words += [] if run.spec["offload"] == "none" else ["offload"]
    return ", ".join(words)


def memory_figure(runs: Sequence[RunRecord]) -> go.Figure:
    """The peak of each run split by category, under the name of its choices; the subtitle says where offload is
    emulated.
    """
    figure = memory_by_category(named(runs))
    if any("host_memory_beside_the_card" in run.provenance for run in runs):
        figure.layout.title.subtitle.text += ", and so is a host memory beside it"
    return figure


def cut_by(strategy: str) -> list[str]:
    """The states that a strategy cuts: `cut_by("zero1") == ["optimizer"]`."""
    return list(STRATEGY_ROWS[strategy].cuts)


def kept_figure(bytes_each: Callable[[Sequence[str], int], dict[str, float]], ranks: int = 8) -> go.Figure:
    """`bytes_each(cut, n)` of every strategy, stacked: bytes a parameter on one rank."""
    names = list({STRATEGY_ROWS[name].cuts: name for name in OVER_ALL_RANKS}.values())  # one of those that cut the same
    by_name = {name: bytes_each(cut_by(name), ranks) for name in names}
    totals = [sum(each.values()) for each in by_name.values()]
    parts = [
        Part(
            f"{kept} ({'bf16' if kept == 'working copy' else 'fp32'})", colour, [by_name[each][kept] for each in names]
        )
        for kept, colour in _COLOURS.items()
    ]
    ends = {name: f"<b>{total:g}</b>" for name, total in zip(names, totals)}
    figure = stacked_bars(ends, parts, "bytes a parameter, on one rank", "%{x:g} bytes")
    title = f"Mixed precision keeps {totals[0]:g} bytes a parameter; full_shard on {ranks} ranks {totals[-1]:g}"
    summary = "; ".join(f"{name} {total:g} bytes" for name, total in zip(names, totals))
    return titled(
        figure,
        title,
        f"Computed for n = {ranks} ranks; activations and gathered units come on top",
        f"Stacked bars: {summary}.",
        height=280,
    )

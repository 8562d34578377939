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
from fsdplab.records import RunRecord, known
from fsdplab.sessions import RunSpec, run
from fsdplab.sessions.bf16_speed import bf16_is_slow, bf16_slowdown
from fsdplab.teaching.core.display import Note, Table, table
from fsdplab.teaching.core.lesson_ranks import LessonRanks
from fsdplab.teaching.core.waiting import doing
from fsdplab.workloads import preset

from .on_ranks import TIED, bf16_run  # noqa: F401 (the notebook calls it)

MB = 1e6
_FORWARDS = {"none": "1", "selective": "about 1.5", "full": "2"}
_COLOURS = {
    "working copy": CATEGORY_COLOURS["unsharded_parameters"],
    "gradient": CATEGORY_COLOURS["sharded_gradients"],
    "master": CATEGORY_COLOURS["sharded_parameters"],
    "moments": CATEGORY_COLOURS["optimizer_state"],
}


# ---- runs by their choices


def trained(spec: RunSpec) -> RunRecord:
    """The run of a spec; in bf16, where that would take minutes on this processor, the recorded one, with a line."""
    if spec.precision == "bf16" and bf16_is_slow():
        print(
            f"bf16 takes {bf16_slowdown():.0f} times as long as fp32 on this processor: this is a recorded run. Its"
            " memory is the same to the byte; its step is of another machine."
        )
        return bf16_run(spec.checkpoint, spec.offload)
    return run(spec)


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
        return said_further(figure, ", and so is a host memory beside it")
    return figure


def changed(before: RunRecord, after: RunRecord) -> Note:
    """The categories of the peak that became smaller, stayed, or grew from one run to another."""
    was, now = (run.summary.peak_memory_bytes.split for run in (before, after))
    moved = {name: (now[name] - was[name]) / MB for name in was if was[name] or now[name]}
    less, more = (
        ", ".join(f"{name.replace('_', ' ')} {part:+.0f} MB" for name, part in moved.items() if sign * part >= 1)
        for sign in (-1, 1)
    )
    first, last = (known(run.summary.peak_memory_bytes.total) / MB for run in (before, after))
    told = f"From {first:.0f} to {last:.0f} MB. Smaller: {less or 'nothing'}. Larger: {more or 'nothing'}."
    return Note((told,))


# ---- precision


def cut_by(strategy: str) -> list[str]:
    """The states that a strategy cuts: `cut_by("zero1") == ["optimizer"]`."""
    return list(STRATEGY_ROWS[strategy].cuts)


def kept_figure(bytes_each: Callable[[Sequence[str], int], dict[str, float]], ranks: int = 8) -> go.Figure:
    """`bytes_each(cut, n)` of every strategy, stacked: bytes a parameter on one rank."""
    names = list({STRATEGY_ROWS[name].cuts: name for name in OVER_ALL_RANKS}.values())  # one of those that cut the same
    by_name = {name: bytes_each(cut_by(name), ranks) for name in names}
    totals = [sum(each.values()) for each in by_name.values()]
    written = {kept: f"{kept} ({'bf16' if kept == 'working copy' else 'fp32'})" for kept in _COLOURS}
    parts = [Part(written[kept], _COLOURS[kept], [by_name[each][kept] for each in names]) for kept in _COLOURS]
    ends = {name: f"<b>{total:g}</b>" for name, total in zip(names, totals)}
    figure = stacked_bars(ends, parts, "bytes a parameter, on one rank", "%{x:g} bytes")
    title = f"Mixed precision keeps {totals[0]:g} bytes a parameter; full_shard on {ranks} ranks {totals[-1]:g}"
    summary = "; ".join(f"{name} {total:g} bytes" for name, total in zip(names, totals))
    subtitle = f"Computed for n = {ranks} ranks; activations and unsharded units come on top"
    return titled(figure, title, subtitle, f"Stacked bars: {summary}.", height=280)


# ---- prices


def prices(runs: Sequence[RunRecord]) -> Table:
    """Peak and price of each run: forwards computed, MB sent, MB over the bus (computed), and the last loss."""
    rows = []
    for each in runs:
        peak, sent, losses = each.summary.peak_memory_bytes, each.summary.comm.bytes_per_step, each.summary.losses
        loss = f"{losses[1]:.6f}" if len(losses) > 1 and losses[1] is not None else "-"
        moved = ["-" if sent is None else f"{sent / MB:.0f}", f"{bus_bytes(each.spec) / MB:.0f}"]
        cells = [f"{known(peak.total) / MB:.0f}", _FORWARDS[each.spec["checkpoint"]], *moved, loss]
        rows.append([choices_of(each), *cells])
    header = ["choices", "peak MB", "forwards", "MB sent", "MB over the bus", "loss, step 2"]
    caption = "Peak, bytes sent and loss measured; forwards and the bus computed, a step and rank each."
    return table(header, rows, caption)


def bus_bytes(spec: dict[str, Any]) -> float:
    """Bytes that a card's bus would carry in a step: the shard for each all-gather (bf16: one cast copy a step), the
    gradient back.
    """
    if spec["offload"] == "none":
        return 0.0
    held = preset(spec["model"]).parameters / spec["world_size"]
    return held * ((2 if spec["precision"] == "bf16" else 2 * 4) + 4)


def bus_table(billions: float, ranks: int, gigabytes_per_second: float) -> Table:
    """Seconds of transfers in a step with everything at rest in host memory."""
    part = 4 * billions / ranks  # fp32
    moved, ways = 3 * part, ("shard down, for the forward", "shard down, for the backward", "gradient up")
    rows = [[way, f"{part:.2f}"] for way in ways]
    caption = (
        f"Computed: {moved:.2f} GB a step over {gigabytes_per_second:g} GB/s = {moved / gigabytes_per_second:.3g} s,"
        f" and {16 * billions / ranks:.1f} GB of states leave the card."
    )
    return table(["over one GPU's bus", "GB"], rows, caption)


# ---- frozen parameters


@doing("training with and without frozen parameters on 2 ranks")
def frozen_costs() -> dict[str, dict[str, int]]:
    """Train a GPT of 3.3 million parameters whole, then its adapters only, on two real ranks: bytes of rank 0."""
    return dict(LessonRanks(__file__)("frozen_costs")[0])


def frozen_table(costs: dict[str, dict[str, int]]) -> Table:
    """One row a way of training, in kB on one rank."""
    rows = [[name, *(f"{nbytes / 1e3:,.0f}" for nbytes in parts.values())] for name, parts in costs.items()]
    header = ["trained", *(f"{part}, kB" for part in costs["everything"])]
    how = "sent for all-gathers and reductions, kept as shards"
    return table(header, rows, f"Measured on rank 0 of 2 real ranks, full_shard, one step: {how}.")

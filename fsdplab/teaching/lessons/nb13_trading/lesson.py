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


def changed(before: RunRecord, after: RunRecord) -> Note:
    """Return the categories of the peak that became smaller or larger from one run to another."""
    peak_before, peak_after = before.summary.peak_memory_bytes, after.summary.peak_memory_bytes
    smaller, larger = [], []
    for name, nbytes in peak_before.split.items():
        change = (peak_after.split[name] - nbytes) / MB
        words = f"{name.replace('_', ' ')} {change:+.0f} MB"
        if change <= -1:
            smaller.append(words)
        elif change >= 1:
            larger.append(words)
    first, last = known(peak_before.total) / MB, known(peak_after.total) / MB
    less, more = ", ".join(smaller) or "nothing", ", ".join(larger) or "nothing"
    return Note((f"From {first:.0f} to {last:.0f} MB. Smaller: {less}. Larger: {more}.",))


# ---- precision


def cut_by(strategy: str) -> list[str]:
    """Return the states that a strategy cuts: `cut_by("zero1") == ["optimizer"]`."""
    return list(STRATEGY_ROWS[strategy].cuts)


def kept_figure(bytes_each: Callable[[Sequence[str], int], dict[str, float]], ranks: int = 8) -> go.Figure:
    """Draw `bytes_each(cut, n)` of every strategy, stacked: bytes a parameter on one rank."""
    one_for_each_cut = {
        STRATEGY_ROWS[name].cuts: name for name in OVER_ALL_RANKS
    }  # of those that cut the same the last
    by_name = {name: bytes_each(cut_by(name), ranks) for name in one_for_each_cut.values()}
    parts = []
    for state, colour in _COLOURS.items():
        dtype = "bf16" if state == "working copy" else "fp32"
        parts.append(Part(f"{state} ({dtype})", colour, [by_state[state] for by_state in by_name.values()]))
    totals = {name: sum(by_state.values()) for name, by_state in by_name.items()}
    ends = {name: f"<b>{total:g}</b>" for name, total in totals.items()}
    figure = stacked_bars(ends, parts, "bytes a parameter, on one rank", "%{x:g} bytes")
    first, *_, last = totals.values()
    title = f"Mixed precision keeps {first:g} bytes a parameter; full_shard on {ranks} ranks {last:g}"
    bars = "; ".join(f"{name} {total:g} bytes" for name, total in totals.items())
    subtitle = f"Computed for n = {ranks} ranks; activations and unsharded units come on top"
    return titled(figure, title, subtitle, f"Stacked bars: {bars}.", height=280)


# ---- prices


def prices(runs: Sequence[RunRecord]) -> Table:
    """Return peak and price of each run: forwards, MB sent, MB over the bus (computed), and the loss of step 2."""
    rows = []
    for record in runs:
        summary = record.summary
        sent, losses = summary.comm.bytes_per_step, summary.losses
        loss = "-"
        if len(losses) > 1 and losses[1] is not None:
            loss = f"{losses[1]:.6f}"
        rows.append(
            [
                choices_of(record),
                f"{known(summary.peak_memory_bytes.total) / MB:.0f}",
                _FORWARDS[record.spec["checkpoint"]],
                "-" if sent is None else f"{sent / MB:.0f}",
                f"{bus_bytes(record.spec) / MB:.0f}",
                loss,
            ]
        )
    header = ["choices", "peak MB", "forwards", "MB sent", "MB over the bus", "loss, step 2"]
    caption = "Peak, bytes sent and loss measured; forwards and the bus computed, a step and rank each."
    return table(header, rows, caption)


def bus_bytes(spec: dict[str, Any]) -> float:
    """Return the bytes that a card's bus would carry in a step: shards down for the all-gathers, gradients back.

    In fp32 the shard goes down for each of two all-gathers; in bf16 one cast copy a step does.
    """
    if spec["offload"] == "none":
        return 0.0
    elements = preset(spec["model"]).parameters / spec["world_size"]
    down = 2 if spec["precision"] == "bf16" else 2 * 4
    up = 4
    return elements * (down + up)


def bus_table(billions: float, ranks: int, gigabytes_per_second: float) -> Table:
    """Return the seconds of transfers in a step with everything at rest in host memory."""
    shard = 4 * billions / ranks  # GB in fp32
    ways = ("shard down, for the forward", "shard down, for the backward", "gradient up")
    moved = shard * len(ways)
    states = 16 * billions / ranks
    caption = (
        f"Computed: {moved:.2f} GB a step over {gigabytes_per_second:g} GB/s = {moved / gigabytes_per_second:.3g} s,"
        f" and {states:.1f} GB of states leave the card."
    )
    return table(["over one GPU's bus", "GB"], [[way, f"{shard:.2f}"] for way in ways], caption)


# ---- frozen parameters


@doing("training with and without frozen parameters on 2 ranks")
def frozen_costs() -> dict[str, dict[str, int]]:
    """Train a GPT of 3.3 million parameters whole, then its adapters only, on two real ranks: bytes of rank 0."""
    return dict(LessonRanks(__file__)("frozen_costs")[0])


def frozen_table(costs: dict[str, dict[str, int]]) -> Table:
    """Return one row a way of training, in kB on one rank."""
    rows = []
    for name, parts in costs.items():
        rows.append([name, *(f"{nbytes / 1e3:,.0f}" for nbytes in parts.values())])
    header = ["trained", *(f"{part}, kB" for part in costs["everything"])]
    how = "sent for all-gathers and reductions, kept as shards"
    return table(header, rows, f"Measured on rank 0 of 2 real ranks, full_shard, one step: {how}.")

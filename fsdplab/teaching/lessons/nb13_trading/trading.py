"""Lesson 13 in the notebook's process: what memory can be bought with (digits, work, transfers), and what each price
is.

One job, three choices: `job(precision=..., checkpoint=..., offload=...)` is a run of it. P is a parameter count, n the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdplab.engine import STRATEGIES
from fsdplab.figures import memory_by_category
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import CATEGORY_COLOURS, EDGE, titled
from fsdplab.figures.view import RunView, view
from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec, call_on_ranks
from fsdplab.teaching.core.display import Table, table
from fsdplab.workloads import parameter_count, preset

from .on_ranks import CARD, JOB, TIED

__all__ = [
    "CARD", "TIED", "bus_table", "bytes_each_reference", "frozen_costs", "job", "kept_figure", "memory_figure",
    "prices",
]  # fmt: skip

ON_THE_RANKS = Path(__file__).with_name("on_ranks.py")
TIME_LIMIT = 150.0
MB = 1e6
STATES = ("parameters", "gradients", "optimizer")
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
_FORWARDS = {"none": "1", "selective": "about 1.5", "full": "2"}


def job(card: int | None = None, **choices: Any) -> RunSpec:
    """The lesson's run, with what `choices` say about precision, checkpoint and offload; `card` in bytes."""
    return RunSpec(**JOB, card=card, **choices)


def named(runs: Sequence[RunRecord]) -> list[RunView]:
    """The runs as figures read them, each under the name of its choices: `fp32`, `bf16, full checkpoint`, `fp32,
    offload`.
    """
    names = [choices_of(run) for run in runs]
    repeated = [names[:index].count(name) for index, name in enumerate(names)]  # bars of one name would be drawn as one
    return [replace(view(run), strategy=name + again * " (again)") for run, name, again in zip(runs, names, repeated)]


def choices_of(run: RunRecord) -> str:
    """The choices of a record in words."""
    words = [run.spec["precision"]]
    words += [] if run.spec["checkpoint"] == "none" else [f"{run.spec['checkpoint']} checkpoint"]
    words += [] if run.spec["offload"] == "none" else ["offload"]
    return ", ".join(words)


def memory_figure(runs: Sequence[RunRecord]) -> go.Figure:
    """The peak of each run split by category, under the name of its choices; the subtitle says where offload is
    emulated.
    """
    figure = memory_by_category(named(runs))
    figure.update_xaxes(range=[0, 1.5 * max(run.summary["peak_memory_bytes"]["total"] for run in runs) / MB])
    if any("host_memory_beside_the_card" in run.provenance for run in runs):
        figure.layout.title.subtitle.text += ", and so is a host memory beside it"
    return figure


# ---- precision


def bytes_each_reference(cut: Sequence[str], n: int) -> dict[str, float]:
    """Bytes a parameter in mixed precision on one of n ranks: `bytes_each_reference(["optimizer"], 4)["master"] ==
    1.0`.
    """
    return {name: nbytes / n if state in cut else float(nbytes) for name, (state, nbytes) in KEPT.items()}


def cut_by(strategy: str) -> list[str]:
    """The states that a strategy cuts: `cut_by("zero1") == ["optimizer"]`."""
    row = STRATEGIES[strategy]
    return [
        state for state, cut in zip(STATES, (row.shard_parameters, row.shard_gradients, row.shard_optimizer)) if cut
    ]


def kept_figure(bytes_each: Callable[[Sequence[str], int], dict[str, float]], ranks: int = 8) -> go.Figure:
    """What `bytes_each(cut, n)` says of every strategy, stacked: bytes a parameter on one rank."""
    names = [name for name in STRATEGIES if name not in ("hybrid_shard", "shard_grad_op")]
    by_name = {name: bytes_each(cut_by(name), ranks) for name in names}
    totals = [sum(each.values()) for each in by_name.values()]
    figure = go.Figure([_kept_bar(kept, by_name) for kept in KEPT])
    figure.update_layout(barmode="stack", xaxis_title="bytes a parameter, on one rank")
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(range=[0, 1.15 * max(totals)])
    for name, total in zip(names, totals):
        figure.add_annotation(x=total, y=name, text=f"<b>{total:g}</b>", showarrow=False, xanchor="left", xshift=6)
    title = f"Mixed precision keeps {totals[0]:g} bytes a parameter; full_shard on {ranks} ranks {totals[-1]:g}"
    told = "; ".join(f"{name} {total:g} bytes" for name, total in zip(names, totals))
    return titled(
        figure,
        title,
        f"Computed for n = {ranks} ranks; activations and gathered units come on top",
        f"Stacked bars: {told}.",
        height=440,
    )


def _kept_bar(kept: str, by_name: dict[str, dict[str, float]]) -> go.Bar:
    fmt = "bf16" if kept == "working copy" else "fp32"
    return go.Bar(
        name=f"{kept} ({fmt})", orientation="h", y=list(by_name), x=[each[kept] for each in by_name.values()],
        marker=dict(color=_COLOURS[kept], line=dict(color=EDGE, width=1)),
        hovertemplate=f"%{{y}}<br>{kept}: %{{x:g}} bytes<extra></extra>",
    )  # fmt: skip


# ---- prices


def prices(runs: Sequence[RunRecord]) -> Table:
    """Peak and price of each run: forwards computed, MB sent, MB over the bus (computed), and the last loss."""
    rows = [[choices_of(run), f"{run.summary['peak_memory_bytes']['total'] / MB:.0f}", *_price(run)] for run in runs]
    header = ["choices", "peak MB", "forwards", "MB sent", "MB over the bus", "loss, step 2"]
    return table(
        header, rows, "Peak, bytes sent and loss measured; forwards and the bus computed, a step and rank each."
    )


def _price(run: RunRecord) -> list[str]:
    losses, sent = run.summary["losses"], run.summary["comm"]["bytes_per_step"]
    loss = f"{losses[1]:.6f}" if len(losses) > 1 and losses[1] is not None else "-"
    return [
        _FORWARDS[run.spec["checkpoint"]],
        "-" if sent is None else f"{sent / MB:.0f}",
        f"{bus_bytes(run.spec) / MB:.0f}",
        loss,
    ]


def bus_bytes(spec: dict[str, Any]) -> float:
    """Bytes that a card's bus would carry in a step: the slice for each gather (bf16: one cast copy a step), the
    gradient back.
    """
    if spec["offload"] == "none":
        return 0.0
    held = parameter_count(preset(spec["model"])) / spec["world_size"]
    return held * ((2 if spec["precision"] == "bf16" else 2 * 4) + 4)


def moved_over_the_bus(billions: float, ranks: int) -> float:
    """GB over one GPU's bus in a step: the fp32 slice down twice, its gradient up:
    `moved_over_the_bus(8, 8) == 12.0`.
    """
    return 3 * 4 * billions / ranks


def bus_table(billions: float, ranks: int, gigabytes_per_second: float) -> Table:
    """Seconds of transfers in a step with everything at rest in host memory."""
    moved = moved_over_the_bus(billions, ranks)
    rows = [
        ["slice down, for the forward", f"{moved / 3:.2f}"],
        ["slice down, for the backward", f"{moved / 3:.2f}"],
        ["gradient up", f"{moved / 3:.2f}"],
    ]
    caption = (
        f"Computed: {moved:.2f} GB a step over {gigabytes_per_second:g} GB/s = {moved / gigabytes_per_second:.3g} s,"
        f" and {16 * billions / ranks:.1f} GB of states leave the card."
    )
    return table(["over one GPU's bus", "GB"], rows, caption)


# ---- frozen parameters


@dataclass(frozen=True, repr=False)
class Frozen:
    """What one rank sends and keeps when everything trains, and when only adapters do."""

    costs: dict[str, dict[str, int]]
    ranks: int
    provenance: dict[str, str] = field(default_factory=lambda: {"bytes of frozen parameters": "measured"})

    @property
    def share_sent(self) -> float:
        """Bytes sent with adapters only, as a part of what is sent when everything trains."""
        whole, adapters = (
            sum(self.costs[name][part] for part in ("gathered", "reduced")) for name in ("everything", "adapters only")
        )
        return adapters / whole

    def table(self) -> Table:
        """One row a way of training, in kB on one rank."""
        rows = [[name, *(f"{nbytes / 1e3:,.0f}" for nbytes in parts.values())] for name, parts in self.costs.items()]
        header = ["trained", *(f"{part}, kB" for part in next(iter(self.costs.values())))]
        return table(
            header,
            rows,
            f"Measured on rank 0 of {self.ranks} real ranks, full_shard, one step: sent for gathers and reductions,"
            " kept as slices.",
        )

    def __repr__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def frozen_costs(world_size: int = 2) -> Frozen:
    """Train a GPT of 3.3 million parameters whole, then its adapters only, on real ranks, and count."""
    by_rank = call_on_ranks(ON_THE_RANKS, "frozen_costs", world_size=world_size, payload=None, time_limit=TIME_LIMIT)
    return Frozen(by_rank[0], world_size)

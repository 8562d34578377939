"""Lesson 13 in the notebook's process: what memory can be bought with (digits, work, transfers), and what each price
is.

One job, three choices: `job(precision=..., checkpoint=..., offload=...)` is a run of it. P is a parameter count, n the
number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdplab.records import RunRecord, known
from fsdplab.sessions import RunSpec, call_on_ranks
from fsdplab.teaching.core.display import Note, Table, table
from fsdplab.teaching.core.waiting import doing
from fsdplab.workloads import preset

from .figures import choices_of, kept_figure, memory_figure
from .on_ranks import CARD, JOB, TIED

__all__ = [
    "CARD", "TIED", "bus_table", "frozen_costs", "job", "kept_figure", "memory_figure",
    "prices", "seen", "changed",
]  # fmt: skip

ON_THE_RANKS = Path(__file__).with_name("on_ranks.py")
TIME_LIMIT = 150.0
MB = 1e6
_FORWARDS = {"none": "1", "selective": "about 1.5", "full": "2"}


def job(card: int | None = None, **choices: Any) -> RunSpec:
    """The lesson's run, with what `choices` say about precision, checkpoint and offload; `card` in bytes."""
    return RunSpec(**JOB, card=card, **choices)


# ---- precision


# ---- prices


def prices(runs: Sequence[RunRecord]) -> Table:
    """Peak and price of each run: forwards computed, MB sent, MB over the bus (computed), and the last loss."""
    rows = [[choices_of(run), f"{known(run.summary.peak_memory_bytes.total) / MB:.0f}", *_price(run)] for run in runs]
    header = ["choices", "peak MB", "forwards", "MB sent", "MB over the bus", "loss, step 2"]
    return table(
        header, rows, "Peak, bytes sent and loss measured; forwards and the bus computed, a step and rank each."
    )


def seen(run: RunRecord) -> Note:
    """The peak of a run and its largest parts, of which the first answers what to shrink."""
    peak = run.summary.peak_memory_bytes
    held = sorted(((nbytes, name) for name, nbytes in peak.split.items() if nbytes), reverse=True)
    whole = known(peak.total)
    parts = ", ".join(
        f"{name.replace('_', ' ')} {nbytes / MB:.0f} MB ({nbytes / whole:.0%})" for nbytes, name in held[:3]
    )
    return Note((f"{choices_of(run)}: {whole / MB:.0f} MB at the peak, most of it {parts}.",))


def changed(before: RunRecord, after: RunRecord) -> Note:
    """The categories of the peak that became smaller, stayed, or grew from one run to another."""
    was, now = (run.summary.peak_memory_bytes.split for run in (before, after))
    moved = {name: (now[name] - was[name]) / MB for name in was if was[name] or now[name]}
    less, more = (
        ", ".join(f"{name.replace('_', ' ')} {part:+.0f} MB" for name, part in moved.items() if sign * part >= 1)
        for sign in (-1, 1)
    )
    totals = [known(run.summary.peak_memory_bytes.total) / MB for run in (before, after)]
    return Note(
        (f"From {totals[0]:.0f} to {totals[1]:.0f} MB. Smaller: {less or 'nothing'}. Larger: {more or 'nothing'}.",)
    )


def _price(run: RunRecord) -> list[str]:
    losses, sent = run.summary.losses, run.summary.comm.bytes_per_step
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
    held = preset(spec["model"]).parameters / spec["world_size"]
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
    """The bytes that one rank sends and keeps when everything trains, and when only adapters do."""

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


@doing("training with and without frozen parameters on 2 ranks")
def frozen_costs(world_size: int = 2) -> Frozen:
    """Train a GPT of 3.3 million parameters whole, then its adapters only, on real ranks, and count."""
    by_rank = call_on_ranks(ON_THE_RANKS, "frozen_costs", world_size=world_size, payload=None, time_limit=TIME_LIMIT)
    return Frozen(by_rank[0], world_size)

"""The ledger's bytes of one step, compared with the formula's."""

from __future__ import annotations

from collections import defaultdict

from fsdplab.common.sizes import size
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import Row
from fsdplab.figures.style import COLLECTIVE_COLOURS, EDGE, STRATEGY_COLOURS, titled
from fsdplab.figures.view import RunView, how_and_where, ranks_and_device, views
from fsdplab.records import RunRecord

MB = 1e6


def ledger_against_formula(record: RunRecord, rank: int = 0) -> go.Figure:
    """Bytes that one rank sent in its last recorded step, stacked by collective and phase, beside the formula's total.

    `record`: a run record with a `ledger` table. ValueError if the rank recorded no collective.
    """
    rows = [row for row in record.table("ledger") if int(row["rank"]) == rank]
    if not rows:
        raise ValueError(
            f"rank {rank} recorded no collective; a run of one rank sends nothing: use world_size=2 or more"
        )
    last = max(int(row["step"]) for row in rows)
    sent = _by_collective([row for row in rows if int(row["step"]) == last])
    run = views(record)[0]
    figure = go.Figure([_segment(name, nbytes) for name, nbytes in sent.items()])
    if run.formula_bytes:
        figure.add_trace(_formula_bar(run.formula_bytes))
    figure.update_layout(barmode="stack", xaxis_title="bytes sent by one rank in one step (MB)")
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    total = sum(sent.values())
    figure.update_xaxes(range=[0, 1.25 * max(total, run.formula_bytes or 0) / MB])
    for bar, nbytes in (("ledger", total), ("formula", run.formula_bytes)):
        if nbytes:
            figure.add_annotation(
                x=nbytes / MB, y=bar, text=f"<b>{size(nbytes)}</b>", showarrow=False, xanchor="left", xshift=6
            )
    words = "; ".join(f"{name} {size(nbytes)}" for name, nbytes in sent.items())
    alt = f"Two bars. Ledger: {words}. Formula: {size(run.formula_bytes)}."
    return titled(figure, _finding(run, total), _conditions(run, rank, last), alt, height=340)


def _by_collective(rows: list[Row]) -> dict[str, int]:
    """Wire bytes per `"kind in phase"`, in order of first appearance."""
    sent: dict[str, int] = defaultdict(int)
    for row in rows:
        sent[f"{row['kind']} in {row['phase']}"] += int(row["wire_bytes"])
    return dict(sent)


def _segment(name: str, nbytes: int) -> go.Bar:
    """One collective in one phase; the second gather of a step has its own shade."""
    colour = COLLECTIVE_COLOURS.get(name) or COLLECTIVE_COLOURS.get(name.split(" in ")[0], "#808488")
    return go.Bar(
        name=name, orientation="h", y=["ledger"], x=[nbytes / MB],
        marker=dict(color=colour, line=dict(color=EDGE, width=1)),
        hovertemplate=f"{name}: " + "%{x:.3f} MB<extra></extra>",
    )  # fmt: skip


def _formula_bar(nbytes: int) -> go.Bar:
    return go.Bar(
        name="formula", orientation="h", y=["formula"], x=[nbytes / MB], showlegend=False,
        marker=dict(color=STRATEGY_COLOURS["no_shard"], line=dict(color=EDGE, width=1)),
        hovertemplate="formula: %{x:.3f} MB<extra></extra>",
    )  # fmt: skip


def _finding(run: RunView, total: int) -> str:
    if not run.formula_bytes:
        return f"{run.label} sends {size(total)} a step; there is no formula for this engine"
    if total == run.formula_bytes:
        return f"{run.label}: the ledger equals the formula, {size(total)} a step"
    return f"{run.label}: the ledger differs from the formula by {total - run.formula_bytes:+,} bytes a step"


def _conditions(run: RunView, rank: int, step: int) -> str:
    if run.simulated:
        return f"{how_and_where([run])}, rank {rank}; the formula is computed"
    return (
        f"Rank {rank} of {ranks_and_device([run])}, step {step}: counted at every collective; the formula is computed"
    )

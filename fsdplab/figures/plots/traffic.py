"""The ledger's bytes of one step, compared with the formula's."""

from __future__ import annotations

from collections import defaultdict

from fsdplab.common.sizes import size
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import COLLECTIVE_COLOURS, STRATEGY_COLOURS, titled
from fsdplab.figures.view import RunView, how_and_where, ranks_and_device, views
from fsdplab.records import RunRecord

MB = 1e6
_GREY = "#808488"


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
    sent: dict[str, int] = defaultdict(int)  # bytes by "kind in phase", in order of first appearance
    for row in (row for row in rows if int(row["step"]) == last):
        sent[f"{row['kind']} in {row['phase']}"] += int(row["wire_bytes"])
    run, total = views(record)[0], sum(sent.values())
    # the second gather of a step has its own shade
    colours = {
        name: COLLECTIVE_COLOURS.get(name, COLLECTIVE_COLOURS.get(name.split(" in ")[0], _GREY)) for name in sent
    }
    parts = [Part(name, colours[name], [nbytes / MB, 0.0]) for name, nbytes in sent.items()]
    parts += [Part("formula", STRATEGY_COLOURS["no_shard"], [0.0, (run.formula_bytes or 0) / MB])]
    ends = {"ledger": f"<b>{size(total)}</b>", "formula": f"<b>{size(run.formula_bytes)}</b>"}
    figure = stacked_bars(ends, parts, "bytes sent by one rank in one step (MB)", "%{x:.3f} MB")
    figure.data[-1].showlegend = False
    words = "; ".join(f"{name} {size(nbytes)}" for name, nbytes in sent.items())
    alt = f"Two bars. Ledger: {words}. Formula: {size(run.formula_bytes)}."
    return titled(figure, _finding(run, total), _conditions(run, rank, last), alt, 200)


def _finding(run: RunView, total: int) -> str:
    if not run.formula_bytes:
        return f"{run.label} sends {size(total)} a step; there is no formula for this engine"
    if total == run.formula_bytes:
        return f"{run.label}: the ledger equals the formula, {size(total)} a step"
    return f"{run.label}: the ledger differs from the formula by {total - run.formula_bytes:+,} bytes a step"


def _conditions(run: RunView, rank: int, step: int) -> str:
    if run.simulated:
        return f"{how_and_where([run])}, rank {rank}; the formula is computed"
    where = f"Rank {rank} of {ranks_and_device([run])}, step {step}"
    return f"{where}: counted at every collective; the formula is computed"

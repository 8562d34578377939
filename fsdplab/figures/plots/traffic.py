"""The ledger's bytes of one step, compared with the formula's."""

from __future__ import annotations

from collections import defaultdict

from fsdplab.common.sizes import size
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import COLLECTIVE_COLOURS, STRATEGY_COLOURS, titled
from fsdplab.figures.view import how_and_where, ranks_and_device, view
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
    run, total = view(record), sum(sent.values())
    formula = run.summary.formula_bytes_per_step
    # the second gather of a step has its own shade
    kinds = {name: name if name in COLLECTIVE_COLOURS else name.split(" in ")[0] for name in sent}
    parts = [Part(name, COLLECTIVE_COLOURS.get(kinds[name], _GREY), [sent[name] / MB, 0.0]) for name in sent]
    parts += [Part("formula", STRATEGY_COLOURS["no_shard"], [0.0, (formula or 0) / MB])]
    ends = {"ledger": f"<b>{size(total)}</b>", "formula": f"<b>{size(formula)}</b>"}
    figure = stacked_bars(ends, parts, "bytes sent by one rank in one step (MB)", "%{x:.3f} MB")
    figure.data[-1].showlegend = False
    if not formula:
        title = f"{run.label} sends {size(total)} a step; there is no formula for this engine"
    elif total == formula:
        title = f"{run.label}: the ledger equals the formula, {size(total)} a step"
    else:
        title = f"{run.label}: the ledger differs from the formula by {total - formula:+,} bytes a step"
    if run.simulated:
        where = f"{how_and_where([run])}, rank {rank}"
    else:
        where = f"Rank {rank} of {ranks_and_device([run])}, step {last}: counted at every collective"
    words = "; ".join(f"{name} {size(nbytes)}" for name, nbytes in sent.items())
    alt = f"Two bars. Ledger: {words}. Formula: {size(formula)}."
    return titled(figure, title, f"{where}; the formula is computed", alt, 200)

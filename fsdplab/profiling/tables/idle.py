"""Why nothing ran: the part "other" of the steps by cause, a row a rank. The definitions are in `traces/idle`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fsdplab.common.sizes import seconds
from fsdplab.profiling.tables.table import Column, Row, Table
from fsdplab.records.tables import IDLE_PARTS

WORDS = {name: name.removesuffix("_ns").replace("_", " ") for name in IDLE_PARTS} | {
    "rest_ns": "unknown",
    "no_core_ns": "waiting for a core",
}


def idle_time(idle: Sequence[Row], breakdown: Sequence[Row]) -> Table:
    """Nanoseconds of a mean step in which a rank neither computed nor communicated, by cause; the idlest rank first.
    The arguments are rows of a record's tables of these names.

    A step of 100 ms with 62 computing or communicating: the causes sum to 38 ms.
    """
    rows = []
    for rank in sorted({row["rank"] for row in idle}):
        mine, whole = ([row for row in table if row["rank"] == rank] for table in (idle, breakdown))
        parts = {name: fmean(row.get(name) or 0 for row in mine) for name in IDLE_PARTS}
        total, step = sum(parts.values()), fmean(row["step_ns"] for row in whole)
        rows.append({"rank": rank, "idle_ns": total, "share": total / step if step else 0.0, **parts})
    rows.sort(key=lambda row: -row["idle_ns"])
    columns = (
        Column("rank", "rank", "count"), Column("idle_ns", "idle a step", "ns"),
        Column("share", "of the step", "share"),
        *(Column(name, WORDS[name], "ns") for name in IDLE_PARTS if any(row[name] for row in rows)),
    )  # fmt: skip
    if not rows or not rows[0]["idle_ns"]:
        sentence = "No rank was idle: at every instant it computed or communicated."
    else:
        most = max(IDLE_PARTS, key=lambda name: rows[0][name])
        sentence = (
            f"Rank {rows[0]['rank']} is idle for {seconds(rows[0]['idle_ns'] / 1e9)} a step ({rows[0]['share']:.0%}),"
            f" most of it {WORDS[most]}: {seconds(rows[0][most] / 1e9)}."
        )
    return Table("idle", "Idle time by cause", sentence, columns, tuple(rows))

"""Tables of a record's own rows: how fast collectives of each size were, and why ranks were idle.

Bus bandwidth is nccl-tests': bytes/t x (n-1)/n for all_gather and reduce_scatter, twice that for all_reduce, so it can
be compared with the link's figure whatever n is. The time is the shortest of any rank: the last to arrive waited for
nobody. HTA and TraceLens take each rank's own time; theirs is lower where ranks arrive apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median

from fsdplab.common.sizes import seconds, size
from fsdplab.profiling.tables.table import Column, Row, Table
from fsdplab.profiling.traces.meeting import matched
from fsdplab.profiling.traces.skew import bandwidths
from fsdplab.records.tables import IDLE_PARTS

_COLUMNS = (
    Column("kind", "collective"), Column("group", "process group"), Column("ranks", "ranks", "count"),
    Column("size", "message", "bytes"), Column("count", "a step", "count"), Column("time_ns", "time, median", "ns"),
    Column("algbw", "size / time", "bytes/s"), Column("busbw", "bus bandwidth", "bytes/s"),
    Column("of_link", "of the link", "share"),
)  # fmt: skip


def bandwidths_by_size(
    collectives: Sequence[Row], ranks_of_job: int = 2, link_bytes_per_s: float | None = None
) -> Table:
    """One row a collective, process group and size (powers of two), the largest first.

    `collectives` are rows of a record's table of that name, `ranks_of_job` the ranks of a group whose size the trace
    does not say. `link_bytes_per_s`: the link's figure in one direction, where it is known. 8 MB
    gathered over 2 ranks in 1 ms are 8 GB/s, and 4 GB/s on the bus.
    """
    steps, given = len({row["step"] for row in collectives}), {row["rank"] for row in collectives}
    groups: dict[tuple[str, str, int, int], list[tuple[int, int]]] = defaultdict(list)
    took_part: dict[tuple[str, str, int, int], list[int]] = defaultdict(list)
    unknown = 0
    for key, members in matched(collectives).items():
        nbytes = next((row["logical_bytes"] for row in members if row["logical_bytes"]), None)
        if nbytes is None:
            unknown += 1
            continue
        ranks = members[0]["group_size"] or ranks_of_job
        name = key.kind, members[0]["group"], int(ranks), nbytes.bit_length()
        groups[name].append((nbytes, min(row["end_ns"] - row["start_ns"] for row in members)))
        took_part[name] += (row["rank"] for row in members)
    a_step = {name: len(ranks) / len(set(ranks)) / max(1, steps) for name, ranks in took_part.items()}
    rows = [_row(name[:3], found, a_step[name], link_bytes_per_s) for name, found in groups.items()]
    rows.sort(key=lambda row: -row["size"] * row["count"])
    notes = [f"{unknown} collectives are left out: the trace does not say how many bytes they moved."] * bool(unknown)
    if len(given) == 1:
        notes.append("One rank's trace: the times hold waiting for peers, so the link did no worse than this.")
    return Table("bandwidth", "Bandwidth by size", _sentence(rows), _COLUMNS, tuple(rows), tuple(notes))


def _row(
    key: tuple[str, str, int], found: Sequence[tuple[int, int]], count: float, link_bytes_per_s: float | None
) -> Row:
    kind, group, ranks = key
    nbytes, time_ns = fmean(nbytes for nbytes, _ in found), median(ns for _, ns in found)
    algbw, busbw = bandwidths(kind, int(nbytes), int(time_ns), ranks)
    return {
        "kind": kind, "group": group, "ranks": ranks, "size": nbytes, "count": count, "time_ns": time_ns,
        "algbw": algbw, "busbw": busbw,
        "of_link": busbw / link_bytes_per_s if busbw is not None and link_bytes_per_s else None,
    }  # fmt: skip


def _sentence(rows: Sequence[Row]) -> str:
    known = [row for row in rows if row["busbw"] is not None]
    if not known:
        return "The traces do not say how many bytes their collectives moved."
    most = known[0]
    link = f", {most['of_link']:.0%} of what the link can do" if most["of_link"] is not None else ""
    return (
        f"Most bytes travel in {most['kind']} of {size(most['size'])} over {most['ranks']} ranks, at"
        f" {size(most['busbw'])}/s of bus bandwidth{link}."
    )


# ---- why nothing ran: the part "other" of the steps by cause, as `traces/account` defines the causes

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

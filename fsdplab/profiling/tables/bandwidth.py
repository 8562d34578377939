"""Tables of a record's own rows: how fast collectives of each size were, and why ranks were idle.

Bus bandwidth is nccl-tests': bytes/t x (n-1)/n for all_gather and reduce_scatter, twice that for all_reduce, so it can
be compared with the link's figure whatever n is. The time is the shortest of any rank: the last to arrive waited for
nobody. HTA and TraceLens take each rank's own time; theirs is lower where ranks arrive apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from fsdplab.common.sizes import seconds, size
from fsdplab.profiling.tables.table import Column, Row, Table
from fsdplab.profiling.traces.meeting import matched
from fsdplab.profiling.traces.skew import bandwidths
from fsdplab.records.tables import IDLE_PARTS

_COLUMNS = (
    Column("kind", "collective"),
    Column("group", "process group"),
    Column("ranks", "ranks", "count"),
    Column("size", "message", "bytes"),
    Column("count", "a step", "count"),
    Column("time_ns", "time, median", "ns"),
    Column("algbw", "size / time", "bytes/s"),
    Column("busbw", "bus bandwidth", "bytes/s"),
    Column("of_link", "of the link", "share"),
)


def bandwidths_by_size(
    collectives: Sequence[Row], ranks_of_job: int = 2, link_bytes_per_s: float | None = None
) -> Table:
    """One row a collective, process group and size (powers of two), the largest first.

    `collectives` are rows of a record's table of that name, `ranks_of_job` the ranks of a group whose size the trace
    does not say. `link_bytes_per_s`: the link's figure in one direction, where it is known. 8 MB gathered over 2 ranks
    in 1 ms are 8 GB/s, and 4 GB/s on the bus.
    """
    messages: dict[_Messages, list[tuple[int, int]]] = defaultdict(list)  # bytes, and the shortest ns of any rank
    took_part: dict[_Messages, list[int]] = defaultdict(list)
    unknown = 0
    for key, members in matched(collectives).items():
        # one rank's trace may say it where another's does not
        nbytes = next((row["logical_bytes"] for row in members if row["logical_bytes"]), None)
        if nbytes is None:
            unknown += 1
            continue
        ranks = members[0]["group_size"] or ranks_of_job
        # 9 MB and 15 MB have as many bits: one row
        alike = _Messages(key.kind, members[0]["group"], int(ranks), nbytes.bit_length())
        shortest_ns = min(row["end_ns"] - row["start_ns"] for row in members)
        messages[alike].append((nbytes, shortest_ns))
        took_part[alike] += [row["rank"] for row in members]

    steps = max(1, len({row["step"] for row in collectives}))
    rows = []
    for alike, sent in messages.items():
        # of groups with one name all are in this row, and a rank takes part in those of its own only
        ranks_of_all = took_part[alike]
        a_rank = len(ranks_of_all) / len(set(ranks_of_all))
        rows.append(_row(alike, sent, a_rank / steps, link_bytes_per_s))
    rows.sort(key=lambda row: -row["size"] * row["count"])

    notes = []
    if unknown:
        notes.append(f"{unknown} collectives are left out: the trace does not say how many bytes they moved.")
    if len({row["rank"] for row in collectives}) == 1:
        notes.append("One rank's trace: the times hold waiting for peers, so the link did no worse than this.")
    return Table("bandwidth", "Bandwidth by size", _sentence(rows), _COLUMNS, tuple(rows), tuple(notes))


class _Messages(NamedTuple):
    """Collectives of one row: of one kind and process group, between the same powers of two."""

    kind: str
    group: str
    ranks: int
    bits: int


def _row(
    alike: _Messages,
    sent: Sequence[tuple[int, int]],  # of each collective its bytes, and the shortest ns of any rank
    count: float,  # how many a rank has in a step
    link_bytes_per_s: float | None,
) -> Row:
    """A row of the table: the mean size, the median time, and the speeds that follow from these."""
    nbytes = fmean(nbytes for nbytes, _ in sent)
    time_ns = median(ns for _, ns in sent)
    algbw, busbw = bandwidths(alike.kind, int(nbytes), int(time_ns), alike.ranks)
    of_link = None
    if busbw is not None and link_bytes_per_s:
        of_link = busbw / link_bytes_per_s
    return {
        "kind": alike.kind,
        "group": alike.group,
        "ranks": alike.ranks,
        "size": nbytes,
        "count": count,
        "time_ns": time_ns,
        "algbw": algbw,
        "busbw": busbw,
        "of_link": of_link,
    }


def _sentence(rows: Sequence[Row]) -> str:
    """Where most bytes travel, and how fast."""
    known = [row for row in rows if row["busbw"] is not None]
    if not known:
        return "The traces do not say how many bytes their collectives moved."
    most = known[0]
    link = "" if most["of_link"] is None else f", {most['of_link']:.0%} of what the link can do"
    return (
        f"Most bytes travel in {most['kind']} of {size(most['size'])} over {most['ranks']} ranks, at"
        f" {size(most['busbw'])}/s of bus bandwidth{link}."
    )


# ---- why nothing ran: the part "other" of the steps by cause, as `traces/idle_causes` defines the causes

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
        idle_of_rank = [row for row in idle if row["rank"] == rank]
        parts: dict[str, float] = {}  # of each cause the mean over the rank's steps
        for name in IDLE_PARTS:
            parts[name] = fmean(row.get(name) or 0 for row in idle_of_rank)
        total_ns = sum(parts.values())
        step_ns = fmean(row["step_ns"] for row in breakdown if row["rank"] == rank)
        share = total_ns / step_ns if step_ns else 0.0
        rows.append({"rank": rank, "idle_ns": total_ns, "share": share, **parts})
    rows.sort(key=lambda row: -row["idle_ns"])
    columns = [
        Column("rank", "rank", "count"),
        Column("idle_ns", "idle a step", "ns"),
        Column("share", "of the step", "share"),
    ]
    for name in IDLE_PARTS:
        if any(row[name] for row in rows):
            columns.append(Column(name, WORDS[name], "ns"))
    return Table("idle", "Idle time by cause", _idlest(rows), tuple(columns), tuple(rows))


def _idlest(rows: Sequence[Row]) -> str:
    """The rank that is idle longest, and most of its cause."""
    if not rows or not rows[0]["idle_ns"]:
        return "No rank was idle: at every instant it computed or communicated."
    idlest = rows[0]
    most = max(IDLE_PARTS, key=lambda name: idlest[name])
    return (
        f"Rank {idlest['rank']} is idle for {seconds(idlest['idle_ns'] / 1e9)} a step ({idlest['share']:.0%}),"
        f" most of it {WORDS[most]}: {seconds(idlest[most] / 1e9)}."
    )

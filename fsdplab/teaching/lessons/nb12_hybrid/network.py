"""Lesson 12's network, and what the ledger of a run says was sent over it.

P are the bytes of all parameters, s the ranks of a shard group, r the groups that hold the same slices.
"""

from __future__ import annotations

from collections import defaultdict

from fsdplab.records import RunRecord
from fsdplab.workloads import preset

WITHIN, ACROSS = "4GB/s", "400MB/s"


def parameter_bytes(record: RunRecord) -> int:
    """P of a run: the bytes of all parameters in fp32."""
    return 4 * preset(record.spec["model"]).parameters


def groups_of(record: RunRecord) -> tuple[int, int]:
    """(s, r) of a run: under full_shard all ranks are one group."""
    s = record.spec["shard_size"] or record.spec["world_size"]
    return s, record.spec["world_size"] // s


def by_collective(record: RunRecord, rank: int = 0) -> dict[str, tuple[int, float]]:
    """(bytes sent, seconds on the link) by kind of collective, of one rank's last timed step."""
    last = max(row["step"] for row in record.table("steps") if row["step_time_s"] is not None)
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for row in record.table("ledger"):
        if (row["rank"], row["step"]) == (rank, last):
            nbytes, spent = found[row["kind"]]
            found[row["kind"]] = nbytes + row["wire_bytes"], spent + (row["end_ns"] - row["start_ns"]) / 1e9
    return dict(found)


def sent(record: RunRecord) -> dict[str, int]:
    """Bytes that a rank sends in a step: `within` its shard group (gathers, reductions) and `across` the groups
    (all-reduces).
    """
    kinds = by_collective(record)
    across = kinds.get("all_reduce", (0, 0.0))[0]
    return {"within": sum(nbytes for nbytes, _ in kinds.values()) - across, "across": across}


def slow(record: RunRecord) -> int:
    """Bytes that a rank sends at the slow link's pace: a group over both nodes sends everything at it."""
    moved = sent(record)
    return moved["across"] if groups_of(record)[1] > 1 else moved["within"]

"""The part of lesson 12 that runs on the ranks: train on the learner's mesh, behind the links of its nodes.

Which link an axis of the mesh gets follows from where its ranks are: fast if every group of the axis is on one node,
else slow. The time on the links is the emulated clock's: bytes over bandwidth, equal on every machine.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdplab.engine import events, shard_model
from fsdplab.engine.emulation.link import Link, emulate
from fsdplab.engine.transport.selection import forget_destroyed
from fsdplab.teaching.core.collectives_log import collectives

BLOCKS, WIDTH = 4, 64
P = 4 * BLOCKS * WIDTH * WIDTH  # bytes of all parameters
FAST, SLOW = Link(16e6), Link(1.6e6)
Rows = list[list[int]]


def complaint(rows: Any, ranks: int) -> str:
    """Return why these rows are no mesh of so many ranks, or nothing."""
    is_list = isinstance(rows, (list, tuple)) and bool(rows)
    if not is_list or not all(isinstance(row, (list, tuple)) for row in rows):
        return f"expected a list of rows, each a list of ranks, got {repr(rows)[:60]}"
    lengths = [len(row) for row in rows]
    if len(set(lengths)) > 1:
        return f"the rows of a mesh are equally long, got {lengths}"
    if sorted(rank for row in rows for rank in row) != list(range(ranks)):
        return f"each of the ranks 0 to {ranks - 1} belongs to exactly one row, got {str(rows)[:60]}"
    return ""


def on_one_node(groups: Sequence[Sequence[int]], per_node: int) -> bool:
    """Return whether no group spans two nodes; rank k is on node k // per_node."""
    for group in groups:
        nodes = {rank // per_node for rank in group}
        if len(nodes) != 1:
            return False
    return True


def axes(rows: Rows, per_node: int) -> tuple[Link, Link]:
    """Return the links of the shard axis (rows) and of the replica axis (columns)."""
    # of [[0, 1], [2, 3]] the columns are (0, 2) and (1, 3)
    columns = list(zip(*rows))
    within = FAST if on_one_node(rows, per_node) else SLOW
    across = FAST if on_one_node(columns, per_node) else SLOW
    return within, across


def expected_ms(rows: Rows, per_node: int) -> float:
    """Return the communication of a step on the links by the formula, in ms.

    A rank sends 3P(s-1)/s bytes within its row, and 2(P/s)(r-1)/r across.
    """
    r, s = len(rows), len(rows[0])
    within, across = axes(rows, per_node)
    # two all-gathers and a reduce-scatter of all parameters in the row, an all-reduce of a shard in the column
    in_row = 3 * P * (s - 1) / s / within.bytes_per_s
    in_column = 2 * (P / s) * (r - 1) / r / across.bytes_per_s
    return 1e3 * (in_row + in_column)


def on_the_links_ms(rows: Rows, per_node: int) -> float:
    """Train one step on this mesh and add up how long this rank's collectives were on the links."""
    within, across = axes(rows, per_node)
    mesh = DeviceMesh("cpu", torch.tensor(rows), mesh_dim_names=("replicate", "shard"))
    try:
        collectives_of_step = _one_step(mesh, within, across)
    finally:
        _leave(mesh)
    return sum(collective.end_ns - collective.start_ns for collective in collectives_of_step) / 1e6


def _one_step(mesh: DeviceMesh, within: Link, across: Link) -> list[events.Collective]:
    """Return the ledger of one forward and backward; where a row is one rank, the replicas' link is the only one."""
    blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
    model = shard_model(blocks, "hybrid_shard", units=(nn.Linear,), mesh=mesh)
    # a row of one rank shards nothing, and its only messages are between rows
    emulate(model, shard=within if mesh["shard"].size() > 1 else across, replicate=across)
    with collectives() as seen:
        model(torch.ones(1, WIDTH)).sum().backward()
    return seen


def _leave(mesh: DeviceMesh) -> None:
    """Give the groups of a mesh back: each holds files, and a check may try many meshes in one process."""
    dist.barrier()
    # the axis of one row over all ranks may be the world's group, which stays
    for group in {mesh.get_group(axis) for axis in ("replicate", "shard")} - {dist.group.WORLD}:
        dist.destroy_process_group(group)
    forget_destroyed()
    gc.collect()

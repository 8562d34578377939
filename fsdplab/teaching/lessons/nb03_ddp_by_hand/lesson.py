"""Lesson 03, the part in the notebook's process: data parallelism with the learner's functions, beside the twin.

P is the bytes of all parameters and n the number of ranks.
"""

from __future__ import annotations

from fsdplab.common.sizes import size
from fsdplab.teaching.core.display import Table, table
from fsdplab.teaching.core.in_use import owner
from fsdplab.teaching.lessons.by_hand.figures import bucket_figure
from fsdplab.teaching.lessons.by_hand.runs import Faulty, Runs
from fsdplab.teaching.lessons.by_hand.training import MODEL, trained, way

from .bucket_costs import bucket_costs

__all__ = ["bucket_costs", "bucket_figure", "data_parallel", "drift", "faulty"]


def drift(steps: int = 6, world_size: int = 2) -> Table:
    """Train without any message between ranks: how far apart are the ranks' parameters after 1 step, and after all?"""
    found = trained([way("alone", "1 step", steps=1), way("alone", f"{steps} steps")], steps, world_size)
    rows = [[run.name, *(f"{losses[-1]:.4f}" for losses in run.losses_by_rank), f"{run.apart:.4f}"] for run in found]
    header = [
        "after",
        *(f"loss on rank {rank}" for rank in range(world_size)),
        "largest difference of a parameter between ranks",
    ]
    return table(header, rows, f"Measured on {world_size} real ranks: {MODEL}, AdamW, nothing is sent.")


def faulty(exercise: str = "03.small_together", steps: int = 12, world_size: int = 2) -> Faulty:
    """The exercise's faulty version as it was given, beside the twin: losses under AdamW and SGD, and its first
    gradients.
    """
    ways = [way("finish", name, name, exercise=exercise, stub=True, arguments=[]) for name in ("adamw", "sgd")]
    adamw, sgd = trained(ways, steps, world_size)
    return Faulty((adamw, sgd))


def data_parallel(steps: int = 6, bucket_bytes: int = 100_000, world_size: int = 2) -> Runs:
    """The learner's hook and buckets (or the references), torch's DDP and the lab's no_shard, each beside the twin."""
    hook, buckets = "03.average_in_hook", "03.in_buckets"
    cut = f"{owner(buckets)} buckets of {size(bucket_bytes)}"
    ways = [
        way("hook", f"{owner(hook)} hook", exercise=hook),
        way("finish", cut, exercise=buckets, stub=False, arguments=[bucket_bytes]),
        way("ddp", "torch's DDP"),
        way("lab", "the lab's no_shard", strategy="no_shard"),
    ]
    return Runs(tuple(trained(ways, steps, world_size)), "2 P (n-1)/n")

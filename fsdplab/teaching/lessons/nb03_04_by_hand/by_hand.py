"""Lessons 03 and 04, the part in the notebook's process: train a small GPT with the learner's functions, beside the
twin.

Each call starts ranks once and trains every way on them, one after the other: from the same weights, on the same
bundled text, with the same optimizer. P is the bytes of all parameters and n the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdplab.common.sizes import size
from fsdplab.sessions import call_on_ranks
from fsdplab.teaching.core.checking import solution_file
from fsdplab.teaching.core.course_state import current
from fsdplab.teaching.core.display import Table, table
from fsdplab.teaching.core.exercise import Call, Exercise
from fsdplab.teaching.core.registry import find
from fsdplab.teaching.core.waiting import doing
from fsdplab.teaching.core.workspace import Workspace

from .bucket_costs import bucket_costs
from .figures import bucket_figure, gradient_figure
from .runs import Faulty, Run, Runs

__all__ = ["bucket_costs", "bucket_figure", "data_parallel", "drift", "faulty", "gradient_figure", "zero"]

ON_THE_RANKS = Path(__file__).with_name("on_ranks.py")
MODEL = "gpt-tiny"
TIME_LIMIT = 150.0


def drift(steps: int = 6, world_size: int = 2) -> Table:
    """Train without any message between ranks: how far apart are the ranks' parameters after 1 step, and after all?"""
    found = _train([_way("alone", "1 step", steps=1), _way("alone", f"{steps} steps")], steps, world_size)
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
    found = find(exercise, Exercise)
    path = Workspace(current().workspace.path / "reference" / "faulty").save(exercise, found.stub)
    ways = [
        _way("finish", name, name, path=str(path), function=found.function, arguments=[]) for name in ("adamw", "sgd")
    ]
    adamw, sgd = _train(ways, steps, world_size)
    return Faulty((adamw, sgd))


def data_parallel(steps: int = 6, bucket_bytes: int = 100_000, world_size: int = 2) -> Runs:
    """The learner's hook and buckets (or the references), torch's DDP and the lab's no_shard, each beside the twin."""
    hook, buckets = solution_file("03.average_in_hook"), solution_file("03.in_buckets")
    cut = f"{_whose(buckets)} buckets of {size(bucket_bytes)}"
    ways = [
        _way("hook", f"{_whose(hook)} hook", path=str(hook), function="average_in_hook"),
        _way("finish", cut, path=str(buckets), function="in_buckets", arguments=[bucket_bytes]),
        _way("ddp", "torch's DDP"),
        _way("lab", "the lab's no_shard", strategy="no_shard"),
    ]
    return Runs(tuple(_train(ways, steps, world_size)), "2 P (n-1)/n")


def zero(stage: int, steps: int = 6, world_size: int = 2) -> Runs:
    """ZeRO-1 or ZeRO-2 from the learner's three functions of notebook 04, and the lab's strategy of that name."""
    files = {name: solution_file(f"04.{name}") for name in ("rows_of", "reduce_rows", "step_and_gather")}
    whose = "your" if all(_whose(path) == "your" for path in files.values()) else "the reference"
    ways = [
        _way(f"zero{stage}", f"{whose} ZeRO-{stage}") | {name: str(path) for name, path in files.items()},
        _way("lab", f"the lab's zero{stage}", strategy=f"zero{stage}"),
    ]
    return Runs(tuple(_train(ways, steps, world_size)), "2 P (n-1)/n")


def _whose(path: Path) -> str:
    return "your" if path.parent == current().workspace.path else "the reference"


def _way(kind: str, name: str, optimizer: str = "adamw", steps: int | None = None, **needs: Any) -> dict[str, Any]:
    return {"kind": kind, "name": name, "optimizer": optimizer, "steps": steps, **needs}


@doing("training the tiny GPT in several ways, and the twin beside each")
def _train(ways: Sequence[dict[str, Any]], steps: int, world_size: int) -> list[Run]:
    """One launch: every way on the same ranks; one Run a way."""
    payload = {"workspace": str(current().workspace.path), "model": MODEL, "steps": steps, "ways": list(ways)}
    by_rank = call_on_ranks(ON_THE_RANKS, "train", world_size=world_size, payload=payload, time_limit=TIME_LIMIT)
    return [_run(way["name"], [results[index] for results in by_rank]) for index, way in enumerate(ways)]


def _run(name: str, by_rank: Sequence[dict[str, Any]]) -> Run:
    first = by_rank[0]
    return Run(
        name=name,
        losses_by_rank=tuple(tuple(result["losses"]) for result in by_rank),
        twin_losses=tuple(first["twin_losses"]),
        differing=tuple(dict.fromkeys(name for result in by_rank for name in result["differing"])),
        largest=max(result["largest"] for result in by_rank),
        apart=first["apart"],
        calls=tuple(Call(*call) for call in first["calls"]),
        calls_in_backward=first["calls_in_backward"],
        lab=(first["lab_collectives"], first["lab_bytes"]),
        moments=tuple(result["moments"] for result in by_rank),
        parameters=first["parameters"],
        elements=first["elements"],
        ratios=first["ratios"],
        held=tuple(first["held"]),
        ready=tuple(first["ready"]),
        sent=tuple(first["sent"]),
    )

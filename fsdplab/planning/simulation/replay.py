"""A recorded run simulated again: the compute that was measured, on the link that it had, in the engine's own order.

What a simulation of data sheets cannot show is whether operations begin and wait as in a real step. Here compute is no
estimate: each unit's forward and backward take what the trace says. Collectives take what the link's rate and latency
give. Not simulated are the host's time between operations, copies, and waiting for a core, so a measured step is
longer; `Replay` says how much of it these are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdplab.common.errors import UserError
from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.common.rows import grouped
from fsdplab.planning.links import ring_steps
from fsdplab.planning.program import ROOT, Sharing, StepWork, Transfer, UnitWork, step_seconds
from fsdplab.records import RunRecord, known

from .accounting import account
from .simulated_step import simulate_work


class ReplayError(UserError, ValueError):
    """A record that cannot be simulated again; the message is one line."""


@dataclass(frozen=True)
class Replay:
    """A profiled step, in seconds, means over its ranks. `exposed_s`: waiting while bytes were on the link.

    `not_simulated_s` is the part of the measured step that is neither compute nor waiting for the link or a peer.
    """

    step: int
    closed_form_s: float
    simulated_s: float
    measured_s: float
    simulated_exposed_s: float
    measured_exposed_s: float
    not_simulated_s: float


def replays(record: RunRecord) -> Iterator[Replay]:
    """Every profiled step of a run of the lab's engine on CPU ranks with a link; raises ReplayError for others.

    >>> from fsdplab.common.places import shared_folder
    >>> (found,) = replays(RunRecord.load(shared_folder("data") / "traces-08"))
    >>> round(found.simulated_exposed_s / found.measured_exposed_s, 2)
    1.08
    """
    _check(record)
    for step, measured in sorted(grouped(record.table("breakdown"), lambda row: row["step"]).items()):
        mean = {name: sum(row[name] for row in measured) / len(measured) / 1e9 for name in _PARTS}
        work = _work_of(record, step, len(measured))
        found = simulate_work(work, communicators=known(record.summary.link).queues or 1)
        exposed_s = account(found.logs[0], 0).exposed_ns / 1e9
        rest_s = mean["step_ns"] - mean["compute_ns"] - mean["on_link_ns"] - mean["waiting_ns"]
        yield Replay(
            step, step_seconds(work), found.step_s, mean["step_ns"], exposed_s, mean["on_link_ns"], rest_s
        )  # fmt: skip


_PARTS = ("step_ns", "compute_ns", "on_link_ns", "waiting_ns")


def _check(record: RunRecord) -> None:
    spec, link, name = record.spec, record.summary.link, record.path.name
    if spec.get("strategy") not in STRATEGY_ROWS or not isinstance(spec.get("world_size"), int):
        raise ReplayError(f"{name} names no strategy and number of ranks that are known here; give a run of the lab")
    if record.status != "finished" or spec.get("engine") != "lab" or not record.table("breakdown"):
        raise ReplayError(f"{name} is no finished run of the lab's engine with profiled steps; record one: --profile 1")
    if record.environment.get("device", "cpu") != "cpu" or link is None or link.across or link.bytes_per_s is None:
        raise ReplayError(f"{name} has no link whose rate is known; record a run on CPU ranks with one: --link 400MB/s")


def _work_of(record: RunRecord, step: int, seen: int) -> StepWork:
    """The units as they computed in that step on the mean of so many ranks, and what they sent."""
    spec, ranks = record.spec, record.spec["world_size"]
    passes = seen * spec.get("micro_batches", 1)
    seconds: dict[tuple[str, str], float] = {}
    for row in record.table("timeline"):
        if row["step"] == step and row["lane"] == "compute":
            key = (row["unit"] if row["phase"] in ("forward", "backward") and row["unit"] else ROOT, row["phase"])
            seconds[key] = seconds.get(key, 0.0) + (row["end_ns"] - row["start_ns"]) / 1e9
    sent: dict[str, dict[str, Transfer]] = {}
    for row in record.table("ledger"):
        if row["step"] == step and row["rank"] == 0 and row["phase"] != "optimizer":
            sent.setdefault(row["unit"], {})[row["kind"]] = _transfer(record, row["kind"], row["wire_bytes"])
    if ROOT not in sent:
        raise ReplayError(
            f"{record.path.name} has no collective of its root in step {step}; give a run whose ranks send"
        )
    units = [
        UnitWork(
            name,
            seconds.get((name, "forward"), 0.0) / passes,
            seconds.get((name, "backward"), 0.0) / passes,
            sent[name],
        )
        for name in sorted(sent, key=_place)
    ]
    shard = spec.get("shard_size") or ranks
    return StepWork(
        units[0], tuple(units[1:]), seconds.get((ROOT, "optimizer"), 0.0) / seen, prefetch=spec.get("prefetch", 1),
        micro_batches=spec.get("micro_batches", 1), shards=shard, replicas=ranks // shard,
        sharing=Sharing.of(spec["strategy"], shard, ranks // shard, streams=False),
    )  # fmt: skip


def _transfer(record: RunRecord, kind: str, wire_bytes: int) -> Transfer:
    link = known(record.summary.link)
    latency_s = (link.latency_s or 0.0) * ring_steps(kind, record.spec["world_size"])
    return Transfer(kind, wire_bytes, known(link.bytes_per_s), latency_s)


def _place(unit: str) -> tuple[int, str]:
    """The root first, then blocks by their numbers."""
    number = unit.rpartition(".")[2]
    return (int(number) + 1, unit) if number.isdigit() else (0 if unit == ROOT else 10**6, unit)

"""Steps that somebody measured beside the same steps simulated: published runs like a plan's, and recorded runs.

A simulation and the closed form are one program with equal inputs, so that they agree says nothing of either. These
are the figures that are not this package's own.

A recorded run is simulated again with the compute that was measured, on the link that it had, in the engine's own
order: each unit's forward and backward take what the trace says, and collectives what the link's rate and latency give.
Not simulated are the host's time between operations, copies, and waiting for a core, so a measured step is longer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdplab.common.errors import UserError
from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.common.rows import grouped
from fsdplab.planning.links import ring_steps
from fsdplab.planning.program import ROOT, Sharing, StepWork, Transfer, UnitWork, step_seconds
from fsdplab.records import RunRecord, known

from .bands import kind_of
from .plan_spec import PlanSpec
from .published import FIT, HELD_OUT, SEEN, SPEED, Case, closed_form_s, read_published, step_s, timed
from .simulation import simulate_work, work_of
from .simulation.simulated_step import account

STEP, SIMULATED_PARTS, EXPOSED = "step", "of it compute and link", "exposed on the link"
RECORDED = "recorded here"
_EACH = 3  # runs of fitted sources, and of held-out ones
# what counts as far as one e-fold of a size does
_OTHER_KIND, _OTHER_GPU, _OTHER_STRATEGY, _OTHER_CHECKPOINTING = 4.0, 1.0, 0.5, 0.5


@dataclass(frozen=True)
class Measured:
    """One quantity of one run, in seconds: in closed form, simulated, and measured by others or on ranks.

    `part`: whether constants were fitted to its source, or it was held out; RECORDED where it ran with this package.
    """

    run: str
    source: str
    part: str
    quantity: str
    closed_form_s: float | None
    simulated_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """Simulated over measured."""
        return self.simulated_s / self.measured_s

    @property
    def seconds(self) -> tuple[float | None, float, float]:
        """In closed form, simulated, measured."""
        return self.closed_form_s, self.simulated_s, self.measured_s

    def as_dict(self) -> dict[str, Any]:
        """Return all figures for `--json`."""
        return {**asdict(self), "ratio": self.ratio}


def published_like(spec: PlanSpec, path: Path) -> list[Measured]:
    """Return the published steps nearest to a plan's: of sources that were fitted, then of held-out ones."""
    cases, _ = read_published(path)
    simulable = [case for case in timed(cases) if case.spec.pipeline_parallel == 1]
    nearest_first = sorted(simulable, key=lambda case: _distance(case.spec, spec))
    rows = []
    for part in (FIT, HELD_OUT):
        of_part = [case for case in nearest_first if _part(case) == part]
        rows += [_published(case) for case in of_part[:_EACH]]
    return rows


def simulated_s(spec: PlanSpec) -> float:
    """Return the seconds of a plan's simulated step."""
    return simulate_work(work_of(spec).shared(streams=True)).step_s


def _published(case: Case) -> Measured:
    measured_s = case.spec.step_tokens / (case.tokens_per_s or math.nan) / case.spec.gpus
    return Measured(
        case.id,
        case.source,
        _part(case),
        STEP,
        closed_form_s=step_s(case, closed_form_s),
        simulated_s=step_s(case, simulated_s),
        measured_s=measured_s,
    )


def _part(case: Case) -> str:
    return FIT if case.source in SEEN[SPEED] else HELD_OUT


def _distance(one: PlanSpec, other: PlanSpec) -> float:
    """How unlike two jobs are: e-folds of their sizes, and what is another."""
    sizes = zip(_sizes(one), _sizes(other))
    far = sum(abs(math.log(size / other_size)) for size, other_size in sizes)
    return (
        far
        + _OTHER_KIND * (kind_of(one) != kind_of(other))
        + _OTHER_GPU * (one.gpu.name != other.gpu.name)
        + _OTHER_STRATEGY * (one.strategy != other.strategy)
        + _OTHER_CHECKPOINTING * (one.checkpointing != other.checkpointing)
    )


def _sizes(spec: PlanSpec) -> tuple[float, ...]:
    return spec.model.parameters, spec.gpus, spec.seq, spec.micro_batch * spec.seq


def spread(rows: Iterable[Measured]) -> tuple[float, float, float]:
    """Return the middle, the least and the largest of simulated over measured."""
    ratios = [row.ratio for row in rows]
    return statistics.median(ratios), min(ratios), max(ratios)


# ---- recorded runs


class ReplayError(UserError, ValueError):
    """A record that cannot be simulated again; the message is one line."""


def recorded(record: RunRecord, name: str = "") -> list[Measured]:
    """Simulate every profiled step of a run of the lab's engine on CPU ranks with a link: three rows of each.

    The rows are means over its ranks: the step, what of it is compute or waiting for the link or a peer, and waiting
    while bytes were on the link. Raises ReplayError for other runs. Without a `name` the run has its folder's.

    >>> from fsdplab.common.places import shared_folder
    >>> _, _, exposed = recorded(RunRecord.load(shared_folder("data") / "traces-08"))
    >>> round(exposed.ratio, 2)
    1.08
    """
    _check(record)
    source = f"{record.spec['model']} on {record.spec['world_size']} CPU ranks, {record.spec['strategy']}"
    quantities = []
    by_step = grouped(record.table("breakdown"), lambda row: row["step"])
    for step, rows in sorted(by_step.items()):
        work = _work_of(record, step, len(rows))
        simulated = simulate_work(work, communicators=known(record.summary.link).queues or 1)
        exposed_s = account(simulated.logs[0], 0).exposed_ns / 1e9
        measured_s = _mean_s(rows, "step_ns")
        on_link_s = _mean_s(rows, "on_link_ns")
        parts_s = _mean_s(rows, "compute_ns") + on_link_s + _mean_s(rows, "waiting_ns")
        run = f"{name or record.path.name}, step {step}"
        quantities += [
            Measured(run, source, RECORDED, STEP, step_seconds(work), simulated.step_s, measured_s),
            Measured(run, source, RECORDED, SIMULATED_PARTS, None, simulated.step_s, parts_s),
            Measured(run, source, RECORDED, EXPOSED, None, exposed_s, on_link_s),
        ]
    return quantities


def _mean_s(rows: Sequence[Mapping[str, Any]], column: str) -> float:
    """The mean over ranks of a column of nanoseconds, in seconds."""
    return sum(row[column] for row in rows) / len(rows) / 1e9


def _check(record: RunRecord) -> None:
    spec, link, name = record.spec, record.summary.link, record.path.name
    if spec.get("strategy") not in STRATEGY_ROWS or not isinstance(spec.get("world_size"), int):
        raise ReplayError(f"{name} names no strategy and number of ranks that are known here; give a run of the lab")
    if record.status != "finished" or spec.get("engine") != "lab" or not record.table("breakdown"):
        raise ReplayError(f"{name} is no finished run of the lab's engine with profiled steps; record one: --profile 1")
    has_known_link = link is not None and not link.across and link.bytes_per_s is not None
    if record.environment.get("device", "cpu") != "cpu" or not has_known_link:
        raise ReplayError(f"{name} has no link whose rate is known; record a run on CPU ranks with one: --link 400MB/s")


def _work_of(record: RunRecord, step: int, seen: int) -> StepWork:
    """The units as they computed in that step on the mean of so many ranks, and what they sent."""
    spec, ranks = record.spec, record.spec["world_size"]
    micro_batches = spec.get("micro_batches", 1)
    seconds = _computed_s(record, step)
    sent = _sent_by(record, step, ranks)
    if ROOT not in sent:
        raise ReplayError(
            f"{record.path.name} has no collective of its root in step {step}; give a run whose ranks send"
        )
    passes = seen * micro_batches
    units = []
    for name in sorted(sent, key=_place):
        forward_s = seconds.get((name, "forward"), 0.0) / passes
        backward_s = seconds.get((name, "backward"), 0.0) / passes
        units.append(UnitWork(name, forward_s, backward_s, sent[name]))
    root, *blocks = units
    shard = spec.get("shard_size") or ranks
    return StepWork(
        root,
        tuple(blocks),
        seconds.get((ROOT, "optimizer"), 0.0) / seen,
        prefetch=spec.get("prefetch", 1),
        micro_batches=micro_batches,
        shards=shard,
        replicas=ranks // shard,
        sharing=Sharing.of(spec["strategy"], shard, ranks // shard, streams=False),
    )


def _computed_s(record: RunRecord, step: int) -> dict[tuple[str, str], float]:
    """Seconds of compute of all ranks by unit and phase; what belongs to no unit's passes is the root's."""
    seconds: dict[tuple[str, str], float] = {}
    for row in record.table("timeline"):
        if row["step"] == step and row["lane"] == "compute":
            in_a_pass = row["phase"] in ("forward", "backward")
            unit = row["unit"] if in_a_pass and row["unit"] else ROOT
            key = (unit, row["phase"])
            seconds[key] = seconds.get(key, 0.0) + (row["end_ns"] - row["start_ns"]) / 1e9
    return seconds


def _sent_by(record: RunRecord, step: int, ranks: int) -> dict[str, dict[str, Transfer]]:
    """The collectives of each unit in that step by kind, as rank 0 sent them over the record's link."""
    link = known(record.summary.link)
    sent: dict[str, dict[str, Transfer]] = {}
    for row in record.table("ledger"):
        if row["step"] == step and row["rank"] == 0 and row["phase"] != "optimizer":
            latency_s = (link.latency_s or 0.0) * ring_steps(row["kind"], ranks)
            transfer = Transfer(row["kind"], row["wire_bytes"], known(link.bytes_per_s), latency_s)
            sent.setdefault(row["unit"], {})[row["kind"]] = transfer
    return sent


def _place(unit: str) -> tuple[int, str]:
    """The root first, then blocks by their numbers, then other units."""
    number = unit.rpartition(".")[2]
    if number.isdecimal():
        return int(number) + 1, unit
    return (0 if unit == ROOT else 10**6), unit

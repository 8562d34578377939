"""Answers `fsdplab plan simulate`: a step, event by event, beside the closed form, and as a page with its timeline.

The two are one program, so below them stand steps that others measured, simulated in the same way: published runs like
the one that is asked for, and runs that were recorded with this package.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdplab import figures
from fsdplab.cli.answer import Answer, Line, Table
from fsdplab.cli.plan.step import provenance
from fsdplab.common.places import shared_folder
from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.common.words import MISSING, plural
from fsdplab.planning.measured import EXPOSED, SIMULATED_PARTS, STEP, Measured, published_like, spread
from fsdplab.planning.measured import recorded as recorded_steps
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.planner import Plan, plan_of, plan_spec
from fsdplab.planning.simulation import simulate
from fsdplab.planning.step_time import peak_flops
from fsdplab.records import RunRecord, comparison_json, known

# runs of data/ with profiled steps and a link
_RECORDS = ("traces-08", "lesson-07/early", "lesson-07/late", "lesson-10/tunnel", "wind-tunnel-8b")
_ON_A_BUSY_MACHINE = "; wind-tunnel-8b ran on a machine that did much other work"
_NOT_SIMULATED = (
    "Compute is as measured, and the link's rate is known; copies, the host's time between operations, and waiting for"
    " a core are not simulated"
)
_FIELDS = ("step_time_s", "tokens_per_s", "peak_memory_bytes", "comm", "formula_bytes_per_step", "simulated")


def simulation_answer(settings: dict[str, Any], record: Path | None) -> Answer:
    """Simulate one step of a plan and steps that were measured, beside the closed form; the page has the timeline.

    `record` is the folder of a recorded run to take in place of those of `data/`.
    """
    spec = plan_spec(**settings)
    peak_flops(spec.gpu)  # refuses a GPU whose FLOP/s are not known
    began = time.perf_counter()
    plan = plan_of(spec)
    simulated = simulate(spec)
    took = time.perf_counter() - began

    columns = ("of one step", "simulated", "closed form", "difference")
    rows = [_row(*quantity) for quantity in _quantities(plan, simulated)]
    where = "the first column is simulated, the second predicted in closed form"
    published, recorded = _published(spec), _recorded(record)
    parts = (
        Table(columns, rows, words=("of one step",)),
        Line(_how(simulated, took), "simulated"),
        provenance([plan], where),
        *_beside_measured(published, recorded, of_the_lab=record is None),
    )
    summary = simulated.summary.as_dict()
    data = {
        "simulated": {name: summary[name] for name in summary if name in _FIELDS},
        "closed_form": plan.as_dict(),
        "provenance": simulated.provenance,
        "measured": [row.as_dict() for row in (*published, *recorded)],
    }
    return Answer(parts, data, lambda: figures.comparison_page(comparison_json([simulated]), [simulated]))


def _published(spec: PlanSpec) -> list[Measured]:
    table = shared_folder("data") / "published.csv"
    if not table.exists():
        return []
    return published_like(spec, table)


def _recorded(record: Path | None) -> list[Measured]:
    """Simulate the steps of a recorded run, or of the lab's own recorded runs."""
    if record:
        return recorded_steps(RunRecord.load(record))
    rows: list[Measured] = []
    for name in _RECORDS:
        folder = shared_folder("data") / name
        if folder.exists():
            rows += recorded_steps(RunRecord.load(folder), name)
    return rows


def _beside_measured(
    published: Sequence[Measured], recorded: Sequence[Measured], of_the_lab: bool
) -> Iterator[Line | Table]:
    """Yield the measured steps one by one, and the spread of every quantity.

    `of_the_lab`: the recorded runs are those of `data/`.
    """
    columns = ("a step that was measured", "closed form", "simulated", "measured", "simulated / measured")
    rows = []
    for measured in (*published, *recorded):
        # parts of a step are in the spreads below
        if measured.quantity == STEP:
            rows.append((measured.run, *map(seconds, measured.seconds), f"{measured.ratio:.2f}"))
    if rows:
        yield Table(columns, rows, words=columns[:1], folds=columns[:1])
    if published:
        sources = ", ".join(dict.fromkeys(f"{row.source}: {row.part}" for row in published))
        yield Line(f"simulated / measured {_spread(published, STEP)} ({sources})", "published runs most like this")
    if recorded:
        quantities = ", ".join(f"{name} {_spread(recorded, name)}" for name in (STEP, SIMULATED_PARTS, EXPOSED))
        note = _ON_A_BUSY_MACHINE if of_the_lab else ""
        yield Line(f"simulated / measured: {quantities}. {_NOT_SIMULATED}{note}", "recorded runs")


def _spread(rows: Sequence[Measured], quantity: str) -> str:
    middle, least, most = spread(row for row in rows if row.quantity == quantity)
    return f"{middle:.2f} in the middle, {least:.2f} to {most:.2f}"


def _row(name: str, write: Callable[[float], str], simulated: float, closed: float) -> Sequence[str]:
    difference = MISSING
    if closed:
        # 1.03 s beside 1.00 s: +3.0 %
        percent = round(100 * (simulated / closed - 1), 1)
        difference = f"{percent or 0:+.1f}%"  # `or 0` turns -0.0 into 0
    return name, write(simulated), write(closed), difference


def _quantities(plan: Plan, record: RunRecord) -> Iterator[tuple[str, Callable[[float], str], float, float]]:
    """Yield (quantity, how it is written, simulated, closed form)."""
    assert plan.time is not None, "a GPU without FLOP/s was refused before"
    summary = record.summary
    compute_s = record.table("breakdown")[0]["compute_ns"] / 1e9
    yield "step", seconds, known(summary.step_time_s.median), plan.time.step_s
    yield "compute", seconds, compute_s, plan.time.compute_s
    # the closed form may be below 0 by rounding
    yield "exposed communication", seconds, known(summary.comm.exposed_s), max(0.0, plan.time.exposed_s)
    sent = sum(row.step_bytes for row in plan.traffic)
    yield "sent by a rank", size, known(summary.comm.bytes_per_step), sent
    speed = known(summary.tokens_per_s) / plan.spec.gpus
    yield "tokens/s a GPU", three_digits, speed, plan.tokens_per_s_per_gpu or 0.0
    peak = known(summary.peak_memory_bytes.total)
    yield "peak memory of a rank", size, peak, plan.memory.peak.total


def _how(record: RunRecord, took: float) -> str:
    """Say how much was simulated, and what the memory is."""
    simulated = known(record.summary.simulated)
    ranks = sum(simulated.ranks.values())
    noun = "rank" if ranks == 1 else "ranks"
    return (
        f"{ranks:,} {noun} of {plural(len(simulated.ranks), 'kind')},"
        f" {simulated.operations:,} events with the engine's own schedule, in {seconds(took)}; memory is the closed"
        " form's, at the instants that the simulation gives it"
    )

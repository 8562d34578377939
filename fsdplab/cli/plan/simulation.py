"""`fsdplab plan simulate`: a step, event by event, beside the closed form, and as a page with its timeline.

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
    """One step of a plan, simulated, beside the closed form, and measured steps simulated; the page has the timeline.

    `record` is the folder of a recorded run to take in place of those of `data/`.
    """
    spec = plan_spec(**settings)
    peak_flops(spec.gpu)
    began = time.perf_counter()
    found, simulated = plan_of(spec), simulate(spec)
    took = time.perf_counter() - began
    columns = ("of one step", "simulated", "closed form", "difference")
    where = "the first column is simulated, the second predicted in closed form"
    published, recorded = _published(spec), _recorded(record)
    parts = (
        Table(columns, [_row(*pair) for pair in _pairs(found, simulated)], words=("of one step",)),
        Line(_how(simulated, took), "simulated"),
        provenance([found], where),
        *_beside_measured(published, recorded, record is not None),
    )
    data = {
        "simulated": {name: part for name, part in simulated.summary.as_dict().items() if name in _FIELDS},
        "closed_form": found.as_dict(),
        "provenance": simulated.provenance,
        "measured": [each.as_dict() for each in (*published, *recorded)],
    }
    return Answer(parts, data, lambda: figures.comparison_page(comparison_json([simulated]), [simulated]))


def _published(spec: PlanSpec) -> list[Measured]:
    table = shared_folder("data") / "published.csv"
    return published_like(spec, table) if table.exists() else []


def _recorded(own: Path | None) -> list[Measured]:
    if own:
        return recorded_steps(RunRecord.load(own))
    found = {name: shared_folder("data") / name for name in _RECORDS}
    return [row for name, path in found.items() if path.exists() for row in recorded_steps(RunRecord.load(path), name)]


def _beside_measured(published: Sequence[Measured], recorded: Sequence[Measured], own: bool) -> Iterator[Line | Table]:
    """Steps one by one, and the spread of every quantity; `own`: the recorded run is not of `data/`."""
    columns = ("a step that was measured", "closed form", "simulated", "measured", "simulated / measured")
    steps = [each for each in (*published, *recorded) if each.quantity == STEP]
    rows = [(each.run, *map(seconds, each.seconds), f"{each.ratio:.2f}") for each in steps]
    if rows:
        yield Table(columns, rows, words=columns[:1], folds=columns[:1])
    if published:
        sources = ", ".join(dict.fromkeys(f"{each.source}: {each.part}" for each in published))
        yield Line(f"simulated / measured {_spread(published, STEP)} ({sources})", "published runs most like this")
    if recorded:
        quantities = ", ".join(f"{name} {_spread(recorded, name)}" for name in (STEP, SIMULATED_PARTS, EXPOSED))
        note = "" if own else _ON_A_BUSY_MACHINE
        yield Line(f"simulated / measured: {quantities}. {_NOT_SIMULATED}{note}", "recorded runs")


def _spread(rows: Sequence[Measured], quantity: str) -> str:
    middle, least, most = spread(each for each in rows if each.quantity == quantity)
    return f"{middle:.2f} in the middle, {least:.2f} to {most:.2f}"


def _row(name: str, write: Callable[[float], str], simulated: float, closed: float) -> Sequence[str]:
    apart = round(100 * (simulated / closed - 1), 1) if closed else None
    return name, write(simulated), write(closed), MISSING if apart is None else f"{apart or 0:+.1f}%"


def _pairs(found: Plan, record: RunRecord) -> Iterator[tuple[str, Callable[[float], str], float, float]]:
    """(quantity, how it is written, simulated, closed form)."""
    assert found.time is not None, "a GPU without FLOP/s was refused before"
    comm, split = record.summary.comm, record.table("breakdown")[0]
    yield "step", seconds, known(record.summary.step_time_s.median), found.time.step_s
    yield "compute", seconds, split["compute_ns"] / 1e9, found.time.compute_s
    yield "exposed communication", seconds, known(comm.exposed_s), max(0.0, found.time.exposed_s)
    yield "sent by a rank", size, known(comm.bytes_per_step), sum(row.step_bytes for row in found.traffic)
    speed = known(record.summary.tokens_per_s) / found.spec.gpus
    yield "tokens/s a GPU", three_digits, speed, found.tokens_per_s_per_gpu or 0.0
    peak = known(record.summary.peak_memory_bytes.total)
    yield "peak memory of a rank", size, peak, found.memory.peak.total


def _how(record: RunRecord, took: float) -> str:
    simulated = known(record.summary.simulated)
    ranks = sum(simulated.ranks.values())
    return (
        f"{ranks:,} {'rank' if ranks == 1 else 'ranks'} of {plural(len(simulated.ranks), 'kind')},"
        f" {simulated.operations:,} events with the engine's own schedule, in {seconds(took)}; memory is the closed"
        " form's, at the instants that the simulation gives it"
    )

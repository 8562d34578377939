"""`fsdplab plan simulate`: a step, event by event, beside the closed form, and as a page with its timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fsdplab.cli.answer import Answer, Line, Table
from fsdplab.cli.plan.provenance import provenance
from fsdplab.common.sizes import seconds, size, three_digits
from fsdplab.common.words import MISSING, plural
from fsdplab.planning.planner import Plan, plan_of, plan_spec
from fsdplab.planning.simulation import simulate
from fsdplab.planning.step_time import peak_flops
from fsdplab.records import RunRecord, comparison_json, known

_FIELDS = ("step_time_s", "tokens_per_s", "peak_memory_bytes", "comm", "formula_bytes_per_step", "simulated")


def simulation_answer(settings: dict[str, Any]) -> Answer:
    """One step of a plan, simulated, beside the closed form; the page has its timeline."""
    spec = plan_spec(**settings)
    peak_flops(spec.gpu)
    began = time.perf_counter()
    found, record = plan_of(spec), simulate(spec)
    took = time.perf_counter() - began
    columns = ("of one step", "simulated", "closed form", "difference")
    where = "the first column is simulated, the second predicted in closed form"
    parts = (
        Table(columns, [_row(*pair) for pair in _pairs(found, record)], words=("of one step",)),
        Line(_how(record, took), "simulated"),
        provenance([found], where),
    )
    simulated = {name: part for name, part in record.summary.as_dict().items() if name in _FIELDS}

    def page() -> str:
        from fsdplab.figures import comparison_page

        return comparison_page(comparison_json([record]), [record])

    data = {"simulated": simulated, "closed_form": found.as_dict(), "provenance": record.provenance}
    return Answer(parts, data, page)


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

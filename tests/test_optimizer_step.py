"""The optimizer's step as a phase: its seconds from the tables of a record, the finding on it, and wrong input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdplab.planning.hardware import find_gpu
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.simulation import simulate
from fsdplab.profiling.findings import Finding, findings
from fsdplab.profiling.step_summary import OptimizerStep, optimizer_step
from fsdplab.records import RunRecord
from fsdplab.records.tables import IDLE_PARTS
from fsdplab.sessions import RunSpec
from fsdplab.sessions.steady_card import steady
from fsdplab.workloads.shapes import model

pytestmark = pytest.mark.quick
MS = 1_000_000


def record(stepping: int, exchange: int = 0, **spec: Any) -> RunRecord:
    """One step of 100 ms: a forward of 50, `stepping` of the optimizer, `exchange` of it exposed, and a rest."""
    where = {"rank": 0, "step": 7}
    parts = dict.fromkeys(("copying_ns", "waiting_ns", "no_core_ns"), 0)
    computed = 50 + stepping - exchange
    breakdown = {
        **where, "step_ns": 100 * MS, "compute_ns": computed * MS, "compute_only_ns": computed * MS, "overlapped_ns": 0,
        "exposed_ns": exchange * MS, "other_ns": (100 - computed - exchange) * MS, "on_link_ns": exchange * MS, **parts,
    }  # fmt: skip
    span = {**where, "lane": "compute", "name": "", "emulated": False}
    timeline = [
        {**span, "unit": "blocks.0", "phase": "forward", "start_ns": 0, "end_ns": 50 * MS},
        {**span, "unit": "", "phase": "optimizer", "start_ns": 60 * MS, "end_ns": (60 + stepping - exchange) * MS},
        {
            **span,
            "step": 1,
            "unit": "",
            "phase": "optimizer",
            "start_ns": 0,
            "end_ns": 900 * MS,
        },  # of the memory's step
    ]
    exposed = {
        **where, "unit": "optimizer", "phase": "optimizer", "kind": "all_to_all", "communication_ns": exchange * MS,
        "exposed_ns": exchange * MS, "cause": "nothing_to_hide_behind", "on_link_ns": exchange * MS, **parts,
    }  # fmt: skip
    idle = {**where, **dict.fromkeys(IDLE_PARTS, 0), "rest_ns": breakdown["other_ns"]}
    tables = {"breakdown": [breakdown], "timeline": timeline, "exposed": [exposed], "idle": [idle]}
    known = {"strategy": "full_shard", "engine": "lab", "world_size": 2, "optimizer": "adamw", **spec}
    return RunRecord(Path("made"), spec=known, environment={"device": "cpu"}, tables=tables)


def on_the_optimizer(found: list[Finding]) -> Finding | None:
    return next((each for each in found if each.kind == "optimizer_step"), None)


def test_the_phase_is_what_it_computes_and_what_it_exposes() -> None:
    assert optimizer_step(record(30, 12).tables, 0) == OptimizerStep(0.030, 0.012)
    assert optimizer_step(record(30, 12).tables, 0).exchanging == 0.4
    assert optimizer_step(record(30).tables, 0) == OptimizerStep(0.030, 0.0)


@pytest.mark.parametrize("gone", ["breakdown", "timeline"])
def test_without_its_tables_nothing_is_said(gone: str) -> None:
    made = record(30)
    assert optimizer_step({**made.tables, gone: []}, 0) is None
    assert optimizer_step(made.tables, 5) is None, "a rank that was not profiled"


def test_a_long_step_of_muon_says_how_much_of_it_exchanges_matrices() -> None:
    found = on_the_optimizer(findings(record(31, 12, optimizer="muon")))
    assert found.title == "The optimizer's step takes 31 % of the step (31.0 ms), 39 % of it exchanging matrices"
    assert found.of == "step" and "Newton-Schulz" in found.text and found.remedy.startswith("Give each step more work")
    stock = on_the_optimizer(findings(record(31, 12, optimizer="muon", engine="torch-fsdp2")))
    assert "whole_matrices" in stock.remedy


def test_a_long_step_of_adamw_has_no_exchange() -> None:
    found = on_the_optimizer(findings(record(25, strategy="no_shard", optimizer="adamw-foreach")))
    assert found.title == "The optimizer's step takes 25 % of the step (25.0 ms)"
    assert found.remedy.startswith("Take the fused AdamW") and "shard it over more ranks" in found.remedy


def test_a_short_step_is_not_worth_a_finding() -> None:
    assert on_the_optimizer(findings(record(15))) is None


@pytest.mark.parametrize(
    "spec", [{"strategy": None}, {"strategy": "of their own"}, {"optimizer": None, "engine": None}]
)
def test_a_record_of_other_programs_is_said_too(spec: dict[str, Any]) -> None:
    assert on_the_optimizer(findings(record(31, **spec))).remedy


def test_a_planned_step_of_muon_shows_its_exchange() -> None:
    adamw, muon = (
        simulate(PlanSpec(model=model("llama-3.1-8b"), gpu=find_gpu("h100-80gb"), gpus=16, optimizer=name))
        for name in ("adamw", "muon")
    )
    plain, found = optimizer_step(adamw.tables, 0), optimizer_step(muon.tables, 0)
    assert plain.exchange_s == 0 and found.exchange_s > 0 and found.seconds > plain.seconds
    told = findings(steady(RunSpec(model="gpt-20m", optimizer="muon", link="150MB/s")))
    assert told[0].title == "The optimizer's step takes 54 % of the step (1.01 s), 14 % of it exchanging matrices"

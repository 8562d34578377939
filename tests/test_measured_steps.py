"""`fsdplab plan simulate` beside what was measured: recorded runs simulated again, and published runs like a plan's."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplab import cli
from fsdplab.cli.plan.simulation import _RECORDS
from fsdplab.common.sizes import seconds
from fsdplab.planning.measured import (
    EXPOSED,
    SIMULATED_PARTS,
    STEP,
    ReplayError,
    published_like,
    recorded,
    simulated_s,
    spread,
)
from fsdplab.planning.planner import plan_spec
from fsdplab.planning.published import FIT, HELD_OUT, closed_form_s, read_published, timed
from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec
from fsdplab.sessions.steady_card import steady

DATA = Path(__file__).parents[1] / "data"
pytestmark = pytest.mark.quick


@pytest.mark.parametrize("prefetch", (0, 1))
@pytest.mark.parametrize("strategy", ("no_shard", "zero2", "shard_grad_op", "full_shard"))
def test_a_step_that_was_itself_simulated_is_found_again(strategy: str, prefetch: int) -> None:
    """Compute, link, order and micro-batches are taken from the record as they are: nothing is left to differ."""
    spec = RunSpec(strategy=strategy, model="gpt-20m", link="100MB/s", prefetch=prefetch, world_size=2, micro_batches=2)
    record = replace(steady(spec), environment={"device": "cpu"})
    step, parts, exposed = recorded(record)
    step_s = record.summary.step_time_s.median
    assert step.measured_s == pytest.approx(step_s, rel=1e-6)
    assert step.simulated_s == pytest.approx(step_s, rel=1e-4)
    assert exposed.simulated_s == pytest.approx(exposed.measured_s, rel=1e-3)
    assert step.measured_s - parts.measured_s < 1e-4


def test_the_recorded_run_on_a_quiet_machine_is_within_a_tenth() -> None:
    rows = {row.quantity: row for row in recorded(RunRecord.load(DATA / "traces-08"))}
    assert list(rows) == [STEP, SIMULATED_PARTS, EXPOSED]
    breakdown = RunRecord.load(DATA / "traces-08").table("breakdown")
    assert rows[STEP].measured_s == pytest.approx(sum(row["step_ns"] for row in breakdown) / 2e9)
    assert rows[EXPOSED].measured_s == pytest.approx(sum(row["on_link_ns"] for row in breakdown) / 2e9)
    # eight collectives of 764,160 bytes in all at 18.75 MB/s, none of them hidden: nothing is gathered ahead
    assert rows[EXPOSED].simulated_s == pytest.approx(764_160 / 18.75e6, rel=0.01)
    assert all(abs(row.ratio - 1) < 0.1 for row in rows.values())


def test_the_table_in_the_text_is_what_is_found() -> None:
    text = (DATA.parent / "docs" / "planning.md").read_text(encoding="utf-8")
    for row in recorded(RunRecord.load(DATA / "traces-08")):
        told = f"| {row.quantity} | {seconds(row.simulated_s)} | {seconds(row.measured_s)} | {row.ratio:.2f} |"
        assert told in text, told
    others = [row for name in _RECORDS[1:] for row in recorded(RunRecord.load(DATA / name))]
    for words, quantity in (("their steps", STEP), ("compute and link of it", SIMULATED_PARTS)):
        _, least, most = spread(row for row in others if row.quantity == quantity)
        assert f"{words} at {least:.2f} to {most:.2f}" in " ".join(text.split()), (quantity, least, most)
    step, parts, _ = recorded(RunRecord.load(DATA / "traces-08"))
    assert f"are {1 - parts.measured_s / step.measured_s:.0%} of the measured step".replace("%", " %") in text


def test_what_cannot_be_simulated_again_is_refused_in_a_sentence(tmp_path: Path, capsys) -> None:
    record = RunRecord.load(DATA / "traces-08")
    with pytest.raises(ReplayError, match="traces-08 .* --link 400MB/s"):
        recorded(replace(record, summary=replace(record.summary, link=None)))
    with pytest.raises(ReplayError, match="traces-08 .* --profile 1"):
        recorded(replace(record, spec={**record.spec, "engine": "torch-ddp"}))
    with pytest.raises(ReplayError, match="traces-08 .* strategy"):
        recorded(replace(record, spec={**record.spec, "strategy": 3}))
    with pytest.raises(ReplayError, match="traces-08 .* step 7"):
        recorded(replace(record, tables={**record.tables, "ledger": []}))
    for folder in (tmp_path / "none", shutil.copytree(DATA / "figures", tmp_path / "figures")):
        with pytest.raises(SystemExit) as end:
            cli.main(["plan", "simulate", "--record", str(folder)])
        said = capsys.readouterr().err
        assert end.value.code == 2 and said.count("\n") == 1 and str(folder) in said


def test_published_runs_are_those_most_like_the_plan() -> None:
    rows = published_like(plan_spec("llama-3.1-70b", "h100", gpus=64, checkpointing="full"), DATA / "published.csv")
    assert [row.part for row in rows] == [FIT] * 3 + [HELD_OUT] * 3
    assert all("70b" in row.run for row in rows)
    middle, least, most = spread(rows)
    assert least <= middle <= most and least > 0.7 and most < 1.3


def test_closed_form_and_simulation_of_published_runs_are_one_within_a_hundredth() -> None:
    """So the errors of tests/plan_validation.py are the simulation's; not all, as each takes up to a second."""
    cases, _ = read_published(DATA / "published.csv")
    few = [case for case in timed(cases) if case.spec.model.layers * case.spec.grad_accum <= 80]
    short = [case for case in few if case.spec.pipeline_parallel == 1]
    assert len(short) > 60
    for case in short:
        assert simulated_s(case.spec) == pytest.approx(closed_form_s(case.spec), rel=0.01), case.id


def test_the_command_prints_and_writes_the_same_rows(tmp_path: Path, capsys) -> None:
    path = tmp_path / "found.json"
    with pytest.raises(SystemExit) as end:
        cli.main(["plan", "simulate", "--model", "llama-3.1-8b", "--json", str(path)])
    out, rows = capsys.readouterr().out, json.loads(path.read_text())["measured"]
    assert not end.value.code and [row["part"] for row in rows[:6]] == [FIT] * 3 + [HELD_OUT] * 3
    assert {row["run"].partition(",")[0] for row in rows[6:]} == set(_RECORDS)
    for row in rows:
        assert row["run"] in out and row["ratio"] == row["simulated_s"] / row["measured_s"]
    assert (
        "published runs most like this: simulated / measured" in out
        and "recorded runs: simulated / measured: step" in out
    )
    with pytest.raises(SystemExit):
        cli.main(["plan", "simulate", "--record", str(DATA / "traces-08"), "--json", str(path)])
    own = [row for row in json.loads(path.read_text())["measured"] if row["part"] not in (FIT, HELD_OUT)]
    assert {row["run"] for row in own} == {"traces-08, step 7"} and len(own) == 3

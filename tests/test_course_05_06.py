"""Notebooks 05 and 06: what the references give, and the learner's engine is the twin's equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdplab.figures import alt_text, ledger_against_formula
from fsdplab.records.summary import Comm
from fsdplab.sessions import Failure
from fsdplab.teaching import one_unit, whole_model
from fsdplab.teaching.core import cell_runs, checking, functions_in_use, registry
from fsdplab.teaching.core.comm_log import bytes_sent
from fsdplab.teaching.core.course_state import open_course
from fsdplab.teaching.core.exercise import Call
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.run_submission import behaviours
from fsdplab.teaching.lessons.nb06_whole_model.lesson import CHOICES, ledger, plan
from fsdplab.workloads import preset
from tests.solutions import right_answers

choosing = registry.find("06.choose_units").module()


# --- what the references give


def seen(workspace, exercise):
    """What the first case shows of the reference, by rank."""
    found = registry.find(exercise)
    (seen,) = behaviours([(found, workspace.save(exercise, found.reference))], workspace)
    workspace.file_of(exercise).unlink()
    return [trial.returned for trial in seen.trials[0]]


def test_golden_values(workspace):
    shards = seen(workspace, "05.shard")
    assert [facts["own rows"][:, 0].tolist() for facts in shards] == [[1, 3, 5], [7, 9, 11], [13]]
    assert shards[2]["padding"].tolist() == [[0, 0]] * 2 and shards[2]["bytes behind it"] == 3 * 2 * 4
    assert seen(workspace, "05.unshard")[1]["rows of whole"].flatten().tolist() == list(range(1, 15))
    assert seen(workspace, "05.reshard")[0] == {
        "bytes behind whole": 0,
        "bytes behind what autograd kept": 0,
        "shape": [7, 2],
    }
    assert seen(workspace, "05.guarded")[0]["the guard"] == "returns"
    mean = seen(workspace, "05.reduce")[
        2
    ]  # (1 + 11 + 21) / 3 = 11 times the row 13.5, 14.5, whose multiples of 3 were given
    assert mean["rows"].tolist() == [[3 * 11 * 13.5, 3 * 11 * 14.5]] and not mean["padding"].any()
    assert (
        registry.find("06.hooks").expected["bytes unsharded at the peak"]
        == plan("gpt-tiny", CHOICES["every block"]).peak
    )


def test_reading_a_dropped_tensor_ends_a_process_not_the_notebook(course, capsys):
    one_unit.read_dropped()
    assert "SIGSEGV" in capsys.readouterr().out


# --- one layer and whole models with the functions in use


def test_the_parts_in_use_follow_the_checks(course, capsys):
    own = registry.find("05.shard").reference + "\n# mine\n"
    course.workspace.save("05.shard", own)
    assert functions_in_use.whose("05.shard") == "with the reference shard", "saved, but its check has not passed"
    course.workspace.note_pass("05.shard", own)
    checking.use("05.shard", "05.unshard")
    said = capsys.readouterr().out
    assert "using your shard" in said and "using the reference unshard" in said
    assert 'HERE / "05.shard.py"' in (course.workspace.path / "in_use.py").read_text()
    assert functions_in_use.functions("05.shard")["shard"].__code__.co_filename == str(
        course.workspace.file_of("05.shard")
    )
    course.workspace.file_of("05.shard").unlink()


def test_a_layer_lives_and_equals_the_whole_one(course):
    life = one_unit.life_of_a_layer(rows=33, columns=8, world_size=2)
    assert life.differences == {"output": 0.0, "sharded gradient": 0.0}
    by_moment = {moment["moment"]: moment for moment in life.moments}
    whole, mine = 33 * 8 * 4, 17 * 8 * 4
    assert [
        by_moment[name]["unsharded_parameters"] for name in ("unshard", "reshard", "unshard again", "reshard again")
    ] == [whole, 0, whole, 0]
    assert by_moment["at rest again"]["sharded_gradients"] == by_moment["shard (at rest)"]["sharded_parameters"] == mine
    assert life.peak_megabytes == (mine + whole + whole) / 1e6, "in backward: shard, weight and unsharded gradient"
    assert "unsharded" in alt_text(one_unit.layer_figure(life)).lower()


@pytest.fixture(scope="module")
def training(course):
    return whole_model.train("gpt-tiny", steps=4)


def test_the_learners_engine_equals_the_twin_and_the_lab(training):
    assert training.losses["my_fsdp"] == training.losses["twin"] == training.losses["lab"]
    assert len(training.losses["twin"]) == 4 and training.losses["twin"][-1] < training.losses["twin"][0]
    for name in ("my_fsdp", "lab"):
        assert training.differs[name] == {"largest": 0.0, "floats": 0, "of": 141_056}


@pytest.mark.timeout(300)
def test_the_learners_engine_beside_ddp_and_fully_shard(course):
    """The same losses to the last bit, and the peak that sharding leaves."""
    beside = whole_model.beside_ddp(steps=2)
    assert beside.losses["my_fsdp"] == beside.losses["DDP"] == beside.losses["fully_shard"]
    states = 16 * preset("gpt-20m").parameters / 1e6
    mine, ddp, torchs = map(beside.megabytes, ("my_fsdp", "DDP", "fully_shard"))
    assert ddp > states > max(mine, torchs) > states / 2 and mine < ddp / 2
    assert f"{mine:.0f}" in str(beside) and "my_fsdp with the reference shard" in str(beside)


@pytest.mark.timeout(300)
def test_fully_shard_takes_the_engines_place_and_prints_the_same_losses(course, capsys):
    whole_model.take_engine()
    path = Path(__file__).parents[1] / "notebooks" / "05_one_sharded_unit.ipynb"
    sources = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]
    mine, torchs = (source for source in sources if "range(5)" in source)
    assert "sharded(model)" in mine and "fully_shard(module" in torchs
    printed = []
    for cell in (mine, torchs):
        capsys.readouterr()
        cell_runs.run_ranks("2", cell.partition("\n")[2])
        printed.append(sorted(line for line in capsys.readouterr().out.splitlines() if "loss" in line))
    assert printed[0] == printed[1] and len(printed[0]) == 10


def test_its_collectives_are_the_formulas_and_the_labs(training):
    summaries = [training.records[name].summary for name in ("my_fsdp", "lab")]
    assert [summary.comm.collectives_per_step for summary in summaries] == [training.plan.collectives] * 2 == [8, 8]
    assert [summary.comm.bytes_per_step for summary in summaries] == [training.plan.traffic(2)] * 2
    mine, lab = (
        sorted(
            (row["unit"], row["phase"], row["kind"], row["logical_bytes"])
            for row in training.records[name].table("ledger")
            if row["step"] == 3
        )
        for name in ("my_fsdp", "lab")
    )
    assert mine == lab


def test_its_gathered_bytes_are_the_arithmetics(training):
    assert training.mine.summary.gathered_bytes == training.plan.peak
    assert training.records["lab"].summary.gathered_bytes >= training.plan.peak, "the lab gathers one unit ahead"
    assert "141,056" in str(training) and "formula" in training._repr_html_()


def test_an_engine_of_other_right_answers_is_the_twins_equal_too(course, tmp_path):
    """What a learner passed with is what runs in 06, and their engine sends what the formula says."""
    own = open_course("learner", tmp_path / "my_fsdp").workspace
    for exercise in (item for notebook in ("05", "06") for item in registry.items_of(notebook)):
        if isinstance(exercise, Exercise) and (solved := right_answers(exercise)):
            source = solved.get("one tensor", [*solved.values()][-1])
            own.save(exercise.id, source)
            own.note_pass(exercise.id, source)
    try:
        run = whole_model.train("gpt-tiny", steps=2, engines=("mine", "twin"))
    finally:
        open_course("learner", course.workspace.path)
    assert run.whose == "with your shard, unshard, guarded, reduce, hooks and the reference reshard"
    assert run.losses["my_fsdp"] == run.losses["twin"] and run.differs["my_fsdp"]["largest"] == 0
    assert run.mine.summary.comm == Comm(bytes_per_step=run.plan.traffic(2), collectives_per_step=8)


def test_its_figures_say_what_they_show(training):
    figure = whole_model.gathered_figure(training)
    assert "unshard blocks.1" in alt_text(figure) and len(figure.data) == 3
    assert "equals the formula" in ledger_against_formula(training.mine).layout.title.text
    assert "every block" in alt_text(
        whole_model.choices_figure(
            target=choosing.TARGET, choose_units=lambda name, module: name.endswith((".attention", ".feed_forward"))
        )
    )


# --- units by arithmetic


def test_plans_of_units():
    blocks = plan("gpt-tiny", CHOICES["every block"])
    assert [name for name, _ in blocks.units] == ["blocks.1", "blocks.0", "root"] and blocks.collectives == 8
    nested = plan("gpt-tiny", lambda name, module: type(module).__name__ == "GPTBlock" or name.endswith("feed_forward"))
    assert nested.peak == blocks.peak, "a unit inside a unit does not lower the peak: both are gathered"
    whole = plan("gpt-tiny", CHOICES["the whole model"])
    assert whole.peak == 4 * 141_056 and whole.traffic(2) == 2 * whole.peak // 2
    with pytest.raises(ValueError, match="never called"):
        plan("gpt-tiny", lambda name, module: name == "blocks")


def test_the_target_wants_a_choice():
    """Neither the ready-made choices nor nesting meet it."""
    target, limit = choosing.TARGET, choosing.LIMIT
    for is_unit in CHOICES.values():
        each = plan("gpt-20m", is_unit)
        assert each.peak > target or each.collectives > limit


def test_bytes_that_calls_send():
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv")
    assert [bytes_sent(Call(kind, 12), 3) for kind in kinds] == [8, 24, 16, 8, 12, 0]
    row = {"step": 0, "phase": "forward", "unit": "root", "what": "unshard", "calls": [("all_gather", 12)], "bytes": 4}
    (kept,) = ledger([row, {**row, "what": "reshard"}], 3)
    assert (kept["kind"], kept["logical_bytes"], kept["wire_bytes"]) == ("all_gather", 12, 8)


def test_rows_that_each_rank_keeps():
    own, padding = one_unit.rows_figure(4, 3).data
    assert list(zip(own.y, own.text)) == [("rank 0", "0"), ("rank 0", "1"), ("rank 1", "2"), ("rank 1", "3")]
    assert list(padding.y) == ["rank 2"] * 2
    assert "c = 2, 2 padding rows, 1 rank without a row" in one_unit.rows_figure(4, 3).layout.title.text
    assert "padding" in alt_text(one_unit.rows_figure(64, 8)) and len(one_unit.rows_figure(64, 8).data[0].x) == 64


def test_a_crash_of_the_ranks_is_still_the_feedback(course):
    failure = Failure("died", "Rank 0 died: it ended with SIGSEGV.", 0)
    assert "crash" in checking.feedback_on_failure(registry.find("06.hooks"), failure).cause

"""Notebook 08: the recorded trace says what the questions ask, the account is judged by its parts, and known slips are
named.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdplab.profiling.diagnosis import findings
from fsdplab.profiling.exports import export_perfetto, export_tensorboard
from fsdplab.profiling.traces.overlap import analyse_trace
from fsdplab.records import RecordError
from fsdplab.teaching import reading
from fsdplab.teaching.core import answers, registry
from fsdplab.teaching.core.exercise import Choice, Exercise, Question
from fsdplab.teaching.lessons.nb08_reading_traces.on_ranks import drive_account
from tests.solutions import must_name_each_slip, solutions_of

ITEMS = registry.items_of("08")
ACCOUNT = registry.find("08.account", Exercise)
QUESTIONS = [item for item in ITEMS if isinstance(item, Question)]
CHOICES = [item for item in ITEMS if isinstance(item, Choice)]
RIGHT = {
    "the lab's own algebra": (
        "from fsdplab.profiling.intervals import intersect, length, subtract, union\n\n\ndef account(step, computing,"
        " communicating):\n    work, talk = union(computing), union(communicating)\n    return"
        " dict(overlapped=length(intersect(work, talk)), exposed=length(subtract(talk, work)),\n               "
        " compute_only=length(subtract(work, talk)), other=step - length(union(work, talk)))\n"
    ),
    "a sweep over edges": (
        "def account(step, computing, communicating):\n    edges = sorted([(t, w, d) for w, pairs in"
        " enumerate((computing, communicating)) for a, b in pairs for t, d in ((a, 1), (b, -1))])\n    parts, depth,"
        " last = [0, 0, 0, 0], [0, 0], 0\n    for t, which, change in [*edges, (step, 0, 0)]:\n        parts[2 *"
        " (depth[0] > 0) + (depth[1] > 0)] += t - last\n        depth[which] += change\n        last = t\n    return"
        " {'other': parts[0], 'exposed': parts[1], 'compute_only': float(parts[2]), 'overlapped': parts[3]}\n"
    ),
}


@pytest.fixture(scope="module")
def record():
    return reading.recorded()


SOLUTIONS = solutions_of([ACCOUNT], {ACCOUNT.id: RIGHT})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("solution", SOLUTIONS, ids=str)
def test_right_accounts_pass_and_wrong_ones_are_diagnosed(tried, solution):
    solution.must_report(tried[solution.key], names_rank=False)


def test_the_reference_gives_the_record_its_breakdown(record):
    namespace: dict = {}
    exec(ACCOUNT.reference, namespace)
    for rank in (0, 1):
        step, computing, communicating = reading.sets(record, rank)
        parts, row = namespace["account"](step, computing, communicating), reading.breakdown(record, rank)
        assert (
            parts
            == {name: row[f"{name}_ns"] for name in reading.PARTS}
            == drive_account(reading.reference_account, step, computing, communicating)
        )
        assert sum(parts.values()) == step == row["step_ns"]


@pytest.mark.parametrize("item", QUESTIONS, ids=lambda item: item.id)
def test_questions_accept_the_right_number_and_name_each_slip(course, record, item):
    must_name_each_slip(item, record)
    assert answers.grade_answer(item.id, f"{item.right(record)} ms", record).passed


def test_the_recorded_trace_is_as_the_choices_say(record):
    worst = reading.worst(record)
    assert (worst["unit"], worst["phase"], worst["kind"]) == ("blocks.0", "backward", "all_gather")  # 08.where c
    assert worst["cause"] in ("late_start", "link_busy")  # 08.cause b
    rows = {(row["unit"] or "root", row["phase"], row["kind"]): row for row in analyse_trace(
        reading.trace_of(record), ledger=record.table("ledger"), life=record.table("life"), rank=0
    ).rows("collectives")}  # fmt: skip
    gather, reduction = rows["blocks.0", "backward", "all_gather"], rows["blocks.1", "backward", "reduce_scatter"]
    assert gather["issue_ns"] < reduction["end_ns"] <= gather["start_ns"], (
        "it stands behind the reduce-scatter of blocks.1"
    )
    others = [row["exposed_ns"] for row in reading.gaps(record)[1:] if row["kind"] == "all_gather"]
    assert worst["exposed_ns"] > 1.3 * max(others)
    assert "no_prefetch" in [finding.kind for finding in findings(record)[:2]]
    ends = {
        (row["unit"] or "root", row["kind"]): row["cause"]
        for row in reading.gaps(record)
        if row["unit"] in ("", "root")
    }
    assert ends["root", "reduce_scatter"] == "nothing_to_hide_behind"  # 08.unavoidable b


def test_a_second_analysis_of_the_file_gives_the_record(record):
    for rank in (0, 1):
        again = analyse_trace(
            reading.trace_of(record, rank), ledger=record.table("ledger"), life=record.table("life"), rank=rank
        ).rows("breakdown")[-1]
        assert {**again, "step": 0} == {**reading.breakdown(record, rank), "step": 0}


def test_tables_say_what_the_record_holds(record):
    assert "FSDP::pre_forward (root)" in str(reading.ranges(reading.trace_of(record)))
    assert "blocks.0" in str(reading.transfers(record)) and "late start" in str(reading.key(record))
    assert "are exposed" in str(reading.seen(record)) and "gathers set out too late" in str(reading.diagnosis(record))
    instants = " ".join(str(reading.at(record, percent)) for percent in range(0, 100, 4))
    assert "compute only" in instants and "exposed" in instants
    row = reading.breakdown(record)
    table = reading.account_table(record, {name: row[f"{name}_ns"] for name in reading.PARTS})
    assert all(cells[1] == cells[2] for cells in table.rows)


def test_the_record_is_small_and_tells_of_no_machine(record):
    files = [path for path in Path(reading.RECORDED).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
    assert "/tmp" not in json.dumps([record.spec, record.environment]) and record.provenance["link"] == "emulated"


def test_exports_lie_where_the_notebook_says(course, record, tmp_path):
    run = export_tensorboard(record, tmp_path / "tensorboard")
    assert run.parent == tmp_path / "tensorboard" and len(list(run.glob("*.pt.trace.json.gz"))) == 2
    assert export_perfetto(record, tmp_path / "both.json.gz").stat().st_size > 10_000
    assert reading.exports().is_dir()


def test_a_missing_record_is_said_so(monkeypatch, tmp_path):
    monkeypatch.setattr(reading, "RECORDED", tmp_path / "nowhere")
    with pytest.raises(RecordError, match="install fsdplab again"):
        reading.recorded()

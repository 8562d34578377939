"""Notebook 08: the recorded trace says what the questions ask, and waits are split by cause."""

from __future__ import annotations

import json

import pytest

from fsdplab.profiling.exports import export_perfetto, export_tensorboard, traces_of
from fsdplab.profiling.findings import findings
from fsdplab.profiling.traces.overlap import analyse_trace
from fsdplab.teaching import reading
from fsdplab.teaching.core import registry
from fsdplab.teaching.core.exercise import Question
from fsdplab.teaching.core.recorded import recorded
from tests.lesson_cells import run_cell
from tests.solutions import function_of, in_all_cases, must_name_each_slip

ITEMS = registry.items_of("08")
WAITED = registry.find("08.waited")
QUESTIONS = [item for item in ITEMS if isinstance(item, Question)]


@pytest.fixture(scope="module")
def record():
    return recorded("traces-08")


def test_the_expected_splits_are_right():
    """(peer, queue, link) of every case, counted by hand."""
    by_hand = [(0, 0, 5), (4.5, 0, 4.75), (0, 4.25, 4.75), (2.5, 2.5, 5), (0, 0, 5)]
    by_hand += [(0, 0, 2), (0, 2, 5), (4, 0, 5), (0, 0, 0)]
    assert in_all_cases(WAITED) == [dict(zip(reading.WAITS, parts)) for parts in by_hand]


def test_the_reference_splits_the_recorded_waits(record):
    rows = reading.waits_table(record, function_of(WAITED)).rows
    assert len(rows) == 8
    for *_, peer, queue, link, exposed, _cause in rows:
        assert float(peer) + float(queue) + float(link) == pytest.approx(float(exposed), abs=0.7)
    key = run_cell("08", "heatmap", record=record, messages=reading.gaps(record), show=lambda figure: None)["_"]
    causes = {row[:3]: row[-1] for row in key.rows}
    assert all(row[-1] == causes[row[:3]] for row in rows), "one cause for one wait, in both tables"
    longest = max(rows, key=lambda row: float(row[6]))
    assert longest[:3] == ("blocks.0", "backward", "all_gather") and float(longest[4]) > 4 > 1 > float(longest[3])


def test_the_trace_is_as_the_text_tells_it(record):
    """The copy comes before the emulated link lets the rank go on; two clocks differ, as the table says."""
    ranges = run_cell("08", "ranges", record=record)["ranges"]
    begun = [event["name"] for event in ranges if "(blocks.0)" in event["name"]]
    first = [name.split()[0].removeprefix("FSDP::") for name in begun[:4]]
    assert first == ["pre_forward", "all_gather", "all_gather_copy_out", "link"]
    table = reading.transfers(record)
    early = [float(row[3]) - float(row[4]) for row in table.rows]
    assert 0 < max(early) < 0.2 and "clock and the link's differ by up to 0.06 ms" in table.caption
    waits = reading.waits_table(record, function_of(WAITED)).rows
    assert min(float(cell) for row in waits for cell in row[3:6]) >= 0


def test_the_parts_sum_to_the_step(record, capsys):
    row = run_cell("08", "bar", record=record, ask=lambda name, against: None)["row"]
    assert sum(row[f"{name}_ns"] for name in reading.PARTS) == row["step_ns"] and row == reading.breakdown(record)
    assert f"{row['step_ns'] / 1e6:.1f} ms" in capsys.readouterr().out


@pytest.mark.parametrize("item", QUESTIONS, ids=lambda item: item.id)
def test_questions_accept_the_right_number_and_name_each_slip(course, record, item):
    must_name_each_slip(item, record)


def test_the_recorded_trace_is_as_the_choices_say(record):
    worst = reading.worst(record)
    assert (worst["unit"], worst["phase"], worst["kind"]) == ("blocks.0", "backward", "all_gather")  # 08.where c
    assert worst["cause"] in ("late_start", "link_busy")  # 08.cause b
    rows = {(row["unit"] or "root", row["phase"], row["kind"]): row for row in analyse_trace(
        traces_of(record)[0], ledger=record.table("ledger"), life=record.table("life"), rank=0
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
            traces_of(record)[rank], ledger=record.table("ledger"), life=record.table("life"), rank=rank
        ).rows("breakdown")[-1]
        assert {**again, "step": 0} == {**reading.breakdown(record, rank), "step": 0}


def test_tables_say_what_the_record_holds(record, capsys):
    names = [event["name"] for event in run_cell("08", "ranges", record=record)["ranges"]]
    assert names[:2] == ["FSDP::root_pre_forward", "FSDP::pre_forward (root)"]
    assert "blocks.0" in str(reading.transfers(record))
    run_cell("08", "findings", record=record)
    assert "All-gathers are issued too late" in capsys.readouterr().out
    instants = " ".join(str(reading.at(record, percent)) for percent in range(0, 100, 4))
    assert "compute only" in instants and "exposed" in instants


def test_the_record_is_small_and_tells_of_no_machine(record):
    files = [path for path in record.path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
    assert "/tmp" not in json.dumps([record.spec, record.environment]) and record.provenance["link"] == "emulated"


def test_exports_lie_where_the_notebook_says(course, record, tmp_path):
    run = export_tensorboard(record, tmp_path / "tensorboard")
    assert run.parent == tmp_path / "tensorboard" and len(list(run.glob("*.pt.trace.json.gz"))) == 2
    assert export_perfetto(record, tmp_path / "both.json.gz").stat().st_size > 10_000
    assert reading.exports().is_dir()

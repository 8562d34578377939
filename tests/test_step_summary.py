"""A profiled step is summed in one place: the bar, the findings, the table and JSON cannot disagree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdplab import figures
from fsdplab.figures.table import COLUMNS, cells
from fsdplab.figures.view import views
from fsdplab.profiling.findings import findings
from fsdplab.profiling.step_summary import StepSummary, exposed_cells, exposure, step_summary, summaries
from fsdplab.records import RunRecord, Spread, Summary, comparison_json
from fsdplab.records.summary import Comm

pytestmark = pytest.mark.quick
MS = 1_000_000


def row(rank: int, step: int, exposed: int, hidden: int = 5, compute: int = 45) -> dict[str, int]:
    """A step of 100 ms."""
    return {
        "rank": rank, "step": step, "step_ns": 100 * MS, "compute_ns": compute * MS,
        "compute_only_ns": (compute - hidden) * MS, "overlapped_ns": hidden * MS, "exposed_ns": exposed * MS,
        "other_ns": (100 - compute - exposed) * MS,
    }  # fmt: skip


ROWS = [row(rank, step, exposed - rank) for rank in (0, 1) for step, exposed in ((10, 10), (11, 10), (12, 40))]


def test_the_parts_are_the_step():
    for summary in summaries(ROWS).values():
        parts = summary.compute_only_ns + summary.overlapped_ns + summary.exposed_ns + summary.other_ns
        assert parts == pytest.approx(summary.step_ns) and summary.steps == 3
        assert summary.compute_only_ns + summary.overlapped_ns == pytest.approx(summary.compute_ns)


def test_the_rank_that_is_exposed_longest_stands_for_the_run():
    assert step_summary(ROWS).rank == 0 and step_summary(ROWS).exposed_ns == 20 * MS
    assert step_summary([row(1, 7, 9), row(0, 7, 9)]).rank == 0, "the first of equals"
    assert step_summary([row(1, 7, 9), row(0, 7, 8)]).rank == 1
    assert step_summary([]) is None and summaries([]) == {}


def test_what_is_hidden_is_a_part_of_communication():
    assert step_summary([row(0, 7, 15)]).hidden == pytest.approx(0.25)
    assert StepSummary(0, 1, 10, 10, 10, 0, 0, 0).hidden is None


def test_bar_findings_and_table_show_one_number(tmp_path: Path):
    """Exposed for 10, 10 and 40 ms: 20 ms everywhere."""
    exposed = [
        {
            "rank": 0, "step": step, "unit": "blocks.0", "phase": "backward", "kind": "reduce_scatter",
            "communication_ns": (each + 5) * MS, "exposed_ns": each * MS, "cause": "nothing_to_hide_behind",
        }
        for step, each in ((10, 10), (11, 10), (12, 40))
    ]  # fmt: skip
    record = RunRecord(
        tmp_path, spec={"strategy": "zero2", "engine": "lab", "world_size": 2, "prefetch": 1},
        tables={"breakdown": ROWS, "exposed": exposed},
    )  # fmt: skip
    assert exposure(ROWS)["exposed_s"] == pytest.approx(0.020) and exposure(ROWS)["overlap"] == pytest.approx(0.2)
    (finding,) = [each for each in findings(record) if each.kind == "nothing_to_hide_behind"]
    assert finding.seconds == pytest.approx(0.020)
    assert finding.title.count("20.0 ms") == 2, "the only collective of its kind costs what all of them cost"
    bar = figures.step_bar(record)
    (segment,) = [trace for trace in bar.data if trace.name == "exposed"]
    assert list(segment.x) == [pytest.approx(20.0)] and "20.0 ms" in bar.layout.title.text


def test_cells_are_means_over_all_profiled_steps_with_one_cause():
    rows = [
        {"unit": "a", "phase": "forward", "kind": "all_gather", "communication_ns": 9, "exposed_ns": 6,
         "cause": cause, "on_link_ns": 1, "copying_ns": 2, "waiting_ns": 3}
        for cause in ("late_start", "link_busy", "link_busy")
    ]  # fmt: skip
    (cell,) = exposed_cells(rows, steps=3)
    assert (cell.exposed_ns, cell.on_link_ns, cell.copying_ns, cell.waiting_ns) == (6, 1, 2, 3)
    assert (cell.communication_ns, cell.cause) == (9, "link_busy"), "the cause of most of it"
    assert cell.shown_cause == "link_busy", "neither copying nor waiting is more than half of it"
    assert [exposed_cells([rows[0] | {"copying_ns": 4, "waiting_ns": 1}], 1)[0].shown_cause,
            exposed_cells([rows[0] | {"copying_ns": 1, "waiting_ns": 4}], 1)[0].shown_cause,
            ] == ["copying", "waiting_for_peer"]  # fmt: skip
    (seldom,) = exposed_cells(rows[:1], steps=3)
    assert seldom.exposed_ns == 2, "a collective of one step in three counts a third"
    del rows[0]["waiting_ns"]
    (older,) = exposed_cells(rows[:1], steps=1)
    assert (older.on_link_ns, older.waiting_ns) == (6, 0), "earlier records: by the cause alone"


def split(record: RunRecord) -> RunRecord:
    """The record with parts: on the link 12 ms, copying 5 and waiting 3, in every row the same shares."""
    for table in ("breakdown", "exposed"):
        for each in record.table(table):
            exposed = each["exposed_ns"]
            each |= {"on_link_ns": exposed * 12 // 20, "copying_ns": exposed // 4, "waiting_ns": exposed * 3 // 20}
    record.summary = replace(record.summary, comm=Comm(**exposure(record.table("breakdown"))))
    return record


def recorded(tmp_path: Path, name: str, shorter: int, step_s: float) -> RunRecord:
    rows = [row(rank, step, exposed - shorter) for rank in (0, 1) for step, exposed in ((10, 20), (11, 40))]
    exposed = [
        {"rank": each["rank"], "step": each["step"], "unit": "", "phase": "backward", "kind": "all_reduce",
         "communication_ns": each["exposed_ns"], "exposed_ns": each["exposed_ns"], "cause": "late_start"}
        for each in rows
    ]  # fmt: skip
    return split(RunRecord(
        tmp_path, spec={"strategy": name, "engine": "lab", "world_size": 2, "prefetch": 1},
        summary=Summary(step_time_s=Spread.of([step_s])),
        tables={"breakdown": rows, "exposed": exposed},
    ))  # fmt: skip


def test_no_two_winners_for_one_word(tmp_path: Path):
    """Table, step bar, parts, heat map and JSON say the same of two runs, though the faster one is exposed longer."""
    runs = [recorded(tmp_path, "zero2", 0, 0.05), recorded(tmp_path, "full_shard", 10, 0.1)]
    column = [cells(view)[COLUMNS.index("exposed")] for view in views(runs)]
    assert column == ["30.0 ms", "20.0 ms"]
    assert [entry["comm"]["exposed_s"] for entry in comparison_json(runs)["runs"]] == [0.030, 0.020]
    title = figures.step_bar(runs).layout.title.text
    assert "zero2 is exposed longest, 30.0 ms a step; least: full_shard, 20.0 ms" in title.replace("<br>", " ")
    bar = figures.exposed_bar(runs)
    assert [trace.name for trace in bar.data] == ["on the link", "copying", "waiting for a peer", "waiting for a core"]
    assert [sum(trace.x[place] for trace in bar.data) for place in (0, 1)] == [pytest.approx(30.0), pytest.approx(20.0)]
    assert (
        "zero2: 30.0 ms a step are exposed, " in bar.layout.title.text
        and " ms of it on the link" in bar.layout.title.text.replace("<br>", " ")
    )
    heat = figures.exposed_heatmap(runs[0])
    assert sum(sum(cells_) for cells_ in heat.data[0].z) == pytest.approx(30.0)


def test_figures_say_where_profiled_steps_were_slower(tmp_path: Path):
    slow, alike = recorded(tmp_path, "zero2", 0, 0.05), recorded(tmp_path, "full_shard", 0, 0.095)
    words = figures.step_bar([slow, alike]).layout.title.subtitle.text.replace("<br>", " ")
    assert "zero2: profiled steps took 100 ms (mean), timed ones 50.0 ms (median)" in words and words.count("took") == 1
    assert "profiled steps took" in figures.exposed_heatmap(slow).layout.title.subtitle.text


def test_an_earlier_record_has_no_parts_to_draw(tmp_path: Path):
    old = recorded(tmp_path, "zero2", 0, 0.05)
    for each in old.table("breakdown"):
        del each["on_link_ns"], each["copying_ns"], each["waiting_ns"]
    assert exposure(old.table("breakdown"))["on_link_s"] is None
    with pytest.raises(ValueError, match="zero2 does not say what its exposed time was spent on.*run it again"):
        figures.exposed_bar(old)

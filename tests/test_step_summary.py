"""A profiled step is summed in one place: the bar, the findings, the table and JSON cannot disagree."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdplab import figures
from fsdplab.profiling.diagnosis import findings
from fsdplab.profiling.step_summary import StepSummary, step_summary, summaries
from fsdplab.records import RunRecord
from fsdplab.sessions.trace_tables import exposure

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
        tmp_path, spec={"strategy": "zero2", "engine": "lab", "world_size": 2, "prefetch": 1}, summary={},
        tables={"breakdown": ROWS, "exposed": exposed},
    )  # fmt: skip
    assert exposure(ROWS)["exposed_s"] == pytest.approx(0.020) and exposure(ROWS)["overlap"] == pytest.approx(0.2)
    (finding,) = [each for each in findings(record) if each.kind == "nothing_to_hide_behind"]
    assert finding.seconds == pytest.approx(0.020)
    assert finding.title.count("20 ms") == 2, "the only collective of its kind costs what all of them cost"
    bar = figures.step_bar(record)
    (segment,) = [trace for trace in bar.data if trace.name == "exposed"]
    assert list(segment.x) == [pytest.approx(20.0)] and "20.0 ms" in bar.layout.title.text

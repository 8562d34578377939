"""Records that earlier versions wrote, with their names of the categories of memory, open under today's names."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from fsdplab.common.names import CATEGORIES, CATEGORY_ROWS
from fsdplab.records import RunRecord, Summary
from fsdplab.records.summary import Peak
from fsdplab.records.tables import OLD_CATEGORIES

DATA = Path(__file__).resolve().parents[1] / "data"


def test_every_old_name_is_one_of_todays_categories_and_none_is_both() -> None:
    assert set(OLD_CATEGORIES.values()) < set(CATEGORIES) and not set(OLD_CATEGORIES) & set(CATEGORIES)


def test_the_guide_explains_every_category() -> None:
    guide = (DATA.parent / "docs" / "reading_results.md").read_text()
    assert all(f"| {row.title} | {row.sentence} |" in guide for row in CATEGORY_ROWS.values())


@pytest.mark.parametrize("folder", ["traces-08", "wind-tunnel-8b"])
def test_records_of_the_course_open_under_todays_names(folder: str) -> None:
    written = json.loads((DATA / folder / "run.json").read_text())["summary"]["peak_memory_bytes"]["by_category"]
    assert "parameter_slices" in written
    record = RunRecord.load(DATA / folder)
    split = record.summary.peak_memory_bytes.split
    assert tuple(split) == CATEGORIES and split["sharded_parameters"] == written["parameter_slices"]
    assert all(set(CATEGORIES) < set(row) for row in record.table("memory"))


def test_a_record_with_the_names_of_before_is_the_record_with_todays(tmp_path: Path) -> None:
    split = {name: 10 + place for place, name in enumerate(CATEGORIES)}
    row = {"rank": 0, "step": 1, "time_ns": 5, **split, "is_peak": True}
    spec = {"strategy": "full_shard", "engine": "lab", "world_size": 1}
    peak = Summary(peak_memory_bytes=Peak(100, split))
    record = RunRecord(
        tmp_path, spec=spec, environment={"device": "cpu"}, summary=peak, tables={"memory": [row]}
    ).save()
    with_old_names(tmp_path)
    assert RunRecord.load(tmp_path) == record


def with_old_names(folder: Path) -> None:
    """Write the record's category names as an earlier version did."""
    old = {today: before for before, today in OLD_CATEGORIES.items()}
    text = (folder / "run.json").read_text()
    table = gzip.decompress((folder / "memory.csv.gz").read_bytes()).decode()
    header, _, rows = table.partition("\n")
    for today, before in old.items():
        assert f'"{today}"' in text and today in header.split(",")
        text = text.replace(f'"{today}"', f'"{before}"')
    (folder / "run.json").write_text(text)
    header = ",".join(old.get(name, name) for name in header.split(","))
    (folder / "memory.csv.gz").write_bytes(gzip.compress(f"{header}\n{rows}".encode()))

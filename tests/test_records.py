"""Records: what is written is what is read, and a folder that is not a whole record is refused with its file and the
remedy.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from pathlib import Path

import pytest

from fsdplab.records import (
    CATEGORIES,
    TABLES,
    RecordError,
    RunRecord,
    Spread,
    Summary,
    comparison_json,
    known,
    matches_reference,
)
from fsdplab.records.summary import Link, Peak, SimulatedRanks, Traces

pytestmark = pytest.mark.quick

STEP = {"rank": 0, "step": 0, "loss": 5.71234567890123, "step_time_s": None, "tokens": 128}
COLLECTIVE = {
    "rank": 1,
    "step": 2,
    "unit": "",
    "phase": "forward",
    "kind": "all_gather",
    "logical_bytes": 1024,
    "wire_bytes": 512,
    "padding_bytes": 0,
    "dtype": "float32",
    "start_ns": 1_700_000_000_000_000_001,
    "end_ns": 1_700_000_000_000_000_901,
    "emulated": False,
    "waited_ns": None,
}
INSTANT = {"rank": 0, "step": 1, "time_ns": 10, **dict.fromkeys(CATEGORIES, 7), "is_peak": True}


def record_in(folder: Path, losses: tuple[float, ...] = (5.7, 5.6), **fields: object) -> RunRecord:
    spec = {"strategy": "full_shard", "engine": "lab", "world_size": 2, "model": "gpt-tiny", "precision": "fp32"}
    return RunRecord(
        folder,
        spec={**spec, **fields},
        environment={"torch": "2.13.0"},
        summary=Summary(losses=losses, step_time_s=Spread.of([0.4, 0.5, 0.6])),
        provenance={"losses": "measured"},
        tables={**{name: [] for name in TABLES}, "steps": [STEP], "ledger": [COLLECTIVE], "memory": [INSTANT]},
    ).save()


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    written = record_in(tmp_path / "run")
    read = RunRecord.load(tmp_path / "run")
    assert read == written
    assert read.table("steps") == [STEP] and read.table("ledger") == [COLLECTIVE] and read.table("memory") == [INSTANT]
    assert {path.name for path in read.path.iterdir()} == {"run.json", *(f"{name}.csv.gz" for name in TABLES)}


def test_a_text_that_no_file_can_hold_is_written_with_a_question_mark(tmp_path: Path) -> None:
    """A byte of a path that is no text, in the model's name or a traceback: the record could not be opened again."""
    written = record_in(tmp_path / "run")
    written.spec["model"] = os.fsdecode("größe".encode() + b"\xf6.py")
    written.status, written.failure = "failed", {"message": "no \udcf6", "traceback": "File 'm\udcf6.py'"}
    written.tables["ledger"] = [COLLECTIVE | {"unit": "\udcf6"}]
    read = RunRecord.load(written.save().path)
    assert read.spec["model"] == "größe?.py" and read.failure == {"message": "no ?", "traceback": "File 'm?.py'"}
    assert read.table("ledger")[0]["unit"] == "?"


def test_columns_of_later_versions_may_be_missing_from_a_whole_table_only(tmp_path: Path) -> None:
    """Records of before steps had `loading_s`, and exposed time its parts, are read; a row without it among others is
    damage.
    """
    older = record_in(tmp_path / "older")
    assert "loading_s" not in RunRecord.load(older.path).table("steps")[0]
    newer = record_in(tmp_path / "newer")
    newer.tables["steps"] = [STEP | {"loading_s": 0.002}, STEP | {"rank": 1, "loading_s": None}]
    assert RunRecord.load(newer.save().path).table("steps") == newer.table("steps")
    newer.tables["steps"].append(STEP)
    with pytest.raises(ValueError, match=r"has columns .*expected .*'loading_s'"):
        newer.save()


def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two = record_in(tmp_path / "one").path, record_in(tmp_path / "two").path
    assert all((two / path.name).read_bytes() == path.read_bytes() for path in one.iterdir())


def test_a_frame_has_the_columns_of_the_table_even_without_rows(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    record = RunRecord(tmp_path / "run").save()
    assert list(record.frame("memory").columns) == ["rank", "step", "time_ns", *CATEGORIES, "is_peak"]


def test_a_folder_that_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no run.json.*fsdplab run"):
        RunRecord.load(tmp_path)
    with pytest.raises(RecordError, match="does not exist. Give the folder"):
        RunRecord.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "has the format None; expected"),
        ('{"format": "another tool 3"}', "has the format 'another tool 3'; expected"),
        ('{"format": "fsdplab run record 2", "spec": {}}', "lacks environment, status"),
    ],
)
def test_a_wrong_run_json_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RecordError, match=message):
        RunRecord.load(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("status", "perfect", "status is one of"),
        ("provenance", {"losses": "guessed"}, "provenance is one of"),
        ("spec", 3, "expected an object"),
    ],
)
def test_a_wrong_field_is_refused(tmp_path: Path, field: str, value: object, message: str) -> None:
    path = record_in(tmp_path).path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(RecordError, match=message):
        RunRecord.load(tmp_path)


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        ([], "summary: expected an object, got []"),
        ({"losses": "x"}, "summary.losses: expected a list, got 'x'"),
        ({"losses": [5.0, None, "x"]}, "summary.losses[2]: expected a number or null, got 'x'"),
        ({"tokens_per_s": True}, "summary.tokens_per_s: expected a number of at least 0 or null, got True"),
        ({"tokens_per_s": 1e200}, "summary.tokens_per_s: expected a number of at least 0 or null, got 1e+200"),
        (
            {"step_time_s": {"median": "x"}},
            "summary.step_time_s.median: expected a number of at least 0 or null, got 'x'",
        ),
        ({"comm": {"bytes_per_step": 2**63}},
         f"summary.comm.bytes_per_step: expected a whole number of at least 0 or null, got {2**63}"),
        ({"comm": {"collectives_per_step": 1.5}},
         "summary.comm.collectives_per_step: expected a whole number or null, got 1.5"),
        ({"peak_memory_bytes": {"by_category": {"other": "x"}}},
         "summary.peak_memory_bytes.by_category['other']: expected a whole number of at least 0 or null, got 'x'"),
        ({"memory_start_ns": {"one": 1}}, "summary.memory_start_ns: expected whole numbers as names, got 'one'"),
        ({"link": {"across": {"name": 3}}}, "summary.link.across.name: expected a text, got 3"),
        ({"card": {"exceeded": 1}}, "summary.card.exceeded: expected true or false or null, got 1"),
        ({"traces": {"files": {}}}, "summary.traces: expected an object with ranks, got {'files': {}}"),
        ({"predicted": {"why_not": "x" * 10_001}}, "summary.predicted.why_not: expected a text, got 'xxx"),
    ],
)  # fmt: skip
def test_a_summary_with_a_value_of_another_type_is_refused(tmp_path: Path, summary: object, message: str) -> None:
    path = record_in(tmp_path).path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "summary": summary}))
    with pytest.raises(RecordError) as raised:
        RunRecord.load(tmp_path)
    said = str(raised.value)
    assert f"is damaged: {message}" in said and "\n" not in said and said.endswith("or record the run again.")


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("spec", {"strategy": "zero1", "engine": "lab"}, "spec.world_size: expected a whole number, got None"),
        ("spec", {"strategy": "zero1", "engine": "lab", "world_size": 2, "link": []}, "spec['link']: expected"),
        ("environment", {"device": 3}, "environment.device: expected a text or null, got 3"),
        ("failure", {"message": 3}, "failure.message: expected a text or null, got 3"),
        ("rows", {"steps": "x"}, "rows['steps']: expected a whole number, got 'x'"),
    ],
)
def test_other_parts_of_run_json_are_checked_too(tmp_path: Path, place: str, value: object, message: str) -> None:
    path = record_in(tmp_path).path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), place: value}))
    with pytest.raises(RecordError) as raised:
        RunRecord.load(tmp_path)
    assert f"is damaged: {message}" in str(raised.value)


def test_a_summary_reads_back_whole_and_passes_over_what_a_later_version_adds() -> None:
    summary = Summary(
        step_time_s=Spread.of([0.4, 0.5]), memory_start_ns={0: 7, 1: 9}, peak_by_rank=(3, None),
        peak_memory_bytes=Peak(3, {"other": 3, "activations": None}),
        link=Link("eth10", 1.25e9, across=Link("slow"), as_="a job"),
        traces=Traces(2, {0: "a", 1: "b"}),
        simulated=SimulatedRanks({0: 8}, 5), losses=(5.0, None),
    )  # fmt: skip
    written = json.loads(json.dumps(summary.as_dict()))
    assert written["link"]["as"] == "a job" and written["memory_start_ns"] == {"0": 7, "1": 9}
    assert Summary.from_dict({**written, "mood": "good", "comm": None, "losses": [5.0, None]}) == summary
    assert summary.peak_memory_bytes.split == {"other": 3} and Summary().peak_memory_bytes.split == {}
    assert known(summary.link).name == "eth10"
    with pytest.raises(ValueError, match="did not measure this figure"):
        known(summary.comm.exposed_s)


def test_a_record_of_before_gets_the_spread_of_its_steps(tmp_path: Path) -> None:
    record = record_in(tmp_path)
    record.tables["steps"] = [STEP | {"step": step, "step_time_s": 0.1 * step} for step in (1, 2, 3, 4)]
    path = record.save().path / "run.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "summary": {"step_time_s": {"median": 0.25, "min": 0.1}}})
    )
    assert RunRecord.load(tmp_path).summary.step_time_s == Spread.of([0.1, 0.2, 0.1 * 3, 0.4])


def damage_missing(path: Path) -> None:
    path.unlink()


def damage_truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-12])


def damage_not_compressed(path: Path) -> None:
    path.write_bytes(b"rank,step\n0,1\n")


def damage_other_columns(path: Path) -> None:
    path.write_bytes(gzip.compress(b"rank,step\n0,1\n"))


def damage_short_line(path: Path) -> None:
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b",128", b"")))


def damage_wrong_type(path: Path) -> None:
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b"128", b"many")))


def damage_lost_row(path: Path) -> None:
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).splitlines(keepends=True)[0]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, "is missing: the record is incomplete"),
        (damage_truncated, "is damaged"),
        (damage_not_compressed, "is damaged"),
        (damage_other_columns, "has columns"),
        (damage_short_line, "has 4 cells; expected 5"),
        (damage_wrong_type, "wrong type"),
        (damage_lost_row, "has 0 rows; run.json says 1"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path: Path, damage: object, message: str) -> None:
    record_in(tmp_path)
    damage(tmp_path / "steps.csv.gz")  # type: ignore[operator]
    with pytest.raises(RecordError, match=message):
        RunRecord.load(tmp_path)


def test_numbers_of_a_run_that_diverged_are_read_again(tmp_path: Path) -> None:
    spec = {"strategy": "zero1", "engine": "lab", "world_size": 2, "learning_rate": 1e30}
    record = RunRecord(tmp_path, spec=spec, status="failed", summary=Summary(losses=(5.0, 3e25, None))).save()
    assert RunRecord.load(tmp_path) == record


def test_wrong_rows_and_tables_are_refused_before_they_reach_the_disk(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has columns"):
        RunRecord(tmp_path, tables={"steps": [{"rank": 0}]}).save()
    assert not (tmp_path / "run.json").exists()
    with pytest.raises(RecordError, match="no table 'losses'"):
        RunRecord(tmp_path).table("losses")


def test_losses_agree_within_the_tolerance_of_their_precision() -> None:
    assert matches_reference([5.0, 4.0], [5.0, 4.00001], "fp32")
    assert not matches_reference([5.0, 4.0], [5.0, 4.001], "fp32")
    assert matches_reference([5.0, 4.0], [5.0, 4.001], "bf16")
    assert not matches_reference([5.0, 4.0], [5.0, 4.1], "bf16")
    assert not matches_reference([5.0], [5.0, 4.0], "fp32")
    assert not matches_reference([], [], "fp32")
    assert not matches_reference([math.nan], [math.nan], "fp32")
    with pytest.raises(ValueError, match="fp8"):
        matches_reference([1.0], [1.0], "fp8")


@pytest.mark.parametrize(
    "reference,agrees",
    [((5.7, 5.6, 5.5), True), ((5.7, 5.6), False), ((5.7, 5.6, 9.9), False), ((5.7, 5.6, 5.5, 5.4, 5.3), False)],
    ids=["no steps under a profiler", "not all timed steps", "another loss", "more steps than the run"],
)
def test_a_reference_may_leave_out_what_runs_train_under_the_profiler(tmp_path, reference, agrees) -> None:
    twin = record_in(tmp_path / "twin", engine="twin", losses=reference)
    run = record_in(tmp_path / "run", losses=(5.7, 5.6, 5.5, 5.4), warmup=1, steps=2, profile=1)
    assert comparison_json([run], twin)["runs"][0]["matches_reference"] is agrees


def test_the_comparison_has_exactly_the_promised_fields(tmp_path: Path) -> None:
    twin = record_in(tmp_path / "twin", engine="twin", strategy="no_shard")
    runs = [record_in(tmp_path / "a"), record_in(tmp_path / "b", losses=(5.7, 9.9), strategy="zero1")]
    comparison = comparison_json(runs, twin)
    assert comparison.keys() == {"format", "spec", "environment", "in_turns", "drift", "runs"}
    assert comparison["spec"] == {"engine": "lab", "world_size": 2, "model": "gpt-tiny", "precision": "fp32"}
    first, second = comparison["runs"]
    assert first.keys() == {
        "strategy", "engine", "world_size", "status", "step_time_s", "cpu_share", "tokens_per_s", "peak_memory_bytes",
        "comm", "steady", "change", "losses", "matches_reference", "provenance", "predicted",
    }  # fmt: skip
    assert first["step_time_s"] == pytest.approx(
        {"median": 0.5, "min": 0.4, "q1": 0.45, "q3": 0.55, "max": 0.6, "count": 3}
    )
    assert first["peak_memory_bytes"].keys() == {"total", "by_category"}
    assert first["comm"].keys() == {
        "bytes_per_step", "collectives_per_step", "exposed_s", "on_link_s", "copying_s", "waiting_s", "no_core_s",
        "overlap", "blocked_s",
    }  # fmt: skip
    assert first["predicted"].keys() == {
        "peak_memory_bytes",
        "comm_bytes_per_step",
        "step_time_s",
        "step_scatter",
        "step_from",
    }
    assert first["matches_reference"] is True and second["matches_reference"] is False
    assert comparison_json(runs)["runs"][0]["matches_reference"] is None
    json.dumps(comparison)

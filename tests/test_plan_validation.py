"""Predictions beside published measurements: the aims are reached, every half is named, wrong files end in one line."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from fsdplab import cli
from fsdplab.planning.efficiency import FITTED_ON, MATMUL_EFFICIENCY
from fsdplab.planning.memory import RESERVED_OVER_USED
from fsdplab.planning.published import COLUMNS, PublishedError, read_published
from fsdplab.planning.validate import FITTED, HELD_OUT, validate

pytestmark = pytest.mark.quick

DATA = Path(__file__).resolve().parents[1] / "data"
TABLE = DATA / "published.csv"


@pytest.fixture(scope="module")
def found():
    return validate(TABLE)


def ended(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    printed = capsys.readouterr()
    return stop.value.code, printed.out, printed.err


def rows_of_the_table() -> list[dict[str, str]]:
    with TABLE.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def written(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_memory_and_throughput_are_within_the_aims(found):
    """Medians of 10 and 15 % were aimed at; the bounds are near what was reached: a change for the worse shows."""
    count, median, worst = found.errors("memory")
    assert count == 28 and median < 0.06 and worst < 0.5
    count, median, worst = found.errors("tokens/s", HELD_OUT)
    assert count == 12 and median < 0.06 and worst < 0.6
    assert found.errors("memory (arithmetic)")[2] < 0.005


def test_every_usable_row_is_predicted_and_every_other_one_has_a_reason(found):
    rows = rows_of_the_table()
    named = {row.id.split(",")[0] for row in found.rows}
    assert named == {row["id"] for row in rows}
    speeds = [row for row in rows if row["tokens_per_s_per_gpu"]]
    without = [name for name, reason in found.left_out if "no tokens/s" in reason]
    assert {row["id"] for row in speeds if row["fp8"] == "y"} == set(without)
    assert len([row for row in found.rows if row.quantity == "tokens/s"]) == len(speeds) - len(without)
    assert found.ran == 26 and found.too_large == (), "what took place is predicted to fit"


def test_one_number_a_gpu_type_is_fitted_on_every_other_row(found):
    for gpu in MATMUL_EFFICIENCY:
        parts = [row.part for row in found.rows if row.quantity == "tokens/s" and row.gpu == gpu]
        assert parts.count(FITTED) == FITTED_ON[gpu]
        assert parts == [FITTED, HELD_OUT] * (len(parts) // 2) + [FITTED] * (len(parts) % 2)
    assert found.efficiencies == MATMUL_EFFICIENCY, "what plans use is what was fitted"


def test_the_fit_does_not_see_the_other_half(tmp_path, found):
    rows = rows_of_the_table()
    held_out = {row.id for row in found.rows if row.part == HELD_OUT}
    for row in rows:
        if row["id"] in held_out:
            row["tokens_per_s_per_gpu"] = str(3 * float(row["tokens_per_s_per_gpu"]))
    changed = validate(written(tmp_path / "changed.csv", rows))
    assert changed.efficiencies == found.efficiencies
    assert changed.errors("tokens/s", HELD_OUT)[1] > 0.5


def test_the_reserved_factor_is_the_one_row_that_prints_both():
    (row,) = [row for row in rows_of_the_table() if row["id"] == "tt-pr165-7b-fsdp2-sac"]
    used, reserved = (float(part.split()[0]) for part in row["peak_mem_GiB"].split(";"))
    assert reserved / used == pytest.approx(RESERVED_OVER_USED)


def test_shapes_are_found_from_the_number_of_parameters():
    cases, _ = read_published(TABLE)
    shapes = {case.id: case.spec.model for case in cases}
    assert shapes["mosaic-h100_80gb-amp_bf16-7b-s65536-g8-mb1x2"].parameters == 6_918_905_856
    assert shapes["tt-l31-70b-256"].parameters == 70_553_706_496
    assert shapes["accel-fsdp2-alloc"].tied and not shapes["ds-6.9b-4-fp32"].gated


def test_no_row_is_predicted_by_its_name(tmp_path, found):
    rows = rows_of_the_table()
    for number, row in enumerate(rows):
        row["id"] = f"row {number}"
    renamed = validate(written(tmp_path / "renamed.csv", rows))
    assert [row.predicted for row in renamed.rows] == [row.predicted for row in found.rows]


def test_the_table_in_data_is_what_the_command_writes(found):
    stored = json.loads((DATA / "plan_validation.json").read_text(encoding="utf-8"))
    now = found.as_dict()
    assert [row["id"] for row in stored["rows"]] == [row["id"] for row in now["rows"]]
    for before, after in zip(stored["rows"], now["rows"]):
        assert after["predicted"] == pytest.approx(before["predicted"], rel=1e-6), after["id"]


def test_the_command_prints_rows_and_errors_and_draws_them(capsys, tmp_path):
    figure, path = tmp_path / "v.html", tmp_path / "v.json"
    code, out, _ = ended(["plan", "validate", "--json", str(path), "--figure", str(figure)], capsys)
    assert code == 0 and "held out" in out and "median error" in out and "left out: tt-l31-8b-8-cp1" in out
    assert json.loads(path.read_text())["memory"]["count"] == 28
    assert "published memory (GiB)" in figure.read_text()
    code, again, _ = ended(["plan", "validate", str(TABLE)], capsys)
    assert code == 0 and again == out


@pytest.mark.parametrize(
    "content,words",
    [
        ("", "lacks the column id"),
        ("id,source\n1,2\n", "lacks the column model"),
        (",".join(COLUMNS) + "\n", "has no usable row"),
        (",".join(COLUMNS) + "\n" + "x" + "," * (len(COLUMNS) - 1) + "\n", "neither memory nor tokens/s"),
        ("\udcff", "is no text"),
    ],
)
def test_wrong_files_end_in_one_line(content, words, tmp_path, capsys):
    path = tmp_path / "wrong.csv"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(PublishedError, match=words):
        validate(path)
    code, _, said = ended(["plan", "validate", str(path)], capsys)
    assert code == 2 and said.count("\n") == 1


@pytest.mark.parametrize(
    "column,value,words",
    [
        ("gpus", "-3", "gpus is '-3'"),
        ("gpus", "many", "expected a number"),
        ("gpu", "Z9000", "unknown GPU"),
        ("strategy", "pipeline", "which is not known here"),
        ("activation_checkpointing", "every 2nd block", "which is not known here"),
        ("source", "fms-fsdp", "some whole blocks"),
        ("layers", "", "layers were not published"),
        ("params_B", "900", "no known kind of block"),
        ("heads", "7", "7 heads do not divide"),
    ],
)
def test_a_row_that_is_not_understood_is_left_out_with_the_reason(column, value, words, tmp_path):
    rows = rows_of_the_table()[:2]
    rows[0][column] = value
    found = validate(written(tmp_path / "one.csv", rows))
    assert len({row.id.split(",")[0] for row in found.rows}) == 1
    assert words in found.left_out[0][1], found.left_out


WORDS = [  # what other sources write, and what a plan makes of it
    ({"strategy": "HSDP"}, {"strategy": "hybrid_shard"}),
    ({"strategy": "FSDP 4 x TP 2"}, {"strategy": "full_shard", "tensor_parallel": 2}),
    ({"strategy": "full_shard, CPU offload"}, {"offload": True}),
    ({"strategy": "single GPU", "gpus": "1"}, {"strategy": "no_shard"}),
    ({"param_dtype": "bf16"}, {"master_dtype": "bf16"}),
    ({"gpu": "A100 SXM 80GB"}, {"gpu": "A100 SXM 80GB"}),
    ({"gpu": "RTX 4090 24GB"}, {"gpu": "RTX 4090"}),
    ({"notes": "QLoRA, rank 32, no gradient of the base"}, {"lora_rank": 32, "base_dtype": "nf4"}),
    ({"optimizer": "AdamW, LoRA"}, {"lora_rank": 64, "base_dtype": None}),
]


@pytest.mark.parametrize("written_as,meant", WORDS, ids=str)
def test_words_of_other_sources_are_understood(written_as, meant, tmp_path):
    row = rows_of_the_table()[0] | written_as
    ((case,), _) = read_published(written(tmp_path / "one.csv", [row]))
    for name, value in meant.items():
        found = getattr(case.spec, name)
        assert (found.name if name == "gpu" else found) == value


def test_a_network_is_a_gpus_share_of_its_node(tmp_path):
    cases, _ = read_published(TABLE)
    by_id = {case.id: case.spec.gpu.nic_bytes_per_s for case in cases}
    assert by_id["mosaic-a100_80gb-bf16-70b-s2048-g64-mb8x4"] == 25e9, "1,600 Gb/s a node"
    assert by_id["tt-l31-8b-128"] == 50e9, "400 Gb/s a GPU"


def test_a_file_without_validate_is_refused(capsys):
    code, _, said = ended(["plan", "some.csv"], capsys)
    assert code == 2 and "No such command 'some.csv'" in said and said.count("\n") == 1

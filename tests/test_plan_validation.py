"""Predictions beside published measurements: the aims are reached, every half is named, wrong files end in one line."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from fsdplab.planning import hardware
from fsdplab.planning import step_time as times
from fsdplab.planning.bands import (
    ADAPTERS_OFFLOADED,
    EIGHT_BIT,
    EXPERTS,
    PLAIN,
    kind_of,
    memory_band,
    speed_band,
    speed_kind_of,
)
from fsdplab.planning.efficiency import FITTED_ON, MATMUL_EFFICIENCY
from fsdplab.planning.memory import RESERVED_OVER_USED
from fsdplab.planning.planner import plan
from fsdplab.planning.published import COLUMNS, FIT, HELD_OUT, MEMORY, SEEN, SPEED, Case, PublishedError, read_published
from fsdplab.planning.step_time import step_time
from tests.plan_validation import ARITHMETIC, Errors, main, validate, validation_figure

DATA = Path(__file__).resolve().parents[1] / "data"
TABLE = DATA / "published.csv"


@pytest.fixture(scope="module")
def found():
    return validate(TABLE)


def rows_of_the_table() -> list[dict[str, str]]:
    with TABLE.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def written(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS, "loss", "experts"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_held_out_sources_are_predicted_as_the_page_says(found):
    """Aims on unseen sources: median 8 %, 90 % within 20 %. The bounds are near what was reached, so a change for the
    worse shows; both miss the second aim, memory by atorch's eight rows alone, tokens/s by runs that docs/planning.md
    names.
    """
    held_out = found.of(SPEED, HELD_OUT)
    errors = Errors.of(row for row in held_out if row.kind != ADAPTERS_OFFLOADED)
    assert errors.figures == 135 and errors.median < 0.075 and errors.ninety < 0.24 and abs(errors.bias - 1) < 0.02
    offloaded = sorted(row.error for row in held_out if row.kind == ADAPTERS_OFFLOADED)
    assert len(offloaded) == 6 and offloaded[4] < 0.12 and offloaded[5] < 0.4  # the last has 24,576 tokens
    errors = found.errors(MEMORY, HELD_OUT)
    assert errors.figures == 68 and errors.median < 0.055 and errors.worst < 0.42
    rest = [row.error for row in found.of(MEMORY, HELD_OUT) if row.source != "atorch"]
    assert len(rest) == 60 and max(rest) < 0.24 and sorted(rest)[53] < 0.13
    assert found.errors(ARITHMETIC).worst < 0.005


def test_the_pages_table_is_what_was_reached(found):
    page = (DATA.parent / "docs" / "planning.md").read_text(encoding="utf-8")
    named = {
        "tokens/s, fit sources": (SPEED, FIT), "tokens/s, held-out sources": (SPEED, HELD_OUT),
        "memory, sources in view when it was written": (MEMORY, FIT), "memory, held-out sources": (MEMORY, HELD_OUT),
    }  # fmt: skip
    for name, (quantity, part) in named.items():
        errors = found.errors(quantity, part)
        large = [f"{100 * value:.1f} %" if value < 0.1 else f"{value:.0%}".replace("%", " %") for value in errors[1:4]]
        assert f"| {name} | {errors.figures} | {' | '.join(large)} | {errors.bias:.2f} |" in page
    assert f"{len(rows_of_the_table())} runs of 18 sources" in page and f"Of {found.ran} runs that took place" in page


def test_the_whole_public_table_is_predicted_and_none_of_its_runs_is_impossible(found):
    """MosaicML's 216 runs on 8 to 512 GPUs, 125 M to 70 B parameters, 512 to 65,536 tokens: all took place."""
    rows = [row for row in found.of(SPEED) if row.source == "MosaicML"]
    assert len(rows) == 216 and {row.part for row in rows} == {FIT}
    assert (min(row.seq for row in rows), max(row.seq for row in rows)) == (512, 65_536)
    assert not [name for name in found.too_large if name.startswith("mosaic")]
    for name, words, (fitted, _) in found.by_range(SPEED):
        assert not fitted.figures or abs(fitted.bias - 1) < 0.03, f"{name} {words}"


def test_runs_that_ended_out_of_memory_are_predicted_not_to_fit(found):
    assert [not_fits for _, not_fits in found.ran_out] == [True, True]
    said_nothing = {
        "mbridge-2511-qwen3-30b",
        "mbridge-2511-gpt-oss-120b",
        "mbridge-2511-l3-70b",
        "mbridge-2511-l31-405b",
    }
    loss_not_said = {f"vectorlm-8b-1-s{seq}" for seq in (2048, 4096, 8192)}
    assert found.ran == 374 and set(found.too_large) - said_nothing == loss_not_said, (
        "of the others checkpointing is not"
    )


def test_every_row_is_predicted_or_left_out_with_a_reason(found):
    named = {row.id.split(",")[0] for row in found.rows} | {each.id for each in found.left_out}
    assert named | {name for name, _ in found.ran_out} == {row["id"] for row in rows_of_the_table()}
    assert all(each.source and each.reason for each in found.left_out)


def test_parts_are_whole_sources(found):
    for quantity in (MEMORY, SPEED):
        parts = {(row.source, row.part) for row in found.of(quantity)}
        assert len(parts) == len({source for source, _ in parts})
    assert {row.source for row in found.of(SPEED, FIT)} == set(SEEN[SPEED])


def test_nothing_is_fitted_to_a_file(tmp_path, found):
    """Throughput that is three times as high changes errors, and no prediction."""
    rows = rows_of_the_table()
    for row in rows:
        row["tokens_per_s_per_gpu"] = row["tokens_per_s_per_gpu"] and str(3 * float(row["tokens_per_s_per_gpu"]))
    changed = validate(written(tmp_path / "changed.csv", rows))
    assert [row.predicted for row in changed.rows] == [row.predicted for row in found.rows]
    assert changed.errors(SPEED, HELD_OUT).bias == pytest.approx(found.errors(SPEED, HELD_OUT).bias / 3)


def off_by(cases: list[Case]) -> float:
    """Mean distance of predicted from published throughput, as a logarithm."""
    ratios = [case.spec.step_tokens / step_time(case.spec).step_s / case.spec.gpus for case in cases]
    return sum(abs(math.log(ratio / case.tokens_per_s)) for ratio, case in zip(ratios, cases)) / len(cases)


@pytest.mark.parametrize("gpu", MATMUL_EFFICIENCY)
def test_what_plans_use_is_what_the_fit_sources_give(gpu, monkeypatch):
    """Products 2 % faster or slower are further off on the runs of the fit sources on that card."""
    cases, _ = read_published(TABLE)
    seen = [case for case in cases if case.source in SEEN[SPEED] and case.spec.gpu.name == gpu and not case.spec.fp8]
    assert len(seen) == FITTED_ON[gpu]
    best = off_by(seen)
    for factor in (0.98, 1.02):
        monkeypatch.setitem(MATMUL_EFFICIENCY, gpu, factor * MATMUL_EFFICIENCY[gpu])
        assert off_by(seen) > best
        monkeypatch.undo()


def test_the_networks_spread_is_near_its_best(monkeypatch):
    """On MosaicML's runs over several nodes, which alone it is fitted to."""
    cases, _ = read_published(TABLE)
    seen = [case for case in cases if case.source == "MosaicML" and case.spec.gpus > 8]
    best = off_by(seen)
    for factor in (0.4, 2.5):
        monkeypatch.setattr(hardware, "SPREAD", factor * 0.1)
        assert off_by(seen) > best


FALLS = {  # tokens/s a GPU, at the most GPUs over at the fewest: published, and how far off it may be predicted
    ("mosaic-h100_80gb-amp_bf16-70b-s2048-g512-mb8x1", "mosaic-h100_80gb-amp_bf16-70b-s2048-g128-mb8x1"): 0.03,
    ("mosaic-h100_80gb-amp_bf16-7b-s2048-g512-mb6x1", "mosaic-h100_80gb-amp_bf16-7b-s2048-g128-mb6x1"): 0.01,
    ("kempner-weak-13b-160", "kempner-weak-13b-32"): 0.02, ("kempner-weak-70b-160", "kempner-weak-70b-32"): 0.03,
    ("tt-l31-8b-128", "tt-l31-8b-8"): 0.02,
}  # fmt: skip


@pytest.mark.parametrize("many,few", FALLS, ids=str)
def test_throughput_falls_with_the_nodes_as_published(many, few, found):
    rows = {row.id: row for row in found.of(SPEED)}
    published = rows[many].published / rows[few].published
    predicted = rows[many].predicted / rows[few].predicted
    assert published < 1 and predicted < 1 and abs(published - predicted) < FALLS[many, few]


def test_llama_on_2048_gpus_falls_as_a_paper_says():
    """Fernandez et al. 2024 (arXiv 2411.13055): 37.2 % less from 128 to 2,048 H100, Llama 2 7B under FSDP. Held out."""
    one, many = (plan("llama-2-7b", "h100", gpus=gpus, micro_batch=2) for gpus in (128, 2048))
    assert 1 - many.tokens_per_s_per_gpu / one.tokens_per_s_per_gpu == pytest.approx(0.372, abs=0.04)


@pytest.mark.parametrize("name", ["EAGER_GPT", "FP8_SPEEDUP", "SLOWED_BY_SECONDS"])
def test_other_fitted_constants_are_near_their_best(name, monkeypatch):
    cases, _ = read_published(TABLE)
    eight = name == "FP8_SPEEDUP"
    seen = [case for case in cases if case.source == "MosaicML" and case.spec.fp8 == eight]
    best, value = off_by(seen), getattr(times, name)
    for factor in (0.8, 1.2):
        monkeypatch.setattr(times, name, factor * value)
        assert off_by(seen) > best


def test_bands_are_those_of_the_known_runs(found):
    cases, _ = read_published(TABLE)
    by_kind, by_speed = ({kind(case.spec): case.spec for case in cases} for kind in (kind_of, speed_kind_of))
    assert set(found.bands(SPEED)) == set(by_speed) and set(found.bands(MEMORY)) == set(by_kind) - {EIGHT_BIT, EXPERTS}
    for kind, spec in by_speed.items():
        assert speed_band(spec)[:2] + (speed_band(spec).runs,) == found.bands(SPEED)[kind]
    for kind, spec in by_kind.items():
        of_memory = found.bands(MEMORY)[PLAIN if kind in (EIGHT_BIT, EXPERTS) else kind]
        assert memory_band(spec)[:2] + (memory_band(spec).runs,) == of_memory


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


def test_the_program_prints_json_and_draws_the_figure(capsys, tmp_path):
    figure = tmp_path / "v.html"
    main(["--figure", str(figure)])
    assert json.loads(capsys.readouterr().out)["errors"]["memory"]["held out"]["figures"] == 68
    assert "published memory (GiB)" in figure.read_text()


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
    with pytest.raises(SystemExit) as end:
        main([str(path)])
    said, code = capsys.readouterr().err, end.value.code
    assert code == 2 and said.count("\n") == 1


@pytest.mark.parametrize(
    "column,value,words",
    [
        ("gpus", "-3", "gpus is '-3'"),
        ("gpus", "many", "expected a number"),
        ("gpu", "Z9000", "unknown GPU"),
        ("strategy", "pipeline", "which is not known here"),
        ("activation_checkpointing", "every 2nd block", "which is not known here"),
        ("activation_checkpointing", "selective, some blocks", "some whole blocks"),
        ("strategy", "full_shard FSDP 4 x PP 2, whole sequences", "keeps sequences whole"),
        ("optimizer", "AdamW, step in the backward", "steps in the backward"),
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
    assert words in found.left_out[0].reason, found.left_out


COLUMN_WORDS = [  # column, a word that no table of the package has, and of what the reason speaks
    ("param_dtype", "int4", "param_dtype is 'int4'"),
    ("param_dtype", "pur bf16", "did you mean pure bf16 or bf16?"),
    ("param_dtype", "", "param_dtype is ''"),
    ("reduce_dtype", "fp16", "reduce_dtype is 'fp16'"),
    ("optimizer", "Lion", "optimizer is 'Lion'"),
    ("optimizer", "AdamW, paged", "optimizer is 'AdamW, paged'"),
    ("activation_checkpointing", "full, every 2nd block", "activation_checkpointing is"),
    ("activation_checkpointing", "", "activation_checkpointing is not stated"),
    ("compile", "max-autotune", "compile is 'max-autotune'"),
    ("fp8", "yes", "fp8 is 'yes'"),
    ("loss", "linear cross-entropy", "loss is 'linear cross-entropy'"),
    ("experts", "8 of 128", "experts is '8 of 128'"),
    ("framework", "JAX", "framework is 'JAX'"),
    ("gpu", "H100 PCIe 80GB", "gpu is 'H100 PCIe 80GB'"),
    ("gpu", "H100 80GB 350W", "gpu is 'H100 80GB 350W'"),
    ("interconnect", "2 x 200 Gb/s", "interconnect is '2 x 200 Gb/s'"),
    ("strategy", "full_shard without prefetch", "strategy is 'full_shard without prefetch'"),
    ("strategy", "full_shard FSDP 8 x SP 2", "strategy is"),
    ("peak_mem_GiB", "33.1 in nvidia-smi", "peak_mem_GiB is '33.1 in nvidia-smi'"),
    ("peak_mem_GiB", "about 30", "peak_mem_GiB is 'about 30'"),
    ("seq_len", "", "seq_len is not stated"),
    ("micro_batch_per_gpu", "", "micro_batch_per_gpu is not stated"),
]


@pytest.mark.parametrize("column,value,words", COLUMN_WORDS)
def test_a_word_that_is_not_known_is_never_passed_over(column, value, words, tmp_path):
    first, second = rows_of_the_table()[:2]
    found = validate(written(tmp_path / "one.csv", [first | {column: value}, second]))
    assert {row.id.split(",")[0] for row in found.rows} == {second["id"]}
    assert words in found.left_out[0].reason, found.left_out


def test_words_of_one_meaning_are_one_plan(tmp_path):
    """ "bf16 (pure)" was once read as float32 masters, twice the memory of states."""
    row = rows_of_the_table()[0]
    masters = {}
    for said in ("pure bf16", "bf16 (pure)", "BF16", "bf16 compute", "bf16 (mixed)", "bf16 compute, fp32 shards"):
        ((case,), _) = read_published(written(tmp_path / "one.csv", [row | {"param_dtype": said}]))
        masters[said] = case.spec.master_dtype
    assert [*masters.values()] == ["bf16"] * 3 + ["fp32"] * 3, masters


def test_an_interleaved_pipeline_needs_its_micro_batches(tmp_path):
    row = next(row for row in rows_of_the_table() if row["id"] == "mbridge-2511-l3-70b")
    for column in ("micro_batch_per_gpu", "grad_accum"):
        found = written(tmp_path / "one.csv", [row | {column: ""}, rows_of_the_table()[0]])
        _, (left_out,) = read_published(found)
        assert left_out.reason == "the micro-batches of its interleaved pipeline are not stated"


def test_memory_that_an_unstated_loss_decides_is_left_out(tmp_path):
    """Compiled blocks with 8-bit products on H200: 1.49 times too much with an eager loss, 1.10 with its own."""
    row = next(row for row in rows_of_the_table() if row["id"] == "trainy-l31-8b-32-f8")
    found = validate(written(tmp_path / "one.csv", [row | {"loss": ""}]))
    assert [each.quantity for each in found.rows] == [SPEED]
    assert found.left_out[0].reason.startswith("no memory: its loss is not stated, and an eager one needs 1.3")
    ratios = [
        validate(written(tmp_path / "one.csv", [row | {"loss": loss}])).of(MEMORY)[0].ratio
        for loss in ("eager", "fused, compiled")
    ]
    assert [round(ratio, 2) for ratio in ratios] == [1.49, 1.10]
    small = row | {"loss": "", "vocab": "1000", "params_B": "6.99"}
    assert validate(written(tmp_path / "one.csv", [small])).of(MEMORY), "where it decides nothing it is not needed"


WORDS = [  # what other sources write, and what a plan makes of it
    ({"strategy": "HSDP"}, {"strategy": "hybrid_shard"}),
    ({"strategy": "FSDP 4 x TP 2"}, {"strategy": "full_shard", "tensor_parallel": 2}),
    ({"strategy": "full_shard, CPU offload"}, {"offload": True}),
    ({"strategy": "single GPU", "gpus": "1"}, {"strategy": "no_shard"}),
    ({"param_dtype": "bf16"}, {"master_dtype": "bf16"}),
    ({"loss": "fused, compiled"}, {"loss": "fused"}),
    ({"loss": "eager, 16-bit"}, {"loss": "eager", "float_logits": False}),
    ({"fp8": "y"}, {"fp8": True}),
    ({"optimizer": "8-bit AdamW"}, {"optimizer": "adamw-8bit"}),
    ({"activation_checkpointing": "selective, every 2nd block"}, {"checkpointing": "full"}),
    ({"gpu": "A100 SXM 80GB"}, {"gpu": "A100 SXM 80GB"}),
    ({"gpu": "RTX 4090 24GB"}, {"gpu": "RTX 4090"}),
    ({"notes": "QLoRA, rank 32, no gradient of the base"}, {"lora_rank": 32, "base_dtype": "nf4"}),
    ({"optimizer": "AdamW, LoRA"}, {"lora_rank": 64, "base_dtype": None}),
    ({"strategy": "ZeRO-1 x TP 2 x PP 2 x VP 4"}, {"pipeline_parallel": 2, "virtual_stages": 4}),
    ({"strategy": "full_shard FSDP 4 x TP 2, async TP"}, {"async_tensor": True}),
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


def test_a_part_has_one_colour_and_one_place_in_the_legend() -> None:
    rows = [("memory", "fit", 1.0, 1.1), ("memory", "held out", 2.0, 1.9), ("tokens/s", "held out", 100.0, 110.0)]
    traces = [each for each in validation_figure([*rows, ("tokens/s", "fit", 90.0, 95.0)], "").data if each.name]
    assert len({(each.name, each.marker.color) for each in traces}) == 2 and len(traces) == 4
    assert [each.name for each in traces if each.showlegend] == ["fit", "held out"]

"""A model of one's own on real ranks: every engine's losses are the twin's, and errors are the user's own."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

from fsdplab import RunSpec, Workload, compare, run
from fsdplab.cli import main
from fsdplab.records import RunRecord, comparison_json
from fsdplab.sessions import RanksFailed, bench
from fsdplab.sessions.steady_card import spec_of

from .own_models import zoo

MINE = Path(__file__).parent / "own_models" / "mine.py"
ENGINES = (("lab", "full_shard"), ("lab", "zero2"), ("torch-ddp", "no_shard"), ("torch-fsdp2", "full_shard"))


def trained(work: object, engines=ENGINES, **settings):
    """The records of these engines and, last, of the twin; whether each one's losses are the twin's."""
    how = {"model": work, "steps": 1, "device": "cpu", **settings}
    specs = [RunSpec(engine=engine, strategy=strategy, **how) for engine, strategy in engines]
    records = compare([*specs, RunSpec(engine="twin", memory=False, **how)])
    return records, [each["matches_reference"] for each in comparison_json(records, records[-1])["runs"]]


# DDP sends buffers of rank 0 to all ranks; FSDP2 and the others leave each rank its own
APART = {"a buffer that changes": [True, True, False, True, True]}


@pytest.mark.parametrize("name", zoo.ZOO)
def test_what_a_strangers_model_brings_is_trained_as_by_the_twin(name):
    records, agree = trained(zoo.ZOO[name]())
    assert [record.status for record in records] == ["finished"] * 5
    assert agree == APART.get(name, [True] * 5), [record.summary.losses for record in records]
    if name == "a buffer that changes":
        assert any("rank 0's buffers" in note for note in records[2].environment["workload"]["notes"])


@pytest.mark.parametrize("settings", [dict(precision="bf16"), dict(checkpoint="full"), dict(micro_batches=2)])
def test_settings_of_a_run_are_those_of_an_own_model_too(settings):
    lab = ENGINES[:2] if "checkpoint" in settings else ENGINES
    how = dict(settings) if "checkpoint" not in settings else {}
    twin = RunSpec(model=str(MINE), engine="twin", memory=False, steps=1, device="cpu", **how)
    specs = [
        RunSpec(model=str(MINE), engine=engine, strategy=strategy, steps=1, device="cpu", **settings)
        for engine, strategy in lab
    ]
    records = compare([*specs, twin])
    assert all(each["matches_reference"] for each in comparison_json(records, records[-1])["runs"])


def test_branches_that_differ_between_ranks_are_said_by_the_lab_and_wrong_in_fsdp2():
    """Torch's FSDP2 gathers another unit than its peer without a word, and its losses show it."""
    work = Workload(zoo.Branches, zoo.numbers, zoo.squares)
    records, agree = trained(work)
    assert "every rank must run the same units" in records[0].failure["message"]
    assert agree[2:] == [True, False, True]
    whole, agree = trained(work, [("lab", "full_shard"), ("lab", "zero1")], units="model")
    assert agree == [True] * 3 and whole[0].environment["workload"]["units"] == "the whole model"


def test_a_loss_that_no_output_leads_to_is_trained_by_the_lab_s_engine():
    """With every strategy, as one unit and as several; its collectives are in the trace."""
    work = Workload(zoo.Opaque, zoo.numbers, lambda model, batch: (model(batch[0]).logits - batch[1]).square().mean())
    for units in ("model", "Block"):
        engines = [("lab", strategy) for strategy in ("full_shard", "shard_grad_op", "zero2", "zero1", "no_shard")]
        records, agree = trained(work, engines, units=units, profile=1)
        assert [record.status for record in records] == ["finished"] * 6
        assert agree == [True] * 6, [record.summary.losses for record in records]


def test_compare_on_the_command_line_has_a_page_a_table_and_a_record(tmp_path, capsys):
    page, result, kept = tmp_path / "page.html", tmp_path / "out.json", tmp_path / "runs"
    words = [
        "compare",
        "--model",
        str(MINE),
        "--steps",
        "1",
        "--profile",
        "1",
        "--device",
        "cpu",
        "--units",
        "Block",
        "--link",
        "none",
    ]
    with pytest.raises(SystemExit) as done:
        main([*words, "--html", str(page), "--json", str(result), "--keep", str(kept)])
    told = capsys.readouterr().out
    assert done.value.code == 0 and "mine.py, 2 ranks on cpu, batches of its own" in told
    assert "Losses agree with the unsharded twin's." in told and "The units are 3 x Block, as asked." in told
    found = json.loads(result.read_text())
    assert len(found["runs"]) == 6 and all(run["matches_reference"] for run in found["runs"])
    assert found["spec"]["model"] == "mine.py" and found["runs"][0]["tokens_per_s"] is None
    assert "mine.py" in page.read_text() and str(MINE.parent) not in page.read_text() + result.read_text()
    record = RunRecord.load(kept / "4-full_shard-lab")
    assert (record.path / "model_source.txt").read_text() == MINE.read_text() and record.summary.samples_per_s
    assert record.environment["workload"]["units"] == "3 x Block" and spec_of(record) is None
    with pytest.raises(SystemExit) as again:
        main(["report", str(record.path), "--html", str(page)])
    assert again.value.code == 0


@pytest.mark.full("what the caller does with such a file is in test_own_model.py")
def test_a_file_that_goes_to_its_own_folder_reads_there_and_is_recorded_here(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "width.txt").write_text("7")
    source = MINE.read_text() + "\nimport os\nos.chdir(os.path.dirname(__file__))\nfirst = batch\n"
    source += "def batch(at):\n    assert open('width.txt').read() == '7'\n    return first(at)\n"
    (tmp_path / "sub" / "goes.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    record = run("sub/goes.py", directory="out", steps=1, device="cpu")
    assert record.status == "finished" and Path.cwd() == tmp_path
    assert RunRecord.load(tmp_path / "out").summary.losses == record.summary.losses


def test_bench_takes_engines_in_turn():
    specs = [RunSpec(model=str(MINE), engine=engine, strategy=strategy, memory=False, device="cpu")
             for engine, strategy in ENGINES]  # fmt: skip
    found = bench(specs, rounds=1)
    assert len({timing.loss for timing in found.timings[1:]}) == 1


def test_an_error_of_ones_own_code_shows_its_line_and_ends_a_comparison_of_many(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE.read_text().replace(".square().mean()", ".sqare().mean()"))
    with pytest.raises(RanksFailed) as caught:
        compare(path, steps=1, device="cpu")
    report = caught.value.report
    assert report.step == 0 and "raised in step 0 (forward): AttributeError" in report.message
    first = report.traceback.splitlines()[1]
    assert f'File "{path}", line' in first and "in loss" in first and "fsdplab/" not in report.traceback


@pytest.mark.parametrize(
    "replace,words",
    [
        ((".square().mean()", ".square()"), r"loss\(model, batch\) returned a tensor of shape \[8, 1\].* a scalar"),
        ((".square().mean()", ".square().mean().item()"), "returned a float; expected a scalar tensor"),
        (("return Net()", "return None"), r"model\(\) returned None; expected an nn.Module"),
        (("(at):", "(at):\n    raise OSError('no such data')"), r"in step 0 \(data\): OSError: no such data"),
        (("return Net()", "return Net(3 + __import__('os').getpid() % 1000)"), "other values on another rank"),
        (
            ('- batch["y"]', ".detach() * torch.ones((), requires_grad=True)"),
            "none of the .* parameters that the optimizer steps has a gradient after the first backward",
        ),
        (('- batch["y"]', "* math.inf"), "the loss is (inf|nan); give a smaller learning rate, or look for"),
    ],
)  # fmt: skip
def test_what_a_rank_finds_wrong_is_one_sentence(tmp_path, replace, words):
    path = tmp_path / "mine.py"
    assert replace[0] in MINE.read_text()
    path.write_text("import math\n" + MINE.read_text().replace(*replace))
    with pytest.raises(RanksFailed, match=words) as caught:
        run(path, strategy="full_shard", steps=1, device="cpu", time_limit=60)
    assert caught.value.record.environment is not None
    if "ModelError" in caught.value.report.message:
        assert not caught.value.report.traceback


def test_a_model_that_hangs_on_its_ranks_is_not_built_by_the_caller_afterwards(tmp_path):
    """The caller built it for the prediction, and hung as the ranks had."""
    path = tmp_path / "mine.py"
    built = f"open({str(tmp_path)!r} + f'/{{os.getpid()}}.built', 'x'); time.sleep(600)"
    path.write_text("import os, time\n" + MINE.read_text().replace("return Net()", built))
    with pytest.raises(RanksFailed, match="(ended the run|hung) while building the model") as caught:
        run(path, strategy="full_shard", steps=1, device="cpu", time_limit=8)
    assert not (tmp_path / f"{os.getpid()}.built").exists() and len(list(tmp_path.glob("*.built"))) == 2
    assert "no rank finished a step" in caught.value.record.summary.predicted.why_not


def test_the_first_loss_is_that_of_the_plain_model():
    record = run(str(MINE), strategy="no_shard", steps=1, world_size=1, device="cpu")
    assert math.isfinite(record.summary.losses[0]) and torch.is_grad_enabled()

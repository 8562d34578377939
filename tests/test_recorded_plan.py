"""A plan from a recording: of a preset it is the closed form's, and of any model it has memory, traffic and seconds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fsdplab import cli
from fsdplab.planning import plan
from fsdplab.planning.plan_spec import PlanError
from fsdplab.planning.plan_traffic import bytes_by_axis
from fsdplab.planning.recorded_plan import recorded_plan, recorded_spec
from fsdplab.sessions.micro_batch import RecordChoices, record_micro_batch
from fsdplab.workloads import ByteText
from fsdplab.workloads.workload import OnText
from tests.own_models import NAMES, OwnModel

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("checkpoint", ["none", "full"])
@pytest.mark.parametrize("strategy", ["full_shard", "zero2", "no_shard", "hybrid_shard"])
def test_of_a_preset_it_is_the_closed_form(strategy, checkpoint):
    """Bytes of traffic are equal, memory nearly is: attention's scratch and small buffers are no part of the other. Of
    256 tokens a step is the launches of its kernels, and the model that is recorded has query, key and value apart.
    """
    workload = OnText("gpt2", ByteText.from_standard_library(), 1, 256)
    choices = RecordChoices(workload.units, low_precision=True, checkpoint=checkpoint, on_card=True)
    recording = record_micro_batch(workload, choices)
    common = dict(gpus=32, strategy=strategy, checkpointing=checkpoint, grad_accum=2)
    found = recorded_plan(recorded_spec("gpt2", "h100-80gb", **common), recording)
    closed = plan("gpt2", "h100-80gb", micro_batch=1, seq=256, **common)
    assert bytes_by_axis(found.traffic) == bytes_by_axis(closed.traffic)
    assert found.memory.peak.total == pytest.approx(closed.memory.peak.total, rel=0.02)
    assert found.time.step_s == pytest.approx(closed.time.step_s, rel=0.3)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "experts"])
def test_of_any_model_it_has_memory_traffic_and_seconds(name):
    workload = OwnModel(name)
    units = lambda _: tuple(workload.file.units)  # noqa: E731
    recording = record_micro_batch(workload, RecordChoices(units, low_precision=True, on_card=True))
    answer = recorded_plan(recorded_spec(f"{name}.py", "h100-80gb", gpus=64), recording).as_dict()
    assert answer["fits"] and answer["memory_bytes"]["total"] > 2**30
    assert answer["comm_bytes_per_step"]["shard"] > 0 and answer["step_time_s"] > answer["compute_s"] > 0
    assert "recording of one micro-batch" in answer["provenance"]


def test_the_command_plans_a_file(capsys):
    file = Path(__file__).parent / "own_models" / "convolutions.py"
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "step", "--model", str(file), "--world-size", "64", "--json", "-"])
    answer = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0
    assert answer["model"] == "convolutions.py" and answer["gpus"] == 64 and answer["parameters"] == 1_228_042
    assert answer["memory_bytes"]["by_category"]["activations"] > 0 and "recording" in answer["provenance"]


@pytest.mark.parametrize(
    ("instead", "says"),
    [
        ("return 1 / 0", "could not be recorded: line 33, ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "could not be recorded: line 33, SystemExit: 3"),
        ("return None", r"model\(\) returned None; expected an nn.Module"),
    ],
)
def test_what_the_code_of_a_file_raises_is_one_line_that_says_where(tmp_path, capsys, instead, says):
    mine = (Path(__file__).parent / "own_models" / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(mine.replace("return Net()", instead))
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--model", str(tmp_path / "mine.py")])
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.count("\n") == 1 and re.search(f"fsdplab: .*mine.py.*{says}", told)


@pytest.mark.parametrize(
    "choice", [dict(tensor_parallel=2), dict(seq=128), dict(lora_rank=8), dict(param_dtype="fp16")]
)
def test_what_a_recording_cannot_answer_is_refused_in_one_line(choice):
    with pytest.raises(PlanError, match="recorded|recording") as refused:
        recorded_spec("mine.py", "h100-80gb", **choice)
    assert "\n" not in str(refused.value)

"""The measures of gpu-check, on CPU: the arithmetic with hand-written figures, right and wrong; test_gpu_check.py has
the dry run of the parts.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdplab.gpu_check.contestants import Case, Timed, host_syncs, medians, synchronisations
from fsdplab.gpu_check.memory import StateBytes, apart
from fsdplab.gpu_check.one_rank import judge as judge_engines
from fsdplab.gpu_check.one_rank import mfu, multiplying_parameters, plans, step_flops
from fsdplab.gpu_check.overlap import RANKS, SIZES, Blocks, Span, judge, link_for
from fsdplab.planning.hardware import gpu_of
from fsdplab.profiling import export_snapshots
from fsdplab.profiling.memory.snapshot import memory_snapshot, write_snapshot
from fsdplab.records import RecordError, RunRecord
from fsdplab.sessions import RunSpec, SpecError
from fsdplab.workloads import ConfigError, build_model, loss_of, parameter_count, preset
from fsdplab.workloads.compiled import compile_blocks

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[1]


# ---- FLOP and MFU


def test_flop_of_a_step_by_hand() -> None:
    shape = preset("llama-1b")
    per_block = 2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 5632 + 2 * 2048
    assert multiplying_parameters(shape) == 20 * per_block + 32_000 * 2048 + 2048
    assert step_flops(shape, tokens=10, sequence_length=4) == 10 * (
        6 * multiplying_parameters(shape) + 6 * 20 * 2048 * 4
    )


def test_tied_embeddings_multiply_once() -> None:
    tied = preset("gpt2")
    assert multiplying_parameters(tied) == parameter_count(tied) - 1024 * 768
    assert multiplying_parameters(replace(tied, tie_embeddings=False)) == multiplying_parameters(tied)


def test_mfu_is_a_part_of_the_peak() -> None:
    shape = preset("llama-1b")
    assert mfu(shape, 16_384, 2048, seconds=0.2173, peak=989e12) == pytest.approx(0.5, abs=0.001)
    assert mfu(shape, 16_384, 2048, seconds=0.2, peak=None) is None


@pytest.mark.parametrize("name,row", [
    ("NVIDIA H200", "H200 SXM 141GB"), ("NVIDIA H100 80GB HBM3", "H100 SXM 80GB"),
    ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"), ("NVIDIA GeForce RTX 4090", "RTX 4090"),
])  # fmt: skip
def test_the_peak_of_a_device_is_the_tables(name: str, row: str) -> None:
    assert gpu_of(name).name == row


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "Tesla T4", "", "A card of next year"])
def test_a_device_of_another_peak_has_none(name: str) -> None:
    assert gpu_of(name) is None


@pytest.mark.parametrize("name,billions", [("llama-0.3b", 0.30), ("llama-1b", 1.07), ("llama-3b", 3.02)])
def test_sizes_for_one_gpu(name: str, billions: float) -> None:
    assert parameter_count(preset(name)) / 1e9 == pytest.approx(billions, abs=0.006)
    assert preset(name).head_width == 128


# ---- host time


def test_only_synchronisations_are_counted_and_paths_are_cut() -> None:
    heard = [
        ("called a synchronizing CUDA operation (Triggered internally)", "/home/me/x/engine/unit.py", 7),
        ("deprecated", "/a/b.py", 1),
    ]
    assert synchronisations(heard) == ["engine/unit.py:7"]


def test_cpu_has_no_host_syncs_to_count() -> None:
    assert host_syncs(lambda: None, CPU) is None


def test_medians_of_steps() -> None:
    assert medians([Timed(3.0, 1.0), Timed(1.0, 0.5), Timed(2.0, 0.7)]) == {
        "step_s": 2.0,
        "step_s_min": 1.0,
        "host_s": 0.7,
    }


# ---- engines side by side


def rows(**lab: object) -> list[dict]:
    peer = {"engine": "torch-fsdp2", "step_s": 1.0, "host_syncs": 0, "allocated_peak": 100, "loss": 5.0, "mfu": 0.5}
    return [{**peer, "engine": "lab", "step_s": 0.9, **lab}, peer]


KEY = Case("llama-1b", 8, 2048, compiled=True)


def failed(case: Case = KEY, **lab: object) -> list[str]:
    return [
        check["name"].removeprefix(f"{case.words}: ")
        for check in judge_engines(rows(**lab), case, on_gpu=True)
        if not check["passed"]
    ]


def test_an_engine_that_meets_every_aim_passes() -> None:
    assert failed() == []
    assert len(judge_engines(rows(), KEY, on_gpu=True)) == 5


@pytest.mark.parametrize("lab,name", [
    ({"step_s": 0.98}, "step time over torch-fsdp2's"), ({"host_syncs": 1}, "no host sync inside a step"),
    ({"allocated_peak": 101}, "peak memory over torch-fsdp2's"),
    ({"mfu": 0.49}, "MFU"), ({"loss": 5.2}, "losses agree"),
])  # fmt: skip
def test_an_engine_that_misses_one_is_told_which(lab: dict, name: str) -> None:
    assert failed(**lab) == [name]


def test_the_aim_of_mfu_is_for_compiled_blocks_of_the_1b_model() -> None:
    assert failed(replace(KEY, compiled=False), mfu=0.1) == []
    assert failed(replace(KEY, model="llama-3b"), mfu=0.1) == []


def test_on_cpu_only_losses_are_judged() -> None:
    checks = judge_engines(rows(step_s=9.0, allocated_peak=None, host_syncs=None, mfu=None), KEY, on_gpu=False)
    assert [(check["name"], check["passed"]) for check in checks] == [(f"{KEY.words}: losses agree", True)]


def test_what_is_compared_on_cuda() -> None:
    cases = [plan.case for plan in plans("cuda")]
    assert {case.model for case in cases} == {"llama-0.3b", "llama-1b", "llama-3b"}
    assert {(case.checkpoint, case.compiled) for case in cases if case.model == "llama-1b"} == {
        (c, k) for c in ("none", "full") for k in (True, False)
    }
    assert all({"lab", "torch-fsdp2"} <= set(plan.engines) for plan in plans("cuda"))


# ---- what can be hidden, and what was


def compute(unit: str, phase: str, start: int, end: int) -> Span:
    return Span(unit, "compute", phase, start, end)


FORWARD = [compute("a", "forward", 0, 10), compute("b", "forward", 10, 20)]


def test_a_gather_under_the_forward_before_it_is_hidden() -> None:
    judged = judge("ab", [*FORWARD, Span("b", "all_gather", "forward", 2, 6)])
    assert (judged.hideable_ns, judged.hidden_ns, judged.share, judged.elsewhere) == (4, 4, 1.0, ())


def test_a_gather_in_a_gap_is_exposed_and_told_to_be_elsewhere() -> None:
    spans = [
        compute("a", "forward", 0, 10),
        compute("b", "forward", 14, 24),
        Span("b", "all_gather", "forward", 10, 14),
    ]
    judged = judge("ab", spans)
    assert (judged.hideable_ns, judged.hidden_ns, judged.share) == (4, 0, 0.0)
    assert judged.elsewhere == ("all_gather of b not under forward of a",)


def test_of_a_gather_longer_than_the_forward_only_that_much_can_be_hidden() -> None:
    spans = [compute("a", "forward", 0, 10), compute("b", "forward", 30, 40), Span("b", "all_gather", "forward", 0, 30)]
    assert (judge("ab", spans).hideable_ns, judge("ab", spans).share) == (10, 1.0)


def test_the_first_gather_has_nothing_to_hide_behind() -> None:
    judged = judge("ab", [compute("a", "forward", 5, 10), Span("a", "all_gather", "forward", 0, 5)])
    assert judged.hideable_ns == 0 and judged.share is None


BACKWARD = [compute("c", "backward", 0, 20), compute("b", "backward", 20, 40), compute("a", "backward", 40, 60)]


def test_a_backward_hides_the_reduction_before_and_the_gather_after() -> None:
    spans = [*BACKWARD, Span("c", "reduce_scatter", "backward", 20, 30), Span("a", "all_gather", "backward", 30, 35)]
    judged = judge("abc", spans)
    slot = next(slot for slot in judged.slots if (slot.unit, slot.phase) == ("b", "backward"))
    assert (slot.compute_ns, slot.communication_ns, slot.hideable_ns, slot.hidden_ns) == (20, 15, 15, 15)
    assert judged.share == 1.0 and judged.elsewhere == ()


def test_a_reduction_after_everything_is_elsewhere() -> None:
    judged = judge("abc", [*BACKWARD, Span("c", "reduce_scatter", "backward", 60, 70)])
    assert judged.share == 0.0 and judged.elsewhere == ("reduce_scatter of c not under backward of b",)


def test_the_last_reduction_has_nothing_to_hide_behind() -> None:
    assert judge("abc", [*BACKWARD, Span("a", "reduce_scatter", "backward", 60, 70)]).share is None


def test_a_link_is_as_slow_as_it_was_asked_to_be() -> None:
    size = SIZES["cpu"]
    assert size.unit_bytes == 2 * sum(parameter.numel() for parameter in Blocks(size).blocks[0].parameters())
    _, nanoseconds = link_for(size, forward_ns=2e6, times=0.5).collective("all_gather", size.unit_bytes, RANKS)
    assert nanoseconds == pytest.approx(1e6, rel=1e-4)


# ---- memory by arithmetic


def test_state_by_hand() -> None:
    shape = StateBytes(preset("llama-20m"), ranks=2)
    parameters = parameter_count(preset("llama-20m"))
    assert (shape.slices, shape.at_rest, shape.gradients) == (2 * parameters, 6 * parameters, 2 * parameters)


def test_in_a_forward_two_blocks_and_the_root_are_gathered() -> None:
    shape = StateBytes(preset("llama-20m"))
    block, root = 3_408_896, 262_656
    assert root + 6 * block == parameter_count(preset("llama-20m"))
    assert shape.in_forward(2) == 2 * (root + 2 * block)
    assert shape.in_forward(5) == 2 * (root + block)  # nothing comes after the last


def test_apart_has_no_sign() -> None:
    assert apart(97, 100) == apart(103, 100) == pytest.approx(0.03)


# ---- snapshots


def snapshot_of(file: str) -> dict:
    """What `torch.cuda.memory._snapshot` returns for one block, allocated in `file`."""
    frames = [{"filename": file, "line": 7, "name": "start_unshard"}, {"filename": "??", "line": 0, "name": "main"}]
    return {
        "segments": [{"blocks": [{"size": 512, "frames": frames}]}],
        "device_traces": [[{"action": "alloc", "addr": 1, "size": 512, "frames": frames}]],
    }


def test_snapshots_are_exported_as_the_viewer_reads_them(tmp_path) -> None:
    (tmp_path / "record" / "snapshots").mkdir(parents=True)
    taken = snapshot_of("/home/me/lab/fsdplab/engine/core/unit.py")
    write_snapshot(taken, tmp_path / "record" / "snapshots" / "rank0.snapshot.pickle.gz")
    (written,) = export_snapshots(RunRecord(tmp_path / "record"), tmp_path / "out")
    assert written.name == "rank0.pickle" and pickle.loads(written.read_bytes()) == snapshot_of(
        "fsdplab/engine/core/unit.py"
    )


def test_a_record_without_snapshots_says_where_they_are_made(tmp_path) -> None:
    with pytest.raises(RecordError, match="on CUDA only.*with GPUs: fsdplab run --profile"):
        export_snapshots(RunRecord(tmp_path), tmp_path / "out")


def test_on_cpu_no_snapshot_is_written(tmp_path) -> None:
    with memory_snapshot(tmp_path / "none.gz", CPU):
        pass
    assert list(tmp_path.iterdir()) == []


# ---- compiled blocks


def test_compiled_blocks_compute_the_same_in_one_graph_and_keep_their_names() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, compiled = build_model("llama-tiny"), compile_blocks(build_model("llama-tiny"), backend="aot_eager")
    tokens = torch.arange(32).view(2, 16)
    losses = [loss_of(model, tokens, tokens) for model in (eager, compiled)]
    [loss.backward() for loss in losses]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for (name, one), (same_name, two) in zip(eager.named_parameters(), compiled.named_parameters(), strict=True):
        assert name == same_name
        assert torch.allclose(one.grad, two.grad, rtol=1e-3, atol=1e-6), name
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "two blocks, one graph"


def test_a_model_without_blocks_is_not_compiled() -> None:
    with pytest.raises(ConfigError, match="Linear has no blocks to compile"):
        compile_blocks(torch.nn.Linear(1, 1))


def test_a_spec_says_whether_blocks_are_compiled(monkeypatch) -> None:
    assert RunSpec().compile == "none"
    with pytest.raises(SpecError, match="unknown compile 'all'.*none, blocks"):
        RunSpec(compile="all")
    monkeypatch.setattr("fsdplab.workloads.compiled.missing_compiler", lambda device: "a C++ compiler (g++)")
    with pytest.raises(SpecError, match=r"needs a C\+\+ compiler.*compile='none'"):
        RunSpec(compile="blocks", device="cpu")


# ---- links between CUDA ranks


@pytest.mark.parametrize("wrong,match", [
    (dict(engine="torch-ddp", strategy="no_shard"), "only the lab's engine meets an emulated link, got torch-ddp"),
    (dict(link_queues=2), "has one queue, got link_queues=2"),
])  # fmt: skip
def test_a_link_between_cuda_ranks_that_cannot_be(wrong: dict, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        RunSpec(device="cuda", link="1GB/s", **wrong)


# ---- the parts, as processes


@pytest.mark.parametrize("part", ["one_rank", "overlap", "memory"])
def test_a_part_without_a_gpu_says_so(tmp_path, part: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, "-m", f"fsdplab.gpu_check.{part}", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "finds no CUDA device" in done.stderr

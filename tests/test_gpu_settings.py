"""What only runs on GPUs write or are asked for: memory snapshots, compiled blocks, links between CUDA ranks."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdplab.planning.hardware import gpu_of
from fsdplab.profiling import export_snapshots
from fsdplab.profiling.profiler import memory_snapshot, write_snapshot
from fsdplab.records import RecordError, RunRecord
from fsdplab.sessions import RunSpec, SpecError
from fsdplab.sessions.bench_engines import ALONE, Alone
from fsdplab.sessions.launch.mailbox import HeartbeatWriter, Mailbox
from fsdplab.sessions.worker.engines import build
from fsdplab.sessions.worker.rank_process import RankContext, _own_device
from fsdplab.workloads import ModelError, build_model, compiled, loss_of, preset
from fsdplab.workloads.compiled import compile_blocks

CPU = torch.device("cpu")


def test_a_gpu_that_others_have_filled_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: torch.device) -> None:
        raise RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")

    monkeypatch.setattr(torch.cuda, "set_device", full)
    with pytest.raises(SystemExit, match=r"^cuda:1 cannot be used \(CUDA error: out of memory\); nvidia-smi shows the"):
        _own_device("cuda:1")


@pytest.mark.parametrize("name,row", [
    ("NVIDIA H200", "H200 SXM 141GB"), ("NVIDIA H100 80GB HBM3", "H100 SXM 80GB"),
    ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"), ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("Tesla T4", "T4"),
])  # fmt: skip
def test_the_peak_of_a_device_is_the_tables(name: str, row: str) -> None:
    assert gpu_of(name).name == row


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "", "A card of next year"])
def test_a_device_of_another_peak_has_none(name: str) -> None:
    assert gpu_of(name) is None


@pytest.mark.parametrize("name,billions", [("llama-0.3b", 0.30), ("llama-1b", 1.07), ("llama-3b", 3.02)])
def test_sizes_for_one_gpu(name: str, billions: float) -> None:
    assert preset(name).parameters / 1e9 == pytest.approx(billions, abs=0.006)
    assert preset(name).head_width == 128


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


def trained_under(engine: str, strategy: str, folder: Path) -> tuple[list[float], list[float], int, int]:
    """The losses of two steps of a bench's turn, eager and with compiled blocks, and that one's breaks and graphs."""
    compile_with = torch.compile
    torch.compile = lambda function, **options: compile_with(function, **options | {"backend": "aot_eager"})
    compiled.missing_compiler = lambda device: None
    mailbox, rank = Mailbox(folder), dist.get_rank()
    context = RankContext(rank, 2, CPU, mailbox, HeartbeatWriter(mailbox.of(rank, "heartbeat"), rank))
    tokens = torch.arange(32).view(2, 16)
    losses = []
    for compile in ("none", "blocks"):
        torch._dynamo.utils.counters.clear()
        of = dict(engine=engine, strategy=strategy) if engine != ALONE else {}
        spec = RunSpec(model="gpt-tiny", device="cpu", compile=compile, **of)
        setup = Alone(spec, context) if engine == ALONE else build(spec, context)
        losses.append([setup.train_step([[(tokens, tokens)]]) for _ in range(2)])
    counters = torch._dynamo.utils.counters
    return *losses, sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("engine,strategy", [
    ("lab", "full_shard"), ("lab", "zero1"), ("torch-fsdp2", "full_shard"), ("torch-ddp", "no_shard"), (ALONE, ALONE),
])  # fmt: skip
def test_blocks_are_one_graph_under_every_engine_of_a_bench(ranks, tmp_path, engine: str, strategy: str) -> None:
    for eager, quick, breaks, graphs in ranks(2, trained_under, engine, strategy, tmp_path):
        assert quick == pytest.approx(eager, rel=1e-5)
        assert (breaks, graphs) == (0, 1)


def test_a_model_without_blocks_is_not_compiled() -> None:
    with pytest.raises(ModelError, match="Linear has no blocks to compile"):
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

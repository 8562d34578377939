"""More ranks than GPUs: where they run, who carries their bytes, what is said of it, and what a trace of it tells."""

from __future__ import annotations

import pytest
import torch

from fsdplab.cli.progress import headline
from fsdplab.engine.transport.selection import TRANSPORTS, transport_of
from fsdplab.sessions import RunSpec, SpecError, run
from fsdplab.sessions.spec import gpus as driver
from fsdplab.sessions.spec.gpus import EXCLUSIVE
from fsdplab.sessions.worker.environment import carrier, nccl_variables
from fsdplab.sessions.worker.rank_process import backend_of_cells
from fsdplab.teaching.core.cell_runs import device_words
from tests.test_traces import analysed, event, kernel, launch, mark, parts

OLD, NEW = (2, 29, 7), (2, 30, 7)


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(1, NEW)`: this machine has one GPU, and torch that version of NCCL."""

    def there_are(count, nccl=OLD):
        monkeypatch.setattr(driver, "usable_gpus", lambda: count)
        monkeypatch.setattr(driver, "why_no_gpu", lambda: "there is none")
        monkeypatch.setattr(driver, "nccl_version", lambda: nccl)

    return there_are


def spec(**wanted):
    return RunSpec(**{"model": "gpt-tiny", **wanted})


@pytest.mark.parametrize(
    ("count", "wanted", "device", "shares"),
    [
        (0, {}, "cpu", False),
        (1, {}, "cpu", False),
        (2, {}, "cuda", False),
        (1, {"world_size": 1}, "cuda", False),
        (1, {"device": "cuda"}, "cuda", True),
        (2, {"device": "cuda", "world_size": 4}, "cuda", True),
        (1, {"device": "cuda", "engine": "twin"}, "cuda", False),
        (1, {"device": "cuda", "engine": "torch-ddp", "strategy": "no_shard"}, "cuda", True),
    ],
)
def test_where_ranks_run(gpus, count, wanted, device, shares):
    gpus(count)
    assert (spec(**wanted).device_type, spec(**wanted).shares_a_gpu) == (device, shares)


def test_the_environment_may_have_ranks_share(gpus, monkeypatch):
    gpus(1)
    monkeypatch.setenv("FSDPLAB_SHARE_A_GPU", "1")
    assert spec().device_type == "cuda" and spec().shares_a_gpu


@pytest.mark.parametrize(
    ("count", "wanted", "said"),
    [
        (0, {}, ""),
        (2, {}, ""),
        (1, {"device": "cpu"}, ""),
        (1, {}, "this machine has 1 GPU; --device cuda lets ranks share"),
        (1, {"device": "cuda"}, "1 GPU for 2 ranks, which take turns"),
        (2, {"device": "cuda", "world_size": 4}, "2 GPUs for 4 ranks, which take turns"),
    ],
)
def test_the_headline_says_why_ranks_run_where_they_do(gpus, count, wanted, said):
    gpus(count)
    line = headline(spec(**wanted), None).text
    assert line.endswith(f"({said})" if said else "no emulated card")


@pytest.mark.parametrize(
    ("nccl", "transport", "backend", "words"),
    [
        (OLD, "auto", "gloo", "gloo through host memory, several ranks on one GPU"),
        (NEW, "auto", "nccl", "nccl 2.30.7, several ranks on one GPU"),
        (NEW, "nccl", "nccl", "nccl 2.30.7, several ranks on one GPU"),
        (NEW, "gloo", "gloo", "gloo through host memory, several ranks on one GPU"),
    ],
)
def test_who_carries_the_bytes_of_ranks_on_one_gpu(gpus, nccl, transport, backend, words):
    gpus(1, nccl)
    shared = spec(device="cuda", transport=transport)
    assert shared.backend == backend and carrier(shared) == {"backend": words}
    assert nccl_variables(shared).get("NCCL_MULTI_RANK_GPU_ENABLE") == ("1" if backend == "nccl" else None)


def test_ranks_with_a_gpu_each_need_no_settings(gpus):
    gpus(2, NEW)
    assert spec().backend == "nccl" and not carrier(spec()) and not nccl_variables(spec())


@pytest.mark.parametrize(
    ("count", "wanted", "complaint"),
    [
        (0, {"device": "cuda"}, "no GPU can be used: there is none; or give device='cpu'"),
        (1, {"device": "cuda", "transport": "nccl"}, "2 ranks on 1 GPU, .* brings 2.29.7; leave transport='auto'"),
        (1, {"device": "cuda", "transport": "shm"}, "transport shm does not move tensors on cuda"),
        (1, {"transport": "nccl"}, "transport nccl does not move tensors on cpu"),
        (1, {"transport": "shared_gpu"}, "transport.*'shared_gpu'.*expected"),
    ],
)
def test_what_cannot_be_is_refused(gpus, count, wanted, complaint):
    gpus(count)
    with pytest.raises(SpecError, match=complaint):
        spec(**wanted)


@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "auto"])
def test_a_transport_refuses_tensors_that_it_does_not_move(transport):
    wrong = {"gloo": "meta", "shm": "cuda", "nccl": "cpu"}[transport]
    with pytest.raises(ValueError, match=f"transport '{transport}' does not move tensors on {wrong}"):
        transport_of(None, torch.device(wrong), transport)


def test_a_trace_shows_what_gloo_carries_between_gpus(tmp_path):
    """Gloo's thread gathers blocks.1 from 300 to 450, under the forward's kernel (200 to 400) for the first 100."""
    step = analysed(tmp_path, [
        mark("FSDP::pre_forward (blocks.0)", 95, 145), mark("FSDP::all_gather (blocks.1)", 100, 140),
        event("c10d::_allgather_base_", 105, 135), event("gloo:all_gather", 300, 450, tid=9),
        launch(160, 3), kernel("gemm", 200, 400, 3),
    ])  # fmt: skip
    assert parts(step) == [100, 100, 50, 750]  # of the wall step: 0 to 1,000
    (row,) = step.collectives
    assert (row["kind"], row["unit"], row["start_ns"], row["end_ns"]) == ("all_gather", "blocks.1", 300_000, 450_000)
    assert row["packing_ns"] == row["unpacking_ns"] == 0  # the host launches copies, and copies nothing


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("engine", "world_size"), [("lab", 2), ("torch-fsdp2", 2), ("lab", 4)])
def test_ranks_on_one_gpu_train_as_the_cpu_twin(engine, world_size):
    more = max(world_size, torch.cuda.device_count() + 1)
    on_gpu = run(spec(steps=2, device="cuda", engine=engine, world_size=more)).summary.losses
    twin = run(spec(steps=2, device="cpu", engine="twin", world_size=more)).summary.losses
    torch.testing.assert_close(torch.tensor(on_gpu), torch.tensor(twin), rtol=1e-3, atol=0.0)


def test_a_gpu_in_exclusive_mode_is_not_shared(gpus, monkeypatch):
    gpus(1)
    monkeypatch.setattr(driver, "compute_mode", lambda gpu: EXCLUSIVE)
    with pytest.raises(SpecError, match="2 ranks on 1 GPU, but the compute mode is EXCLUSIVE_PROCESS: .* nvidia-smi"):
        spec(device="cuda")
    assert spec(device="cuda", world_size=1).device_type == "cuda"


# ---- cells of notebooks


@pytest.mark.parametrize(
    ("gpus", "ranks", "said"),
    [
        (0, 2, []),
        (1, 2, ["rank % 1", "share", "through host memory"]),
        (2, 4, ["rank % 2", "share"]),
        (2, 2, ["the GPU of each", "NCCL carries its tensors"]),
    ],
)
def test_a_cell_says_how_it_reaches_the_gpus(gpus, ranks, said):
    words = device_words(gpus, ranks)
    assert bool(words) == bool(said) and all(part in words for part in said)


@pytest.mark.parametrize(
    ("gpus", "nccl", "backend"),
    [(0, True, "gloo"), (1, True, "gloo"), (2, True, "cpu:gloo,cuda:nccl"), (8, True, "cpu:gloo,cuda:nccl"),
     (2, False, "gloo")],
)  # fmt: skip
def test_a_cells_ranks_use_nccl_where_each_has_a_gpu(monkeypatch, gpus, nccl, backend):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    assert backend_of_cells(2) == backend

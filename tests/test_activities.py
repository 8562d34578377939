"""What is counted of a job's loop, each where it is called: near misses are not counted."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.profiler import profile, record_function
from torch.utils.checkpoint import checkpoint

from fsdplab.profiling import analyse_trace
from fsdplab.recording import activities
from fsdplab.recording.observed import Observed
from fsdplab.recording.rows import Place, Taken, resident_bytes

pytestmark = pytest.mark.quick
CPU = torch.device("cpu")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A recorder's notes of one step; what is wrapped for it is restored after the test."""
    for owner, name in (
        (copy, "deepcopy"),
        (clip_grad, "clip_grad_norm_"),
        (nn.utils, "clip_grad_norm_"),
        (torch.Tensor, "numpy"),
        (torch.Tensor, "tolist"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    return SimpleNamespace(taken=Taken(), done=False, is_in_backward=False)


def counts(recorder: Any) -> dict[str, int]:
    return {name: count for name, (count, _, _) in recorder.taken.activities.items()}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))


def test_modules_that_are_copied_whole_are_counted_and_other_copies_are_not(recorder):
    activities._watch_deep_copies(recorder)
    kept = copy.deepcopy(model())
    assert isinstance(kept, nn.Sequential) and counts(recorder) == {"deep copy": 1}
    assert copy.deepcopy({"a": [1, 2]}) == {"a": [1, 2]} and counts(recorder) == {"deep copy": 1}
    recorder.done = True
    copy.deepcopy(kept)
    assert counts(recorder) == {"deep copy": 1}


def test_tensors_whose_numbers_are_read_are_counted(recorder):
    activities._watch_numpy(recorder)
    assert torch.ones(2).tolist() == [1.0, 1.0] and torch.ones(3).numpy().sum() == 3
    assert counts(recorder) == {"to numpy": 2}


def test_only_the_same_parameters_are_clipped_again(recorder):
    activities._watch_clipping_again(clip_grad, recorder)
    first, second = model(), model()
    for each in (first, second):
        each(torch.randn(4, 8)).sum().backward()
        torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
    assert counts(recorder) == {}
    norm = torch.nn.utils.clip_grad_norm_(first.parameters(), 1e9)
    assert norm > 0 and counts(recorder) == {"clipped again": 1}
    recorder.taken = Taken()  # the next step
    torch.nn.utils.clip_grad_norm_(first.parameters(), 1.0)
    assert counts(recorder) == {}


def test_layers_that_work_as_in_an_evaluation_are_seen_where_the_model_is_set_so():
    network = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Dropout(0.0), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    place = Place(0, 1, 1, CPU)

    def seen() -> dict[str, Any]:
        observed = Observed(network, [optimizer], place)
        observed.begin()
        observed.before_backward()
        observed.end()
        return observed.as_report("")

    assert seen()["asleep"] == {} and seen()["anomaly_mode"] is False
    network[3].eval()  # frozen statistics, as in many a fine-tuning
    assert seen()["asleep"] == {}
    network.eval()
    assert seen()["asleep"] == {"Dropout": 1, "BatchNorm1d": 1}, "a dropout of 0 does nothing anyway"
    with torch.autograd.set_detect_anomaly(True):
        assert seen()["anomaly_mode"] is True


def test_an_optimizer_that_is_told_to_loop_is_told_from_one_that_does_so_by_default():
    network, place = model(), Place(0, 1, 1, CPU)
    told = {
        name: Observed(network, [torch.optim.AdamW(network.parameters(), **how)], place).as_report("")
        for name, how in {"told": {"foreach": False}, "default": {}, "fused": {"fused": True}}.items()
    }
    assert {name: (report["optimizer_loops"], report["told_to_loop"]) for name, report in told.items()} == {
        "told": (True, True),
        "default": (True, False),
        "fused": (False, False),
    }


def test_what_a_process_holds_is_read():
    before = resident_bytes(CPU)
    kept = torch.ones(50_000_000)  # 200 MB
    assert resident_bytes(CPU) - before > 100_000_000 or before == 0, "0 where the system does not say"
    del kept


# ---- graphs that no backward uses


def of_graphs(tmp_path: Path, step: Any) -> dict[str, int]:
    """How many nodes a step has built, and how many of them were dropped, as its trace shows it."""
    with profile() as profiled, record_function("ProfilerStep#3"):
        step()
    path = tmp_path / "trace.json"
    profiled.export_chrome_trace(str(path))
    return {row["name"]: row["count"] for row in analyse_trace(path).rows("activities") if "graph" in row["name"]}


def deep() -> nn.Sequential:
    """Four blocks, whose forward builds more nodes in a row than any check after a layer."""
    return nn.Sequential(*(model() for _ in range(4)))


def test_a_forward_without_a_backward_is_a_dropped_graph(tmp_path):
    network, x = deep(), torch.randn(4, 8)

    def trains_and_validates() -> None:
        network(x).sum().backward()
        network(x).sum()

    found = of_graphs(tmp_path, trains_and_validates)
    assert found["dropped graph"] >= 12 and found["graph"] >= 2 * found["dropped graph"] - 1


def test_a_check_after_each_layer_drops_no_graph(tmp_path):
    """What is read of a layer's output builds a node or two; the forward's own nodes stand in between."""
    network, x = deep(), torch.randn(4, 8)

    def check(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        assert output.abs().max().item() < 1e6

    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(check)

    found = of_graphs(tmp_path, lambda: network(x).sum().backward())
    assert not found.get("dropped graph")


def test_what_is_used_or_needs_no_graph_is_none(tmp_path):
    network, x = model(), torch.randn(4, 8)

    def with_no_grad() -> None:
        network(x).sum().backward()
        with torch.no_grad():
            network(x).sum()

    def recomputes() -> None:
        checkpoint(network, x, use_reentrant=False).sum().backward()

    def two_forwards_of_one_loss() -> None:
        (network(x).sum() + network(2 * x).sum()).backward()

    for step in (with_no_grad, recomputes, two_forwards_of_one_loss):
        assert of_graphs(tmp_path, step).get("dropped graph", 0) <= 1, step.__name__

"""What is counted of a job's loop, each where it is called: near misses are not counted."""

from __future__ import annotations

import copy
import gc
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.profiler import profile, record_function
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

from fsdplab.profiling import analyse_trace
from fsdplab.profiling.setup_faults import SETUP_FAULTS
from fsdplab.profiling.traces.host_reads import BEFORE_FORWARD, FORWARD_BEGINS, LOOP_GOES_ON
from fsdplab.recording import activities
from fsdplab.recording.assemble import _batches, _cores_of_a_node, _interpreter
from fsdplab.recording.batches import Batches
from fsdplab.recording.garbage import Collections
from fsdplab.recording.interpreter import Interpreter
from fsdplab.recording.observed import Observed
from fsdplab.recording.rank import Round
from fsdplab.recording.rows import Place, Taken, resident_bytes
from fsdplab.sessions.worker.core_share import core_time

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


@pytest.mark.parametrize(
    "fused,looping,remedy",
    [
        (True, {"SGD": 12}, "torch.optim.SGD(..., fused=True), or foreach=True."),
        (
            None,
            {"AdamW": 12, "SGD": 12},
            "torch.optim.AdamW(..., fused=True) and torch.optim.SGD(..., fused=True), or foreach=True.",
        ),
    ],
)
def test_of_two_optimizers_the_one_that_loops_is_named(fused, looping, remedy):
    """AdamW of 12 tensors, fused or not, and SGD of 12 others."""
    first, second = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))) for _ in range(2))
    optimizers = [torch.optim.AdamW(first.parameters(), fused=fused), torch.optim.SGD(second.parameters())]
    report = Observed(nn.Sequential(first, second), optimizers, Place(0, 1, 1, CPU)).as_report("")
    assert report["looping"] == looping and report["parameters"] == 24
    facts = SimpleNamespace(observed=report, optimizer=SimpleNamespace(seconds=0.1), step_s=1.0)
    rule = next(rule for rule in SETUP_FAULTS if rule.kind == "looping_optimizer")
    values = rule.claims(rule.kind, facts, None).values
    assert values["parameters"] == sum(looping.values()) and rule.remedy.format(**values) == remedy


def test_groups_of_the_optimizer_are_counted_and_their_kinds_of_options():
    network, place = model(), Place(0, 1, 1, CPU)
    groups = [{"params": [each], "weight_decay": 0.1 * (each.ndim > 1)} for each in network.parameters()]
    report = Observed(network, [torch.optim.AdamW(groups, fused=True)], place).as_report("")
    assert (report["groups"], report["kinds_of_groups"], report["parameters"]) == (4, 2, 4)
    rates = [{"params": [each], "lr": 0.1 / number} for number, each in enumerate(network.parameters(), 1)]
    assert Observed(network, [torch.optim.SGD(rates)], place).as_report("")["kinds_of_groups"] == 4


def test_full_collections_are_noted_between_begin_and_end():
    noted: list[int] = []
    collections = Collections(noted.append)
    collections.end()
    gc.collect()
    collections.begin()
    gc.collect()
    gc.collect(1)
    collections.end()
    gc.collect()
    assert len(noted) == 1 and noted[0] > 0 and collections not in gc.callbacks


@pytest.mark.parametrize("keeps_python", [True, False])
def test_a_thread_that_keeps_the_interpreter_is_told_from_one_that_sleeps(keeps_python):
    has_ended = threading.Event()

    def beside() -> None:
        while not has_ended.is_set():
            if not keeps_python:
                time.sleep(0.001)

    threading.Thread(target=beside, name="metrics", daemon=True).start()
    results = []
    # a busy machine takes the core from the thread now and then, which keeps nothing then
    for _ in range(20):
        interpreter = Interpreter()
        for _ in range(8):
            interpreter.note(core_time().threads)
        results.append(_interpreter({3: {"interpreter": interpreter.as_report()}}))
        if results[-1].get("interpreter_wait_s", 0.0) >= 0.004:
            break
    has_ended.set()
    longest = max(results, key=lambda result: result.get("interpreter_wait_s", 0.0))
    assert (longest.get("interpreter_wait_s", 0.0) >= 0.004) == keeps_python, results
    if keeps_python and core_time().threads is not None:
        assert (longest["thread"], longest["thread_rank"]) == ("metrics", 3) and longest["thread_s"] > 0.001


# ---- batches


def busy(seconds: float) -> None:
    """Work in Python for so much CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_work_before_a_forward_is_preparing_and_waiting_is_not():
    network, taken = model(), Taken()
    batches = Batches(network, pytest.fail)

    def prepared_ms(prepare: Any) -> float:
        taken.activities.clear()
        batches.loop_goes_on(taken, 0)
        prepare()
        network(torch.randn(4, 8))
        _, took_ns, _ = taken.activities.get("preparing", (0, 0, 0))
        return took_ns / 1e6

    def is_counted_already() -> None:
        began = time.perf_counter_ns()
        busy(0.02)
        taken.note("saving", time.perf_counter_ns() - began)

    def is_an_evaluation() -> None:
        with torch.no_grad():
            network(torch.randn(4, 8))

    assert prepared_ms(lambda: busy(0.02)) >= 20
    for prepare in (lambda: None, lambda: time.sleep(0.02), is_counted_already, is_an_evaluation):
        assert prepared_ms(prepare) < 10
    # of two forwards in a row the first one has the batch
    batches.loop_goes_on(taken, 0)
    taken.activities.clear()
    network(torch.randn(4, 8))
    busy(0.02)
    network(torch.randn(4, 8))
    assert taken.activities["preparing"][0] == 1 and taken.activities["preparing"][1] < 10_000_000
    batches.end()
    assert not network._forward_pre_hooks


def test_a_checksum_tells_batches_apart_by_all_of_their_tensors():
    def checksums(*steps: Any) -> dict[int, int]:
        network = nn.Identity()
        batches = Batches(network, pytest.fail)
        for step, args in enumerate(steps):
            batches.loop_goes_on(Taken(), step)
            network(args)
        batches.end()
        return batches.checksums()

    x, y = torch.randint(1000, (64, 128)), torch.randn(16).bfloat16()
    same = checksums(({"ids": x}, y), ({"ids": x.clone()}, y.clone()))
    assert same[0] == same[1]
    other = y.clone()
    other[3] += 1
    assert checksums((x, other))[0] != checksums((x, y))[0]
    with torch.no_grad():
        assert checksums((x, y)) == {}, "an evaluation"
    images = torch.randn(2, 3, 32, 32)
    for first, second in ((images, images + 1), (images.to(memory_format=torch.channels_last), images.mT + 1)):
        of_images = checksums((first,), (first.clone(),), (second,))
        assert of_images[0] == of_images[1] != of_images[2]
    # tensors that are no grid of elements in memory are left out, and end no job
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    others = [torch.eye(3).to_sparse(), nested, torch.empty(3, device="meta"), torch.empty(0)]
    assert checksums((x, others))[0] == checksums((x,))[0]
    assert checksums(others, ("a sentence", [3, 4])) == {}
    # one buffer for all batches
    kept = torch.zeros(8)
    batches = Batches(network := nn.Identity(), pytest.fail)
    for step in range(2):
        batches.loop_goes_on(Taken(), step)
        network(kept.fill_(step))
    assert len(set(batches.checksums().values())) == 2


def test_a_batch_that_cannot_be_looked_at_ends_no_forward():
    class Lazy:
        """A batch that reads its tensors when they are asked for, and whose file is gone."""

    def read(batch: Lazy) -> Any:
        raise OSError("shard-3.tar is gone")

    register_pytree_node(Lazy, read, lambda content, context: Lazy())
    reasons: list[str] = []
    batches = Batches(network := nn.Identity(), reasons.append)
    batches.loop_goes_on(Taken(), 8)
    assert isinstance(network(Lazy()), Lazy)
    assert reasons == ["the batch of step 8: OSError: shard-3.tar is gone"] and batches.checksums() == {}


def test_steps_in_which_all_ranks_have_the_same_batch_are_counted():
    def of_ranks(*batches: dict[str, int]) -> dict[str, int]:
        return _batches({rank: {"batches": batch} for rank, batch in enumerate(batches)})

    counted = of_ranks({"8": 1, "9": 2, "10": 2}, {"8": 1, "9": 2, "10": 2, "11": 5})
    assert list(counted.values()) == [2, 3, 3, 2]
    assert list(of_ranks({"8": 1, "9": 2}, {"8": 1, "9": 3}).values()) == [2, 2, 1, 1]


def test_operators_before_a_forward_are_left_out_of_the_trace(tmp_path):
    def event(name: str, category: str, begin: int, end: int) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": category, "pid": 1, "tid": 1, "ts": begin, "dur": end - begin}

    events = [
        event("ProfilerStep#3", "user_annotation", 0, 1000),
        event(LOOP_GOES_ON, "user_annotation", 5, 6),
        event("aten::lerp_", "cpu_op", 100, 300),  # an average of the weights
        event(LOOP_GOES_ON, "user_annotation", 400, 401),  # the loader's batch is there
        event("aten::to", "cpu_op", 450, 460),
        event(FORWARD_BEGINS, "user_annotation", 600, 601),
        event("aten::mm", "cpu_op", 610, 700),
        event(FORWARD_BEGINS, "user_annotation", 800, 801),  # a second forward of the same batch
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    (row,) = [row for row in analyse_trace(path).rows("activities") if row["name"] == BEFORE_FORWARD]
    assert (row["step"], row["count"], row["took_ns"]) == (3, 2, 190_000)


def test_what_a_process_holds_is_read():
    before = resident_bytes(CPU)
    kept = torch.ones(50_000_000)  # 200 MB
    assert resident_bytes(CPU) - before > 100_000_000 or before == 0, "0 where the system does not say"
    del kept


def test_cores_of_ranks_that_are_bound_to_their_own_are_added():
    def of_rank(*numbers: int) -> dict[str, Any]:
        return {"observed": {"core_numbers": numbers, "ranks_of_a_node": 2}}

    # ranks 2 and 3 are of another node, whose cores have the same numbers
    results = {0: of_rank(0, 1), 1: of_rank(2, 3), 2: of_rank(0, 1), 3: of_rank(4, 5)}
    assert _cores_of_a_node(results) == 4
    assert _cores_of_a_node({0: of_rank(0, 1), 1: of_rank(0, 1)}) == 2


# ---- gradients of a step


def seen_of_a_step(network: nn.Module, optimizers: list[Any], step: Any) -> dict[str, Any]:
    """What is seen of `step`, which calls its three arguments: before the backward, before an update, nothing else."""
    observed = Observed(network, optimizers, Place(0, 1, 1, CPU))
    observed.begin()
    step(observed.before_backward, observed.gradients.before_update)
    observed.end()
    return observed.as_report("")


def test_gradients_that_are_never_set_to_zero_are_told_from_kept_ones():
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def step(before_backward: Any, before_update: Any) -> None:
        before_backward()
        network(torch.randn(4, 8)).sum().backward()
        before_update(optimizer)
        optimizer.step()

    first, second = (seen_of_a_step(network, [optimizer], step) for _ in range(2))
    assert (first["kept_gradient_bytes"], first["never_zeroed"], first["updates_nothing"]) == (0, False, False)
    assert second["kept_gradient_bytes"] > 0 and second["never_zeroed"] is True
    optimizer.zero_grad(set_to_none=False)
    zeroed = seen_of_a_step(network, [optimizer], step)
    assert zeroed["kept_gradient_bytes"] > 0 and zeroed["never_zeroed"] is False
    other = torch.optim.SGD(model().parameters(), lr=0.1)
    in_turns = seen_of_a_step(network, [optimizer, other], step)
    assert (in_turns["kept_gradient_bytes"], in_turns["never_zeroed"]) == (0, False), "as a GAN keeps its generator's"


def test_an_optimizer_without_gradients_updates_nothing():
    network = model()
    of_others = torch.optim.SGD(model().parameters(), lr=0.1)

    def trains(before_backward: Any, before_update: Any) -> None:
        before_backward()
        network(torch.randn(4, 8)).sum().backward()
        before_update(of_others)

    report = seen_of_a_step(network, [of_others], trains)
    assert report["updates_nothing"] is True
    assert report["idle_gradient_bytes"] == sum(4 * each.numel() for each in network.parameters())

    def in_a_closure(before_backward: Any, before_update: Any) -> None:
        before_update(of_others)
        before_backward()
        of_others.param_groups[0]["params"][0].grad = torch.ones(8, 8)

    assert seen_of_a_step(network, [of_others], in_a_closure)["updates_nothing"] is False
    assert seen_of_a_step(network, [of_others], lambda *_: None)["updates_nothing"] is False, "no update was seen"
    idle = torch.optim.SGD(network.parameters(), lr=0.1)  # it steps seldom, and lives
    assert seen_of_a_step(network, [of_others], trains)["idle_gradient_bytes"] == 0
    del idle

    def by_hand(before_backward: Any, before_update: Any) -> None:
        trains(before_backward, before_update)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= 0.1 * parameter.grad

    assert seen_of_a_step(network, [of_others], by_hand)["idle_gradient_bytes"] == 0, "no optimizer of torch steps them"


def test_forwards_of_the_model_are_counted_while_it_trains():
    network = model()

    def step(before_backward: Any, before_update: Any) -> None:
        network(torch.randn(4, 8))
        with torch.no_grad():
            network(torch.randn(4, 8))
            network[0](torch.randn(4, 8))
        network.eval()
        network(torch.randn(4, 8))
        network.train()

    report = seen_of_a_step(network, [], step)
    assert (report["forwards"], report["forwards_without_graph"]) == (1, 1)
    network(torch.randn(4, 8))
    assert not network._forward_pre_hooks


def test_an_optimizer_that_is_made_in_each_step_takes_the_place_of_the_one_before():
    network, steps = model(), Round()
    made = [torch.optim.SGD(network.parameters(), lr=0.1) for _ in range(4)]
    assert [steps.is_remade(each) or not steps.is_first_of(each) for each in made] == [False, False, True, True]
    assert steps.optimizers == [made[3]]

    pair = Round()  # of the same parameters, which step in turns
    for each in made[:2]:
        assert not pair.is_remade(each) and pair.is_first_of(each)
    assert [pair.is_remade(each) or pair.is_first_of(each) for each in (*made[:2], *made[:2])] == 4 * [False]
    assert pair.optimizers == made[:2]


@pytest.mark.parametrize(
    "tensor,is_of_model",
    [
        (torch.ones(3, 4, requires_grad=True) * 2, True),  # features
        ((torch.ones(3, requires_grad=True) * 2).sum(), False),  # a loss
        (torch.ones(3, 4), False),
        (torch.ones(3, 4, requires_grad=True), False),  # weights
    ],
)
def test_a_collective_of_activations_is_the_models(tensor, is_of_model):
    assert activities._is_of_model(([torch.ones(3)], tensor, None)) == is_of_model


def test_compilations_are_counted(recorder, monkeypatch):
    from torch._dynamo import callback

    for name in ("run_start_callbacks", "run_end_callbacks"):
        monkeypatch.setattr(
            callback.CompilationCallbackHandler, name, getattr(callback.CompilationCallbackHandler, name)
        )
    activities.watch_compilations(callback, recorder)
    doubled = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    for size in (3, 4, 4):
        doubled(torch.ones(size))
    assert counts(recorder) == {"compiled": 2}


# ---- graphs that no backward uses


def of_graphs(tmp_path: Path, step: Any) -> dict[str, int]:
    """How many nodes a step has built, and how many of them were dropped, as its trace shows it."""
    return {name: count for name, count in of_trace(tmp_path, step).items() if "graph" in name}


def of_trace(tmp_path: Path, step: Any) -> dict[str, int]:
    """What is counted of a step in its trace."""
    with profile() as profiled, record_function("ProfilerStep#3"):
        step()
    path = tmp_path / "trace.json"
    profiled.export_chrome_trace(str(path))
    return {row["name"]: row["count"] for row in analyse_trace(path).rows("activities")}


def test_products_without_a_graph_are_counted(tmp_path):
    network, x = deep(), torch.randn(4, 8)

    def measures() -> None:
        network(x).sum().backward()
        with torch.no_grad():
            network(x).sum()

    assert of_trace(tmp_path, measures)["products without a graph"] == 8
    assert "products without a graph" not in of_trace(tmp_path, lambda: network(x).sum().backward())
    recomputed = of_trace(tmp_path, lambda: checkpoint(network, x, use_reentrant=False).sum().backward())
    assert "products without a graph" not in recomputed


def test_a_norm_that_is_a_part_of_the_loss_is_not_counted(tmp_path):
    network, x = model(), torch.randn(4, 8)

    def regularised() -> None:
        (network(x).sum() + sum(each.norm() for each in network.parameters())).backward()

    def looks_at_gradients() -> None:
        network(x).sum().backward()
        for each in network.parameters():
            each.grad.norm()
        network(x).sum().backward()  # the next node has the number that these norms have

    assert "norm" not in of_trace(tmp_path, regularised)
    assert of_trace(tmp_path, looks_at_gradients)["norm"] == 4


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

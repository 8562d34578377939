"""Measured memory on real torch: known bytes come out exactly, and engines on real ranks show what they are known to
hold.
"""

from __future__ import annotations

import gc
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._profiler import _EventType
from torch.profiler import record_function

from fsdplab.common.names import CATEGORIES
from fsdplab.engine.events import Tag, emit, tag
from fsdplab.profiling import MemoryRecorder, MemoryTimeline, TagLog
from fsdplab.profiling.memory import events_of_trace
from fsdplab.profiling.memory import recorder as memory_module
from fsdplab.profiling.memory.events_of_trace import read_trace
from fsdplab.profiling.memory.live_storages import cuda_blocks, living_storages
from fsdplab.profiling.memory.recorder import ResidentGrowth
from fsdplab.profiling.memory.timeline import build_timeline
from fsdplab.sessions import RunSpec
from fsdplab.sessions.worker import engines
from fsdplab.workloads import build_model
from tests.ranks import transports

CPU = torch.device("cpu")
WIDTH, DEPTH, ROWS = 512, 4, 32
WEIGHT = WIDTH * WIDTH * 4  # bytes of one layer


def stack() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
    return nn.Sequential(*layers)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(ROWS, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


_of_other_tests: list[torch.Tensor] = []  # what modules loaded by earlier tests in this process keep for themselves


@pytest.fixture(autouse=True, scope="module")
def look_at_new_objects_only():
    """The recorder asks the collector for every object: after a thousand tests a worker has millions."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def leave_out_other_tests():
    gc.collect()
    _of_other_tests[:] = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    yield
    _of_other_tests.clear()


def measure(
    model: nn.Module, optimizer: Any, run: Any = None, engine: str = "torch-ddp", **more: Any
) -> MemoryTimeline:
    more["ignore"] = [*more.get("ignore", ()), *_of_other_tests]
    with MemoryRecorder(model=model, optimizer=optimizer, engine=engine, device=CPU, **more) as recorder:
        (run or (lambda: step(model, optimizer)))()
    return recorder.timeline


def most(timeline: MemoryTimeline, category: str) -> int:
    return max(row[category] for row in timeline.points)


@pytest.fixture
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = stack()
    optimizer = adamw(model)
    step(model, optimizer)
    return model, optimizer


def test_known_bytes_of_a_plain_step(trained):
    timeline = measure(*trained)
    counters = DEPTH * 4  # AdamW's step counter, one float32 a parameter
    activation = ROWS * WIDTH * 4
    first, last = timeline.points[0], timeline.points[-1]
    assert (
        first["sharded_parameters"]
        == last["sharded_parameters"]
        == timeline.peak["sharded_parameters"]
        == DEPTH * WEIGHT
    )
    assert first["optimizer_state"] == last["optimizer_state"] == 2 * DEPTH * WEIGHT + counters
    assert (
        most(timeline, "unsharded_gradients") == DEPTH * WEIGHT
        and first["unsharded_gradients"] == last["unsharded_gradients"] == 0
    )
    assert most(timeline, "activations") >= (DEPTH + 1) * activation, "the input and what each ReLU keeps"
    assert timeline.peak["unsharded_parameters"] == timeline.peak["communication_buffers"] == 0
    assert timeline.other_share < 0.05
    assert timeline.unknown_frees == timeline.unseen_frees == timeline.found_late == 0
    assert timeline.allocated_peak is None and timeline.reserved_peak is None


def test_the_first_step_makes_the_optimizer_state():
    model = stack()
    timeline = measure(model, adamw(model))
    assert timeline.points[0]["optimizer_state"] == 0
    assert timeline.points[-1]["optimizer_state"] == 2 * DEPTH * WEIGHT + DEPTH * 4
    assert timeline.other_share < 0.05


def test_the_total_is_torchs_own_running_total(trained, monkeypatch):
    kept = []
    monkeypatch.setattr(
        memory_module,
        "read_trace",
        lambda profile, *rest, **more: kept.append(profile) or read_trace(profile, *rest, **more),
    )
    timeline = measure(*trained)
    nodes, waiting = [], list(kept[0].profiler.kineto_results.experimental_event_tree())
    while waiting:
        node = waiting.pop()
        waiting += node.children
        if hasattr(node.extra_fields, "total_allocated"):
            nodes.append((node.start_time_ns, node.extra_fields))
    nodes.sort(key=lambda pair: pair[0])
    before = nodes[0][1].total_allocated - nodes[0][1].alloc_size
    assert timeline.growth == max(fields.total_allocated for _, fields in nodes) - before
    assert timeline.totals[-1] - timeline.baseline_total == nodes[-1][1].total_allocated - before


@pytest.mark.parametrize("engine, groups", [("lab", 3), ("torch-fsdp2", 3), ("torch-ddp", 1)])
def test_the_optimizer_has_every_parameter_once(engine, groups):
    """In a group a block where parameters are sharded, since a first step on all at once is slow."""
    model = build_model("gpt-tiny")
    strategy = "no_shard" if engine == "torch-ddp" else "full_shard"
    spec = RunSpec(model="gpt-tiny", engine=engine, strategy=strategy, device="cpu")
    optimizer = engines.optimizer_of(spec, model, engines.workload_of(spec))
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert len(optimizer.param_groups) == groups and len(held) == len(set(held))
    assert set(held) == {id(parameter) for parameter in model.parameters()}


def test_a_looped_optimizer_shows_its_temporaries_as_other():
    model = stack()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    step(model, optimizer)
    assert most(measure(model, optimizer), "other") - measure(model, optimizer).points[0]["other"] in range(
        2 * WEIGHT, 4 * WEIGHT
    )


def test_a_new_step_is_measured_like_the_last_one(trained):
    assert measure(*trained).peak == measure(*trained).peak


def test_without_an_optimizer_gradients_are_found_at_the_end():
    model = stack()
    timeline = measure(model, None, lambda: model(torch.ones(ROWS, WIDTH)).sum().backward())
    assert timeline.points[-1]["unsharded_gradients"] == DEPTH * WEIGHT
    timeline = measure(model, None, lambda: model.zero_grad())
    assert (timeline.points[0]["unsharded_gradients"], timeline.points[-1]["unsharded_gradients"]) == (
        DEPTH * WEIGHT,
        0,
    )


def test_baseline_memory_that_goes_is_seen_to_go(trained):
    things = {"dropped": torch.ones(1_000_000), "emptied": torch.ones(2_000_000)}
    held_by_a_view = torch.ones(3_000_000)[10:]

    def run() -> None:
        del things["dropped"]
        things["emptied"].untyped_storage().resize_(0)
        step(*trained)

    timeline = measure(*trained, run)
    assert timeline.baseline_total - timeline.totals[-1] == 12_000_000
    assert held_by_a_view.untyped_storage().nbytes() == 12_000_000


def test_what_is_no_part_of_training_can_be_left_out(trained):
    text = torch.ones(5_000_000, dtype=torch.uint8)
    assert measure(*trained).baseline_total - measure(*trained, ignore=[text[100:]]).baseline_total == 5_000_000


def test_tags_name_memory_of_before_and_of_now(trained):
    model, optimizer = trained
    with TagLog() as log:
        flat = torch.ones(1_000_000)
        tag("communication_buffers", flat, "block.0")

        def run() -> None:
            gathered = torch.empty(3_000_000)
            tag("unsharded_parameters", gathered, "block.1")
            step(model, optimizer)

        timeline = measure(model, optimizer, run, engine="lab", tags=log)
    assert timeline.points[0]["communication_buffers"] == 4_000_000
    assert timeline.peak["unsharded_parameters"] == 12_000_000 and timeline.unit_names_gathered_at_peak == ["block.1"]
    del flat


def test_old_tags_do_not_rename_the_optimizers_state(trained):
    model, optimizer = trained
    with TagLog() as log:
        for state in optimizer.state.values():
            tag("unsharded_parameters", state["exp_avg"], "stale")
        assert len(log.tags) == DEPTH
        timeline = measure(model, optimizer, tags=log)
    assert timeline.points[0]["unsharded_parameters"] == 0


def test_a_free_of_an_announced_buffer_on_another_thread(trained):
    """A transport may hand its buffers to a backend past torch's operators: then only the engine's tag says that they
    travel.
    """
    model, optimizer = trained

    def run() -> None:
        buffers = [torch.ones(5_000_000)]
        tag("communication_buffers", buffers[0], "block.0")
        step(model, optimizer)  # the profiler's clock is not the tag's to the microsecond: let time pass between both
        thread = threading.Thread(target=buffers.clear)
        thread.start()
        thread.join()

    timeline = measure(model, optimizer, run, engine="lab")
    assert most(timeline, "communication_buffers") == 20_000_000 and timeline.points[-1]["communication_buffers"] == 0


def test_a_tagged_arena_that_no_allocator_made_is_counted_once(trained):
    arena = bytearray(1_000_000)  # stands for mapped memory: no tensor owns it
    address = torch.frombuffer(arena, dtype=torch.uint8).data_ptr()

    def run() -> None:
        for _ in range(2):
            emit(Tag("communication_buffers", address, len(arena), memory_module.time.time_ns(), "arena"))
        step(*trained)

    timeline = measure(*trained, run)
    assert timeline.found_late == 1 and timeline.peak["communication_buffers"] == len(arena)


def test_ranges_tell_fsdp2s_buffers_apart(trained):
    model, optimizer = trained

    def run() -> None:
        with record_function("FSDP::all_gather (blocks.1)"):
            flat = torch.empty(3_000_000)
        with record_function("FSDP::all_gather_copy_out (blocks.1)"):
            whole = torch.empty(0)
            whole.untyped_storage().resize_(12_000_000)
        with record_function("FSDP::all_gather_copy_out"):
            top = torch.empty(0)
            top.untyped_storage().resize_(4_000_000)
        step(model, optimizer)
        del flat, whole, top

    timeline = measure(model, optimizer, run, engine="torch-fsdp2")
    assert timeline.peak["communication_buffers"] == 12_000_000 and timeline.peak["unsharded_parameters"] == 16_000_000
    assert timeline.unit_names_gathered_at_peak == ["blocks.1", "root"]


def test_a_free_on_a_thread_that_the_profiler_does_not_see(trained, lone_group):
    """As gloo's threads do with the buffers of a collective: the block ends with its last use, not with the step."""
    model, optimizer = trained

    def run() -> None:
        buffers = [torch.ones(5_000_000)]
        dist.all_reduce(buffers[0])
        thread = threading.Thread(target=buffers.clear)
        thread.start()
        thread.join()
        step(model, optimizer)

    timeline = measure(model, optimizer, run)
    assert most(timeline, "communication_buffers") == 20_000_000
    assert timeline.points[-1]["communication_buffers"] == 0 and timeline.totals[-1] == timeline.baseline_total


@pytest.fixture
def lone_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_resident_memory_agrees_on_a_big_tensor(trained):
    def run() -> None:
        torch.ones(50_000_000)

    timeline = measure(*trained, run)
    if timeline.resident_growth is None:
        pytest.skip("this system does not tell a process's resident memory")
    assert timeline.growth == 200_000_000
    assert 0.98 < timeline.resident_growth / timeline.growth < 1.15


def test_resident_growth_is_of_this_measurement_only():
    torch.ones(50_000_000)
    growth = ResidentGrowth().stop()
    assert growth is None or growth < 20_000_000


def test_an_error_in_the_step_passes_through_and_leaves_nothing_behind(trained):
    model, optimizer = trained
    recorder = MemoryRecorder(model=model, optimizer=optimizer, engine="lab", device=CPU)
    with pytest.raises(ZeroDivisionError), recorder:
        1 / 0
    with pytest.raises(RuntimeError, match="only if the step inside did not fail"):
        recorder.timeline
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert measure(model, optimizer).peak_total > 0


def test_a_closed_log_records_no_more():
    log = TagLog()
    log.close()
    log.close()
    tag("other", torch.ones(3), "a")
    assert log.tags == []


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_other_devices_are_refused(device):
    with pytest.raises(ValueError, match=f"cpu and cuda, got device '{device}'"):
        MemoryRecorder(model=stack(), optimizer=None, engine="lab", device=torch.device(device))


def test_a_profile_without_a_tree_is_refused():
    with pytest.raises(RuntimeError, match="without an event tree"):
        read_trace(torch.profiler.profile(), CPU)


class Given(SimpleNamespace):
    """In place of the profiler's record of a tensor that an operator was given."""


def operator(name: str, start_ns: int, end_ns: int, address: int) -> SimpleNamespace:
    """A node of the profiler's tree: an operator that is given one tensor."""
    tensor = Given(storage_data_ptr=address, sizes=[1], dtype=torch.float32, device=CPU)
    return node(name, start_ns, end_ns, _EventType.TorchOp, SimpleNamespace(inputs=[tensor]))


def allocation(time_ns: int, address: int, nbytes: int) -> SimpleNamespace:
    """A node of the profiler's tree: an allocation, or a free where `nbytes` is negative."""
    fields = SimpleNamespace(ptr=address, alloc_size=nbytes, device=CPU)
    return node("[memory]", time_ns, time_ns, _EventType.Allocation, fields)


def node(name: str, start_ns: int, end_ns: int, kind: Any, fields: Any) -> SimpleNamespace:
    times = {"start_time_ns": start_ns, "end_time_ns": end_ns}
    return SimpleNamespace(name=name, **times, tag=kind, typed=(kind, fields), parent=None, children=[])


@pytest.mark.parametrize("second", [100, 120])
def test_a_free_that_was_not_seen_does_not_end_what_comes_later_at_the_address(second, monkeypatch):
    """The first block was freed on a thread that the profiler does not see; the second lies where it was, or inside."""
    monkeypatch.setattr(events_of_trace, "_TensorMetadata", Given)
    tree = [
        allocation(1, 100, 50),
        operator("c10d::allreduce_", 2, 3, 100),
        allocation(10, second, 30),
        operator("aten::mul", 12, 15, second),
        allocation(20, second, -30),
        allocation(30, 100, 40),
        allocation(40, 100, -40),
    ]
    results = SimpleNamespace(experimental_event_tree=lambda: tree)
    profile = SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))
    timeline = build_timeline(read_trace(profile, CPU).events)
    seen = [(row["time_ns"], total) for row, total in zip(timeline.points, timeline.totals)]
    assert seen == [(0, 0), (1, 50), (3, 0), (10, 30), (20, 0), (30, 40), (40, 0)]
    assert timeline.unknown_frees == timeline.unseen_frees == 0


def test_living_storages_skips_what_owns_no_memory():
    fake, sparse, meta, real = torch.empty(0), torch.eye(3).to_sparse(), torch.empty(5, device="meta"), torch.ones(7)
    found = living_storages(CPU)
    assert found[real.data_ptr()].nbytes() == 28 and 0 not in found
    del fake, sparse, meta


def test_blocks_of_a_cuda_snapshot():
    blocks = [("active_allocated", 512), ("inactive", 1024), ("active_pending_free", 512), ("active_allocated", 2048)]
    segment = {"device": 1, "address": 10_000, "blocks": [{"state": state, "size": size} for state, size in blocks]}
    assert cuda_blocks([segment, segment | {"device": 0, "address": 0}], 1) == {10_000: 512, 12_048: 2048}


# ---- engines on real ranks


def build(engine: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = stack()
    if engine == "torch-ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif engine == "torch-fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in model[::2]:
            fully_shard(layer)
        fully_shard(model)
    elif engine.startswith("torch-fsdp1"):
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        row = ShardingStrategy.NO_SHARD if engine.endswith("whole") else ShardingStrategy.FULL_SHARD
        model = FullyShardedDataParallel(
            model,
            sharding_strategy=row,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_id=CPU,
            use_orig_params=True,
        )
    else:
        from fsdplab.engine import shard_model

        model = shard_model(model, engine, units=[nn.Linear])
    return model, adamw(model)


def engines_on_a_rank(names: list[str]) -> dict[str, dict[str, Any]]:
    """What each engine's timeline shows on this rank; every model is gone before the next is built."""
    shown = {}
    for name in names:
        with TagLog() as log:
            model, optimizer = build(name)
            for _ in range(3):
                step(model, optimizer)
            timeline = measure(model, optimizer, engine=name if name.startswith("torch") else "lab", tags=log)
        shown[name] = {
            "most": {category: most(timeline, category) for category in CATEGORIES},
            "first": timeline.points[0],
            "last": timeline.points[-1],
            "other": timeline.other_share,
            "total": timeline.peak_total,
            "units": timeline.unit_names_gathered_at_peak,
        }
        del model, optimizer, timeline
        gc.collect()
    return shown


# FSDP1 goes last: torch keeps parts of its NO_SHARD models alive, and what is alive is counted.
ENGINES = [
    "torch-ddp",
    "torch-fsdp2",
    "no_shard",
    "zero1",
    "zero2",
    "shard_grad_op",
    "full_shard",
    "torch-fsdp1",
    "torch-fsdp1-whole",
]
WHOLE, SLICE = DEPTH * WEIGHT, DEPTH * WEIGHT // 2
PARAMETERS_AT_REST = dict.fromkeys(ENGINES, WHOLE) | dict.fromkeys(
    ["torch-fsdp1", "torch-fsdp2", "shard_grad_op", "full_shard"], SLICE
)
STATE = dict.fromkeys(ENGINES, 2 * SLICE) | dict.fromkeys(["torch-ddp", "torch-fsdp1-whole", "no_shard"], 2 * WHOLE)

# What lies there between two steps although no gradient is set: DDP's buckets, and the flat gradients behind FSDP1's
# original parameters.
KEPT = {
    "torch-ddp": {"communication_buffers": WHOLE},
    "torch-fsdp1": {"sharded_gradients": SLICE},
    "torch-fsdp1-whole": {"unsharded_gradients": WHOLE},
}


@pytest.fixture(scope="module")
def shown(ranks) -> list[dict[str, dict[str, Any]]]:
    """A process group for each engine, so that none finds the shared memory of another."""
    by_engine = [ranks(2, engines_on_a_rank, [engine]) for engine in ENGINES]
    return [{name: seen for answers in by_engine for name, seen in answers[rank].items()} for rank in range(2)]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_holds_what_its_row_says(shown, engine):
    for rank in shown:
        seen = rank[engine]
        assert seen["first"]["sharded_parameters"] == seen["last"]["sharded_parameters"] == PARAMETERS_AT_REST[engine]
        assert math.isclose(seen["first"]["optimizer_state"], STATE[engine], abs_tol=4 * DEPTH)
        assert seen["other"] < 0.05
        assert seen["total"] >= PARAMETERS_AT_REST[engine] + STATE[engine]
        kept = dict.fromkeys(
            (
                "unsharded_parameters",
                "unsharded_gradients",
                "sharded_gradients",
                "activations",
                "communication_buffers",
            ),
            0,
        )
        shares = "shm" in transports() and not engine.startswith("torch")
        arenas = {"communication_buffers": seen["first"]["communication_buffers"]} if shares else {}
        kept |= KEPT.get(engine, arenas)  # where ranks share memory the lab's arenas stay, as they were
        assert {name: seen["last"][name] for name in kept} == kept


@pytest.mark.parametrize("engine", ["torch-fsdp1", "torch-fsdp2", "zero2", "shard_grad_op", "full_shard"])
def test_sharded_gradients_are_slices(shown, engine):
    for rank in shown:
        assert rank[engine]["most"]["sharded_gradients"] == SLICE
        assert 0 < rank[engine]["most"]["unsharded_gradients"] < WHOLE


@pytest.mark.parametrize("engine", ["torch-ddp", "torch-fsdp1-whole", "no_shard", "zero1"])
def test_unsharded_gradients_are_whole(shown, engine):
    for rank in shown:
        assert rank[engine]["most"]["unsharded_gradients"] >= WHOLE


def test_unsharded_parameters_come_and_go(shown):
    for rank in shown:
        assert 0 < rank["full_shard"]["most"]["unsharded_parameters"] < WHOLE
        assert 0 < rank["torch-fsdp2"]["most"]["unsharded_parameters"] < WHOLE
        assert 0 < rank["torch-fsdp1"]["most"]["unsharded_parameters"] < WHOLE
        assert rank["shard_grad_op"]["most"]["unsharded_parameters"] == WHOLE
        assert (
            rank["no_shard"]["most"]["unsharded_parameters"] == rank["torch-ddp"]["most"]["unsharded_parameters"] == 0
        )
        names = {"0", "2", "4", "6", "root"}
        assert set(rank["full_shard"]["units"]) <= names and set(rank["torch-fsdp2"]["units"]) <= names


def test_ddps_buckets_are_found(shown):
    for rank in shown:
        assert rank["torch-ddp"]["first"]["communication_buffers"] == WHOLE


# ---- CUDA


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_total_is_the_allocators():
    device = torch.device("cuda")
    model = stack().to(device)
    optimizer = adamw(model)

    def run() -> None:
        model(torch.ones(ROWS, WIDTH, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run()
    before = torch.cuda.memory_allocated()
    with MemoryRecorder(model=model, optimizer=optimizer, engine="lab", device=device) as recorder:
        run()
    timeline = recorder.timeline
    kept = timeline.workspaces  # cuBLAS has some by now, on every card
    assert kept and timeline.baseline_total == before - kept
    assert timeline.peak_total == timeline.allocated_peak - kept and timeline.allocated_peak <= timeline.reserved_peak
    assert (
        most(timeline, "unsharded_gradients") == DEPTH * WEIGHT
        and timeline.peak["sharded_parameters"] == DEPTH * WEIGHT
    )

"""Faults that are counted: each rule on a record whose numbers are written by hand, and the record without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdplab.common.sizes import size
from fsdplab.profiling.diagnosis import diagnosis
from fsdplab.profiling.findings import Finding, findings
from fsdplab.profiling.late_rank import too_few_steps
from fsdplab.profiling.vocabulary import words_of
from fsdplab.recording.rows import Taken
from fsdplab.recording.settings import steps_of
from fsdplab.records import RunRecord
from fsdplab.records.spread import Spread
from fsdplab.records.summary import Comm, Peak, Summary

pytestmark = pytest.mark.quick
MS = 1_000_000
STEPS, PROFILED = range(26), range(8, 16)
OBSERVED = {"threads": 1, "cores": 2, "ranks_of_a_node": 2, "parameters": 26, "optimizer": "AdamW"}
FSDP2 = {"engine": "torch-fsdp2", "strategy": "full_shard", "world_size": 2, "job": "a.py", "precision": "fp32"}
PLAIN = {**FSDP2, "engine": "plain", "strategy": "no_shard"}
FSDP1 = {**FSDP2, "engine": "torch-fsdp1"}
DDP = {**FSDP2, "engine": "torch-ddp", "strategy": "no_shard"}
GRAPHS = {"graph": (100, 40 * MS, 0), "dropped graph": (50, 20 * MS, 0)}
NOTHING = {"updates_nothing": True, "has_model": True}
ONCE = (1, 30 * MS, 0)
NO_MODEL = {"updates_nothing": True, "has_model": False}
OUTSIDE = {"outside_parameters": 3, "outside_bytes": 4_000_000}
IDLE = {"idle_gradient_bytes": 8_000_000}
PREPARED = {"preparing": (1, 35 * MS, 0), "before a forward": (1, 32 * MS, 0)}
GROUPS = {"groups": 26, "kinds_of_groups": 2}
SAME_BATCHES = {"ranks_with_batches": 2, "steps_with_batches": 8, "steps_with_equal_batches": 8, "equal_batches": 8}
COPIES = {"compared_parameters": 26, "different_parameters": 18}
LOST = {"updated_elements": 900, "lost_elements": 700, "trained_elements_here": 1000, "short_type": "bfloat16"}
UNTRAINED = {
    "untrained_parameters": 12, "untrained_bytes": 5_000_000, "stepped_bytes": 20_000_000, "ranks_with_batches": 2,
    "untrained_modules": ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"],
}  # fmt: skip
SCALED = {"scale": 65536.0, "last_scale": 128.0, "skipped": 9, "scaled_steps": 9}
CLIPPED = {"clipped scaled": (1, 0, 0), "clipping": (1, MS, 0)}
THREAD = {"interpreter_wait_s": 0.005, "thread": "metrics", "thread_s": 0.05, "thread_rank": 1}
BOUND = {"cores": 1, "cores_of_the_machine": 8}
Call = tuple[str, str, str, int]  # kind, unit, phase, bytes
SHARDED: list[Call] = [
    *(("all_gather", f"blocks.{block}", phase, 2_000_000) for phase in ("forward", "backward") for block in range(4)),
    *(("reduce_scatter", f"blocks.{block}", "backward", 2_000_000) for block in range(4)),
]
NORMS = [*SHARDED, *(("all_gather", f"norm.{number}", "forward", 512) for number in range(8))]
LARGE = {"activations": 1_000_000_000}
KEEPS = {**FSDP2, "strategy": "shard_grad_op"}
KEPT = {"kept_gradient_bytes": 4_000_000}
BUFFERS = {"broadcast_buffers": True, "buffer_bytes": 32_000, "buffers_change": False}
UNUSED = {"find_unused_parameters": True}
BUCKETS = {"observed": {"bucket_bytes": 50_000}, "calls": 5 * [("all_reduce", "", "backward", 400_000)]}
ONE_BUCKET = {"observed": {"bucket_bytes": 10**9}, "calls": [("all_reduce", "", "backward", 25_000_000)]}
REPLICATED: list[Call] = [("all_reduce", "", "backward", 25_000_000), ("all_reduce", "", "backward", 7_000_000)]


def row(rank: int, step: int, call: Call) -> dict[str, Any]:
    kind, unit, phase, nbytes = call
    begin = step * 100 * MS
    return {
        "rank": rank, "step": step, "unit": unit, "phase": phase, "kind": kind, "issue_ns": begin, "start_ns": begin,
        "end_ns": begin + MS, "logical_bytes": nbytes, "group": "", "group_size": 2, "members": "0,1",
        "exposed_ns": MS, "on_link_ns": MS, "packing_ns": 0, "unpacking_ns": 0, "waiting_ns": 0, "no_core_ns": 0,
        "cause": "nothing_to_hide_behind", "emulated": False,
    }  # fmt: skip


def exposed(call: dict[str, Any]) -> dict[str, Any]:
    kept = {name: call[name] for name in ("rank", "step", "unit", "phase", "kind", "exposed_ns", "on_link_ns", "cause")}
    return {**kept, "communication_ns": MS, "copying_ns": 0, "waiting_ns": 0, "no_core_ns": 0}


def job(
    folder: Path, spec: dict[str, Any] = FSDP2, calls: list[Call] = SHARDED, observed: dict[str, Any] | None = None,
    share: float | None = 1.0, cpu_s: tuple[float, float] = (0.08, 0.08), split: dict[str, int] | None = None,
    **activities: tuple[int, int, int],
) -> RunRecord:  # fmt: skip
    """A job of two ranks with steps of 100 ms, 60 of them computing. `activities`: count, ns and bytes a step."""
    ranks, rows = (0, 1), [row(rank, step, call) for rank in (0, 1) for step in PROFILED for call in calls]
    told = len(calls) * MS
    breakdown = [
        {
            "rank": rank, "step": step, "step_ns": 100 * MS, "compute_ns": 60 * MS, "compute_only_ns": 60 * MS,
            "overlapped_ns": 0, "exposed_ns": told, "other_ns": 40 * MS - told, "on_link_ns": told, "copying_ns": 0,
            "waiting_ns": 0, "no_core_ns": 0, "device_busy_ns": None, "core_wait_ns": None,
        }
        for rank in ranks for step in PROFILED
    ]  # fmt: skip
    steps = [
        {"rank": rank, "step": step, "loss": 2.0 - 0.01 * step + 0.001 * rank, "step_time_s": 0.1, "tokens": None,
         "loading_s": 0.0, "cpu_s": cpu_s[rank], "core_wait_s": None}
        for rank in ranks for step in STEPS
    ]  # fmt: skip
    done = [
        {"rank": rank, "step": step, "name": name.replace("own_", "own "), "count": count, "took_ns": ns,
         "nbytes": nbytes}
        for rank in ranks for step in STEPS for name, (count, ns, nbytes) in activities.items()
    ]  # fmt: skip
    memory = split or {"activations": 60_000_000, "sharded_parameters": 4_000_000, "unsharded_parameters": 8_000_000}
    return RunRecord(
        folder, spec=spec,
        environment={
            "device": "cpu", "backend": "gloo", "observed": {**OBSERVED, **(observed or {})},
            "cpu": {"memory_bytes": 64_000_000_000},
        },
        summary=Summary(
            step_time_s=Spread.of([0.1] * 10), peak_memory_bytes=Peak(sum(memory.values()), memory), cpu_share=share,
            comm=Comm(bytes_per_step=12_000_000),
        ),
        tables={
            "breakdown": breakdown, "collectives": rows, "exposed": [exposed(each) for each in rows], "steps": steps,
            "activities": done,
        },
    )  # fmt: skip


def faults(record: RunRecord) -> list[Finding]:
    return [each for each in findings(record) if each.is_fault]


def only(record: RunRecord) -> Finding:
    """The only fault, which is the first finding and the first sentence."""
    (found,) = faults(record)
    assert findings(record)[0] == found and diagnosis(record).startswith(found.title)
    return found


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("spec,calls", [(FSDP2, SHARDED), (DDP, REPLICATED)])
def test_a_job_without_a_fault_is_accused_of_none(spec, calls, share, tmp_path):
    record = job(tmp_path, spec, calls, share=share, backward=(1, 30 * MS, 0), loading=(1, MS, 0))
    assert faults(record) == []
    if share == 1.0:
        assert diagnosis(record).startswith("No fault is found in a step of 100 ms: computing takes 60 % of it")


@pytest.mark.parametrize("share", [1.0, 0.4])  # a busy machine changes times, and none of these
@pytest.mark.parametrize(
    "kind,says,remedy,given",
    [
        ("own_collectives", "4 all_reduce of 4 B", "every hundredth step", {"own_all_reduce": (4, 9 * MS, 16)}),
        ("own_collectives", "1 full_tensor of 4 B", "every hundredth step", {"full_tensor": (1, 9 * MS, 4)}),
        ("own_collectives", "1 barrier", "Take the barrier out", {"own_barrier": (1, 9 * MS, 0)}),
        ("own_collectives", "1 broadcast of 2.00 MB", "the broadcast out", {"own_broadcast": (1, MS, 2_000_000)}),
        ("evaluation", "An evaluation in each step takes 40.0 ms", "Evaluate every", {"evaluation": (1, 40 * MS, 0)}),
        ("state_dict", "1 call of torch.save", "Save every", {"saving": (1, 20 * MS, 0)}),
        ("gathered_whole", "26 calls of full_tensor", "to_local()", {"full_tensor": (26, 20 * MS, 0)}),
        ("garbage_collection", "garbage collector", "gc.collect()", {"garbage_collection": (3, 50 * MS, 0)}),
        ("clipped_apart", "26 norms", "clip_grad_norm_(model.parameters()", {"clipping": (26, 5 * MS, 0)}),
        ("reads", "reads 40 numbers", ".item()", {"read": (41, MS, 0), "backward": (1, 30 * MS, 0)}),
        ("slow_loading", "takes 30.0 ms of a step of 100 ms (30 %)", "num_workers", {"loading": (1, 30 * MS, 0)}),
        ("recomputed", "4 blocks a step", "torch.utils.checkpoint", {"recomputed": (4, 9 * MS, 0)}),
        ("more_work", "Rank 1 works 2.0 times as much", "rank 1's data", {"cpu_s": (0.05, 0.1)}),
        ("deep_copy", "copied once in each step", "AveragedModel", {"deep copy": (1, 20 * MS, 0)}),
        ("emptied_cache", "empty_cache is called 2 times", "out of the loop", {"cache emptied": (2, 20 * MS, 0)}),
        ("loader_begun", "begun once in each step", "before the loop", {"loader begun": (1, 20 * MS, 0)}),
        ("clipped_again", "clipped again", "Once a step", {"clipping": (2, MS, 0), "clipped again": (1, MS, 0)}),
        ("norms_apart", "26 a step", "get_total_norm", {"norm": (26, MS, 0)}),
        ("norms_apart", "26 a step", "get_total_norm", {"norm": (28, MS, 0), "clipping": (1, MS, 0)}),
        ("read_whole", "reads 26 tensors whole", "hundredth", {"to numpy": (26, MS, 0)}),
        ("dropped_graph", "50 of the 100 nodes", "torch.no_grad()", GRAPHS),
        ("in_eval_mode", "Dropout (4)", "model.train()", {"observed": {"asleep": {"Dropout": 4}}}),
        ("anomaly_mode", "anomaly detection", "set_detect_anomaly", {"observed": {"anomaly_mode": True}}),
        ("updates_nothing", "zero before the step", "after optimizer.step()", {"observed": NOTHING, "backward": ONCE}),
        ("updates_nothing", "no module has", "after the model", {"observed": NO_MODEL, "backward": ONCE}),
        ("not_reduced", "No gradient is reduced", "set_requires_gradient_sync(True)", {"calls": SHARDED[:8]}),
        ("outside_units", "3 parameters (4.00 MB) are outside", "fully_shard(model)", {"observed": OUTSIDE}),
        ("retained_graphs", "the last one of a step too", "detach()", {"retained graph": (1, 0, 0), "backward": ONCE}),
        ("wrapped_anew", "wrapped in DistributedDataParallel once", "before the loop", {"wrapped": (1, 20 * MS, 0)}),
        ("compiled_anew", "compiles anew once in each step", "dynamic=True", {"compiled": (1, 50 * MS, 0)}),
        ("gathered_whole", "1 call of summon_full_params", "on the shards", {"summoned": (1, 20 * MS, 0)}),
        ("remade_optimizer", "(AdamW) is made anew", "once, before the loop", {"optimizer made": (1, 0, 0)}),
        ("never_zeroed", "never set to zero", "zero_grad()", {"observed": {**KEPT, "never_zeroed": True}}),
        ("not_stepped", "Gradients of 8.00 MB", "requires_grad_(False)", {"observed": IDLE}),
        ("preparing", "code of its own before each forward", "num_workers", PREPARED),
        ("preparing", "prepares each batch itself", "collate_fn", {**PREPARED, "loading": (1, MS, 0)}),
        ("many_groups", "26 groups of parameters", "one group", {"observed": GROUPS, "optimizer": (1, 4 * MS, 0)}),
        ("same_data", "their batches are equal in each of 8", "DistributedSampler", {"observed": SAME_BATCHES}),
        ("busy_thread", "metrics of rank 1 runs for 50.0 ms of a step", "multiprocessing", {"observed": THREAD}),
        ("bound_together", "bound to 1 core of the machine's 8", "taskset", {"observed": BOUND}),
        ("double_precision", "fp64", "model.float()", {"spec": {**FSDP2, "precision": "fp64"}}),
        ("different_copies", "18 of 26 parameters", "torch.manual_seed", {"observed": COPIES}),
        ("no_learning_rate", "0 in 26 of 26 steps, first in step 0", "step // warmup", {"learning rate 0": (1, 0, 0)}),
        ("lost_updates", "leaves 78 % of the elements", "MixedPrecisionPolicy", {"observed": LOST}),
        ("lost_updates", "bfloat16", "torch.autocast", {"observed": LOST, "spec": DDP, "calls": REPLICATED}),
        ("lost_updates", "bfloat16", "MixedPrecision(", {"observed": LOST, "spec": FSDP1}),
        ("lost_updates", "bfloat16", "TrainingArguments", {"observed": LOST, "spec": FSDP2 | {"trainer": "Trainer"}}),
        ("lost_updates", "bfloat16", "bf16-mixed", {"observed": LOST, "spec": FSDP2 | {"trainer": "Lightning"}}),
        ("untrained", "12 parameters (5.00 MB, 25 % of what", "torch.no_grad()", {"observed": UNTRAINED}),
        ("untrained", "blocks.1.up and 1 other", "requires_grad_(False)", {"observed": UNTRAINED}),
        ("skipped_steps", "9 of 9 steps", "set_detect_anomaly", {"observed": SCALED}),
        ("clipped_scaled", "128 times as large", "unscale_", {"observed": SCALED | {"skipped": 0}, **CLIPPED}),
        ("groups_made", "made once in each step", "before the loop", {"group made": (1, 20 * MS, 0)}),
        ("threads", "2 ranks with 8 threads each", "OMP_NUM_THREADS=1", {"observed": {"threads": 8}}),
        ("kept_gradients", "Gradients of the step before", "set_to_none=True", {"observed": KEPT}),
        ("full_messages", "fp32 (12.0 MB a step)", "MixedPrecisionPolicy", {"observed": {"autocast": "bfloat16"}}),
        ("one_unit", "The whole model is one unit", "fully_shard", {"spec": {**FSDP2, "unit_count": 1}}),
        ("needless_resharding", "all of them together are 8.00 MB", "reshard_after_forward=False", {"split": LARGE}),
        ("kept_units", "Units stay unsharded", "reshard_after_forward=True", {"spec": KEEPS}),
        ("small_units", "8 of 20 collectives a step (40 %)", "fully_shard on whole blocks", {"calls": NORMS}),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_remedy(kind, says, remedy, given, share, tmp_path):
    found = only(job(tmp_path, share=share, **given))
    assert found.kind == kind and says in found.title and remedy in found.remedy


@pytest.mark.parametrize(
    "kind,says,remedy,given",
    [
        ("find_unused", "find_unused_parameters", "find_unused_parameters=False", {"observed": UNUSED}),
        ("sent_buffers", "32.0 kB", "broadcast_buffers=False", {"observed": BUFFERS}),
        ("small_buckets", "5 all-reduces a step", "bucket_cap_mb", BUCKETS),
        ("different_copies", "18 of 26 parameters", "load_state_dict on every rank", {"observed": COPIES}),
        ("one_bucket", "the all-reduce of 25.0 MB begins", "bucket_cap_mb=25", ONE_BUCKET),
        ("full_messages", "fp32", "bf16_compress_hook", {"observed": {"autocast": "bfloat16"}}),
    ],
)  # fmt: skip
def test_faults_of_ddp(kind, says, remedy, given, tmp_path):
    found = only(job(tmp_path, DDP, **{"calls": REPLICATED, **given}))
    assert found.kind == kind and says in found.title and remedy in found.remedy


@pytest.mark.parametrize("options", [
    {"find_unused_parameters": True, "unused_parameters": 2},
    {"broadcast_buffers": True, "buffer_bytes": 32_000, "buffers_change": True},
    {"autocast": "bfloat16", "has_comm_hook": True},
    {"bucket_bytes": 10**9},  # and there are two buckets
])  # fmt: skip
def test_an_option_of_ddp_that_is_needed_is_no_fault(options, tmp_path):
    assert faults(job(tmp_path, DDP, REPLICATED, options)) == []


@pytest.mark.parametrize("spec,calls,remedy", [
    (FSDP2, [each for each in SHARDED for _ in range(4)], "set_requires_gradient_sync(False)"),
    (DDP, 4 * REPLICATED, "no_sync()"),
])  # fmt: skip
def test_gradients_that_are_reduced_in_each_micro_batch(spec, calls, remedy, tmp_path):
    found = only(job(tmp_path, spec, calls, backward=(4, 30 * MS, 0)))
    assert "reduced 4 times a step" in found.title and remedy in found.remedy
    total = sum(nbytes for kind, *_, nbytes in calls if kind != "all_gather") / (2 if spec is FSDP2 else 1)
    assert f"{size(0.75 * total)} of {size(total)} sent are avoidable" in found.title
    for adding, kinds in ((3, ["reduced_often"]), (0, [])):  # as of SAM, which sets them to zero between
        record = job(tmp_path, spec, calls, {"adding_backwards": adding}, backward=(4, 30 * MS, 0))
        assert [each.kind for each in faults(record)] == kinds
    once = [each for each in calls if each[0] == "all_gather"] + (SHARDED[8:] if spec is FSDP2 else REPLICATED)
    assert faults(job(tmp_path, spec, once, backward=(4, 30 * MS, 0))) == []


@pytest.mark.parametrize("given", [
    {"graph": (100, 40 * MS, 0), "dropped graph": (26, 2 * MS, 0)},  # many nodes, and hardly any time: to_local
    {"graph": (100, 40 * MS, 0), "dropped graph": (6, 20 * MS, 0)},  # a metric that keeps few nodes
    {"clipping": (1, MS, 0), "norm": (2, MS, 0)},  # what clip_grad_norm_ takes besides its list of norms
    {"to numpy": (2, MS, 0)}, {"read": (4, MS, 0), "backward": (1, 30 * MS, 0)},
    {"read": (7, MS, 0), "backward": (4, 30 * MS, 0)},  # the recording reads four losses
    {"resident": (1, 0, 500_000_000)},
    {**PREPARED, "preparing": (1, 9 * MS, 0)},  # the main thread slept, or other threads worked
    {**PREPARED, "before a forward": (1, 9 * MS, 0)},  # operators ran meanwhile: an average of the weights
    {"preparing": (1, 35 * MS, 0)},  # a record without marks in its trace
    {"observed": GROUPS, "optimizer": (1, MS, 0)},  # the groups cost nothing
    {"observed": GROUPS | {"kinds_of_groups": 26}, "optimizer": (1, 4 * MS, 0)},  # a learning rate of its own for each
    {"observed": {"groups": 2, "kinds_of_groups": 2}, "optimizer": (1, 4 * MS, 0)},
    {"observed": THREAD | {"interpreter_wait_s": 0.001}},  # it computes outside of Python: NumPy, a file, a tokeniser
    {"observed": THREAD | {"thread_s": 0.005}},
    {"observed": SAME_BATCHES | {"steps_with_equal_batches": 7}},
    {"observed": SAME_BATCHES | {"equal_batches": 1}},  # one graph, which every rank has as a whole
    {"observed": SAME_BATCHES | {"ranks_with_batches": 1}},
    {"observed": SAME_BATCHES | {"splits_tensors": True}},  # tensor parallelism
])  # fmt: skip
def test_a_near_miss_is_no_fault(given, tmp_path):
    assert faults(job(tmp_path, **given)) == []


@pytest.mark.parametrize(
    "spec,given",
    [
        (FSDP2, {"observed": IDLE | {"idle_gradient_bytes": 1_000_000}}),
        (FSDP2, {"observed": {"cores": 2, "cores_of_the_machine": 64}}),
        (DDP, {"calls": [], "observed": {"has_comm_hook": True}}),
        (PLAIN, {"calls": [], "observed": {"has_model": True}, "own_all_reduce": (1, MS, 4_000_000)}),
        (PLAIN, {"calls": [("send", "", "forward", 4_000)], "observed": {"has_model": True}}),
        (FSDP2, {"retained graph": (1, 0, 0), "backward": (2, 30 * MS, 0)}),  # two losses of one graph
        (DDP, {"calls": REPLICATED, "observed": COPIES | {"different_parameters": 2}}),  # as a head of a rank's own
        (DDP, {"calls": REPLICATED, "observed": COPIES | {"has_comm_hook": True}}),  # which may average now and then
        (DDP, {"calls": REPLICATED, "observed": COPIES, "own_all_gather": (2, MS, 80_000)}),
        (FSDP2, {"observed": LOST | {"lost_elements": 300}}),
        (FSDP2, {"observed": LOST | {"trained_elements_here": 10_000}}),  # a tenth of the model is in bf16
        (FSDP2, {"observed": UNTRAINED | {"untrained_bytes": 500_000}}),  # a pooler that the loss does not use
        (FSDP2, {"observed": UNTRAINED | {"ranks_with_batches": 1}}),  # the other rank's part may be trained
        (FSDP2, {"observed": SCALED | {"skipped": 3}}),  # it looks for its scale
        (FSDP2, {"observed": SCALED | {"skipped": 0, "last_scale": 1.0}, **CLIPPED}),
        (FSDP2, {"observed": NOTHING}),  # and no backward is called: it searches without gradients
        (
            FSDP2,
            {"observed": OUTSIDE, "calls": [*SHARDED, ("all_to_all", "", "forward", 4_000)]},
        ),  # experts of a rank's own
        (FSDP2, {"own_all_gather": (2, MS, 80_000)}),  # features of a contrastive loss
        (DDP, {"calls": REPLICATED, "read": (35, MS, 0), "observed": UNUSED | {"unused_parameters": 6}}),
    ],
)
def test_what_looks_like_a_wrong_training_is_no_fault(spec, given, tmp_path):
    assert [each.title for each in faults(job(tmp_path, spec, **{"calls": SHARDED, **given}))] == []


def test_a_batch_that_one_rank_alone_prepares_or_a_few_steps_do_is_not_the_loops(tmp_path):
    for is_prepared in (lambda row: row["rank"] == 0, lambda row: row["step"] % 2):
        record = job(tmp_path, **PREPARED)
        rows = record.table("activities")
        rows[:] = [row for row in rows if row["name"] not in PREPARED or is_prepared(row)]
        assert faults(record) == []


def test_idle_time_in_which_the_loop_prepares_its_batch_has_a_known_reason(tmp_path):
    titles = [found.title for found in findings(job(tmp_path, **PREPARED))]
    assert "32.0 ms" in titles[0] or "28.0 ms" in titles[0]
    assert not any("the reason is unknown" in title for title in titles)


def test_parameters_outside_of_units_may_be_reduced_by_the_loop(tmp_path):
    record = job(tmp_path, observed=OUTSIDE, own_all_reduce=(3, MS, 3_000_000))
    assert [each.kind for each in faults(record)] == ["own_collectives"]


@pytest.mark.parametrize(
    "kind,says,given",
    [
        (
            "forwards_without_graph", "(1 forward): products take 20.0 ms (20 %)",
            {"observed": {"forwards": 1, "forwards_without_graph": 1}, "products without a graph": (17, 20 * MS, 0)},
        ),
        ("many_forwards", "runs 8 times for each backward", {"observed": {"forwards": 8}, "backward": (1, 30 * MS, 0)}),
    ],
)  # fmt: skip
def test_forwards_that_a_loss_may_need_are_said_first_and_not_accused(kind, says, given, tmp_path):
    told = findings(job(tmp_path, **given))[0]
    assert (told.kind, told.is_fault) == (kind, False) and says in told.title
    few = {"observed": {"forwards": 3}, "products without a graph": (17, 20 * MS, 0), "backward": (1, 30 * MS, 0)}
    assert not any(each.kind == kind for each in findings(job(tmp_path, **few)))


def test_ranks_that_exchange_nothing_are_named(tmp_path):
    found = only(job(tmp_path, PLAIN, [], {"has_model": True}))
    assert "each trains a model of its own" in found.title and "DistributedDataParallel(model)" in found.remedy
    # the loss is averaged for a log
    found = only(in_some(job(tmp_path, DDP, [], own_all_reduce=(1, MS, 4)), "own all_reduce", lambda step: step == 10))
    assert "No gradient is reduced" in found.title and "model.module(x)" in found.remedy


def test_gradients_that_a_loop_reduces_one_by_one_are_named(tmp_path):
    reduced = {"own_all_reduce": (26, 20 * MS, 26 * 80_000)}
    found = only(job(tmp_path, PLAIN, 26 * [("all_reduce", "", "backward", 80_000)], **reduced))
    assert "26 all_reduce of 80.0 kB, 20.0 ms" in found.title and "DistributedDataParallel(model)" in found.remedy
    few = {"own_all_reduce": (2, 20 * MS, 26 * 80_000)}
    assert faults(job(tmp_path, PLAIN, 2 * [("all_reduce", "", "backward", 1_000_000)], **few)) == []


def test_a_wrong_training_comes_before_what_costs_time(tmp_path):
    record = job(tmp_path, observed=NOTHING, saving=(1, 50 * MS, 0), backward=ONCE)
    assert [each.kind for each in faults(record)] == ["updates_nothing", "state_dict"]


@pytest.mark.parametrize(
    "engine,trained,is_named",
    [("torch-fsdp1", 1000, True), ("torch-fsdp1", 60_000, False), ("torch-fsdp2", 1000, False)],
)
def test_reductions_of_units_that_are_mostly_frozen_are_named_where_the_engine_reduces_whole_units(
    engine, trained, is_named, tmp_path
):
    elements = {"reduced_elements": 100_000, "trained_elements": trained}
    found = faults(job(tmp_path, {**FSDP2, "engine": engine}, observed=elements))
    assert [each.kind for each in found] == (["frozen_reduced"] if is_named else [])
    assert not found or "7.92 MB of 8.00 MB a step are zeros (99 %)" in found[0].title


@pytest.mark.parametrize("nbytes,is_named", [(4, True), (2_000_000, False), (None, False)])
def test_equal_batches_of_an_averaged_loss_are_named_and_those_of_a_model_that_communicates_are_not(
    nbytes, is_named, tmp_path
):
    calls = [*REPLICATED, ("all_reduce", "", "forward", nbytes)]
    kinds = [found.kind for found in faults(job(tmp_path, DDP, calls, SAME_BATCHES))]
    assert kinds == (["same_data"] if is_named else [])


def losing(record: RunRecord, loss: Callable[[int, int], float]) -> RunRecord:
    """The ranks have these losses, by rank and step."""
    for each in record.table("steps"):
        each["loss"] = loss(each["rank"], each["step"])
    return record


def test_what_an_unknown_transport_does_is_not_judged(tmp_path):
    for spec in (PLAIN, DDP):
        record = job(tmp_path, spec, [], {"has_model": True})
        record.environment["backend"] = "mpi"
        assert faults(record) == []


def test_ranks_that_train_on_the_same_data_are_named(tmp_path):
    def same(rank: int, step: int) -> float:
        return 2.0 - 0.01 * step

    found = only(losing(job(tmp_path, DDP, REPLICATED), same))
    assert "All 2 ranks train on the same data" in found.title and "DistributedSampler" in found.remedy
    averaged = job(tmp_path, DDP, [*REPLICATED, ("all_reduce", "", "forward", 4)])
    constant = losing(job(tmp_path, DDP, REPLICATED), lambda rank, step: 1.0)
    in_most_steps = losing(job(tmp_path, DDP, REPLICATED), lambda rank, step: same(rank, step) + (step == 5) * rank)
    for record in (losing(averaged, same), constant, in_most_steps, losing(job(tmp_path, PLAIN, REPLICATED), same)):
        assert faults(record) == []


def computing(record: RunRecord, *begins_ns: tuple[str, int]) -> RunRecord:
    """Rank 0 computes phases that begin so long after each step's begin."""
    rows = []
    for step in PROFILED:
        for phase, begin in begins_ns:
            start = step * 100 * MS + begin
            rows.append({"rank": 0, "step": step, "lane": "compute", "phase": phase, "start_ns": start})
    record.tables["timeline"] = rows
    return record


def test_buckets_of_one_size_are_sent_once_and_told_from_repeated_ones(tmp_path):
    """All are sent when a step begins: after the last of two backwards, or in the only one that the trace shows."""
    buckets = 4 * [("all_reduce", "", "backward", 25_000_000)]
    twice = [("forward", -4), ("backward", -3), ("forward", -2), ("backward", -1)]
    assert faults(computing(job(tmp_path, DDP, buckets, backward=(2, 30 * MS, 0)), *twice)) == []
    record = computing(job(tmp_path, DDP, buckets, backward=(2, 30 * MS, 0)), *twice)
    for number, each in enumerate(record.table("collectives")):
        each["start_ns"] -= 2 * (number % 2)
    assert "reduced 2 times a step" in only(record).title


@pytest.mark.parametrize("begin_ms,is_named", [(60, True), (0, False)])
def test_a_last_micro_batch_that_is_not_reduced_is_named(begin_ms, is_named, tmp_path):
    """Reductions end 1 ms after a step's begin; the last backward begins later, or before."""
    record = job(tmp_path, DDP, REPLICATED, backward=(4, 30 * MS, 0))
    computing(record, ("forward", 0), ("backward", begin_ms * MS + 1), ("forward", 90 * MS))
    found = [each.kind for each in faults(record)]
    assert found == (["reduced_early"] if is_named else [])


def test_a_reduction_that_ends_late_in_one_step_hides_no_copies_that_differ(tmp_path):
    """A busy machine delays one of eight reductions beyond the begin of the last backward."""
    for observed, kinds in ((COPIES, ["reduced_early"]), ({**COPIES, "different_parameters": 0}, [])):
        record = job(tmp_path, DDP, REPLICATED, observed, backward=(4, 30 * MS, 0))
        computing(record, ("forward", 0), ("backward", 60 * MS), ("forward", 90 * MS))
        for each in record.table("collectives"):
            each["end_ns"] += 80 * MS * (each["step"] == 9)
        assert [each.kind for each in faults(record)] == kinds


def test_a_loss_that_is_read_in_each_micro_batch_is_named(tmp_path):
    found = only(job(tmp_path, read=(8, MS, 0), backward=(4, 30 * MS, 0)))
    assert found.kind == "reads" and "reads 4 numbers" in found.title


def in_some(record: RunRecord, name: str, has: Callable[[int], bool]) -> RunRecord:
    """Only some steps have this activity."""
    record.tables["activities"] = [
        each for each in record.table("activities") if each["name"] != name or has(each["step"])
    ]
    return record


def test_an_optimizer_that_steps_without_a_backward_is_named(tmp_path):
    found = only(in_some(job(tmp_path, backward=(1, 30 * MS, 0)), "backward", lambda step: step % 2 == 0))
    assert "steps 2 times for each backward: 50 %" in found.title
    assert faults(in_some(job(tmp_path, backward=(1, 30 * MS, 0)), "backward", lambda step: step != 20)) == []
    pipeline = in_some(job(tmp_path, backward=(1, 30 * MS, 0)), "backward", lambda step: False)
    assert faults(pipeline) == [], "its backward is not one of a tensor"


@pytest.mark.parametrize("has", [lambda step: step == 0, lambda step: step >= 20, lambda step: step % 4 == 0])
def test_a_warm_up_that_begins_at_0_and_a_decay_that_ends_there_are_no_fault(has, tmp_path):
    assert faults(in_some(job(tmp_path, **{"learning rate 0": (1, 0, 0)}), "learning rate 0", has)) == []
    ended = in_some(job(tmp_path, **{"learning rate 0": (1, 0, 0)}), "learning rate 0", lambda step: step >= 7)
    assert "0 in 19 of 26 steps, first in step 7" in only(ended).title


def test_epochs_of_the_same_order_are_named_unless_one_of_them_has_another(tmp_path):
    def begins(at: tuple[int, ...], same: tuple[int, ...]) -> RunRecord:
        record = job(tmp_path, **{"epoch begun": (1, 0, 0), "same order": (1, 0, 0)})
        return in_some(in_some(record, "epoch begun", at.__contains__), "same order", same.__contains__)

    found = only(begins((7, 14, 21), (7, 14, 21)))
    assert found.kind == "same_order" and "begun again 3 times" in found.title and "set_epoch" in found.remedy
    assert faults(begins((7, 14, 21), (7,))) == [], "an epoch that was begun anew"
    assert faults(begins((7, 14, 21), ())) == faults(begins((), ())) == []


def test_losses_that_are_no_numbers_are_named(tmp_path):
    def of_step(rank: int, step: int) -> float:
        return float("nan") if step >= 5 and rank == 1 else 2.0 - 0.01 * step + 0.001 * rank

    found = only(losing(job(tmp_path), of_step))
    assert found.kind == "not_finite" and "in 21 of 26 steps, first in step 5" in found.title
    once = losing(job(tmp_path), lambda rank, step: float("inf") if step == 20 else 2.0 - 0.01 * step + 0.001 * rank)
    assert faults(once) == []


def holds(record: RunRecord, of_step: Callable[[int], int]) -> RunRecord:
    """Rank 1 holds so many bytes after each step."""
    for each in record.table("activities"):
        if each["name"] == "resident" and each["rank"] == 1:
            each["nbytes"] = of_step(each["step"])
    return record


def test_memory_that_grows_in_each_step_is_named(tmp_path):
    given = {"resident": (1, 0, 500_000_000)}
    grown = holds(job(tmp_path, **given), lambda step: 500_000_000 + 12_000_000 * step)
    found = only(grown)
    assert found.rank == 1 and "by 12.0 MB: rank 1 holds 692 MB, and 800 MB 9 steps later" in found.title
    assert "loss.detach()" in found.remedy
    once = holds(job(tmp_path, **given), lambda step: 500_000_000 if step < 20 else 700_000_000)
    little = holds(job(tmp_path, **given), lambda step: 500_000_000 + 100_000 * step)
    profiled = holds(job(tmp_path, **given), lambda step: 500_000_000 + 12_000_000 * min(step, 16))
    slower = holds(job(tmp_path, **given), lambda step: 600_000_000 - round(400_000_000 * 0.7 ** (step - 8)))
    for record in (once, little, profiled, slower):
        assert faults(record) == []


def test_fsdp2_that_gathers_nothing_ahead_is_told_so_and_not_accused(tmp_path):
    told = findings(job(tmp_path, observed={"prefetches_forward": False}))[0]
    assert (told.kind, told.is_fault) == ("not_ahead", False) and "set_modules_to_forward_prefetch" in told.remedy
    assert not any(each.kind == "not_ahead" for each in findings(job(tmp_path, observed={"prefetches_forward": True})))


def test_numbers_that_ddp_reads_itself_are_not_the_loops(tmp_path):
    """With find_unused_parameters DDP reads for each parameter whether it was used."""
    record = job(tmp_path, DDP, REPLICATED, UNUSED | {"unused_parameters": 2}, read=(27, MS, 0), backward=(1, MS, 0))
    assert faults(record) == []


def test_a_count_that_only_some_steps_have_is_no_fault(tmp_path):
    record = job(tmp_path, saving=(1, 20 * MS, 0))
    record.tables["activities"] = [each for each in record.table("activities") if each["step"] % 10 == 0]
    assert faults(record) == []


def test_words_follow_from_how_the_model_was_sharded():
    """Lightning's ModelParallelStrategy shards with fully_shard, and its FSDPStrategy with FSDP1."""
    lightning = {"job": "a.py", "trainer": "Lightning"}
    assert "fully_shard" in words_of({**lightning, "engine": "torch-fsdp2"})["keep_gathered"]
    assert "FSDPStrategy" in words_of({**lightning, "engine": "torch-fsdp1"})["keep_gathered"]
    assert "bucket_cap_mb" in words_of({**lightning, "engine": "torch-ddp"})["fewer_units"]
    assert "fully_shard" in words_of({**lightning, "engine": "torch-fsdp2"})["fewer_units"]


def test_more_steps_are_asked_for_as_record_takes_them(tmp_path):
    record = job(tmp_path)
    for name in ("breakdown", "steps", "collectives"):
        record.tables[name] = [each for each in record.table(name) if each["step"] in (8, 9, 10)]
    told = too_few_steps(record)
    assert "--steps 8:16" in told and steps_of("8:16") == (8, 16)


def test_an_evaluation_ends_when_the_model_trains_again_however_that_is_said():
    """Lightning sets the attribute of every module but DDP's wrapper, and calls `train` of none."""
    taken, model = Taken(), torch.nn.Linear(1, 1)
    taken.evaluated, taken.evaluates_since = torch.nn.Sequential(model).eval(), 1
    assert not taken.may_begin() and not taken.activities
    model.training = True
    assert taken.may_begin() and taken.activities["evaluation"][0] == 1

"""Malformed traces end in one line: mutations of a small real trace, seeded, and the kinds of damage by name.

A bad file must never end in a traceback, take long or fill the memory. The process's own limit of memory is not touched
(it would stop other tests); what Python allocates is measured.
"""

from __future__ import annotations

import gzip
import json
import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from fsdplab.profiling import AccountingError, TraceError, merge_traces
from fsdplab.profiling.findings import findings
from fsdplab.profiling.traces.import_traces import record_of_traces
from fsdplab.records import RunRecord
from tests.gpu_traces import GpuRank

REAL = Path(__file__).resolve().parents[1] / "data" / "traces-08" / "traces" / "rank0.pt.trace.json.gz"
MUTATIONS = 560
SECONDS, BYTES = 5.0, 500_000_000
ODD = (
    1e300, -1e300, float("inf"), float("-inf"), float("nan"), 2**70, -(2**70), -1, 0, 1.5, True, None, "", "word", "12",
    [], {}, [1], [[1]], {"a": 1}, "ProfilerStep#99999999999999999999", "FSDP::all_gather (", "\ud800", "a" * 5000,
)  # fmt: skip


def small_trace() -> dict[str, Any]:
    """A real trace of the lab's two ranks, cut down: every range and collective, and a few of the operators."""
    with gzip.open(REAL, "rt", encoding="utf-8") as file:
        content = json.load(file)
    kept, plain = [], 0
    for event in content["traceEvents"]:
        named = not str(event.get("name")).startswith(("aten::", "[memory]", "autograd::"))
        plain += not named
        if event.get("ph") == "X" and (named or plain % 40 == 0):
            kept.append(event)
    return {**content, "traceEvents": kept[:80]}


def small_gpu_trace() -> dict[str, Any]:
    trace = GpuRank().step(1, 0, 50).range("FSDP::pre_forward (a)", 5, 30).nccl("all_gather", 8, 100, 200)
    trace.kernel(10, 150, 300).copy(20, 300, 320).loader(35, 40).synchronise(42, 48)
    return trace.step(2, 50, 90).kernel(60, 330, 400).nccl("reduce_scatter", 70, 380, 450).content()


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The path of every value in nested lists and objects."""
    found = [path] if path else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        found += places(child, (*path, key))
    return found


def mutated(content: dict[str, Any], chance: random.Random) -> bytes:
    """The trace as bytes, with one to four values replaced or removed, or with its text damaged."""
    content = json.loads(json.dumps(content))
    for _ in range(chance.randint(1, 4)):
        around = chance.random() < 0.2 or "traceEvents" not in content
        within = content if around else {"traceEvents": content["traceEvents"]}
        *above, last = chance.choice(places(within))
        holder: Any = content
        for key in above:
            holder = holder[key]
        if chance.random() < 0.15:
            del holder[last]
        else:
            holder[last] = chance.choice(ODD)
    text = bytearray(json.dumps(content).encode())
    if chance.random() < 0.25:
        at = chance.randrange(len(text))
        damage = chance.randrange(3)
        if damage == 0:
            del text[at:]
        elif damage == 1:
            text[at : at + 1] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 6)))
        else:
            del text[at : at + chance.randint(1, 300)]
    return bytes(text)


def opened(path: Path, folder: Path) -> str:
    """What a report does with a trace: "" when it worked, else the error's one line."""
    try:
        record = record_of_traces([path])
        findings(record)
        RunRecord(folder / "record", record.spec, tables=record.tables).save()
        merge_traces({0: path}, folder / "merged.json")
    except (AccountingError, TraceError) as error:
        assert "\n" not in str(error) and len(str(error)) < 1000, error
        return str(error)
    return ""


@pytest.mark.parametrize("seed", range(4))
def test_mutations_of_a_small_trace_end_in_one_line(tmp_path, seed):
    chance = random.Random(seed)
    content = small_gpu_trace() if seed % 2 else small_trace()
    (tmp_path / "sound.json").write_text(json.dumps(content))
    assert opened(tmp_path / "sound.json", tmp_path) == ""
    outcomes, slowest, peak = [], 0.0, 0
    for number in range(MUTATIONS // 4):
        path = tmp_path / "mutated.json"
        path.write_bytes(mutated(content, chance))
        began = time.process_time()
        tracemalloc.start()  # here: mutating would take ten times as long under it
        try:
            outcomes.append(opened(path, tmp_path))
        except Exception as error:
            raise AssertionError(f"mutation {number} of seed {seed} ended in a traceback") from error
        finally:
            peak = max(peak, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        slowest = max(slowest, time.process_time() - began)
    assert slowest < SECONDS and peak < BYTES
    assert any(outcomes) and not all(outcomes)


def with_event(**changes: Any) -> bytes:
    content = small_gpu_trace()
    event = next(each for each in content["traceEvents"] if each["cat"] == "kernel")
    event.update(changes)
    return json.dumps(content).encode()


def with_world(**changes: Any) -> bytes:
    content = small_gpu_trace()
    content["distributedInfo"].update(changes)
    return json.dumps(content).encode()


@pytest.mark.quick
@pytest.mark.parametrize(
    "content",
    [
        with_event(ts=1e300), with_event(ts=float("inf")), with_event(dur=float("nan")),
        with_event(name=None), with_event(name=7), with_event(args=[1]), with_event(args="text"),
        with_event(args={"correlation": 2**70}), with_event(args={"correlation": "9" * 19}), with_event(tid=[1]),
        with_world(rank="first"), with_world(rank=None), with_world(rank=1.5), with_world(world_size="two"),
        with_world(rank=2**70),
        b'{"traceEvents": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b', "traceEvents": []}',
        b'{"baseTimeNanoseconds": "soon", "traceEvents": [{"ph": "X"}]}',
        b'{"traceEvents": ["' + b"x" * 3_000_000,
    ],
    ids=lambda content: content[:18].decode() + f"...{len(content)}",
)  # fmt: skip
def test_what_no_profiler_writes_is_one_line(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    assert "bad.json" in opened(path, tmp_path)


@pytest.mark.quick
@pytest.mark.parametrize(
    "changes,told",
    [
        (dict(ts=None), "ts None"),
        (dict(ts="0.5"), "ts '0.5'"), (dict(name=None), "(None of 'kernel'"),
    ],
)  # fmt: skip
def test_what_no_profiler_writes_is_told_by_its_event(tmp_path, changes, told):
    """And not by Python's own error: "'NoneType' object has no attribute 'startswith'"."""
    (tmp_path / "bad.json").write_bytes(with_event(**changes))
    said = opened(tmp_path / "bad.json", tmp_path)
    assert told in said and "Error" not in said


# ---- one odd event is left out, and said


def notes(path: Path) -> str:
    return "; ".join(record_of_traces([path]).summary.traces.notes)


def test_one_event_of_a_negative_duration_is_left_out(tmp_path):
    """As without it; many of them are no profiler's."""
    content = small_gpu_trace()
    (tmp_path / "sound.json").write_text(json.dumps(content))
    odd = {"ph": "X", "cat": "kernel", "name": "sm90_gemm", "pid": 0, "tid": 7, "ts": 100, "dur": -5, "args": {}}
    content["traceEvents"].insert(3, odd)
    (tmp_path / "odd.json").write_text(json.dumps(content))
    sound, found = (record_of_traces([tmp_path / f"{name}.json"]) for name in ("sound", "odd"))
    assert found.table("breakdown") == sound.table("breakdown")
    assert "1 event left out whose duration is negative ('sm90_gemm' of 'kernel', ts 100, dur -5)" in notes(
        tmp_path / "odd.json"
    )
    content["traceEvents"].append(odd)
    (tmp_path / "odd.json").write_text(json.dumps(content))
    assert "('sm90_gemm' of 'kernel', ts 100, dur -5)" in opened(tmp_path / "odd.json", tmp_path)


@pytest.mark.parametrize("indent", [None, 2])
def test_names_with_bare_quotes_are_left_out_with_their_position(tmp_path, indent):
    """As kineto writes Python's functions with `with_stack=True` (kineto#1459); a damaged operator is not left out."""
    content = small_gpu_trace()
    (tmp_path / "sound.json").write_text(json.dumps(content))
    stack = {"ph": "X", "cat": "python_function", "name": "QQ(12): run", "pid": 1, "tid": 1, "ts": 1, "dur": 3}
    for at in (2, 5, 7):
        content["traceEvents"].insert(at, stack)
    text = json.dumps(content, indent=indent).replace("QQ", '{"device": "cpu"}')
    (tmp_path / "odd.json").write_text(text)
    sound, found = (record_of_traces([tmp_path / f"{name}.json"]) for name in ("sound", "odd"))
    assert found.table("breakdown") == sound.table("breakdown")
    said = notes(tmp_path / "odd.json")
    where = text.index('{"ph": "X", "cat": "python' if indent is None else '{\n      "ph": "X",\n      "cat": "python')
    assert (
        f"3 of the trace's events are left out, since they are no JSON: the first one, at character {where}, is" in said
    )
    assert "with_stack=False" in said
    (tmp_path / "bad.json").write_text(text.replace("python_function", "cpu_op"))
    assert "is damaged at character" in opened(tmp_path / "bad.json", tmp_path)


# ---- what is not read is not called a CPU

H100 = [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]


def host_only(**around: Any) -> GpuRank:
    """Operators of the host for two steps, and no work of a device."""
    trace = GpuRank(world_size=1, **around)
    for step in range(2):
        trace.step(step, 100 * step, 100 * step + 99).operator("aten::mm", 100 * step + 4, 100 * step + 60)
    return trace


@pytest.mark.parametrize(
    "trace,told",
    [
        (host_only(backend="gloo", deviceProperties=H100), "names NVIDIA H100 80GB HBM3"),
        (host_only(backend="nccl"), "is of a job over NCCL"),
        (host_only(backend="gloo")._add("cuda_runtime", "cudaLaunchKernel", 5, 6, 1, 1, {}), "launches work"),
    ],
)  # fmt: skip
def test_a_device_whose_work_was_not_recorded_is_no_cpu(tmp_path, trace, told):
    said = opened(trace.write(tmp_path / "t.json"), tmp_path)
    assert told in said and "no GPU work was recorded: profile with ProfilerActivity.CUDA" in said


def test_a_cpu_job_on_a_machine_with_gpus_is_a_cpu_job(tmp_path):
    trace = host_only(backend="gloo", deviceProperties=H100).range("gloo:all_reduce", 60, 90, thread=9)
    trace.range("gloo:all_reduce", 160, 190, thread=9)
    (row, *_) = record_of_traces([trace.write(tmp_path / "t.json")]).table("collectives")
    assert row["kind"] == "all_reduce"


def test_categories_that_nobody_knows_are_named(tmp_path):
    npu = host_only(backend="gloo")._add("npu_kernel", "matmul", 10, 4210, 1, 1, {})
    said = opened(npu.write(tmp_path / "t.json"), tmp_path)
    assert "categories that are not read, 'npu_kernel' (4.20 ms)" in said
    beside = GpuRank(world_size=1).step(1, 0, 50).kernel(5, 10, 40)._add("npu_kernel", "matmul", 10, 20, 1, 1, {})
    assert "'npu_kernel' (10.0 µs)" in notes(beside.write(tmp_path / "t.json"))

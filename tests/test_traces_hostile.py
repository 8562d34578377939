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
        with_event(ts=1e300), with_event(ts=float("inf")), with_event(dur=float("nan")), with_event(dur=-5),
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
        (dict(dur=-5, name="sm90_gemm"), "('sm90_gemm' of 'kernel', ts 100, dur -5)"), (dict(ts=None), "ts None"),
        (dict(ts="0.5"), "ts '0.5'"), (dict(name=None), "(None of 'kernel'"),
    ],
)  # fmt: skip
def test_what_no_profiler_writes_is_told_by_its_event(tmp_path, changes, told):
    """And not by Python's own error: "'NoneType' object has no attribute 'startswith'"."""
    (tmp_path / "bad.json").write_bytes(with_event(**changes))
    said = opened(tmp_path / "bad.json", tmp_path)
    assert told in said and "Error" not in said

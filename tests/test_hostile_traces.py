"""Traces of other people that no good profiler writes, in every way that `report` shows them: a result, or one line.

A result holds no number that cannot be: none below zero, none that is no number, no time that is longer than the trace.
`test_traces_hostile.py` damages traces at random; here each damage is one that was met, and is held to what it should
give.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_traces import GpuRank
from tests.test_cli import ended

Content = dict[str, Any]
WAYS: dict[str, list[str]] = {
    "table": [], "tables": ["--tables"], "page": ["--html", "page.html"], "json": ["--json", "-"],
    "perfetto": ["--perfetto", "all.json"], "csv": ["--csv", "csv"], "tensorboard": ["--tensorboard", "log"],
}  # fmt: skip
# what no result says: no number, amounts below zero, millions of seconds, and numbers of ten digits
_ABSURD = re.compile(
    r"\bnan\b|\binf\b|(?<![\w.])-\d[\d.,]* (?:B|kB|MB|GB|TB|[num]?s|µs|ranks)\b"
    r"|\d,\d{3},\d{3} s|\de\+\d|\d(?:,\d{3}){3}",
    re.IGNORECASE,
)


# ---- the traces


def gpu(rank: int = 0, world: int = 1) -> Content:
    """Two steps of a GPU rank: kernels, a copy, two collectives, a loader."""
    trace = GpuRank(rank, world).step(1, 0, 50).range("FSDP::pre_forward (a)", 5, 30)
    trace.nccl("all_gather", 8, 100, 200).kernel(10, 150, 300).copy(20, 300, 320).loader(35, 40).synchronise(42, 48)
    trace.step(2, 50, 90).kernel(60, 330, 400).nccl("reduce_scatter", 70, 380, 450)
    return trace.content()


def cpu() -> Content:
    """Two steps of 900 us of a CPU rank, each with an operator of 100 us and an all-reduce of 80 us."""
    events = []
    for step, start in enumerate((0.0, 900.0)):
        world = {"Input Dims": [[4]], "Input type": ["float"]}
        events += [
            event("user_annotation", f"ProfilerStep#{step}", start, 900.0),
            event("cpu_op", "aten::mm", start + 10, 100.0),
            event("user_annotation", "gloo:all_reduce", start + 50, 80.0, 2, **world),
        ]
    world_of_one = {"backend": "gloo", "rank": 0, "world_size": 1}
    return {"distributedInfo": world_of_one, "baseTimeNanoseconds": 10**18, "traceEvents": events}


def event(category: str, name: str, ts: float, dur: float, thread: int = 1, **arguments: Any) -> Content:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": ts, "dur": dur, "args": arguments}


def changed(content: Content, which: Callable[[Content], bool], **values: Any) -> Content:
    """The trace with these values in the events that are chosen; `args` are added to those that an event has."""
    arguments = values.pop("args", {})
    for each in filter(which, content["traceEvents"]):
        each |= values
        each["args"] = {**each["args"], **arguments}
    return content


def without(content: Content, which: Callable[[Content], bool]) -> Content:
    return only(content, lambda each: not which(each))


def only(content: Content, which: Callable[[Content], bool]) -> Content:
    return {**content, "traceEvents": list(filter(which, content["traceEvents"]))}


def of(*categories: str) -> Callable[[Content], bool]:
    return lambda each: each["cat"] in categories


def named(beginning: str) -> Callable[[Content], bool]:
    return lambda each: each["name"].startswith(beginning)


def every(each: Content) -> bool:
    return True


ZERO: dict[str, Callable[[], Content]] = {
    "kernels": lambda: changed(gpu(), of("kernel"), dur=0),
    "collectives of a GPU": lambda: changed(gpu(), named("nccl"), dur=0),
    "kernels without steps": lambda: without(changed(gpu(), of("kernel"), dur=0), named("ProfilerStep")),
    "kernels and nothing else": lambda: only(changed(gpu(), of("kernel"), dur=0), of("kernel")),
    "operators": lambda: changed(cpu(), of("cpu_op"), dur=0),
    "collectives of a CPU": lambda: changed(cpu(), named("gloo"), dur=0),
    "steps of a CPU": lambda: changed(cpu(), named("ProfilerStep"), dur=0),
    "steps of a GPU": lambda: changed(gpu(), named("ProfilerStep"), dur=0),
    "all events of a CPU": lambda: changed(cpu(), every, dur=0),
    "all events of a GPU": lambda: changed(gpu(), every, dur=0),
    "events without a length": lambda: changed(gpu(), every, dur=None),
}  # fmt: skip
LONG: dict[str, Callable[[], Content]] = {  # 1e15 us are 32 years
    "operator": lambda: changed(cpu(), of("cpu_op"), dur=1e15),
    "kernel": lambda: changed(gpu(), lambda each: each["name"] == "sm90_gemm", dur=1e15),
    "collective of a CPU": lambda: changed(cpu(), named("gloo"), dur=1e15),
    "collective of a GPU": lambda: changed(gpu(), named("nccl"), dur=1e15),
    "step": lambda: changed(cpu(), named("ProfilerStep#1"), dur=1e15),
    "late kernel": lambda: changed(gpu(), of("kernel"), ts=1e15),
}
NEGATIVE: dict[str, Callable[[], Content]] = {
    "elements": lambda: changed(gpu(), named("nccl"), args={"In msg nelems": -5, "Out msg nelems": -10}),
    "ranks of a group": lambda: changed(gpu(), named("nccl"), args={"Group size": -2}),
    "shape": lambda: changed(cpu(), named("gloo"), args={"Input Dims": [[-4]]}),
    "shape of an operator": lambda: changed(cpu(), of("cpu_op"), args={"Input Dims": [[-4, 3], [3, -2]]}),
    "stream": lambda: changed(gpu(), of("kernel", "gpu_memcpy"), args={"stream": -7}),
    "copied bytes": lambda: changed(gpu(), of("gpu_memcpy"), args={"bytes": -5, "memory bandwidth (GB/s)": -1.0}),
    "elements without end": lambda: changed(
        gpu(), named("nccl"), args={"In msg nelems": 2**62, "Out msg nelems": 2**62}
    ),
    "shape without end": lambda: changed(cpu(), named("gloo"), args={"Input Dims": [[10**12, 10**12, 10**12]]}),
}  # fmt: skip
OTHER: dict[str, Callable[[], Content]] = {
    "two steps of one number": lambda: changed(cpu(), named("ProfilerStep"), name="ProfilerStep#0"),
    "a step in a step": lambda: {
        **cpu(), "traceEvents": [*cpu()["traceEvents"], event("user_annotation", "ProfilerStep#5", 100, 100)]
    },
    "one correlation for all": lambda: changed(gpu(), every, args={"correlation": 1}),
    "processes of any type": lambda: changed(gpu(), every, pid="host", tid=None),
}  # fmt: skip
CASES = {
    f"{kind}: {name}": make
    for kind, cases in (("zero", ZERO), ("long", LONG), ("negative", NEGATIVE), ("other", OTHER))
    for name, make in cases.items()
}
# ---- what each gives


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., tuple[int, str, str]]:
    """`fsdplab report` in an empty folder: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "240")
    return lambda *arguments: ended(["report", *map(str, arguments)], capsys)


def written(path: Path, content: Content) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def numbers(value: Any) -> Iterator[float]:
    """Every number in a JSON value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from numbers(each)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def no_number(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_an_odd_trace_is_a_result_or_one_line(case: str, way: str, report: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "odd.json", CASES[case]())
    code, out, err = report(path, *WAYS[way])
    if code == 2:
        assert out == "" and err.count("\n") == 1 and err.startswith("fsdplab: ") and len(err) < 1000, err
        return
    assert code == 0, err
    assert not (found := _ABSURD.search(f"{out}{err}")), (found, out)
    if way == "json":
        content = json.loads(out, parse_constant=no_number)
        assert all(0 <= number < 1e6 for number in numbers(content["runs"])), content
    if way == "page":
        assert "NaN" not in re.findall(r'id="comparison">(.*?)</script>', Path("page.html").read_text())[0]


@pytest.mark.parametrize("case", ZERO)
def test_the_parts_of_a_step_without_length_sum_to_it(case: str, tmp_path: Path) -> None:
    """And none of them is negative: the accounting holds for what takes no time."""
    from fsdplab.profiling import TraceError, analyse_trace

    try:
        found = analyse_trace(written(tmp_path / "odd.json", CASES[f"zero: {case}"]()))
    except TraceError:
        return
    for row in found.rows("breakdown"):
        parts = [row[name] for name in ("compute_only_ns", "overlapped_ns", "exposed_ns", "other_ns")]
        assert sum(parts) == row["step_ns"] and min(parts) >= 0


def test_times_since_1970_are_no_trace_of_fifty_years(tmp_path: Path, report: Any) -> None:
    """Before PyTorch 2.3 a trace's times were those of the system's clock: 1.7e15 us are the year 2023."""
    content = {**gpu(), "baseTimeNanoseconds": 0}
    for each in content["traceEvents"]:
        each["ts"] += 1.7e15
    shown = [report(written(tmp_path / "t.json", each), "--tables") for each in (gpu(), content)]
    assert shown[0] == shown[1] and shown[0][0] == 0


# ---- folders


def test_runs_of_one_trace_each_are_told_apart_by_their_folders(tmp_path: Path, report: Any) -> None:
    """Every job calls its first rank's trace worker0: two of them beside each other are known by where they lie."""
    for name in ("eager", "compiled"):
        written(tmp_path / name / "worker0.pt.trace.json", gpu())
    code, out, err = report("eager", "compiled", "--json", "-")
    assert code == 0, err
    assert [run["strategy"] for run in json.loads(out)["runs"]] == ["eager", "compiled"]
    assert all("worker0" not in line for line in err.splitlines() if line.lstrip().startswith(("eager", "compiled")))


@pytest.mark.parametrize("name", ["worker0.pt.trace.json", "rank0.json", "host_17.1700000000000.pt.trace.json"])
def test_a_folder_of_one_trace_is_a_report(tmp_path: Path, report: Any, name: str) -> None:
    written(tmp_path / "folder" / name, gpu())
    for way in WAYS.values():
        code, _, err = report("folder", *way)
        assert code == 0, err


def test_what_the_file_says_of_its_rank_counts_more_than_its_name(tmp_path: Path, report: Any) -> None:
    written(tmp_path / "folder" / "worker0.pt.trace.json", gpu(3, 8))
    code, out, _ = report("folder", "--tensorboard", "log")
    assert code == 0 and "1 of the job's 8 ranks were given" in out
    assert [path.name.split(".")[0] for path in Path("log").rglob("*.json")] == ["rank3"]


@pytest.mark.parametrize("below", ["folder/worker0", "folder/worker0/trace.json"])
def test_a_folder_that_holds_no_trace_itself_is_one_line(tmp_path: Path, report: Any, below: str) -> None:
    """A trace whose name ends in nothing that traces end in, or that lies a folder deeper."""
    written(tmp_path / below, gpu())
    code, out, err = report("folder")
    assert (code, out, err.count("\n")) == (2, "", 1) and "no trace (.json, .json.gz)" in err

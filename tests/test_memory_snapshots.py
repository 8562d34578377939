"""Snapshots of PyTorch's CUDA allocator: what fills a device, read from files that may be hostile."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest

from fsdplab.cli import main
from fsdplab.figures.plots.allocator import allocator_timeline
from fsdplab.profiling.memory.snapshot_file import SnapshotError, is_snapshot, read_snapshot
from fsdplab.profiling.memory.snapshot_memory import UNRECORDED, memory_of

pytestmark = pytest.mark.quick
MB = 10**6


class Command:
    """`fsdplab report` in this process: its exit code, stdout and stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: str) -> None:
        with pytest.raises(SystemExit) as end:
            main(["report", *words])
        self.code = end.value.code or 0
        self.out, self.err = capsys.readouterr()


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


TORCH = "/lib/site-packages/torch"
FORWARD = [
    frame(f"{TORCH}/nn/modules/linear.py", 125, "forward"),
    frame("/job/model.py", 41, "forward"),
    frame("/job/train.py", 9, "main"),
]
STEP = [frame(f"{TORCH}/optim/adamw.py", 30, "_init_group"), frame("/job/train.py", 12, "main")]
BUILD = [frame(f"{TORCH}/nn/modules/module.py", 900, "_apply"), frame("/job/train.py", 3, "main")]


class Allocator:
    """Writes what PyTorch's caching allocator would: each allocation has a segment of its own."""

    def __init__(self) -> None:
        self.trace: list[dict[str, Any]] = []
        self.blocks: dict[int, dict[str, Any]] = {}

    def _note(self, action: str, address: int, size: int, frames: list[dict[str, Any]], **more: Any) -> None:
        entry = {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}
        self.trace.append(entry | {"time_us": 1000 * len(self.trace), **more})

    def alloc(self, address: int, size: int, frames: list[dict[str, Any]]) -> None:
        self._note("segment_alloc", address, size, frames)
        self._note("alloc", address, size, frames)
        self.blocks[address] = {
            "address": address, "size": size, "requested_size": size, "state": "active_allocated", "frames": frames,
        }  # fmt: skip

    def free(self, address: int) -> None:
        block = self.blocks[address]
        for action in ("free_requested", "free_completed"):
            self._note(action, address, block["size"], [])
        block["state"] = "inactive"

    def fail(self, size: int, device_free: int) -> None:
        self._note("oom", 0, size, FORWARD, device_free=device_free)

    def snapshot(self) -> dict[str, Any]:
        segments = [
            {
                "device": 0, "address": block["address"], "total_size": block["size"], "allocated_size": 0,
                "stream": 0, "segment_type": "large", "blocks": [block],
            }
            for block in self.blocks.values()
        ]  # fmt: skip
        return {"segments": segments, "device_traces": [self.trace], "allocator_settings": {}}


def written(folder: Path, content: object, name: str = "snapshot.pickle") -> Path:
    path = folder / name
    path.write_bytes(pickle.dumps(content))
    return path


def a_job() -> Allocator:
    """Weights and what is freed of them before the history begins; then two activations, of which one is freed; then
    an optimizer's state.
    """
    allocator = Allocator()
    allocator.alloc(0x10, 40 * MB, BUILD)
    allocator.alloc(0x20, 5 * MB, BUILD)
    allocator.trace.clear()
    allocator.alloc(0x30, 100 * MB, FORWARD)
    allocator.alloc(0x40, 50 * MB, FORWARD)
    allocator.free(0x20)
    allocator.free(0x30)
    allocator.alloc(0x50, 80 * MB, STEP)
    return allocator


def test_the_peak_and_what_was_alive_at_it(tmp_path: Path) -> None:
    (memory,) = memory_of(read_snapshot(written(tmp_path, a_job().snapshot())))
    assert memory.peak == 195 * MB and memory.in_use == 170 * MB
    assert memory.reserved == 275 * MB and memory.reserved_at_peak == 195 * MB
    assert memory.free == 105 * MB and memory.largest_free == 100 * MB
    assert [(line.where, line.nbytes, line.count) for line in memory.alive] == [
        ("job/model.py:41 forward", 150 * MB, 2),
        ("job/train.py:3 main", 40 * MB, 1),
        (UNRECORDED, 5 * MB, 1),
    ]
    assert memory.by_category == {"activations": 150 * MB, "parameters": 40 * MB, "not known": 5 * MB}
    assert [moment.in_use // MB for moment in memory.moments] == [45, 145, 145, 195, 195, 190, 190, 90, 90, 170]
    assert memory.sentence == (
        "195 MB were in use at the peak, of 195 MB reserved, 77 % of it activations; 77 % was allocated in"
        " job/model.py:41 forward."
    )


def test_the_peak_may_be_before_the_first_event(tmp_path: Path) -> None:
    allocator = a_job()
    del allocator.trace[:8]
    (memory,) = memory_of(read_snapshot(written(tmp_path, allocator.snapshot())))
    assert memory.peak == 170 * MB and memory.by_category["optimizer states"] == 80 * MB
    allocator.free(0x50)
    del allocator.trace[:2]
    (memory,) = memory_of(read_snapshot(written(tmp_path, allocator.snapshot())))
    assert memory.peak == 170 * MB and (memory.alive[0].where, memory.alive[0].nbytes) == (UNRECORDED, 80 * MB)


def test_running_out_of_memory_is_the_first_thing_said(tmp_path: Path) -> None:
    allocator = a_job()
    allocator.fail(90 * MB, 3 * MB)
    (memory,) = memory_of(read_snapshot(written(tmp_path, allocator.snapshot())))
    assert memory.sentence.startswith(
        "Out of memory: 90.0 MB were asked for in job/model.py:41 forward while 170 MB were in use, 275 MB were"
        " reserved and 3.00 MB were free on the device; at the peak 195 MB were in use, 77 % of it activations"
    )
    assert "expandable_segments" in memory.fragmentation, "105 MB were unused, in 100 and 5"


@pytest.mark.parametrize("asked,in_pieces", [(105 * MB, True), (105 * MB + 1, False)])
def test_fragmentation_is_judged_when_the_request_failed(tmp_path: Path, asked: int, in_pieces: bool) -> None:
    """The job freed what it held before the snapshot was taken."""
    allocator = a_job()
    allocator.fail(asked, 3 * MB)
    allocator.free(0x40)
    allocator.free(0x50)
    (memory,) = memory_of(read_snapshot(written(tmp_path, allocator.snapshot())))
    assert memory.free == 235 * MB and memory.largest_free == 100 * MB, "at the end"
    assert ("expandable_segments" in memory.fragmentation) == in_pieces
    assert ("105 MB (38 %)" in memory.fragmentation) == in_pieces
    assert "235 MB (85 %)" in memory.fragmentation and "piece had 100 MB" in memory.fragmentation


def test_a_request_that_failed_is_drawn_when_it_failed(tmp_path: Path) -> None:
    """The job caught the error and went on for 4 events of 1 ms."""
    allocator = a_job()
    failed_at = 1000 * len(allocator.trace)
    allocator.fail(90 * MB, 3 * MB)
    allocator.free(0x40)
    allocator.alloc(0x60, 20 * MB, FORWARD)
    (memory,) = memory_of(read_snapshot(written(tmp_path, allocator.snapshot())))
    assert memory.out_of_memory is not None and memory.out_of_memory.time_us == failed_at
    (mark,) = allocator_timeline(memory).layout.shapes
    assert mark.x0 == mark.x1 == failed_at / 1000


def test_without_a_history_the_state_at_the_end_is_told(tmp_path: Path) -> None:
    content = a_job().snapshot() | {"device_traces": []}
    (memory,) = memory_of(read_snapshot(written(tmp_path, content)))
    assert memory.peak == memory.in_use == 170 * MB and "when the snapshot was taken" in memory.sentence
    with pytest.raises(ValueError, match="_record_memory_history"):
        allocator_timeline(memory)
    assert memory_of(read_snapshot(written(tmp_path, content["segments"])))[0].peak == 170 * MB, "torch 2.0's list"


def test_devices_are_told_apart(tmp_path: Path) -> None:
    content, other = a_job().snapshot(), Allocator()
    other.alloc(0x10, 7 * MB, STEP)
    content["device_traces"].append(other.trace)
    content["segments"] += [segment | {"device": 1} for segment in other.snapshot()["segments"]]
    first, second = memory_of(read_snapshot(written(tmp_path, content)))
    assert (first.device, first.peak, second.device, second.peak) == (0, 195 * MB, 1, 7 * MB)


# ---- files that are none, or mean harm


class Runs:
    """A pickle of it runs a command when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


GOOD = pickle.dumps(a_job().snapshot())
HOSTILE = {
    "cut": GOOD[: len(GOOD) // 2],
    "another pickle": pickle.dumps([1, {"a": 2}][1:]),
    "a number": pickle.dumps(3),
    "one byte": b"\x80",
    "no segments": pickle.dumps({"segments": 5}),
    "a segment that is a text": pickle.dumps({"segments": ["x"]}),
    "blocks that are a number": pickle.dumps({"segments": [{"blocks": 5}]}),
    "a size below zero": pickle.dumps({"segments": [{"total_size": -1}]}),
    "a size that is a text": pickle.dumps({"segments": [{"total_size": 1, "blocks": [{"size": "x"}]}]}),
    "a frame that is a number": pickle.dumps({"segments": [{"blocks": [{"size": 1, "frames": [5]}]}]}),
    "events that are a number": pickle.dumps({"segments": [], "device_traces": [7]}),
    "a memo of 30 GB": b"\x80\x04Nr" + struct.pack("<I", 2**31 - 1) + b".",
    "a text of 8 GB": b"\x80\x04\x8d" + struct.pack("<Q", 8 << 30) + b"x.",
    "a list in itself, deep": b"\x80\x04" + 100_000 * b"]" + 99_999 * b"a" + b".",
    "a list that is named again and again": pickle.dumps({"segments": 9_999 * [{"blocks": 9_999 * [{"size": 1}]}]}),
    "a class": pickle.dumps(Path("x")),
    "outside": b"\x80\x04NQ.",
    "nothing in use": pickle.dumps({"segments": [], "device_traces": []}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_no_snapshot_is_refused_in_one_line(capsys: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(HOSTILE[name])
    done = Command(capsys, str(path))
    assert done.code == 2 and "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) == 1 and "snapshot" in done.err


def test_nothing_of_a_file_is_run(tmp_path: Path) -> None:
    path = written(tmp_path, Runs(tmp_path / "touched"))
    with pytest.raises(SnapshotError, match="system.*nothing of it was run"):
        read_snapshot(path)
    assert not (tmp_path / "touched").exists()


# ---- the command


def test_the_command_says_the_fault_first_and_writes_page_and_json(capsys: Any, tmp_path: Path) -> None:
    allocator = a_job()
    allocator.fail(102 * MB, 3 * MB)
    path, page = written(tmp_path, allocator.snapshot()), tmp_path / "page.html"
    zipped = tmp_path / "rank0.snapshot.pickle.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert is_snapshot(path) and is_snapshot(zipped)
    done = Command(capsys, str(path), "--html", str(page), "--json", str(tmp_path / "answer.json"))
    assert done.code == 0, done.err
    assert done.out.startswith("Out of memory: 102 MB were asked for in job/model.py:41 forward")
    assert "expandable_segments:True" in done.out and "activations" in done.out
    answer = json.loads((tmp_path / "answer.json").read_text())["snapshots"]["snapshot.pickle, device 0"]
    assert answer["peak"] == 195 * MB and answer["alive"][0]["where"] == "job/model.py:41 forward"
    assert "Out of memory: 102 MB" in page.read_text() and "in use by tensors" in page.read_text()
    done = Command(capsys, str(zipped), "-q")
    assert done.code == 0 and done.out.startswith("Out of memory")


def test_snapshots_stand_in_no_table_beside_runs(capsys: Any, tmp_path: Path) -> None:
    path = written(tmp_path, a_job().snapshot())
    done = Command(capsys, str(path), str(tmp_path))
    assert done.code == 2 and "is a memory snapshot, but" in done.err

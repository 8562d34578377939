"""The runs of a comparison take turns: real ranks that wait side by side, failures among them, and what is done where
they cannot.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdplab.common.machine import free_memory
from fsdplab.common.processes import processor_seconds, resident_bytes
from fsdplab.figures import comparison_page
from fsdplab.records import RunRecord, Summary, comparison_json, drift_sentence
from fsdplab.sessions import RunSpec, compare, compare_runs
from fsdplab.sessions.compare_runs import Rota, SpareMemory, why_no_turns
from fsdplab.sessions.launch import turns, warm
from fsdplab.sessions.launch.launcher import RunningRanks
from fsdplab.sessions.launch.mailbox import HeartbeatWriter, Mailbox, read_heartbeats
from fsdplab.sessions.launch.turns import STEP, TO_THE_END, WAITING, OwnTurns, Turns, fifos_in
from fsdplab.sessions.spec.pairs import least_bytes
from tests.leftovers import left_of, processes_of, until
from tests.watching import watching

WORKER = str(Path(__file__).with_name("turns_worker.py"))
TINY: dict[str, Any] = {"model": "gpt-tiny", "steps": 4, "sequence_length": 32, "device": "cpu"}
NEEDS_FORKS = pytest.mark.skipif(warm.why_not() is not None, reason="ranks are not forked here")
STARTS = (pytest.param("warm", marks=NEEDS_FORKS), "torchrun")
linux = pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")


def lab(strategy: str, **settings: Any) -> RunSpec:
    return RunSpec(strategy=strategy, **{**TINY, **settings})


def noting(folder: Path, **faults: str) -> list[str]:
    """The program of ranks that note their steps below `folder`."""
    (folder / "notes").mkdir(exist_ok=True)
    return [WORKER, str(folder / "notes"), json.dumps(faults)]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """A row a started run and step, in order of time: from when its first rank began to when its last ended."""
    steps: dict[tuple[str, int], dict[str, Any]] = {}
    for file in (folder / "notes").iterdir():
        for row in map(json.loads, file.read_text().splitlines()):
            seen = steps.setdefault((row["folder"], row["step"]), row)
            seen |= {"began": min(seen["began"], row["began"]), "ended": max(seen["ended"], row["ended"])}
    return sorted(steps.values(), key=lambda step: step["began"])


def fifos_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_fifo()]


# ---- runs that go right


@pytest.fixture(scope="module", params=[1, 2, 3])
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A comparison of two strategies of the lab, torch's DDP and the twin, on 1, 2 and 3 ranks."""
    folder, ranks = tmp_path_factory.mktemp("compared"), request.param
    same = {**TINY, "world_size": ranks, "micro_batches": 1}
    specs = [
        RunSpec(strategy="zero2", profile=1, **same),
        RunSpec(strategy="full_shard", profile=1, **same),
        RunSpec(engine="torch-ddp", strategy="no_shard", **same),
        RunSpec(engine="twin", memory=False, **same),
    ]
    seen: dict[str, list[Any]] = {"ready": [], "ended": [], "notes": [], "progress": [], "cpu": [], "fifos": []}
    first = Mailbox(folder / "runs" / "0-zero2-lab" / "ranks")

    def on_ready(record: RunRecord) -> None:
        seen["ready"].append(record)
        seen["fifos"] += fifos_below(folder)
        if Path("/proc").exists():
            pids = [heartbeat.pid for heartbeat in read_heartbeats(first, ranks).values()]
            seen["cpu"].append((time.monotonic(), sum(processor_seconds(pid) or 0.0 for pid in pids)))

    records = compare(
        specs,
        directory=folder / "runs",
        watcher=watching(
            ended=seen["ended"].append,
            ready=on_ready,
            note=seen["notes"].append,
            progressed=lambda spec, step, total, loss: seen["progress"].append((spec.engine, spec.strategy, step)),
        ),
        program=noting(folder),
    )
    return {**seen, "specs": specs, "records": records, "steps": steps_of(folder), "folder": folder}


def test_no_step_of_a_run_overlaps_with_one_of_another(compared: dict[str, Any]) -> None:
    steps = compared["steps"]
    assert len(steps) == sum(spec.total_steps for spec in compared["specs"])
    for before, after in zip(steps, steps[1:]):
        assert before["run"] == after["run"] or before["ended"] <= after["began"], (before, after)


def test_runs_warm_up_alone_then_rotate_then_profile_alone(compared: dict[str, Any]) -> None:
    names = [f"{spec.strategy}-{spec.engine}" for spec in compared["specs"]]
    order = [(step["run"], step["step"]) for step in compared["steps"]]
    warm, timed, profiled = order[:8], order[8:24], order[24:]
    assert warm == [(name, step) for name in names for step in (0, 1)]
    assert profiled == [(name, 6) for name in names[:2]]
    for number in range(4):
        turns_of_round = timed[4 * number : 4 * number + 4]
        assert sorted(turns_of_round) == sorted((name, number + 2) for name in names), "each run once a round"
    followed = {(one, other) for (one, _), (other, _) in zip(timed, timed[1:])}
    assert all(one != other for one, other in followed)
    for name in names:
        assert len([one for one, other in followed if other == name]) > 1, f"{name} always follows the same run"


def test_runs_that_took_turns_agree_with_the_twin_and_say_so(compared: dict[str, Any]) -> None:
    *records, twin = compared["records"]
    comparison = comparison_json(records, twin)
    assert [run["matches_reference"] for run in comparison["runs"]] == [True, True, True]
    assert comparison["in_turns"] is True and comparison["drift"] is None and drift_sentence(comparison) == ""
    for record in compared["records"]:
        assert record.status == "finished" and record.summary.in_turns is True
        assert RunRecord.load(record.path) == record
        timed = [row for row in record.table("steps") if row["step_time_s"] is not None]
        assert {row["step"] for row in timed} == {2, 3, 4, 5}


def test_what_is_called_while_runs_take_turns(compared: dict[str, Any]) -> None:
    records, ready = compared["records"], compared["ready"]
    assert compared["ended"] == records and [each.path for each in ready] == [record.path for record in records]
    for early, record in zip(ready, records):
        assert early.summary.step_time_s.median is None and record.summary.step_time_s.median > 0
        assert early.summary.peak_memory_bytes == record.summary.peak_memory_bytes
        assert early.summary.comm.bytes_per_step == record.summary.comm.bytes_per_step
    assert len(compared["notes"]) == 1 and "take turns" in compared["notes"][0]
    for engine, strategy in {entry[:2] for entry in compared["progress"]}:
        told = [step for *run, step in compared["progress"] if run == [engine, strategy]]
        assert told == list(range(1, len(told) + 1)) and len(told) >= 6
    assert compared["fifos"] == [] and fifos_below(compared["folder"]) == []


@linux
def test_a_rank_that_waits_uses_next_to_no_processor(compared: dict[str, Any]) -> None:
    """Processor time of the first run's ranks, from when they wait until the last run waits too; gloo's thread looks a
    hundred times a second, and the system counts in hundredths of a second.
    """
    (began, before), (ended, after) = compared["cpu"][0], compared["cpu"][-1]
    assert after - before <= 0.03 + 0.02 * (ended - began), compared["cpu"]
    assert processes_of(compared["folder"]) == []


# ---- runs that go wrong


@pytest.fixture(scope="module")
def with_failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    """Five runs that go wrong in their second turn, or before it, between two that go right.

    The others wait for longer than their own time limit while the one that computes for ever reaches its own.
    """
    folder = tmp_path_factory.mktemp("failures")
    faults = {"zero1": "kill", "zero2": "raise", "shard_grad_op": "compute"}
    specs = [
        lab("full_shard", time_limit=12.0),
        lab("zero1"),
        lab("zero2"),
        lab("shard_grad_op", time_limit=12.0),
        lab("no_shard", card=1_000_000),
        RunSpec(engine="torch-ddp", strategy="no_shard", learning_rate=1e30, **TINY),
        RunSpec(engine="torch-fsdp2", strategy="full_shard", time_limit=12.0, **TINY),
    ]
    ended: list[RunRecord] = []
    began = time.monotonic()
    records = compare(
        specs, directory=folder / "runs", watcher=watching(ended=ended.append), program=noting(folder, **faults)
    )
    assert time.monotonic() - began > 12.0, "the others have waited for longer than their time limit"
    assert Counter(record.path for record in ended) == Counter(record.path for record in records)
    if Path("/proc").exists():
        assert processes_of(folder) == []
    assert fifos_below(folder) == []
    names = ("first", "kill", "raise", "compute", "card", "diverge", "last")
    return dict(zip(names, records))


def test_a_run_that_fails_in_its_turn_leaves_the_others_going_on(with_failures: dict[str, RunRecord]) -> None:
    for name in ("first", "last"):
        record = with_failures[name]
        assert record.status == "finished" and record.summary.in_turns is True, record.failure
        assert len([row for row in record.table("steps") if row["step_time_s"] is not None]) == 2 * 4


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("kill", "died", "Rank 1 died in step 3 (data): it ended with SIGKILL (signal 9)."),
        ("raise", "raised", "Rank 1 raised in step 3 (data): ValueError: the slices do not fit."),
        ("compute", "timeout", "The time limit of 12 s ended the run in step 3 (data) while rank 1 computed"),
        ("diverge", "diverged", "the loss is nan"),
    ],
)
def test_each_ends_with_its_own_report(with_failures: dict[str, RunRecord], name: str, kind: str, says: str) -> None:
    record = with_failures[name]
    assert record.status == "failed" and record.failure is not None
    assert record.failure["kind"] == kind and says in record.failure["message"], record.failure["message"]
    if name != "diverge":  # a loss that is no number equals nothing
        assert RunRecord.load(record.path) == record
        assert {row["step"] for row in record.table("steps")} == {0, 1, 2}


def test_a_run_over_its_card_takes_its_turns(with_failures: dict[str, RunRecord]) -> None:
    record = with_failures["card"]
    assert record.status == "finished" and record.summary.card is not None and record.summary.card.exceeded
    assert record.summary.in_turns and record.summary.step_time_s.count == record.spec["steps"]


@pytest.mark.parametrize("start", STARTS)
def test_a_run_killed_while_it_waits_leaves_the_others_going_on(tmp_path: Path, start: str, capsys: Any) -> None:
    folder, killed = tmp_path / "runs", []
    specs = [lab(strategy, start=start) for strategy in ("zero1", "zero2", "full_shard")]
    waits = Mailbox(folder / "0-zero1-lab" / "ranks")

    def kill_one_that_waits(spec: RunSpec, step: int, total: int, loss: float) -> None:
        if spec.strategy == "full_shard" and step == 3 and not killed:
            heartbeat = read_heartbeats(waits, 2)[1]
            killed.append((heartbeat.phase, heartbeat.step))
            os.kill(heartbeat.pid, signal.SIGKILL)

    records = compare(specs, directory=folder, watcher=watching(progressed=kill_one_that_waits))
    assert killed == [(WAITING, 2)]
    assert "zero1 failed: Rank 1 died in step 2" in capsys.readouterr().err
    assert [record.status for record in records] == ["failed", "finished", "finished"]
    failure = records[0].failure or {}
    assert (failure["kind"], failure["rank"], failure["phase"]) == ("died", 1, WAITING)
    assert "Rank 1 died in step 2 (waiting for its turn): it ended with SIGKILL" in failure["message"]
    assert processes_of(tmp_path) == [] and fifos_below(tmp_path) == []


@pytest.mark.parametrize("start", STARTS)
def test_an_interrupt_in_the_middle_of_a_turn_ends_all_runs(tmp_path: Path, start: str) -> None:
    def interrupt(spec: RunSpec, row: Any) -> None:
        if row["step_time_s"] is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(
            [lab(strategy, start=start) for strategy in ("zero1", "zero2")],
            directory=tmp_path,
            watcher=watching(stepped=interrupt),
        )
    assert processes_of(tmp_path) == [] and fifos_below(tmp_path) == []
    assert list(tmp_path.rglob("run.json")) == []


@pytest.mark.skipif(warm.why_not() is not None, reason="ranks are not forked here")
def test_starters_killed_at_every_try_end_every_run_with_a_report_of_its_own(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_the_starter(spec: RunSpec, row: Any) -> None:
        starter = warm.starter_pid()
        if row["step_time_s"] is not None and starter is not None and starter not in killed:
            killed.append(starter)
            os.kill(starter, signal.SIGKILL)

    specs = [lab(strategy, start="warm", steps=300) for strategy in ("zero1", "zero2", "full_shard")]
    records = compare(specs, directory=tmp_path, watcher=watching(stepped=kill_the_starter))
    assert [record.status for record in records] == ["failed"] * 3
    for record in records:
        assert (record.failure or {})["message"].startswith("The warm starter, the process that forks the ranks, was")
    assert processes_of(tmp_path) == [] and fifos_below(tmp_path) == []


@pytest.mark.parametrize("start", STARTS)
def test_a_killed_caller_takes_all_runs_with_it(tmp_path: Path, start: str) -> None:
    specs = f"[RunSpec(strategy=each, **{ {**TINY, 'steps': 5000, 'start': start}!r}) for each in ('zero1', 'zero2')]"
    code = f"from fsdplab.sessions import RunSpec, compare\ncompare({specs}, directory={str(tmp_path)!r})"
    caller = subprocess.Popen([sys.executable, "-c", code])
    steps = [
        tmp_path / f"{number}-{name}-lab" / "ranks" / "rank0.steps" for number, name in enumerate(("zero1", "zero2"))
    ]
    both = until(lambda: all(each.exists() and len(each.read_text().splitlines()) > 4 for each in steps), 90)
    caller.kill()
    caller.wait()
    assert both, "both took turns"
    assert left_of(tmp_path) == [] and fifos_below(tmp_path) == []


# ---- runs that cannot take turns


def test_without_memory_the_first_is_run_again_last_and_its_drift_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_runs, "free_memory", lambda: 1_000_000)
    notes: list[str] = []
    records = compare(
        [lab("zero2", profile=1), lab("full_shard"), RunSpec(engine="twin", **TINY)],
        directory=tmp_path / "runs",
        watcher=watching(note=notes.append, ready=lambda record: pytest.fail("no run waits")),
        program=noting(tmp_path, zero2="slower"),
    )
    assert notes == [
        "The runs go one after the other, and the first is run again last: 1.00 MB of memory are free, and a further"
        f" run may need {2 * least_bytes(lab('zero2')) / 1e9:.2f} GB."
    ]
    order = [step["run"] for step in steps_of(tmp_path)]
    assert order == ["zero2-lab"] * 7 + ["full_shard-lab"] * 6 + ["full_shard-twin"] * 6 + ["zero2-lab"] * 6
    first = records[0]
    assert first.summary.in_turns is False and first.summary.again_s > 1.03 * first.summary.step_time_s.median
    assert RunRecord.load(first.path) == first and len(list((tmp_path / "runs").iterdir())) == 3
    comparison = comparison_json(records[:2], records[2])
    sentence = drift_sentence(comparison)
    assert comparison["in_turns"] is False and comparison["drift"]["strategy"] == "zero2"
    assert sentence.startswith("The machine's speed drifted: zero2 was run again last, and its step took ")
    assert sentence in comparison_page(comparison, records[:2]).replace("&#39;", "'")
    assert "longer (" in sentence and "was run again" not in comparison_page({**comparison, "drift": None}, records[:2])


def test_a_run_without_room_lets_those_that_wait_go_on_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([10**12, 0])
    monkeypatch.setattr(compare_runs, "free_memory", lambda: next(free))
    ready: list[RunRecord] = []
    records = compare([lab("zero2"), lab("full_shard")], watcher=watching(ready=ready.append), program=noting(tmp_path))
    assert len(ready) == 1 and [record.status for record in records] == ["finished", "finished"]
    assert [record.summary.in_turns for record in records] == [False, False]
    steps = [(step["run"], step["step"]) for step in steps_of(tmp_path)]
    assert [step for run, step in steps[:6]] == list(range(6)) and {run for run, _ in steps[:6]} == {"zero2-lab"}
    assert records[0].summary.again_s > 0 and records[1].summary.again_s is None


def test_a_run_beside_the_twin_alone_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_runs, "free_memory", lambda: 0)
    notes: list[str] = []
    records = compare(
        [RunSpec(engine="twin", **TINY), lab("zero2")], watcher=watching(note=notes.append), program=noting(tmp_path)
    )
    assert len(steps_of(tmp_path)) == 12 and notes[0].startswith("The runs go one after the other: 0 B of memory")
    assert not any(record.summary.again_s for record in records)


def test_one_run_alone_takes_no_turns_and_is_not_run_again(tmp_path: Path) -> None:
    notes: list[str] = []
    (record,) = compare([lab("zero2")], watcher=watching(note=notes.append), program=noting(tmp_path))
    assert notes == [] and record.summary.in_turns is False and record.summary.again_s is None
    assert len(steps_of(tmp_path)) == 6


@pytest.mark.quick
def test_gpus_and_folders_without_fifos_allow_no_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [lab("zero2"), lab("full_shard")]
    assert why_no_turns(specs, tmp_path / "new") == "" and (tmp_path / "new").is_dir()
    assert why_no_turns(specs[:1], None) == "there is one run"
    assert why_no_turns(specs, None) == ""
    monkeypatch.setattr(turns.os, "mkfifo", refuse)
    assert (
        not fifos_in(tmp_path) and "has no FIFOs" in why_no_turns(specs, tmp_path) and why_no_turns(specs, None) == ""
    )
    monkeypatch.setattr(RunSpec, "device_type", "cuda")
    assert why_no_turns(specs, None) == "they use a GPU"


def refuse(*_: Any) -> None:
    raise PermissionError(1, "Operation not permitted")


# ---- whose turn it is


@pytest.mark.quick
@pytest.mark.parametrize("runs", range(2, 9))
def test_no_run_always_follows_the_same_one(runs: int) -> None:
    rota, order = Rota(), []
    for _ in range(2 * runs):
        order += [[rota.next(range(runs)) for _ in range(runs)]]
    assert all(sorted(each) == list(range(runs)) for each in order)
    flat = [run for each in order for run in each]
    followed = Counter(zip(flat, flat[1:]))
    assert all(one != other for one, other in followed)
    for run in range(runs):
        before = {one for one, other in zip(flat[: 4 * runs], flat[1 : 4 * runs]) if other == run}
        assert len(before) >= min(3, runs - 1), f"in four rounds run {run} follows {before}"


@pytest.mark.quick
def test_a_run_that_ends_or_has_fewer_steps_leaves_its_turns_to_the_others() -> None:
    rota = Rota()
    assert [rota.next([0, 1, 2]) for _ in range(3)] == [0, 1, 2]
    assert sorted(rota.next([0, 2]) for _ in range(2)) == [0, 2]
    assert [rota.next([2]) for _ in range(2)] == [2, 2]
    assert rota.turns == {0: 2, 1: 1, 2: 4}


# ---- the memory for runs that wait


@pytest.mark.quick
def test_there_is_room_for_a_run_where_twice_its_need_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = lab("zero2")
    least = least_bytes(spec)
    memory = SpareMemory()
    monkeypatch.setattr(compare_runs, "free_memory", lambda: 2 * least)
    assert memory.why_not(spec) == ""
    monkeypatch.setattr(compare_runs, "free_memory", lambda: 2 * least - 1)
    assert "of memory are free, and a further run may need" in memory.why_not(spec)
    monkeypatch.setattr(compare_runs, "free_memory", lambda: 4 * least)
    memory.take(Waiting(spec, least // 2))
    assert memory.why_not(spec) == "", "a run that holds less than predicted changes nothing"
    memory.take(Waiting(spec, 3 * least))
    assert memory.why_not(spec) != "", "another may hold as much more than predicted"


@pytest.mark.quick
def test_where_the_system_does_not_say_what_is_free_a_few_small_runs_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_runs, "free_memory", lambda: None)
    memory, spec, waiting = SpareMemory(), RunSpec(device="cpu"), 0
    while not memory.why_not(spec):
        memory.take(Waiting(spec, 0))
        waiting += 1
    assert 2 <= waiting <= 4


class Waiting:
    """A run that waits, and what it holds."""

    def __init__(self, spec: RunSpec, held: int) -> None:
        self.spec, self.held = spec, held

    def resident_bytes(self) -> int:
        return self.held


def files(root: Path, **contents: str) -> None:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.quick
def test_free_memory_is_what_the_kernel_and_the_control_groups_allow(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None, "a system without /proc"
    files(tmp_path, **{"proc/meminfo": "MemTotal: 9000 kB\nHugePages_Total:       0\n"})
    assert free_memory(tmp_path) is None, "a kernel that does not say"
    files(tmp_path, **{"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"})
    assert free_memory(tmp_path) == 8_192_000
    # version 2: a group without a limit in one that allows 1000 kB more, 200 kB of which are copies of files
    files(tmp_path, **{
        "proc/self/cgroup": "0::/user/lab\n",
        "sys/fs/cgroup/user/lab/memory.max": "max\n", "sys/fs/cgroup/user/lab/memory.current": "5\n",
        "sys/fs/cgroup/user/lab/memory.stat": "anon 1\n",
        "sys/fs/cgroup/user/memory.max": "3000000\n", "sys/fs/cgroup/user/memory.current": "2200000\n",
        "sys/fs/cgroup/user/memory.stat": "anon 1\ninactive_file 150000\nactive_file 50000\n",
    })  # fmt: skip
    assert free_memory(tmp_path) == 1_000_000
    # version 1, in a container that does not show the group's own folder; used beyond its limit
    files(tmp_path, **{
        "proc/self/cgroup": "5:cpu:/x\n4:memory,hugetlb:/docker/1\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "900000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "950000\n",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 6000\ntotal_active_file 4000\n",
    })  # fmt: skip
    assert free_memory(tmp_path) == 0


@linux
@pytest.mark.quick
def test_memory_of_a_process_is_known_until_it_ends() -> None:
    assert (resident_bytes(os.getpid()) or 0) > 1_000_000
    child = subprocess.Popen(["true"])
    child.wait()
    assert resident_bytes(child.pid) is None


# ---- the turns themselves


@pytest.fixture
def both_sides(tmp_path: Path) -> Iterator[tuple[Turns, list[OwnTurns], Mailbox]]:
    mailbox = Mailbox(tmp_path)
    callers = Turns(mailbox, 2)
    own = [OwnTurns(mailbox, rank, HeartbeatWriter(mailbox.of(rank, "heartbeat"), rank)) for rank in range(2)]
    yield callers, own, mailbox
    callers.close()
    callers.close()
    assert fifos_below(tmp_path) == []


@pytest.mark.quick
def test_ranks_wait_until_they_are_allowed_a_step_or_all_of_them(both_sides: Any, tmp_path: Path) -> None:
    callers, own, mailbox = both_sides
    taken: list[tuple[int, int]] = []

    def train(rank: int) -> None:
        for step in range(4):
            own[rank].wait()
            taken.append((rank, step))

    threads = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(2)]
    threads[0].start()
    callers.look(0.2)
    assert not callers.all_wait and len(fifos_below(tmp_path)) == 4, "one of two ranks waits"
    threads[1].start()
    callers.look(20.0)
    assert callers.all_wait and taken == [] and fifos_below(tmp_path) == []
    assert {beat.phase for beat in read_heartbeats(mailbox, 2).values()} == {WAITING}
    callers.tell(STEP)
    assert not callers.all_wait
    callers.look(20.0)
    assert callers.all_wait and sorted(taken) == [(0, 0), (1, 0)]
    callers.tell(TO_THE_END)
    for thread in threads:
        thread.join(20.0)
    assert len(taken) == 8


@pytest.mark.quick
def test_a_run_that_takes_no_turns_does_not_wait(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path)
    writer = HeartbeatWriter(mailbox.of(0, "heartbeat"), 0)
    OwnTurns(mailbox, 0, writer).wait()
    assert writer.last().phase == "start"


@pytest.mark.quick
def test_fifos_that_cannot_be_made_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank1.turn").touch()
    with pytest.raises(FileExistsError):
        Turns(Mailbox(tmp_path), 2)
    assert fifos_below(tmp_path) == []


class Idle:
    """An agent that runs on."""

    lost, left = None, {}

    def running(self, within_s: float = 0.0) -> bool:
        return True


@pytest.mark.quick
def test_the_time_between_two_turns_is_neither_a_hang_nor_of_the_time_limit(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path)
    callers = Turns(mailbox, 1)
    own = OwnTurns(mailbox, 0, HeartbeatWriter(mailbox.of(0, "heartbeat"), 0))
    own._heartbeat.enter("forward", 3)
    ranks = RunningRanks(Idle(), mailbox, 1, time_limit=60.0, turns=callers)
    thread = threading.Thread(target=lambda: [own.wait() for _ in range(2)], daemon=True)
    thread.start()
    assert ranks.watch(to_the_end=False) is True
    ranks.activity.last -= 10_000.0  # so long ago was its last turn
    assert ranks.activity.stalled(1)
    callers.tell(STEP)
    assert ranks.watch(to_the_end=False) is True and ranks._used < 60.0
    callers.tell(TO_THE_END)
    thread.join(20.0)
    callers.close()


# ---- what is said of a drift


def record_of(strategy: str, engine: str = "lab", **summary: Any) -> RunRecord:
    return RunRecord(
        Path("nowhere"),
        spec={"strategy": strategy, "engine": engine, "world_size": 2},
        summary=Summary.from_dict(summary),
    )


@pytest.mark.quick
@pytest.mark.parametrize(
    ("again", "says"),
    [
        (0.1029, ""),
        (0.0971, ""),
        (0.112, "full_shard was run again last, and its step took 12% longer (112 ms instead of 100 ms), so"),
        (0.08, "full_shard was run again last, and its step took 20% less time (80.0 ms instead of 100 ms), so"),
    ],
)
def test_a_drift_above_three_percent_is_one_sentence(again: float, says: str) -> None:
    first = record_of("full_shard", step_time_s={"median": 0.1, "min": 0.1}, again_s=again)
    comparison = comparison_json([first, record_of("zero2", step_time_s={"median": 0.1, "min": 0.1})])
    assert comparison["drift"]["relative"] == pytest.approx(again / 0.1 - 1)
    sentence = drift_sentence(comparison)
    assert (
        says in sentence
        and bool(says) == bool(sentence)
        and sentence.count(".") == bool(says) + sentence.count(".0 ms")
    )


@pytest.mark.quick
def test_runs_that_took_turns_and_records_of_before_have_no_drift() -> None:
    for summary in ({}, {"step_time_s": {"median": None, "min": None}, "again_s": 0.1}, {"step_time_s": None}):
        comparison = comparison_json([record_of("zero2", **summary)])
        assert comparison["drift"] is None and drift_sentence(comparison) == ""
    assert drift_sentence({"runs": []}) == "", "the JSON of an earlier version"
    other = record_of("no_shard", "torch-ddp", step_time_s={"median": 0.1, "min": 0.1}, again_s=0.2)
    assert "no_shard (torch-ddp) was run again last" in drift_sentence(comparison_json([other]))

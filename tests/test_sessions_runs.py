"""Sessions on real ranks: runs agree, runs that go wrong end with one report, and no process is left in either case."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdplab.records import RunRecord, comparison_json
from fsdplab.records.summary import Card
from fsdplab.sessions import RanksFailed, RunSpec, compare
from fsdplab.sessions.launch.failure_report import NO_ANSWER
from fsdplab.sessions.launch.mailbox import Mailbox, read_heartbeats
from fsdplab.sessions.run_and_record import WORKER, run
from tests.leftovers import left_of, processes_of, until
from tests.tiers import values_of
from tests.watching import watching

FAULTY = str(Path(__file__).with_name("faulty_worker.py"))
TINY = {"model": "gpt-tiny", "steps": 4, "sequence_length": 32, "device": "cpu"}
STARTS = ("warm", "torchrun")
HANG_AFTER_S = {"warm": 15.0, "torchrun": 45.0}  # a busy machine takes half a minute to start Pythons
OnStep = Callable[[Path, int], None]

linux = pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc to look for processes")


# ---- runs that go right


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    """One comparison, with two micro-batches a step: the twin, the lab, two peers, and one run that cannot finish in
    its time.
    """
    folder, same = tmp_path_factory.mktemp("compared"), {**TINY, "micro_batches": 2}
    specs = [
        RunSpec(engine="twin", **same),
        RunSpec(engine="lab", strategy="zero2", **same),
        RunSpec(engine="torch-ddp", strategy="no_shard", time_limit=0.2, start="torchrun", **same),
        RunSpec(engine="torch-ddp", strategy="no_shard", **same),
        RunSpec(engine="torch-fsdp2", **same),
    ]
    seen: list[RunRecord] = []
    progress: list[tuple[str, int, int]] = []

    def follow(spec: RunSpec, step: int, total: int, loss: float) -> None:
        progress.append((spec.engine, step, total))

    records = compare(specs, directory=folder, watcher=watching(ended=seen.append, progressed=follow))
    assert seen[0] is records[2], "the run that fails does not wait for the others"
    assert seen[1:] == [*records[:2], *records[3:]] and [record.spec["engine"] for record in records] == [
        spec.engine for spec in specs
    ]
    assert [entry for entry in progress if entry[0] == "lab"] == [("lab", step, 6) for step in range(1, 7)]
    names = ("twin", "lab", "late", "ddp", "fsdp2")
    return dict(zip(names, records))


def test_engines_agree_with_the_twin_at_every_step(compared: dict[str, RunRecord]) -> None:
    records = [compared[name] for name in ("lab", "ddp", "fsdp2")]
    entries = comparison_json(records, compared["twin"])["runs"]
    assert [entry["matches_reference"] for entry in entries] == [True, True, True]
    assert all(len(entry["losses"]) == 6 for entry in entries)


def test_a_run_that_fails_is_a_row_and_the_others_go_on(compared: dict[str, RunRecord]) -> None:
    late = compared["late"]
    assert (
        late.status == "failed"
        and late.failure["kind"] == "timeout"
        and "did not start within the time limit" in late.failure["message"]
    )
    assert compared["ddp"].status == "finished"


def test_the_records_on_disk_are_those_returned(compared: dict[str, RunRecord]) -> None:
    for record in compared.values():
        assert RunRecord.load(record.path) == record


def test_the_ledger_has_the_bytes_of_the_formula_and_peers_have_none(compared: dict[str, RunRecord]) -> None:
    summary = compared["lab"].summary
    assert summary.comm.bytes_per_step == summary.formula_bytes_per_step > 0
    assert {row["rank"] for row in compared["lab"].table("ledger")} == {0, 1}
    assert compared["fsdp2"].table("ledger") == [] and compared["fsdp2"].summary.comm.bytes_per_step is None


def test_warm_up_is_not_timed_and_memory_is_split_at_its_peak(compared: dict[str, RunRecord]) -> None:
    record = compared["lab"]
    timed = {row["step"]: row["step_time_s"] is not None for row in record.table("steps") if row["rank"] == 1}
    assert timed == {0: False, 1: False, 2: True, 3: True, 4: True, 5: True}
    peaks = [row for row in record.table("memory") if row["is_peak"]]
    assert {row["rank"] for row in peaks} == {0, 1} and {row["step"] for row in peaks} == {1}
    memory = record.summary.peak_memory_bytes
    assert sum(memory.split.values()) == memory.total == max(record.summary.peak_by_rank)
    assert record.environment["device"] == "cpu" and record.provenance["losses"] == "measured"


# ---- runs that go wrong


def signal_rank_1(which: signal.Signals) -> OnStep:
    def on_step(folder: Path, step: int) -> None:
        if step == 3:
            os.kill(read_heartbeats(Mailbox(folder / "ranks"), 2)[1].pid, which)

    return on_step


def interrupt(folder: Path, step: int) -> None:
    raise KeyboardInterrupt


def nothing(folder: Path, step: int) -> None:
    pass


LONG = {**TINY, "steps": 2000}
DDP = {"engine": "torch-ddp", "strategy": "no_shard", **LONG}
WRONG: dict[str, tuple[RunSpec, OnStep, tuple[str, ...]]] = {
    "sleep": (RunSpec(memory=False, **DDP), nothing, (FAULTY, "sleep")),
    "stop": (RunSpec(engine="torch-fsdp2", memory=False, **LONG), signal_rank_1(signal.SIGSTOP), WORKER),
    "raise": (RunSpec(engine="lab", **LONG), nothing, (FAULTY, "raise")),
    "exit": (RunSpec(engine="lab", **LONG), nothing, (FAULTY, "exit")),
    "kill": (RunSpec(engine="torch-fsdp2", **LONG), signal_rank_1(signal.SIGKILL), WORKER),
    "diverge": (RunSpec(engine="lab", learning_rate=1e30, **LONG), nothing, WORKER),
    "interrupt": (RunSpec(**DDP), interrupt, WORKER),
    "card": (RunSpec(engine="lab", strategy="no_shard", card=1_000_000, **LONG | dict(steps=3)), nothing, WORKER),
}


@pytest.fixture(scope="module")
def failed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    """What each ended with, by (start, name), for the ways to start that this run's tests ask for. Several at the same
    time, since some only wait; every one must have ended without leaving a process.
    """

    def fail(case: tuple[str, str]) -> Any:
        start, name = case
        folder = tmp_path_factory.mktemp(name)
        spec, on_step, program = WRONG[name]
        limit = HANG_AFTER_S[start] if name in ("sleep", "stop") else spec.time_limit
        try:
            ended: Any = run(
                replace(spec, start=start, time_limit=limit),
                directory=folder,
                watcher=watching(progressed=lambda spec, step, total, loss: on_step(folder, step)),
                program=program,
            )
        except (RanksFailed, KeyboardInterrupt) as error:
            ended = error
        if Path("/proc").exists():
            assert processes_of(folder) == []
        return ended

    asked = {values_of(item).get("start") for item in request.session.items if "failed" in fixtures_of(item)}
    cases = [(start, name) for name in WRONG for start in STARTS if start in asked or None in asked]
    with ThreadPoolExecutor(5) as pool:  # four of them wait for their time limit, the others run one after the other
        return dict(zip(cases, pool.map(fail, cases)))


def fixtures_of(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


@pytest.mark.parametrize(
    "start",
    [pytest.param("warm", marks=pytest.mark.default), "torchrun"],  # the first one pays for all ends
)
@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("kill", "died", "it ended with SIGKILL (signal 9)"),
        ("raise", "raised", "in step 3 (data): ValueError: the slices do not fit."),
        ("exit", "died", "left in step 3 (data) with exit code 0"),
        ("sleep", "hung", "hung in step 3 (data): no progress for"),
        ("stop", "hung", "and the other ranks waited for it"),
    ],
)
def test_one_report_names_the_rank(
    failed: dict[tuple[str, str], Any], name: str, kind: str, says: str, start: str
) -> None:
    report = failed[start, name].report
    assert (report.kind, report.rank) == (kind, 1)
    assert says in report.message and report.step is not None


@pytest.mark.full("each kind of end under torchrun too")
@pytest.mark.parametrize("name", ["raise", "exit", "sleep", "diverge"])
def test_the_report_does_not_depend_on_how_the_ranks_were_started(
    failed: dict[tuple[str, str], Any], name: str
) -> None:
    warm, torchrun = (failed[start, name].report for start in STARTS)
    assert without_numbers(warm.message) == without_numbers(torchrun.message)
    assert (warm.kind, warm.step, warm.phase) == (torchrun.kind, torchrun.step, torchrun.phase)
    if name == "raise":  # the stack of a hang depends on the instant
        assert warm.traceback == torchrun.traceback


def without_numbers(message: str) -> str:
    """The message without seconds and ranks: of a loss that is no number, either rank may be first to tell."""
    return re.sub(r"\d+ s\b|Rank \d", "#", message)


@pytest.mark.parametrize("start", STARTS)
def test_a_hang_shows_where_each_rank_stood(failed: dict[tuple[str, str], Any], start: str) -> None:
    assert "time.sleep(10_000)" in failed[start, "sleep"].report.traceback
    assert NO_ANSWER in failed[start, "stop"].report.traceback, (
        "a stopped process cannot answer, and is ended all the same"
    )


@pytest.mark.parametrize("start", STARTS)
def test_a_loss_that_is_no_number_ends_the_run(failed: dict[tuple[str, str], Any], start: str) -> None:
    report = failed[start, "diverge"].report
    assert (
        report.kind == "diverged"
        and report.rank in (0, 1)
        and "give a smaller learning_rate than 1e+30" in report.message
    )


@pytest.mark.parametrize("start", STARTS)
def test_a_failed_run_leaves_a_record_with_its_report_and_the_steps_it_did(
    failed: dict[tuple[str, str], Any], start: str
) -> None:
    for error in (failed[start, name] for name in ("sleep", "stop", "raise", "exit", "kill", "diverge")):
        record = RunRecord.load(error.record.path)
        assert record.status == "failed" and record.failure == error.report.as_dict()
        assert record.environment["versions"]
        json.loads(
            (record.path / "run.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON")
        )
    raised = failed[start, "raise"].record
    assert [row["step"] for row in raised.table("steps") if row["rank"] == 1] == [0, 1, 2]


@pytest.mark.parametrize("start", STARTS)
def test_an_interrupted_caller_gets_its_interrupt(failed: dict[tuple[str, str], Any], start: str) -> None:
    assert isinstance(failed[start, "interrupt"], KeyboardInterrupt)


@pytest.mark.parametrize("start", STARTS)
def test_a_run_over_its_emulated_card_is_marked_and_goes_on(failed: dict[tuple[str, str], Any], start: str) -> None:
    record = failed[start, "card"]
    assert record.status == "finished" and record.failure is None
    assert record.summary.card == Card(1_000_000, exceeded=True) and record.provenance["card"] == "emulated"
    assert (
        len(record.summary.losses) == RunSpec(**record.spec).total_steps
        and record.summary.peak_memory_bytes.total > 1_000_000
    )
    assert not (record.path / "ranks").exists(), "the ranks printed nothing, and the rest is in the record"


def test_a_killed_caller_takes_its_ranks_with_it(tmp_path: Path) -> None:
    """And ranks that start warm: test_warm_starts.py."""
    folder = tmp_path / "run"
    code = (
        "from fsdplab.sessions import RunSpec, run\nrun(RunSpec(engine='torch-ddp', strategy='no_shard',"
        f" start='torchrun', **{LONG!r}), directory={str(folder)!r})"
    )
    caller = subprocess.Popen([sys.executable, "-c", code])
    steps = Mailbox(folder / "ranks").of(0, "steps")
    until(steps.exists)
    caller.kill()
    caller.wait()
    assert steps.exists(), "the ranks were training"
    assert left_of(folder) == []

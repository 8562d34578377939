"""A long run: what has been read is not read again, what has been written is not kept. No test here judges a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdplab.sessions import RunSpec, run
from fsdplab.sessions.launch.mailbox import HeartbeatWriter, Mailbox, read_lines
from fsdplab.sessions.run_and_record import _Follower
from fsdplab.sessions.worker.rank_process import RankContext
from fsdplab.sessions.worker.training import Ledger
from tests.watching import watching

STEPS = 1000


def row(step: int) -> dict[str, object]:
    return {"rank": 0, "step": step, "loss": 5.0, "step_time_s": 0.01, "tokens": 128}


@pytest.mark.quick
def test_a_look_reads_only_the_steps_that_are_new(tmp_path: Path) -> None:
    told: list[int] = []
    rows: list[Any] = []
    spec = RunSpec(model="gpt-tiny", steps=STEPS, warmup=0, memory=False)
    watcher = watching(
        progressed=lambda spec, step, total, loss: told.append(step), stepped=lambda spec, row: rows.append(row)
    )
    follower = _Follower(Mailbox(tmp_path), spec, watcher)
    path = Mailbox(tmp_path).of(0, "steps")
    follower.look()
    for step in range(STEPS):
        with path.open("a") as file:
            file.write(json.dumps(row(step)) + "\n")
        follower.look()
        size = path.stat().st_size
        path.write_bytes(b"x" * (size - 1) + b"\n")  # whoever reads it again finds no JSON
    assert told == list(range(1, STEPS + 1)) and rows == [row(step) for step in range(STEPS)]


@pytest.fixture
def context(tmp_path: Path) -> RankContext:
    mailbox = Mailbox(tmp_path)
    return RankContext(0, 1, torch.device("cpu"), mailbox, HeartbeatWriter(mailbox.of(0, "heartbeat"), 0))


@pytest.mark.quick
def test_a_rank_holds_the_ledger_of_one_step_and_of_those_that_are_traced(context: RankContext) -> None:
    ledger = Ledger(context, lambda step: step in (1, 998))
    for step in range(STEPS):
        for collective in range(5):
            ledger.add({"step": step, "kind": "all_gather", "start_ns": collective})
        ledger.write()
        assert [each["step"] for each in ledger.of_step] == [step] * 5
    assert [each["step"] for each in ledger.kept] == [1] * 5 + [998] * 5
    written = read_lines(context.mailbox.of(0, "ledger"))
    assert [each["step"] for each in written] == [step for step in range(STEPS) for _ in range(5)]


@pytest.mark.quick
def test_collectives_are_counted_only_where_that_was_asked_for(context: RankContext) -> None:
    for _ in range(STEPS):
        context.note_collective("all_reduce", 8)
    assert context.issued is None and context.heartbeat.last().collectives == STEPS
    assert context.mailbox.of(0, "heartbeat").stat().st_size == 512, "a heartbeat is rewritten in place"


def test_the_record_has_the_ledger_of_every_step_and_its_folder_no_more(tmp_path: Path) -> None:
    record = run(RunSpec(model="gpt-tiny", steps=5, sequence_length=16, device="cpu"), directory=tmp_path / "run")
    steps = [each["step"] for each in record.table("ledger") if each["rank"] == 1]
    assert sorted(set(steps)) == list(range(7)) and steps == sorted(steps)
    assert not (tmp_path / "run" / "ranks").exists()

"""What starting costs is printed by `python -m tests.starts`, and what is heavy is imported where it is needed only.

No test here judges a time: another program on the machine would decide it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdplab.cli import main
from fsdplab.profiling import analyse_trace, with_peers
from fsdplab.records import PARTS_OF_EXPOSED, RunRecord
from fsdplab.sessions import RunSpec, run
from fsdplab.sessions.launch import warm
from fsdplab.sessions.worker.training import main as worker
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.registry import find
from tests import starts
from tests.starts import CHECKED, Row, StartsFailed, in_turn

TINY = RunSpec(model="gpt-tiny", steps=1, batch_size=1, sequence_length=16, profile=1, device="cpu")
HEAVY = {"torch", "numpy", "plotly", "pandas", "IPython"}
MODULES_OF_A_RANK = "modules.json"
# a few lines that newer versions of torch load with the first profile, and older ones lack
PER_VERSION = "torch.profiler._cupti_monitor"


def modules_after(program: str) -> set[str]:
    """The modules that a new Python has imported after a program."""
    code = f"{program}\nimport sys; print('loaded', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split("loaded")[-1].split())


def heavy_after(program: str) -> set[str]:
    """Those of the heavy packages that a new Python has imported after a program."""
    return HEAVY & {name.partition(".")[0] for name in modules_after(program)}


@pytest.mark.parametrize(
    "program",
    [
        "import fsdplab",
        "import fsdplab.cli as cli\ntry:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass",
        "import fsdplab.sessions.launch.launcher",
    ],
    ids=["import", "help", "launch"],
)
def test_what_must_answer_at_once_imports_nothing_heavy(program: str) -> None:
    """The last one begins the starter before the caller has imported torch."""
    assert heavy_after(program) == set()


def test_the_caller_of_a_run_does_without_torchs_dtensor() -> None:
    """Its import takes a second, beside the starter, which needs the cores; nor do ranks of one function need it."""
    program = "import fsdplab.sessions.compare_runs, fsdplab.sessions.remote_call"
    assert not {"torch.distributed.tensor", "torch.distributed.fsdp", "sympy"} & modules_after(program)


def test_the_doctor_says_of_shared_memory_what_the_engine_does() -> None:
    """It does not ask the engine, whose import would be half of its time."""
    from fsdplab.engine.transport.shared_memory.arena import machine_of_this_rank
    from fsdplab.sessions.capabilities import _transport

    assert (_transport().value == "shared memory") == (machine_of_this_rank() is not None)


def test_a_row_has_medians_and_their_ratio() -> None:
    row = Row("ranks that answer", (6.0, 5.0, 4.0), (0.1, 0.05, 0.2))
    assert (row.median("cold"), row.median("warm"), row.ratio) == (5.0, 0.1, 50.0)
    assert row.as_dict() == {
        "name": "ranks that answer", "cold_s": [6.0, 5.0, 4.0], "warm_s": [0.1, 0.05, 0.2], "cold_median_s": 5.0,
        "warm_median_s": 0.1, "ratio": 50.0,
    }  # fmt: skip
    assert starts.cells(row) == ("ranks that answer", "5.00 s", "0.10 s", "50.0")
    assert starts.cells(Row("fsdplab doctor", (), (12.34,))) == ("fsdplab doctor", "–", "12.3 s", "–")


def test_cold_and_warm_are_asked_in_turn_after_one_that_is_not_counted() -> None:
    asked: list[str] = []
    row = in_turn("anything", asked.append, 2)
    assert asked == ["warm", "torchrun", "warm", "torchrun", "warm"]
    assert len(row.cold) == len(row.warm) == 2


def test_a_command_that_fails_is_one_line() -> None:
    with pytest.raises(StartsFailed, match="exit code 2: fsdplab: unknown start 'tepid'") as raised:
        starts._rows_of_compare(["--start", "tepid"])
    assert "\n" not in str(raised.value)


def test_the_check_that_is_timed_starts_ranks() -> None:
    assert not find(CHECKED, Exercise).pure


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"of_ranks": "ranks that answer", "of_the_course": "%%ranks cell", "of_commands": "import fsdplab"}
    for name, what in rows.items():
        row = in_turn(what, lambda start: None, 2)
        monkeypatch.setattr(starts, name, lambda repetitions, on_row, row=row: on_row(row))
    monkeypatch.setattr(starts, "of_compare", lambda on_row: on_row(Row(starts.WHOLE, (80.0,), (30.0,))))
    file = tmp_path / "starts.json"
    starts.main(["--repetitions", "2", "--json", str(file)])
    printed, written = capsys.readouterr().out, json.loads(file.read_text())
    names = [*rows.values(), starts.WHOLE]
    assert [row["name"] for row in written["rows"]] == names and written["repetitions"] == 2
    assert all(printed.count(name) == 2 for name in names)  # as it was measured, and in the table
    assert "80.0 s" in printed and "2.7" in printed


@pytest.mark.parametrize("command", ["compare", "run", "bench"])
def test_the_start_is_a_flag_of_every_command_with_ranks(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "--start " in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main([command, "--start", "tepid"])
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.count("\n") == 1
    assert "unknown start 'tepid'; expected one of auto, warm, torchrun" in said


def test_warm_where_ranks_cannot_be_forked_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warm, "why_not", lambda: "this is a test")
    with pytest.raises(SystemExit) as left:
        main(["run", "--model", "gpt-tiny", "--start", "warm", "--out", str(tmp_path / "record")])
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.count("\n") == 1
    assert "--start is 'warm', but this is a test; give --start auto or torchrun" in said


def test_repetitions_are_at_least_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        starts.main(["--repetitions", "0"])
    assert left.value.code == 2 and "--repetitions is 0; expected at least 1" in capsys.readouterr().err


def worker_that_lists_modules(folder: str) -> None:
    """The lab's worker, which leaves behind what it had to import."""
    from fsdplab.sessions.worker import rank_process

    before, end = set(sys.modules), rank_process.end_process

    def listed(code: int) -> None:
        (Path(folder).parent / MODULES_OF_A_RANK).write_text(json.dumps(sorted(set(sys.modules) - before)))
        end(code)

    rank_process.end_process = listed
    worker(folder)


@pytest.mark.skipif(warm.why_not() is not None, reason="ranks are not forked here")
def test_a_forked_rank_finds_all_it_needs_imported_and_its_record_says_that_it_was_forked(tmp_path: Path) -> None:
    """Whatever a run imports itself, every rank of every run imports again: it belongs into starter.RANK_SIDE."""
    record = run(TINY, directory=tmp_path, program=[__file__])
    imported = json.loads((tmp_path / MODULES_OF_A_RANK).read_text())
    assert set(imported) <= {PER_VERSION}, imported
    assert record.environment["start"] == "warm"
    assert [less(row) for row in record.table("breakdown")] == [less(row) for row in breakdown_read_here(record)]


def less(row: dict) -> dict:
    """A step's times without those that need the rank's waits for a core: its trace does not hold them."""
    return {name: value for name, value in row.items() if name not in ("core_wait_ns", *PARTS_OF_EXPOSED)}


def breakdown_read_here(record: RunRecord) -> list[dict]:
    """What the caller finds in the traces that the ranks have analysed themselves."""
    shift = TINY.untimed + TINY.steps
    ledgers = [[row for row in record.table("ledger") if row["rank"] == rank] for rank in range(TINY.world_size)]
    read = [
        analyse_trace(record.path / "traces" / f"rank{rank}.pt.trace.json.gz", ledger=rows, rank=rank)
        for rank, rows in enumerate(ledgers)
    ]
    return [row | {"step": row["step"] + shift} for analysis in with_peers(read) for row in analysis.rows("breakdown")]


if __name__ == "__main__":
    worker_that_lists_modules(*sys.argv[1:])

"""Ranks start on whatever machine: with many open files, beside an editor, on file systems without locks, and where the
kernel denies what forking needs.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdplab.sessions import RanksFailed, RunSpec, SpecError, call_on_ranks, compare, run
from fsdplab.sessions.capabilities import capabilities
from fsdplab.sessions.launch import warm
from fsdplab.sessions.launch.failure_report import NO_ANSWER
from tests.denied import at_every_start

PROGRAMS = Path(__file__).with_name("warm_programs.py")
STARTER = "sessions.launch.starter"  # in the command line of a starter, and of nothing else
TINY = {"model": "gpt-tiny", "steps": 2, "sequence_length": 32, "device": "cpu"}

pytestmark = pytest.mark.skipif(warm.why_not() is not None, reason=f"no warm starts here: {warm.why_not()}")


def call(name: str = "look", **arguments: Any) -> Any:
    return call_on_ranks(PROGRAMS, name, **{"world_size": 2, "time_limit": 60.0, "start": "warm", **arguments})


@pytest.fixture
def many_files() -> Iterator[None]:
    """More open files than `select` can name."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for file in opened:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_ranks_start_beside_more_than_1024_open_files(many_files: None) -> None:
    warm.end()
    assert len(call()) == 2
    records = compare([RunSpec(strategy=strategy, start="warm", **TINY) for strategy in ("no_shard", "full_shard")])
    assert [record.status for record in records] == ["finished"] * 2 and records[0].summary.in_turns
    warm.end()


def test_an_editors_lock_is_no_source_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module.py").write_text("value = 1\n")
    (tmp_path / ".#module.py").symlink_to("somebody@somewhere.1234:1")
    monkeypatch.setattr(warm, "_PACKAGE", tmp_path)
    assert len(call()) == 2


# ---- where the kernel denies what forking needs

DENIED = {
    "pidfd_open": ("from tests.denied import deny; deny('pidfd_open')", "os.pidfd_open failed .PermissionError"),
    "no pidfd_open": ("import os; del os.pidfd_open", "os.pidfd_open failed .AttributeError"),
    "flock": (
        "from tests.denied import deny; deny('flock')",
        "a rank forked on trial failed: .*Operation not permitted",
    ),
    "fork": (
        "import os\ndef fork(): raise BlockingIOError(11, 'Resource temporarily unavailable')\nos.fork = fork",
        "the warm starter cannot fork .BlockingIOError",
    ),
}


@pytest.fixture(params=DENIED)
def denied(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A machine that denies the starter something; what is said of it."""
    code, says = DENIED[request.param]
    warm.end()  # one of an earlier test was denied nothing
    monkeypatch.setenv("PYTHONPATH", at_every_start(tmp_path, code, STARTER))
    yield says
    warm.end()


def test_where_ranks_cannot_be_forked_torchrun_starts_them_and_record_and_doctor_say_why(denied: str) -> None:
    with pytest.warns(RuntimeWarning, match=denied):
        record = run(RunSpec(**TINY))
    assert record.environment["start"] == "torchrun"
    assert re.search(denied, record.environment["not_forked"]) and "\n" not in record.environment["not_forked"]
    said = next(each for each in capabilities() if each.name == "rank starts")
    assert said.present and said.value == "torchrun" and re.search(denied, said.note)
    with pytest.raises(SpecError, match=denied):
        run(RunSpec(start="warm", **TINY))
    assert len(warm._starters) == 1, "one starter has found out for all"


# ---- before a rank's first heartbeat


def test_a_denied_affinity_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from tests.denied import deny; deny('sched_setaffinity')"
    monkeypatch.setenv("PYTHONPATH", at_every_start(tmp_path, code, STARTER))
    cores = os.sched_getaffinity(0)
    assert len(call()) == 2, "ranks with the cores of their starter need not ask for them"
    os.sched_setaffinity(0, {min(cores)})
    try:
        with pytest.raises(RanksFailed, match="before it could start.*\n.*PermissionError.*Operation not permitted"):
            call()
    finally:
        os.sched_setaffinity(0, cores)
        warm.end()


def test_ranks_start_in_a_folder_whose_path_is_too_long_and_in_one_that_was_deleted(tmp_path: Path) -> None:
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        for _ in range(20):
            os.mkdir("x" * 250)
            os.chdir("x" * 250)
        assert call("where_it_is") == [os.stat(".").st_ino] * 2
        os.chdir(tmp_path)
        os.mkdir("deleted")
        os.chdir("deleted")
        os.rmdir(tmp_path / "deleted")
        assert call("where_it_is") == [os.stat(".").st_ino] * 2
    finally:
        os.chdir(before)
        shutil.rmtree(tmp_path / ("x" * 250))


@pytest.mark.parametrize("start", ["warm", "torchrun"])
def test_ranks_of_a_caller_that_blocks_every_signal_end_and_say_where_they_stand(start: str) -> None:
    """A starter that does not hear of the end of its ranks, and ranks that do not answer, made such runs hang."""
    warm.end()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        assert call("return_at_once", start=start) == [0, 1]
        with pytest.raises(RanksFailed, match="stood in .innermost call first.*\n.*return_never") as failed:
            call("return_never", start=start, time_limit=3.0 if start == "warm" else 40.0)
        assert NO_ANSWER not in str(failed.value)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        warm.end()


def test_what_a_forked_rank_has_printed_is_there_when_it_ends_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    heard: list[str] = []
    with pytest.raises(RanksFailed, match="ended with exit code 3"):
        call("print_and_end", on_output=lambda rank, line: heard.append(line))
    assert heard == ["last words"] * 2


FORKS_TWICE = """
import os
fork, forked = os.fork, []
def limited():
    forked.append(None)
    if len(forked) > 2:
        raise BlockingIOError(11, 'Resource temporarily unavailable')
    return fork()
os.fork = limited
"""


@pytest.mark.filterwarnings("ignore:.*It is tried once more")
def test_a_fork_that_fails_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first fork is the trial's."""
    monkeypatch.setenv("PYTHONPATH", at_every_start(tmp_path, FORKS_TWICE, STARTER))
    with pytest.raises(RanksFailed, match="could be started: the warm starter cannot fork .BlockingIO"):
        call()
    warm.end()

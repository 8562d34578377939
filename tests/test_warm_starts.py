"""The warm starter: ranks forked from it are as good as fresh processes, and it ends, fails and is replaced without
leaving anything.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fsdplab.sessions import RanksFailed, RunSpec, SpecError, call_on_ranks, run
from fsdplab.sessions.launch import warm
from fsdplab.sessions.launch.launcher import begin_starter

PROGRAMS = Path(__file__).with_name("warm_programs.py")
LIBRARY = (os.path.dirname(os.__file__), os.path.join(os.path.dirname(os.__file__), "lib-dynload"))
TINY = {"model": "gpt-tiny", "steps": 2, "sequence_length": 32, "device": "cpu"}

pytestmark = [
    pytest.mark.skipif(warm.why_not() is not None, reason=f"no warm starts here: {warm.why_not()}"),
    pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc"),
]


def call(name: str, **arguments: Any) -> Any:
    return call_on_ranks(PROGRAMS, name, **{"world_size": 2, "time_limit": 60.0, "start": "warm", **arguments})


def until(true: Callable[[], Any], patience_s: float = 20.0) -> Any:
    """What `true` says as soon as it says something, or when patience ends."""
    deadline = time.monotonic() + patience_s
    while not (said := true()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return said


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(autouse=True, scope="module")
def unchanged_sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whoever edits fsdplab while these tests run does not get them a new starter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm, "_PACKAGE", tmp_path_factory.mktemp("package"))
        yield


@pytest.fixture
def starter() -> int:
    """The process id of a starter that is ready."""
    call("look", world_size=1)
    return warm.starter_pid()


@pytest.fixture
def working(tmp_path: Path) -> Iterator[Callable[[], tuple[Any, list[int]]]]:
    """`future, pids = working()`: a call on two ranks, going on in a thread until `tmp_path / "stop"` is there."""
    with ThreadPoolExecutor(1) as pool:

        def begin() -> tuple[Any, list[int]]:
            said, stop = tmp_path / "said", tmp_path / "stop"
            future = pool.submit(call, "work", payload={"said": str(said), "stop": str(stop)}, time_limit=90.0)
            assert until(lambda: said.exists() or future.done(), 60.0) and not future.done(), future
            return future, [int(pid) for pid in said.read_text().split()]

        yield begin


# ---- what it is


@pytest.mark.quick
def test_the_starter_has_one_thread_and_nothing_open_but_its_caller(starter: int) -> None:
    assert os.listdir(f"/proc/{starter}/task") == [str(starter)]
    assert children(starter) == [], "ranks of the call before are reaped"
    files = [os.readlink(f"/proc/{starter}/fd/{number}") for number in os.listdir(f"/proc/{starter}/fd")]
    assert not [name for name in files if name.startswith("/dev/nvidia")] and not listening(starter)
    assert os.readlink(f"/proc/{starter}/cwd") == "/", "it keeps no folder busy"
    assert os.getsid(starter) == starter, "Ctrl-C in the caller's terminal does not reach it"


@pytest.mark.quick
def test_one_starter_serves_run_after_run_from_any_thread(starter: int) -> None:
    thread = threading.Thread(target=call, args=("look",))
    thread.start()
    thread.join()
    run(RunSpec(start="warm", **TINY))
    assert warm.starter_pid() == starter and alive(starter)


def test_a_starter_begun_by_a_thread_that_has_ended_lives_on() -> None:
    warm.end()
    thread = threading.Thread(target=begin_starter)
    thread.start()
    thread.join()
    begun = warm.starter_pid()
    call("look")
    assert warm.starter_pid() == begun


def listening(*pids: int) -> set[str]:
    """Addresses at which processes listen, as /proc/net has them (hexadecimal, "0100007F" is 127.0.0.1)."""
    sockets = set()
    for link in (link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # closed just now
            sockets.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == "0A" and row[9] in sockets}


def test_forked_ranks_listen_for_nobody_but_each_other(working: Any, starter: int, tmp_path: Path) -> None:
    """gloo has a port a group, on loopback; torchrun's ranks meet at a TCP store, which forked ranks do not have."""
    future, pids = working()
    assert {address.partition(":")[0] for address in listening(*pids)} <= {"0100007F"}
    assert len(listening(*pids)) <= len(pids), "one port of gloo a rank, and nothing else"
    assert not listening(starter)
    (tmp_path / "stop").touch()
    assert future.result() == [0, 1]


def test_another_interface_chosen_for_gloo_is_not_used_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    assert [each["environment"]["GLOO_SOCKET_IFNAME"] for each in call("look")] == ["lo", "lo"]


def test_the_store_lies_in_a_folder_that_nobody_else_can_open(tmp_path: Path) -> None:
    seen: list[int] = []
    run(
        RunSpec(start="warm", **TINY),
        directory=tmp_path / "run",
        on_look=lambda: seen.append((tmp_path / "run" / "ranks").stat().st_mode & 0o777),
    )
    assert set(seen) == {0o700}


# ---- ranks are fresh


@pytest.mark.quick
def test_nothing_of_one_run_is_seen_by_the_next() -> None:
    before = call("look")
    call("leave_traces")
    after = call("look")
    for name in ("path", "threads", "dtype", "left", "grad", "folder"):
        assert [each[name] for each in after] == [each[name] for each in before], name
    assert len({each["seed"] for each in [*before, *after]}) == 4, "a new process chooses torch's seed at random"
    assert after[0]["left"] == [] and "LEFT_BEHIND" not in after[0]["environment"]
    assert len({each["draws"] for each in [*before, *after]}) == 4, "every rank draws numbers of its own"


def test_a_forked_rank_is_as_one_that_torchrun_starts() -> None:
    forked, started = call("look"), call("look", start="torchrun")
    for name in ("path", "dtype", "left", "grad", "folder", "cores", "session"):
        assert forked[1][name] == started[1][name], name
    assert forked[1]["threads"][0] == started[1]["threads"][0] == 1
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        assert forked[1]["environment"][name] == started[1]["environment"][name], name


@pytest.mark.quick
def test_a_rank_has_the_environment_folder_and_cores_of_its_caller_now(
    starter: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = os.sched_getaffinity(0)
    monkeypatch.setenv("SAID_LATER", "yes")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.chdir(tmp_path)
    os.sched_setaffinity(0, {min(cores)})
    try:
        seen = call("look")
    finally:
        os.sched_setaffinity(0, cores)
    assert [each["environment"]["SAID_LATER"] for each in seen] == ["yes", "yes"]
    assert seen[0]["folder"] == str(tmp_path)
    assert next(each for each in seen[0]["path"] if each not in LIBRARY) == str(tmp_path), "before other packages"
    assert seen[0]["threads"][0] == 2 and seen[0]["cores"] == [min(cores)]
    assert warm.starter_pid() == starter, "none of this needs another starter"


def test_each_rank_has_a_session_of_its_own_and_none_of_the_starters_files(starter: int) -> None:
    seen = call("look", world_size=3)
    assert [each["session"] for each in seen] == [True] * 3
    assert {each["parent"] for each in seen} == {starter}
    inherited = [name for each in seen for name in each["files"] if name.startswith("anon_inode:[pidfd]")]
    assert inherited == []


def test_what_a_rank_has_started_ends_with_it() -> None:
    started = call("start_a_child")
    assert until(lambda: not any(map(alive, started)))


# ---- when another is needed


def test_a_changed_source_file_gets_a_new_starter(
    starter: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module.py").write_text("value = 1\n")
    monkeypatch.setattr(warm, "_PACKAGE", tmp_path)
    call("look")
    first = warm.starter_pid()
    call("look")
    assert first != starter and warm.starter_pid() == first
    (tmp_path / "module.py").write_text("value = 22\n")
    call("look")
    assert warm.starter_pid() != first and until(lambda: not alive(first))


def test_what_a_process_reads_when_it_starts_gets_a_new_starter(starter: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    assert call("look")[0]["environment"]["PYTHONHASHSEED"] == "3"
    assert warm.starter_pid() != starter


def test_a_starter_that_is_replaced_finishes_its_runs(
    working: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    future, pids = working()
    old = warm.starter_pid()
    monkeypatch.setenv("PYTHONHASHSEED", "4")
    call("look")
    assert warm.starter_pid() != old and alive(old)
    (tmp_path / "stop").touch()
    assert future.result() == [0, 1]
    assert until(lambda: not alive(old))


def test_a_forked_caller_has_a_starter_of_its_own(starter: int) -> None:
    code = """
import os, sys
from fsdplab.sessions import call_on_ranks
from fsdplab.sessions.launch import warm
arguments = dict(world_size=1, time_limit=60.0)
call_on_ranks(sys.argv[1], "look", **arguments)
mine = warm.starter_pid()
child = os.fork()
if child == 0:
    assert warm.starter_pid() is None
    call_on_ranks(sys.argv[1], "look", **arguments)
    other = warm.starter_pid()
    warm.end()
    os._exit(0 if other not in (None, mine) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert warm.starter_pid() == mine
call_on_ranks(sys.argv[1], "look", **arguments)
"""
    done = subprocess.run([sys.executable, "-c", code, str(PROGRAMS)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ---- when it fails


@pytest.mark.quick
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_a_starter_killed_in_the_middle_of_a_run_is_one_clear_report(working: Any, how: str) -> None:
    future, pids = working()
    killed = warm.starter_pid()
    os.kill(killed, signal.Signals[how])
    with pytest.raises(RanksFailed) as caught:
        future.result()
    report = caught.value.report
    assert (report.kind, report.rank) == ("died", None) and "\n" not in report.message
    assert (
        "warm starter" in report.message
        and f"was killed by {how}" in report.message
        and "The next run starts a new one." in report.message
    )
    assert until(lambda: not any(map(alive, pids)))
    assert call("look")[0]["parent"] == warm.starter_pid() != killed


def test_a_starter_killed_between_two_runs_is_replaced(starter: int) -> None:
    os.kill(starter, signal.SIGKILL)
    assert until(lambda: not alive(starter))
    assert call("look")[0]["parent"] == warm.starter_pid() != starter


def test_a_starter_that_stands_still_does_not_hold_its_caller_for_ever(starter: int) -> None:
    os.kill(starter, signal.SIGSTOP)
    with pytest.raises(RanksFailed, match="did not start within the time limit of 1 s"):
        call("look", time_limit=1.0)
    assert until(lambda: not alive(starter))
    assert call("look")[0]["parent"] == warm.starter_pid() != starter


BROKEN = {
    "ends": ("import sys; sys.exit('no torch in here')", "ended with exit code 1: no torch in here"),
    "CUDA": (
        (
            "import torch, sys; torch.cuda.is_initialized = lambda: True;"
            " from fsdplab.sessions.launch.starter import main; main(*sys.argv[1:])"
        ),
        "CUDA was initialised while the warm starter imported",
    ),
    "thread": (
        (
            "import threading, time, sys; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(); "
            "from fsdplab.sessions.launch.starter import main; main(*sys.argv[1:])"
        ),
        "the warm starter has 2 threads after importing",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_where_forking_cannot_work_torchrun_does(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    boot, says = BROKEN[how]
    warm.end()
    monkeypatch.setattr(warm, "_BOOT", boot)
    with pytest.raises(SpecError, match=says) as caught:
        call("look", start="warm")
    assert "\n" not in str(caught.value) and "give start='torchrun'" in str(caught.value)
    with pytest.warns(RuntimeWarning, match=says):
        seen = call("look", start="auto")
    assert "TORCHELASTIC_RUN_ID" in seen[0]["environment"]
    warm.end()


def test_a_system_that_cannot_fork_uses_torchrun_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "why_not", lambda: "ranks are forked on Linux only, and this is darwin")
    assert "TORCHELASTIC_RUN_ID" in call("look", start="auto")[0]["environment"]
    with pytest.raises(
        SpecError,
        match=(
            "start is 'warm', but ranks are forked on Linux only, and this is darwin; give start='auto' or 'torchrun'"
        ),
    ):
        call("look", start="warm")


@pytest.mark.quick
def test_an_unknown_start_is_refused() -> None:
    with pytest.raises(SpecError, match="unknown start 'hot'; expected one of auto, warm, torchrun"):
        RunSpec(start="hot")
    with pytest.raises(SpecError, match="unknown start 'hot'"):
        call("look", start="hot")


# ---- it leaves nothing


def what_is_left(starter: int) -> dict[str, Any]:
    """Everything that a run could leave: descriptors and children of caller and starter, segments, folders."""
    return {
        "caller's files": len(os.listdir("/proc/self/fd")),
        "starter's files": len(os.listdir(f"/proc/{starter}/fd")),
        "starter's children": children(starter),
        "zombies": [pid for pid in children(os.getpid()) if not alive(pid)],
        # another worker may drive a browser
        "segments": sorted(path.name for path in Path("/dev/shm").glob("*") if "chromium" not in path.name),
    }


def test_two_hundred_runs_leave_what_one_leaves(starter: int) -> None:
    call("train_sharded")
    before = what_is_left(starter)
    losses = {tuple(call("train_sharded")) for _ in range(200)}
    assert len(losses) == 1, "and all are alike"
    assert until(lambda: what_is_left(starter) == before), (what_is_left(starter), before)
    assert warm.starter_pid() == starter


def test_ctrl_c_at_any_moment_leaves_nothing(starter: int, tmp_path: Path) -> None:
    moments = random.Random(10)
    spec = RunSpec(start="warm", **{**TINY, "steps": 30})
    run(spec, directory=tmp_path / "whole")
    before, seconds, interrupted = what_is_left(starter), [], 0
    for number in range(30):
        timer = threading.Timer(moments.uniform(0.0, 0.8), signal.raise_signal, (signal.SIGINT,))
        began = time.monotonic()
        try:
            timer.start()
            run(spec, directory=tmp_path / str(number))
            timer.join()
            time.sleep(0.01)  # where the signal comes after the run it is heard here
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        seconds.append(time.monotonic() - began)
        assert until(lambda: children(starter) == []), f"ranks are left after interrupt {number}"
    assert interrupted == 30
    # it closes a run's socket just after its last rank
    assert until(lambda: what_is_left(starter) == before), (what_is_left(starter), before)
    assert alive(starter)
    run(spec, directory=tmp_path / "after")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda how: how.name)
@pytest.mark.parametrize("when", ["importing", "training"])
def test_the_end_of_the_caller_is_the_end_of_all(how: signal.Signals, when: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    code = f"""
from fsdplab.sessions import call_on_ranks
from fsdplab.sessions.launch import warm
from fsdplab.sessions.launch.launcher import begin_starter
begin_starter()
open({str(said)!r} + ".starter", "w").write(str(warm.starter_pid()))
payload = {{"said": {str(said)!r}, "stop": "/never"}}
call_on_ranks({str(PROGRAMS)!r}, "work", world_size=2, time_limit=60.0, payload=payload)
"""
    caller = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    begun, ranks = Path(f"{said}.starter"), []
    assert until(lambda: begun.exists() and begun.read_text(), 60.0)
    if when == "training":
        assert until(said.exists, 90.0)
        ranks = [int(pid) for pid in said.read_text().split()]
    caller.send_signal(how)
    caller.wait(30.0)
    assert until(lambda: not any(map(alive, [int(begun.read_text()), *ranks])))

"""The warm starter: ranks forked from it are as good as fresh processes, and it ends, fails and is replaced without
leaving anything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fsdplab.common.temporary import folder_of_this_process
from fsdplab.sessions import RanksFailed, RunSpec, SpecError, call_on_ranks, compare, run
from fsdplab.sessions.launch import launcher, warm
from fsdplab.sessions.launch.mailbox import Mailbox, read_heartbeats
from fsdplab.sessions.launch.served import tell
from tests.leftovers import until
from tests.watching import watching

PROGRAMS = Path(__file__).with_name("warm_programs.py")
LIBRARY = (os.path.dirname(os.__file__), os.path.join(os.path.dirname(os.__file__), "lib-dynload"))
TINY = {"model": "gpt-tiny", "steps": 2, "sequence_length": 32, "device": "cpu"}

pytestmark = [
    pytest.mark.skipif(warm.why_not() is not None, reason=f"no warm starts here: {warm.why_not()}"),
    pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc"),
]


def call(name: str, **arguments: Any) -> Any:
    return call_on_ranks(PROGRAMS, name, **{"world_size": 2, "time_limit": 60.0, "start": "warm", **arguments})


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.fixture(autouse=True, scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A source file in place of fsdplab's: whoever edits these while the tests run does not get them a new starter."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "module.py").write_text("value = 1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm, "_PACKAGE", folder)
        yield folder


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


def test_the_store_lies_in_a_folder_that_nobody_else_can_open_and_goes_with_the_ranks() -> None:
    """Not in the folder of the record, whose file system may have no locks."""
    stores = [Path(each["environment"]["FSDPLAB_RANKS_STORE"]) for each in call("look")]
    assert {store.parent for store in stores} == {folder_of_this_process()}
    assert folder_of_this_process().stat().st_mode & 0o777 == 0o700 and not stores[0].exists()


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


@pytest.mark.quick
def test_a_rank_has_the_environment_folder_and_cores_of_its_caller_now(
    starter: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = os.sched_getaffinity(0)
    monkeypatch.setenv("SAID_LATER", "yes")
    monkeypatch.chdir(tmp_path)
    os.sched_setaffinity(0, {min(cores)})
    try:
        seen = call("look")
    finally:
        os.sched_setaffinity(0, cores)
    assert [each["environment"]["SAID_LATER"] for each in seen] == ["yes", "yes"]
    assert seen[0]["folder"] == str(tmp_path)
    assert next(each for each in seen[0]["path"] if each not in LIBRARY) == str(tmp_path), "before other packages"
    assert seen[0]["cores"] == [min(cores)]
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


def test_a_changed_source_file_gets_a_new_starter_and_the_old_one_finishes_its_runs(
    working: Any, sources: Path, tmp_path: Path
) -> None:
    future, pids = working()
    old = warm.starter_pid()
    call("look", world_size=1)
    assert warm.starter_pid() == old
    (sources / "module.py").write_text("value = 22\n")
    call("look")
    assert warm.starter_pid() != old and alive(old)
    (tmp_path / "stop").touch()
    assert future.result() == [0, 1]
    assert until(lambda: not alive(old))


# A starter whose ranks would have to import the rank side themselves.
OF_LITTLE = """
import sys
from fsdplab.sessions.launch import starter
starter.RANK_SIDE = ("numpy", "torch")
starter.main(*sys.argv[1:])
"""


def test_a_forked_caller_has_a_starter_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os\nprint(os.getppid())\n")
    code = """
import os, sys
from pathlib import Path
from fsdplab.sessions.launch import warm
from fsdplab.sessions.launch.mailbox import Mailbox
folder = Path(sys.argv[1])
warm._BOOT = sys.argv[2]

def forked_by(name):
    mailbox = Mailbox(folder / name)
    mailbox.folder.mkdir()
    process = warm.start([str(folder / "program.py")], mailbox, 1, lambda: None)
    process.running(60.0)
    assert process.exits == {0: 0}
    assert int(mailbox.agent_log.read_text()) == warm.starter_pid()
    return warm.starter_pid()

mine = forked_by("first")
child = os.fork()
if child == 0:
    assert warm.starter_pid() is None
    other = forked_by("child")
    warm.end()
    os._exit(0 if other != mine else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert forked_by("again") == mine
"""
    command = [sys.executable, "-c", code, str(tmp_path), OF_LITTLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_what_a_starter_has_sent_is_read_though_it_has_left_a_request_unread(tmp_path: Path) -> None:
    """The caller asks for the end as the last rank ends: the exit codes count, not the connection that was reset."""
    own, theirs = socket.socketpair()
    ranks = warm.WarmRanks(None, own, tmp_path / "store")  # type: ignore[arg-type]
    ranks.terminate()
    for message in ({"pids": [7]}, {"left": {0: 0}}, {"exits": {0: 0}}):
        tell(theirs, **message)
    theirs.close()
    assert not ranks.running(5.0) and (ranks.pids, ranks.exits, ranks.lost) == ([7], {0: 0}, None)


@pytest.mark.quick
def test_a_request_that_finds_no_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The starter is not to blame, and is not waited for."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(warm.json, "dump", full)
    with pytest.raises(warm.StarterFailed, match=r"takes no file \(No space left on device\); make room there"):
        warm._written({"world_size": 2})


def test_an_environment_may_be_longer_than_a_packet(starter: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        monkeypatch.setenv(f"LONG_{number}", "x" * 100_000)
    assert call("look")[0]["environment"]["LONG_7"] == "x" * 100_000
    assert warm.starter_pid() == starter


def test_what_a_process_reads_when_it_starts_gets_a_new_starter(starter: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    (seen,) = call("look", world_size=1)
    assert seen["environment"]["PYTHONHASHSEED"] == "3" and seen["threads"][0] == 2
    assert warm.starter_pid() != starter


# ---- where forking cannot work

ENDS = "import sys; sys.exit('no torch in here')"
BROKEN = {
    "ends": (ENDS, "ended with exit code 1: no torch in here"),
    "CUDA": (  # as torch is in a child of a process in which `torch.cuda.is_available()` was called
        f"import torch; torch.version.cuda, torch.cuda._is_in_bad_fork = '13.0', lambda: True\n{OF_LITTLE}",
        "CUDA was touched while the warm starter imported .*torch.cuda.is_available.* is enough",
    ),
    "driver": (
        f"import torch; torch.version.cuda = '13.0'; from fsdplab.sessions.worker import trial\n"
        f"class Used: cuInit = staticmethod(lambda flags: 3)\n"
        f"trial.ctypes = type('ctypes', (), dict(CDLL=staticmethod(lambda *_, **__: Used)))\n{OF_LITTLE}",
        "CUDA was touched while the warm starter imported",
    ),
    "thread": (
        f"import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n{OF_LITTLE}",
        "the warm starter has 2 threads after importing",
    ),
}


@pytest.fixture(scope="module")
def fallen_back(sources: Path) -> list[dict[str, Any]]:
    """What ranks look like that were to start as they can, where the starter cannot: a warning says why."""
    warm.end()
    with pytest.MonkeyPatch.context() as patch, pytest.warns(RuntimeWarning, match="no torch in here"):
        patch.setattr(warm, "_BOOT", ENDS)
        return call("look", start="auto")


def test_where_forking_cannot_work_torchrun_does(fallen_back: list[dict[str, Any]]) -> None:
    assert all("TORCHELASTIC_RUN_ID" in each["environment"] for each in fallen_back)


class TakenInstead(Exception):
    """torchrun would start the ranks now."""


@pytest.fixture
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torchrun would be taken, that is told: the test above has seen it start ranks."""

    def taken(*_: object, **__: object) -> None:
        raise TakenInstead

    monkeypatch.setattr(launcher, "start_torchrun", taken)


@pytest.mark.parametrize("how", BROKEN)
def test_why_forking_cannot_work_is_said_in_one_line(
    how: str, no_torchrun: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot, says = BROKEN[how]
    warm.end()
    monkeypatch.setattr(warm, "_BOOT", boot)
    with pytest.raises(SpecError, match=says) as caught:
        call("look", start="warm")
    assert "\n" not in str(caught.value) and "give start='auto' or 'torchrun'" in str(caught.value)
    with pytest.warns(RuntimeWarning, match=says), pytest.raises(TakenInstead):
        call("look", start="auto")
    warm.end()


def test_a_system_that_cannot_fork_uses_torchrun_without_a_word(
    no_torchrun: None, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(warm, "why_not", lambda: "ranks are forked on Linux only, and this is darwin")
    with pytest.raises(TakenInstead):
        call("look", start="auto")
    assert not recwarn.list
    with pytest.raises(
        SpecError,
        match=(
            "start is 'warm', but ranks are forked on Linux only, and this is darwin; give start='auto' or 'torchrun'"
        ),
    ):
        call("look", start="warm")


def test_a_forked_rank_is_as_one_that_torchrun_starts(fallen_back: list[dict[str, Any]]) -> None:
    forked, started = call("look"), fallen_back
    for name in ("path", "dtype", "left", "grad", "folder", "cores", "session"):
        assert forked[1][name] == started[1][name], name
    assert forked[1]["threads"][0] == started[1]["threads"][0] == 1
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        assert forked[1]["environment"][name] == started[1]["environment"][name], name


@pytest.mark.quick
def test_an_unknown_start_is_refused() -> None:
    with pytest.raises(SpecError, match="unknown start 'hot'; expected one of auto, warm, torchrun"):
        RunSpec(start="hot")
    with pytest.raises(SpecError, match="unknown start 'hot'"):
        call("look", start="hot")


def test_a_starter_begun_by_a_thread_that_has_ended_lives_on() -> None:
    warm.end()
    thread = threading.Thread(target=warm.begin)
    thread.start()
    thread.join()
    begun = warm.starter_pid()
    call("look")
    assert warm.starter_pid() == begun


# ---- when it fails


@pytest.mark.filterwarnings("ignore:.*It is tried once more")
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_a_starter_killed_in_the_middle_of_both_tries_is_one_clear_report(
    working: Any, how: str, tmp_path: Path
) -> None:
    future, pids = working()
    os.kill(warm.starter_pid(), signal.Signals[how])
    said = tmp_path / "said"
    assert until(lambda: not any(map(alive, pids))) and until(lambda: said.read_text().split() != [*map(str, pids)], 60)
    pids += map(int, said.read_text().split())
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


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_starter_lost_in_the_middle_of_a_run_costs_one_try(working: Any, how: str, tmp_path: Path) -> None:
    future, pids = working()
    lost = warm.starter_pid()
    os.kill(lost, signal.Signals[how])
    with pytest.warns(RuntimeWarning, match=f"was (killed|stopped) by {how}.*It is tried once more"):
        assert until(lambda: not alive(lost) and not any(map(alive, pids)))
        (tmp_path / "stop").touch()
        assert future.result() == [0, 1] and warm.starter_pid() != lost


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_starter_lost_while_runs_take_turns_costs_one_try(starter: int, how: str, tmp_path: Path) -> None:
    notes: list[str] = []
    lost: list[int] = []

    def lose_it(*_: object) -> None:
        if not lost:
            lost.append(warm.starter_pid())
            os.kill(lost[0], signal.Signals[how])

    specs = [RunSpec(start="warm", strategy=each, **{**TINY, "steps": 3}) for each in ("no_shard", "full_shard")]
    records = compare(specs, directory=tmp_path, watcher=watching(stepped=lose_it, note=notes.append))
    assert [record.status for record in records] == ["finished"] * 2 and not alive(lost[0])
    assert [len(record.table("steps")) for record in records] == [10, 10]
    assert any("is run again" in note for note in notes)


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


# ---- it leaves nothing


def what_is_left(starter: int) -> dict[str, Any]:
    """Everything that a run could leave: descriptors and children of caller and starter, segments, folders."""
    return {
        "caller's files": len(os.listdir("/proc/self/fd")),
        "starter's files": len(os.listdir(f"/proc/{starter}/fd")),
        "starter's children": children(starter),
        "zombies": [pid for pid in children(os.getpid()) if not alive(pid)],
        "segments": left_segments(starter),
    }


def left_segments(starter: int) -> list[str]:
    """Shared memory that names the starter, the caller or a process that has ended; other tests' is not counted."""
    left = []
    for path in Path("/dev/shm").iterdir():
        numbers = [int(number) for number in re.findall(r"\d{2,7}", path.name)]
        ours = {starter, os.getpid()}.intersection(numbers)
        # torch_1234_... is what process 1234 shares
        ended = path.name.startswith("torch_") and not alive(numbers[0])
        if ours or ended:
            left.append(path.name)
    return sorted(left)


@pytest.mark.full("two hundred runs")
def test_two_hundred_runs_leave_what_one_leaves(starter: int) -> None:
    """Every fourth is one of ranks that return at once: one that left while another was still connecting to it made one
    such run in ten fail on a busy machine.
    """
    call("compute_sharded")
    before = what_is_left(starter)
    losses = set()
    for number in range(200):
        if number % 4:
            losses.add(tuple(call("compute_sharded")))
        else:
            assert call("return_at_once", world_size=3) == [0, 1, 2]
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


SIGNALS = pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda how: how.name)


def caller_of(code: str, folder: Path) -> subprocess.Popen[bytes]:
    """A process that has begun its starter and does something with it; its temporary folders lie in `folder`."""
    begun = f"{folder}/starter"
    beginning = f"""
import os
from pathlib import Path
from fsdplab.sessions import RunSpec, run
from fsdplab.sessions.launch import warm
from fsdplab.sessions.launch.mailbox import Mailbox
warm.begin()
open({begun + ".new"!r}, "w").write(str(warm.starter_pid()))
os.replace({begun + ".new"!r}, {begun!r})
"""
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen([sys.executable, "-c", beginning + code], stderr=subprocess.DEVNULL, env=environment)


def ended_with_its_starter(caller: subprocess.Popen[bytes], how: signal.Signals, folder: Path, *ranks: int) -> bool:
    """Whether a signal to the caller ends it, its starter and its ranks, and its temporary folders are gone."""
    starter = int((folder / "starter").read_text())
    assert all(map(alive, [starter, *ranks])) and list(folder.glob("fsdplab-*"))
    caller.send_signal(how)
    caller.wait(30.0)
    return until(lambda: not any(map(alive, [starter, *ranks])) and not list(folder.glob("fsdplab-*")))


@SIGNALS
def test_a_caller_that_ends_while_its_starter_imports_takes_it_along(how: signal.Signals, tmp_path: Path) -> None:
    wait = f"warm.start(['none'], Mailbox(Path({str(tmp_path)!r})), 1, lambda: None)"
    caller = caller_of(wait, tmp_path)
    assert until((tmp_path / "starter").exists, 60.0)
    assert ended_with_its_starter(caller, how, tmp_path)


@SIGNALS
def test_a_caller_that_ends_in_the_middle_of_a_run_leaves_nothing(how: signal.Signals, tmp_path: Path) -> None:
    spec = {**TINY, "engine": "torch-ddp", "strategy": "no_shard", "steps": 100_000, "memory": False, "start": "warm"}
    caller = caller_of(f"run(RunSpec(**{spec!r}))", tmp_path)
    assert until(lambda: list(tmp_path.glob("fsdplab-*/*/ranks/rank1.steps*")), 90.0), "the ranks are training"
    (mailbox,) = tmp_path.glob("fsdplab-*/*/ranks")
    ranks = [beat.pid for beat in read_heartbeats(Mailbox(mailbox), 2).values()]
    assert len(ranks) == 2 and ended_with_its_starter(caller, how, tmp_path, *ranks)

"""Reports that must not be false: a rank that computes is not hung, a killed launcher is no rank's exit, and what lies
in the working folder has no part in a run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplab.common.processes import descendants, gone, processor_seconds, send, send_group, state
from fsdplab.common.pythons import run_of
from fsdplab.records import RunRecord
from fsdplab.sessions import RanksFailed, RunSpec, call_on_ranks, run
from fsdplab.sessions.launch import failure_report, launcher, warm
from fsdplab.sessions.launch.failure_report import PostMortem, computing, failed_first, hung, too_slow
from fsdplab.sessions.launch.launcher import RankActivity, RunningRanks
from fsdplab.sessions.launch.mailbox import HeartbeatWriter, Mailbox, read_heartbeats
from tests.leftovers import processes_of
from tests.test_sessions import CLOSED, SLEEPING, WAITING, heartbeat
from tests.watching import watching

FAULTY = str(Path(__file__).with_name("faulty_worker.py"))
TINY = {"model": "gpt-tiny", "steps": 2000, "sequence_length": 32, "device": "cpu", "memory": False}
linux = pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
COMPUTING = '  File "/x/my_fsdp.py", line 7, in shard\n    while True: x = x @ x'
ON_A_GPU = '  File "/x/training.py", line 7, in step\n    return loss.item()'


# ---- a rank that computes


@pytest.mark.quick
@pytest.mark.parametrize(
    ("busy", "stacks", "rank"),
    [
        ({0: 0.0, 1: 0.9}, {0: WAITING, 1: COMPUTING}, 1),
        ({0: 0.9, 1: 0.0}, {0: COMPUTING, 1: SLEEPING}, None),  # rank 1 is behind, and does nothing
        ({0: 0.0, 1: 0.02}, {0: WAITING, 1: SLEEPING}, None),
        ({1: 0.9}, {0: WAITING, 1: ON_A_GPU}, None),  # a host that waits for its GPU is busy too
        ({}, {0: WAITING, 1: COMPUTING}, None),  # no system without /proc says so
    ],
)
def test_the_rank_that_the_others_wait_for_may_compute(busy: dict, stacks: dict, rank: int | None) -> None:
    beats = {0: heartbeat(0, phases=11), 1: heartbeat(1)}
    post_mortem = PostMortem(heartbeats=beats, stacks=stacks, busy=busy)
    assert computing(post_mortem) == rank
    if rank is not None:
        report = too_slow(post_mortem, 60.0)
        assert (report.kind, report.rank) == (
            "timeout",
            1,
        ) and "while rank 1 computed, at 90% of a core" in report.message
        assert "x @ x" in report.traceback and "rank 0" not in report.traceback


@pytest.mark.quick
def test_ranks_that_wait_for_each_other_are_hung_however_busy() -> None:
    post_mortem = PostMortem(
        heartbeats={0: heartbeat(0), 1: heartbeat(1)}, stacks={0: WAITING, 1: WAITING}, busy={0: 1.0, 1: 1.0}
    )
    assert computing(post_mortem) is None and hung(post_mortem, 9.0).rank is None


@pytest.mark.quick
@pytest.mark.parametrize(
    ("first", "second", "counts", "told"),
    [
        ("all_gather of 64 bytes", "reduce_scatter of 32 bytes", (7, 7), True),
        ("all_gather of 64 bytes", "all_gather of 32 bytes", (7, 7), True),
        ("all_gather of 64 bytes", "all_gather of 64 bytes", (7, 7), False),
        (
            "all_gather of 64 bytes",
            "reduce_scatter of 32 bytes",
            (7, 8),
            False,
        ),  # one is further: it waits for the other
        ("send of 64 bytes", "recv of 64 bytes", (7, 7), False),
    ],
)
def test_a_report_says_where_two_ranks_entered_different_collectives(first, second, counts, told) -> None:
    beats = {
        rank: replace(heartbeat(rank), collective=name, collectives=count)
        for rank, (name, count) in enumerate(zip((first, second), counts))
    }
    stuck = hung(PostMortem(heartbeats=beats, stacks={0: WAITING, 1: WAITING}), 9.0)
    died = failed_first(PostMortem({0: -6}, {}, beats))
    says = f"As collective number 7, rank 0 entered {first}, rank 1 entered {second}: ranks of one group"
    assert [says in each.message for each in (stuck, died)] == [told, told]


class Watched:
    """An agent that runs on, as who watches it sees it, and what happens at each look."""

    lost, left = None, {}

    def __init__(self, at_a_look: Callable[[], None] = lambda: None) -> None:
        self.at_a_look = at_a_look

    def running(self, within_s: float = 0.0) -> bool:
        if within_s:
            self.at_a_look()
        return True


@pytest.fixture
def stalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunningRanks:
    """One rank, this process, that has not moved for long; its agent is the test's."""
    mailbox = Mailbox(tmp_path)
    mailbox.of(0, "stack").touch()
    writer = HeartbeatWriter(mailbox.of(0, "heartbeat"), 0)
    writer.enter("forward", 3)
    activity = RankActivity()
    activity.look(read_heartbeats(mailbox, 1))
    activity.last -= 100.0
    monkeypatch.setattr(launcher, "_GRACE_S", 0.3)
    # On a busy machine the looks themselves, of this process, would be all of the core that it could get.
    monkeypatch.setattr(launcher, "busy_processes_per_core", lambda: 1.0)
    monkeypatch.setattr(failure_report, "ask_for_stacks", lambda *_: {0: COMPUTING})
    return RunningRanks(Watched(), mailbox, 1, 60.0, activity=activity)


@linux
@pytest.mark.quick
def test_a_stall_of_a_rank_that_computes_does_not_end_the_run(
    stalled: RunningRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stalled.activity.stalled(1)
    # Beside other programs this process may get a twentieth of a core while it is watched.
    monkeypatch.setattr(launcher, "busy_processes_per_core", lambda: 50.0)
    seen: list[int] = []
    # this process is the rank, and computes while it is watched
    stalled.agent = Watched(lambda: seen.append(sum(range(200_000))))
    assert stalled._stalled() is None
    assert seen and not stalled.activity.stalled(1), "computing is a move"


@linux
@pytest.mark.quick
def test_a_stall_of_a_rank_that_does_nothing_does(stalled: RunningRanks) -> None:
    looks: list[int] = []
    stalled.agent, stalled.on_look = Watched(lambda: time.sleep(0.1)), lambda: looks.append(1)
    report = stalled._stalled()
    assert report is not None and report.kind == "hung" and looks, "the caller goes on looking meanwhile"


@pytest.mark.quick
def test_a_rank_that_moves_after_all_does_not_end_the_run(stalled: RunningRanks) -> None:
    writer = HeartbeatWriter(stalled.mailbox.of(0, "heartbeat"), 0)
    stalled.agent = Watched(lambda: writer.enter("backward", 3))
    assert stalled._stalled() is None


def test_a_run_whose_rank_computes_for_ever_ends_at_its_time_limit_as_slow(tmp_path: Path) -> None:
    limit = 10.0 if warm.why_not() is None else 45.0  # torchrun starts new Pythons
    spec = RunSpec(engine="torch-ddp", strategy="no_shard", time_limit=limit, start="auto", **TINY)
    with pytest.raises(RanksFailed) as failed:
        run(spec, directory=tmp_path / "run", program=(FAULTY, "compute"))
    report = failed.value.report
    assert (report.kind, report.rank, report.step) == ("timeout", 1, 3), report
    assert "while rank 1 computed" in report.message and "hung" not in report.message
    assert "compute_for_ever" in report.traceback
    assert processes_of(tmp_path) == []


# ---- processes that end while they are looked at


@linux
@pytest.mark.quick
def test_a_process_that_has_ended_is_no_error() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    while state(child.pid)[0] not in ("Z", ""):
        time.sleep(0.01)
    assert gone(child.pid) and descendants(child.pid) == [] and processor_seconds(child.pid) is not None
    child.wait()
    assert state(child.pid) == ("", 0) and processor_seconds(child.pid) is None and gone(child.pid)
    send(child.pid, signal.SIGTERM)
    send_group(child.pid, signal.SIGTERM)


@linux
@pytest.mark.quick
def test_looking_at_processes_that_come_and_go_never_raises() -> None:
    for _ in range(20):
        children = [subprocess.Popen(["true"]) for _ in range(4)]
        while any(child.poll() is None for child in children):
            for child in children:
                processor_seconds(child.pid)
                gone(child.pid)
                descendants(os.getpid())


@linux
@pytest.mark.quick
def test_processor_time_counts_children_that_compute() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass\ninput()"], stdin=-1
    )
    began = processor_seconds(os.getpid())
    while (processor_seconds(child.pid) or 0) < 0.4:
        time.sleep(0.02)
    assert child.pid in descendants(os.getpid()) and processor_seconds(os.getpid()) - began >= 0.3
    child.communicate(b"\n")


# ---- a launcher that is killed


class Lost:
    lost = "The launcher of the ranks was killed by SIGTERM, and all ranks ended with it."

    def failed(self) -> dict[int, int]:
        return {}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("exits", "notes", "rank"),
    [
        ({}, {}, None),
        ({}, {1: CLOSED}, None),  # a rank that lost its peer
        ({0: 1, 1: -15}, {0: CLOSED}, None),  # the ranks of another node than the launcher's
        ({0: -11}, {}, 0),
    ],
)
def test_a_lost_launcher_is_blamed_unless_a_rank_failed_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exits: dict, notes: dict, rank: int | None
) -> None:
    post_mortem = PostMortem(exits, notes, {0: heartbeat(0), 1: heartbeat(1)})
    monkeypatch.setattr(failure_report, "gather", lambda *_: post_mortem)
    report = RunningRanks(Lost(), Mailbox(tmp_path), 2, 60.0).how_it_ended()
    assert (report.kind, report.rank) == ("died", rank)
    assert report.message.startswith("The launcher of the ranks was killed by SIGTERM") == (rank is None)


@pytest.mark.filterwarnings("ignore:.*It is tried once more")
@pytest.mark.parametrize("which", [signal.SIGKILL, signal.SIGTERM])
def test_a_launcher_killed_at_both_tries_is_not_reported_as_the_exit_of_a_rank(
    tmp_path: Path, which: signal.Signals
) -> None:
    folder = tmp_path / "run"

    def kill_the_launcher(spec: RunSpec, step: int, *_: object) -> None:
        if step == 3:
            rank = read_heartbeats(Mailbox(folder / "ranks"), 2)[1].pid
            os.kill(state(rank)[1], which)

    spec = RunSpec(engine="torch-ddp", strategy="no_shard", start="torchrun", time_limit=120.0, **TINY)
    with pytest.raises(RanksFailed) as failed:
        run(spec, directory=folder, watcher=watching(progressed=kill_the_launcher))
    report = failed.value.report
    assert (report.kind, report.rank) == ("died", None), report
    assert report.message.startswith(f"The launcher of the ranks was killed by {which.name}, and all ranks ended")
    assert RunRecord.load(folder).status == "failed" and processes_of(tmp_path) == []


STOPS = """
import os, signal, sys
open(sys.argv[1] + "/stopped." + os.environ["RANK"], "w").write(str(os.getpid()))
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.parametrize("start", ["warm", "torchrun"])
def test_a_rank_that_was_stopped_before_its_first_heartbeat_is_ended(tmp_path: Path, start: str) -> None:
    if start == "warm" and warm.why_not() is not None:
        pytest.skip("no warm starts here")
    (tmp_path / "stops.py").write_text(STOPS)
    spec = RunSpec(engine="torch-ddp", strategy="no_shard", start=start, time_limit=20.0, **TINY)
    stopped = [tmp_path / "run" / "ranks" / f"stopped.{rank}" for rank in (0, 1)]

    def leave() -> None:
        if all(path.exists() and path.read_text() and state(int(path.read_text()))[0] == "T" for path in stopped):
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, RanksFailed)) as ended:
        run(spec, directory=tmp_path / "run", watcher=watching(look=leave), program=(str(tmp_path / "stops.py"),))
    assert issubclass(ended.type, KeyboardInterrupt), ended.value
    assert [gone(int(path.read_text())) for path in stopped] == [True, True]


# ---- what lies in the working folder


def test_modules_of_the_working_folder_do_not_stand_in_for_pythons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun, the ranks, and what torch imports only when it needs it; a learner's own modules are found."""
    for name in sys.stdlib_module_names:
        if not name.startswith("_"):
            (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name}.py of the working folder')\n")
    (tmp_path / "own_module.py").write_text("found = 7\n")
    source = (
        "def answer(rank, world_size, payload):\n    import own_module, torch._dynamo\n    return own_module.found\n"
    )
    (tmp_path / "own_answer.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    for start in ("torchrun", "auto"):
        assert call_on_ranks("own_answer.py", "answer", world_size=2, start=start, time_limit=120.0) == [7, 7]
    done = subprocess.run(run_of("fsdplab", "--version"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("fsdplab "), done.stderr

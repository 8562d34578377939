"""Ranks that stay: their names live on, their output is live, and whatever a cell does the caller lives, is told, and
leaves no process.

The faults that depend on how ranks were started are tried both ways. Groups that a cell ends are started side by side:
torchrun takes seconds for each.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from jupyter_client import KernelManager

from fsdplab import teaching
from fsdplab.common.processes import gone, send
from fsdplab.sessions import RanksFailed, SpecError
from fsdplab.sessions.cell_ranks.cell_reports import CellInterrupted
from fsdplab.sessions.cell_ranks.ranks import StayingRanks
from fsdplab.sessions.launch import warm
from fsdplab.sessions.launch.mailbox import Tail
from fsdplab.teaching.core import cell_runs, course_state
from fsdplab.teaching.core.magics import chosen_ranks
from tests.leftovers import until

STARTS = ("warm", "torchrun")
SLEEP = "import time\nprint('asleep')\ntime.sleep(10_000)"
Heard = list[tuple[int, str]]


@pytest.fixture(scope="module", params=STARTS)
def staying(request: pytest.FixtureRequest) -> Iterator[StayingRanks]:
    """Two ranks that outlive all of these tests."""
    ranks = StayingRanks.start(2, request.param)
    yield ranks
    assert ranks.alive
    ranks.stop()


def heard(ranks: StayingRanks, source: str, chosen: list[int] | None = None) -> Heard:
    """What the ranks print, those of a rank in order."""
    lines: Heard = []
    ranks.run(source, chosen, time_limit=60.0, on_output=lambda rank, line: lines.append((rank, line)))
    return sorted(lines, key=lambda each: each[0])


def failure_of(ranks: StayingRanks, source: str, limit: float = 60.0) -> RanksFailed:
    """How a cell failed."""
    with pytest.raises(RanksFailed) as failed:
        ranks.run(source, time_limit=limit, on_output=lambda rank, line: None)
    return failed.value


def pids_of(ranks: StayingRanks) -> list[int]:
    return [status.pid for status in ranks.status()]


# ---- cells that end well


def test_names_live_on_and_ranks_meet(staying: StayingRanks) -> None:
    assert heard(staying, "import math\nx = torch.tensor([rank + 1.0])\ndef double(y):\n    return 2 * y") == []
    assert heard(staying, "dist.all_reduce(x)\ndouble(x).item() + math.floor(0.5)") == [(0, "6.0"), (1, "6.0")]


def test_a_loop_over_rank_is_no_trap_for_the_next_cell(staying: StayingRanks) -> None:
    heard(staying, "for rank in range(9):\n    pass")
    assert heard(staying, "rank, world_size") == [(0, "(0, 2)"), (1, "(1, 2)")]


def test_a_cells_classes_can_be_pickled(staying: StayingRanks) -> None:
    heard(staying, "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int")
    assert heard(staying, "import pickle\npickle.loads(pickle.dumps(Point(rank)))") == [
        (0, "Point(x=0)"),
        (1, "Point(x=1)"),
    ]


def test_a_cell_runs_on_some_ranks(staying: StayingRanks) -> None:
    heard(staying, "here = rank")
    assert heard(staying, "here += 10", [1]) == []
    assert heard(staying, "here") == [(0, "0"), (1, "11")]


def test_output_is_live(staying: StayingRanks, tmp_path: Path) -> None:
    """The cell waits for a file that exists only when its first line has been handed over."""
    answer, lines = tmp_path / "answer", []

    def on_output(rank: int, line: str) -> None:
        lines.append(line)
        answer.touch()

    source = (
        f"import pathlib, time\nprint('are you there?')\nwhile not pathlib.Path({str(answer)!r}).exists():\n   "
        " time.sleep(0.01)\nprint('yes')"
    )
    staying.run(source, [0], time_limit=60.0, on_output=on_output)
    assert lines == ["are you there?", "yes"]


def test_nothing_that_is_printed_is_lost(staying: StayingRanks) -> None:
    source = (
        "import os, sys, warnings\nwarnings.warn('careful')\nprint('\\n'.join(map(str,"
        " range(20_000))))\nos.system('echo from a child')\nprint('no end', end='')"
    )
    lines = [line for rank, line in heard(staying, source, [1])]
    assert (
        "careful" in lines[0]
        and lines[-20_002:-2] == [str(number) for number in range(20_000)]
        and lines[-2:] == ["from a child", "no end"]
    )


def test_a_file_is_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "out"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_bytes("1\né".encode()[:-1])
    assert tail.lines() == ["1"]
    with path.open("ab") as file:
        file.write("é".encode()[-1:] + b"\r\n10%\r100%")
    assert tail.lines() == ["é"] and tail.last() == ["100%"] and tail.last() == []


def test_the_status_is_a_line_a_rank(staying: StayingRanks) -> None:
    heard(staying, "\n".join(f"name{number} = 0" for number in range(30)) + "\ndist.barrier()")
    status = staying.status()[1]
    assert (status.alive, status.busy, status.collective, status.names[-1]) == (True, False, "barrier", "name29")
    assert re.fullmatch(
        r"rank 1: idle, process \d+, holds name22, .*name29 and \d+ more; last collective: barrier", str(status)
    )


@pytest.mark.parametrize("ranks", [[2], [-1], [], [0, 0]])
def test_ranks_that_do_not_exist_are_refused(staying: StayingRanks, ranks: list[int]) -> None:
    with pytest.raises(SpecError, match=r"expected some of \[0, 1\], each once"):
        staying.run("1", ranks)


# ---- cells that do not, and ranks that stay all the same


def test_a_cell_that_raises_names_the_rank_and_the_names_stay(staying: StayingRanks) -> None:
    heard(staying, "def invert(x):\n    return 1 / x\nkept = 'kept'")
    failed = failure_of(staying, "done = rank\ninvert(rank)")
    assert (
        failed.report.message
        == "Rank 0 raised ZeroDivisionError: division by zero. All ranks stay, with what they hold."
    )
    assert (
        "[rank 0]     return 1 / x" in str(failed)
        and "[rank 0]     invert(rank)" in str(failed)
        and "fsdplab" not in str(failed)
    )
    assert heard(staying, "kept, done") == [(0, "('kept', 0)"), (1, "('kept', 1)")]


# a call on rank 1 of 2 that names a rank which is not there, and how the report calls it
NOBODY = {
    "dist.send(t, rank + 1)": "send",
    "dist.send(t, group_dst=rank + 1)": "send",
    "dist.recv(t, src=2)": "recv",
    "dist.isend(t, dst=-1).wait()": "isend",
    "dist.irecv(t, 2).wait()": "irecv",
    "from torch.distributed import isend; isend(t, 2).wait()": "isend",
    "dist.batch_isend_irecv([dist.P2POp(dist.isend, t, 2)])": "P2POp",
    "dist.broadcast(t, src=2)": "broadcast",
    "dist.reduce(t, dst=2)": "reduce",
    "dist.gather(t, dst=2)": "gather",
    "dist.scatter(t, src=-1)": "scatter",
    "dist.send_object_list([1], 2)": "send_object_list",
    "dist.broadcast_object_list([1], 2)": "broadcast_object_list",
}


def test_a_rank_that_is_not_there_is_named(staying: StayingRanks) -> None:
    """Gloo ends the process at most of these calls, or waits for ever."""
    for call, name in NOBODY.items():
        failed = failure_of(staying, f"t = torch.ones(2)\nif rank: {call}")
        named = "-1" if "-1" in call else "2"
        message = f"Rank 1 raised NoSuchRank: rank 1 named rank {named} in {name}, which does not exist: there are"
        assert f"{message} ranks 0 to 1" in str(failed) and "(rank + 1) % world_size" in str(failed), call
        assert "All ranks stay" in str(failed) and call in str(failed)
    assert heard(staying, "t = torch.tensor(rank)\ndist.broadcast(t, 1)\nt.item()") == [(0, "1"), (1, "1")]


def test_what_all_ranks_raise_is_shown_once(staying: StayingRanks) -> None:
    failed = failure_of(staying, "raise ValueError('two\\nlines')")
    assert (
        failed.report.message.startswith("Ranks 0 and 1 raised ValueError: two. ")
        and str(failed).count("ValueError: two") == 2
    )
    assert "rank 0 raised KeyError: 0; rank 1 raised KeyError: 1" in failure_of(
        staying, "raise KeyError(rank)"
    ).report.message.lower().replace("keyerror", "KeyError")


@pytest.mark.parametrize("source", ["import sys\nsys.exit(3)", "x = 3 4", "raise KeyboardInterrupt"])
def test_leaving_a_cell_is_not_leaving_the_rank(staying: StayingRanks, source: str) -> None:
    assert "Ranks 0 and 1 raised" in failure_of(staying, source).report.message
    assert staying.alive


def test_a_cell_that_hangs_in_python_is_interrupted_at_its_limit(staying: StayingRanks) -> None:
    heard(staying, "held = 7\ndist.barrier()")
    failed = failure_of(staying, "if rank:\n    import time\n    time.sleep(10_000)", limit=0.5)
    assert (
        failed.report.message
        == "The cell did not end within 0.5 s. Rank 1 was interrupted. All ranks stay, with what they hold."
    )
    assert (
        "[rank 1] last collective: barrier" in str(failed)
        and "[rank 1]     time.sleep(10_000)" in str(failed)
        and "[rank 0]" not in str(failed)
    )
    assert heard(staying, "held") == [(0, "7"), (1, "7")]


def test_an_interrupted_caller_interrupts_the_cell(staying: StayingRanks) -> None:
    asleep: list[int] = []

    def interrupt(rank: int, line: str) -> None:
        asleep.append(rank)
        # once: a second interrupt, by the line of a rank that was slower, would end the ranks
        if len(asleep) == 2:
            raise KeyboardInterrupt

    with pytest.raises(
        CellInterrupted,
        match="(?s)The cell was interrupted. Ranks 0 and 1 were interrupted. All ranks stay.*time.sleep",
    ) as caught:
        staying.run(SLEEP, on_output=interrupt)
    assert re.fullmatch(r"stopped after \d+ s; the ranks stay, with what they hold", *caught.value._render_traceback_())
    assert isinstance(caught.value, KeyboardInterrupt)
    assert heard(staying, "rank") == [(0, "0"), (1, "1")]


def test_an_interrupt_that_comes_too_late_does_no_harm(staying: StayingRanks) -> None:
    for _ in range(20):
        heard(staying, "rank")
        for pid in pids_of(staying):
            send(pid, signal.SIGINT)
    assert heard(staying, "rank") == [(0, "0"), (1, "1")]


# ---- cells that end the ranks


@dataclass(frozen=True)
class Ended:
    """What a cell did to its own group of ranks."""

    failed: RanksFailed
    seconds: float
    alive: bool
    left: list[int]
    again: RanksFailed


FATAL = {  # source, limit
    "exit": ("import os\nprint('last words', end='')\nif rank: os._exit(3)\ndist.barrier()", 60.0),
    "leave": ("import os\nif rank: os._exit(0)\ndist.barrier()", 60.0),
    "kill": ("import os\ndist.barrier()\nif rank: os.kill(os.getpid(), 9)\ndist.barrier()", 60.0),
    "segv": ("import ctypes\nif rank: ctypes.string_at(0)\ndist.barrier()", 60.0),
    "raise": ("if rank: raise ValueError('no')\ndist.all_reduce(torch.ones(2))", 60.0),
    "hang": ("if rank == 0: dist.barrier()\nimport time\nwhile rank: time.sleep(0.1)", 1.0),
    "deaf": ("import time\nwhile True:\n    try: time.sleep(10)\n    except KeyboardInterrupt: pass", 1.0),
}

CASES = [("torchrun", "exit"), ("torchrun", "raise"), ("torchrun", "hang"), *(("warm", name) for name in FATAL)]


@pytest.fixture(scope="module")
def ended() -> dict[tuple[str, str], Ended]:
    """What each fatal cell did, each on ranks of its own."""

    def end(case: tuple[str, str]) -> Ended:
        start, name = case
        ranks = StayingRanks.start(2, start)
        pids, began = pids_of(ranks), time.monotonic()
        failed = failure_of(ranks, *FATAL[name])
        return Ended(
            failed,
            time.monotonic() - began,
            ranks.alive,
            [pid for pid in pids if not gone(pid)],
            failure_of(ranks, "1"),
        )

    with ThreadPoolExecutor(3) as pool:
        return dict(zip(CASES, pool.map(end, CASES)))


SAYS = {
    "exit": "Rank 1 died: it ended with exit code 3. All ranks were ended.",
    "leave": "Rank 1 left with exit code 0",
    "kill": "Rank 1 died: it ended with SIGKILL .signal 9.*The last collective it entered: barrier",
    "segv": "Rank 1 died: it ended with SIGSEGV",
    "raise": (
        r"(?s)Rank 1 raised ValueError: no, and rank 0 waits in all_reduce of 8 bytes.*\[rank 1\] ValueError:"
        r" no.*\[rank 0\]     dist.all_reduce"
    ),
    "hang": (
        r"(?s)did not end within 1 s. Rank 0 could not be interrupted. All ranks were ended.*\[rank 0\] last"
        r" collective: barrier.*\[rank 1\].*time.sleep"
    ),
    "deaf": "did not end within 1 s. Ranks 0 and 1 could not be interrupted. All ranks were ended",
}


@pytest.mark.parametrize(("start", "name"), CASES)
def test_a_cell_that_ends_the_ranks_says_which_and_leaves_none(
    ended: dict[tuple[str, str], Ended], start: str, name: str
) -> None:
    case = ended[start, name]
    assert re.search(SAYS[name], str(case.failed)), str(case.failed)
    assert not case.alive and case.left == []
    assert case.again.report == case.failed.report, "the next cell is told how they ended"
    assert case.seconds < 25.0, "far from its limit of a minute"


# ---- cells that damage their own rank

DAMAGING = {
    "no group": "dist.destroy_process_group()",
    "long": "raise ValueError('x' * 50_000_000)",
    "no stdout": "import sys\nsys.stdout = sys.stderr = None",
    "closed stdout": "import sys\nsys.stdout.close()",
    "files": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))",
    "memory": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))",
}
# the ranks stay, and a barrier of the next cell meets or says this
THEN = {
    "no group": "Default process group has not been initialized.*a cell has destroyed the process.*All ranks stay",
    "files": "Too many open files.*All ranks stay",
    "memory": "Rank [01] died.*Its last words: cannot allocate memory|Cannot allocate memory",
}


@pytest.mark.parametrize("name", DAMAGING)
def test_ranks_survive_what_a_cell_does_to_them(name: str) -> None:
    ranks = StayingRanks.start(2, "warm")
    pids = pids_of(ranks)
    if name == "long":
        failed = failure_of(ranks, DAMAGING[name])
        assert len(str(failed)) < 50_000 and "49,9" in str(failed) and "characters are left out" in str(failed)
    else:
        heard(ranks, DAMAGING[name])
    if name in THEN:
        failed = failure_of(ranks, "dist.barrier()\nprint('both')")
        assert re.search(THEN[name], failed.report.message), failed.report.message
    else:
        assert heard(ranks, "dist.barrier()\nprint('both')") == [(0, "both"), (1, "both")]
    if name == "no group":
        assert heard(ranks, "rank, world_size") == [(0, "(0, 2)"), (1, "(1, 2)")]
    ranks.stop()
    assert all(map(gone, pids))


DAEMON = (
    "import subprocess\nchild = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    "print(child.pid, flush=True)\n"
)


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc to look for processes")
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("end", ["stop", "exit"])
def test_a_child_in_its_own_session_ends_with_its_rank(start: str, end: str) -> None:
    ranks = StayingRanks.start(1, start)
    ((_, child),) = heard(ranks, DAEMON)
    assert not gone(int(child)), "it lives from cell to cell"
    ranks.stop() if end == "stop" else failure_of(ranks, "import os\nos._exit(3)")
    assert until(lambda: gone(int(child)))


def test_a_rank_that_dies_between_two_cells_is_named_at_the_next() -> None:
    ranks = StayingRanks.start(2, "warm")
    pids = pids_of(ranks)
    send(pids[1], signal.SIGKILL)
    assert until(lambda: not ranks.alive)
    assert "Rank 1 died: it ended with SIGKILL" in failure_of(ranks, "1").report.message
    assert [str(status) for status in ranks.status()] == [
        f"rank {rank}: ended (it was process {pid})" for rank, pid in enumerate(pids)
    ]
    assert until(lambda: all(map(gone, pids)))


@pytest.mark.parametrize("start", STARTS)
def test_a_starter_lost_while_ranks_that_stay_begin_costs_one_try(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank to begin kills its parent, once."""
    kills = (
        f"import os, pathlib, time\npathlib.Path({str(tmp_path / 'killed')!r}).touch(exist_ok=False)\n"
        "os.kill(os.getppid(), 9)\ntime.sleep(60)"
    )
    (tmp_path / "kills.py").write_text(
        f"try:\n    exec({kills!r})\nexcept FileExistsError:\n    pass\n"
        "import sys, time\nfrom fsdplab.sessions.cell_ranks.cell_loop import main\nmain(sys.argv[1])\n"
    )
    monkeypatch.setattr("fsdplab.sessions.cell_ranks.ranks._PROGRAM", (str(tmp_path / "kills.py"),))
    with pytest.warns(RuntimeWarning, match="was killed by SIGKILL.*It is tried once more"):
        ranks = StayingRanks.start(1, start)
    assert (tmp_path / "killed").exists() and heard(ranks, "rank") == [(0, "0")]
    ranks.stop()


@pytest.mark.parametrize("start", STARTS)
def test_ranks_that_a_thread_has_started_outlive_it(start: str) -> None:
    """Linux tells a child when the thread that has started it ends, as if it were the process."""
    started: list[StayingRanks] = []
    thread = threading.Thread(target=lambda: started.append(StayingRanks.start(1, start)))
    thread.start()
    thread.join()
    time.sleep(1.0)
    assert heard(started[0], "rank") == [(0, "0")]
    started[0].stop()


def test_stopped_ranks_are_gone_with_their_folder() -> None:
    ranks = StayingRanks.start(3, "warm")
    pids, folder = pids_of(ranks), ranks._living.ranks.mailbox.folder
    assert folder.stat().st_mode & 0o777 == 0o700
    ranks.stop()
    ranks.stop()
    assert all(map(gone, pids)) and not folder.exists()
    assert "were stopped" in failure_of(ranks, "1").report.message


def test_output_that_cannot_be_shown_ends_the_ranks() -> None:
    def broken(rank: int, line: str) -> None:
        raise BrokenPipeError

    ranks = StayingRanks.start(1, "warm")
    with pytest.raises(BrokenPipeError):
        ranks.run(SLEEP, on_output=broken)
    assert not ranks.alive and "in the middle of a cell" in ranks.failure.message


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc to look for processes")
@pytest.mark.parametrize(("start", "how"), [("warm", "exit"), ("torchrun", "kill")])
def test_no_rank_outlives_its_caller(start: str, how: str, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom fsdplab.sessions.cell_ranks.ranks import StayingRanks\n"
        f"ranks = StayingRanks.start(2, {start!r})\nranks.run({DAEMON!r}, on_output=lambda rank, pid: print(pid))\n"
        "print(*(status.pid for status in ranks.status()), flush=True)\nsys.stdin.readline()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as caller:
        pids = [int(word) for _ in range(3) for word in caller.stdout.readline().split()]
        assert len(pids) == 4 and not any(map(gone, pids))
        caller.kill() if how == "kill" else caller.stdin.write("\n")
    assert until(lambda: all(map(gone, pids)))
    assert until(lambda: list(tmp_path.glob("fsdplab-*")) == [])


# ---- the magics


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InteractiveShell]:
    """A shell with the course open and nothing that stays; what stays at the end is ended."""
    found = InteractiveShell()
    teaching.start(workspace=tmp_path_factory.mktemp("learner") / "my_fsdp", shell=found)
    yield found
    cell_runs.manage_ranks("stop")
    course_state._open.clear()


def told(shell: InteractiveShell, capsys: pytest.CaptureFixture[str], cell: str) -> list[str]:
    """What a cell prints, the lines of a rank in order."""
    capsys.readouterr()
    shell.run_cell(cell).raise_error()
    return sorted(capsys.readouterr().out.splitlines(), key=lambda line: line.partition("]")[0])


def test_the_course_begins_the_starter_and_says_what_stays(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sys.platform != "linux" or warm.starter_pid() is not None
    assert told(shell, capsys, "%ranks") == ["No ranks stay. `%ranks 2` starts two."]
    assert told(shell, capsys, "%ranks stop") == ["No ranks stay."]


def test_cells_without_a_number_run_on_what_stays(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(shell, capsys, "%%ranks\nx = rank\nworld_size") == ["[rank 0] 2", "[rank 1] 2"], (
        "two fresh ones where none stay"
    )
    assert "3 ranks stay" in told(shell, capsys, "%ranks 3")[0]
    assert told(shell, capsys, "%%ranks\nx = [rank]") == []
    assert told(shell, capsys, "%%ranks[0, 2]\nx += [10]\nprint('%%ranks[0]')") == [
        "[rank 0] %%ranks[0]",
        "[rank 2] %%ranks[0]",
    ]
    assert told(shell, capsys, "%%ranks --limit 60\nx") == ["[rank 0] [0, 10]", "[rank 1] [1]", "[rank 2] [2, 10]"]
    assert told(shell, capsys, "%%ranks 1\n'x' in globals()") == ["[rank 0] False"], "a number means fresh ranks"
    assert told(shell, capsys, "%%ranks 2\nif rank: print('I')") == ["[rank 0] (printed nothing)", "[rank 1] I"]
    assert [line.partition(",")[0] for line in told(shell, capsys, "%ranks status")] == [
        f"rank {rank}: idle" for rank in range(3)
    ]
    assert told(shell, capsys, "%ranks 3") == [
        "3 ranks stay already, with what they hold. `%ranks reset` starts fresh ones."
    ]
    with pytest.raises(UsageError, match=r"%%ranks\[3\]: expected some of the ranks 0, 1, 2, each once"):
        shell.run_cell_magic("ranks", "[3]", "1")
    assert "3 ranks ended, and what they held: x." in told(shell, capsys, "%ranks reset")
    with pytest.raises(cell_runs.CellFailed, match="NameError: name 'x' is not defined"):
        shell.run_cell_magic("ranks", "", "x")
    assert told(shell, capsys, "%ranks stop") == ["3 ranks ended."]


def test_a_saved_exercise_is_the_latest_on_ranks_that_stay(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    told(shell, capsys, "%ranks 1")
    for answer in ("first", "the second"):
        course_state.current().workspace.save("00.hello_ranks", f"def hello_ranks():\n    return {answer!r}\n")
        assert told(shell, capsys, "%%ranks\nfrom my_fsdp import hello_ranks\nhello_ranks()") == [
            f"[rank 0] {answer!r}"
        ]
    told(shell, capsys, "%ranks stop")


def test_ranks_that_have_ended_are_told_and_started_anew(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    told(shell, capsys, "%ranks 2")
    with pytest.raises(
        cell_runs.CellFailed,
        match="Rank 1 died: it ended with exit code 3.*All ranks were ended. `%ranks reset` starts new ones.",
    ):
        shell.run_cell_magic("ranks", "", "import os\nif rank: os._exit(3)")
    with pytest.raises(
        UsageError, match="the ranks that stayed have ended: Rank 1 died.*`%ranks reset` starts new ones"
    ):
        shell.run_cell_magic("ranks", "", "1")
    assert "`%ranks reset` starts new ones" in "".join(told(shell, capsys, "%ranks status"))
    assert "2 ranks stay" in told(shell, capsys, "%ranks reset")[0]
    assert told(shell, capsys, "%%ranks[1]\nrank") == ["[rank 1] 1"]
    assert told(shell, capsys, "%ranks stop") == ["2 ranks ended."]


@pytest.mark.parametrize(
    ("magic", "line", "says"),
    [
        *(
            ("%", line, f"from 1 to 16, status, reset or stop, got '{line}'; write %ranks 4")
            for line in ("0", "x", "99", "-1", "2 3")
        ),
        ("%", "reset", "no ranks stay; write for example %ranks 2"),
        *(("%%", line, "from 1 to 16") for line in ("0", "x", "99", "2 3")),
        *(
            ("%%", line, "no ranks stay; start some with for example %ranks 4")
            for line in ("[0]", "[]", "[a]", "[0,0]", "[0")
        ),
        *(("%%", f"2 --limit {limit}", "expected seconds above 0") for limit in ("", "0", "-3", "x", "nan", "inf")),
    ],
)
def test_bad_lines_are_refused_in_one(shell: InteractiveShell, magic: str, line: str, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as refused:
        shell.run_cell_magic("ranks", line, "1") if magic == "%%" else shell.run_line_magic("ranks", line)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("chosen", ["[2]", "[]", "[a]", "[0,0]", "[0", "[-1]", "[0;1]"])
def test_ranks_that_do_not_stay_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setattr(cell_runs, "_staying", [SimpleNamespace(world_size=2)])
    with pytest.raises(UsageError, match=r"expected some of the ranks 0, 1, each once; write for example %%ranks\[0\]"):
        cell_runs.run_ranks(chosen, "1")


def test_a_cell_that_is_no_python_shows_its_line() -> None:
    with pytest.raises(
        cell_runs.CellFailed, match=r'(?s)^  File "<%%ranks cell>", line 2\n    x = 3 4\n.*SyntaxError: '
    ):
        cell_runs.run_ranks("2", "y = 1\nx = 3 4")


def test_only_the_first_line_of_a_cell_is_rewritten() -> None:
    assert chosen_ranks(["%%ranks[0,2] --limit 3\n", "%%ranks[0]\n"]) == ["%%ranks [0,2] --limit 3\n", "%%ranks[0]\n"]
    for lines in (["x = '''\n", "%%ranks[0]\n", "'''"], ["%%ranks 2\n", "1"], []):
        assert chosen_ranks(lines) == lines


# ---- a real kernel


class Kernel:
    """A kernel of Jupyter with the course open and two ranks that stay."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, "TMPDIR": str(folder)})
        self.client = self.manager.client()
        self.client.start_channels()
        self.begin()

    def begin(self) -> None:
        """Open the course in the new kernel, and start ranks."""
        self.client.wait_for_ready(timeout=60)
        self.run("from fsdplab import teaching\nteaching.start()")
        self.run("%ranks 2")
        self.ranks = [int(pid) for pid in re.findall(r"process (\d+)", self.run("%ranks status"))]
        assert len(self.ranks) == 2 and not any(map(gone, self.ranks))

    def run(self, code: str, at: Callable[[str], None] = lambda text: None) -> str:
        """What a cell prints, and its error; `at` gets each piece as it comes."""
        said: list[str] = []

        def on_message(message: dict) -> None:
            content = message["content"]
            said.append(
                content.get("text", "") if message["msg_type"] == "stream" else "\n".join(content.get("traceback", []))
            )
            at(said[-1])

        self.client.execute_interactive(code, timeout=90, output_hook=on_message)
        return "".join(said)

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc to look for processes")
def test_ranks_live_and_end_with_their_kernel(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    try:
        interrupted = kernel.run(
            f"%%ranks[0]\n{SLEEP}", at=lambda text: kernel.manager.interrupt_kernel() if "asleep" in text else None
        )
        assert (
            "stopped after" in interrupted
            and "the ranks stay, with what they hold" in interrupted
            and "cell_ranks/ranks.py" not in interrupted
        )
        assert sorted(kernel.run("%%ranks\nrank").splitlines()) == ["[rank 0] 0", "[rank 1] 1"], (
            "the kernel and its ranks live on"
        )
        before = kernel.ranks
        kernel.manager.restart_kernel()
        assert until(lambda: all(map(gone, before))), "a restart leaves no rank"
        kernel.begin()
        os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)
        assert until(lambda: all(map(gone, kernel.ranks))), "neither does a kernel that is killed"
    finally:
        kernel.close()

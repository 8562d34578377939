"""Everything goes on where what only Linux has is taken away (tests/without_linux): ranks by torchrun, over gloo.

That is Linux without some of its calls, and no Mac; and where what Windows lacks is taken away too, plans and records
are left, and ranks are refused in one sentence.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdplab.common.places import checkout
from fsdplab.common.pythons import run_of, with_this_checkout
from fsdplab.records import RunRecord
from tests.leftovers import left_of
from tests.without_linux import without

CLONE = checkout()
RECORD = Path(__file__).resolve().parents[1] / "data" / "wind-tunnel-8b"
TINY = ("--model", "gpt-tiny", "--steps", "2", "--sequence-length", "32")
TEXT = "To shard is to keep a part and to gather the rest when it is needed. "
REFUSED = "ranks do not run on Windows itself; run fsdplab in WSL 2"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="takes away what only Linux has")


def python(what: str, *arguments: str, folder: Path | None = None, limit: float = 280.0) -> subprocess.CompletedProcess:
    """A Python without what only Linux has ("linux") or without what Windows lacks too ("posix")."""
    return subprocess.run(
        arguments, env=without(what, with_this_checkout(os.environ)), cwd=folder, capture_output=True, text=True,
        timeout=limit, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def said(what: str, code: str) -> list[str]:
    """The lines that `code` prints there."""
    done = python(what, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def fsdplab(what: str, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess:
    """A command there."""
    return python(what, *run_of("fsdplab", *arguments), folder=folder)


LOOK = """
import ctypes, os, pathlib, resource, select, socket, subprocess, sys
print(sys.platform, hasattr(os, 'pidfd_open'), hasattr(os, 'memfd_create'), hasattr(os, 'sched_getaffinity'))
print(hasattr(ctypes.CDLL(None), 'prctl'), hasattr(select, 'epoll'), hasattr(resource, 'prlimit'))
for look in (open, os.open, os.listdir, os.scandir, os.readlink, os.stat):
    try:
        look('/proc/self', *[0] * (look is os.open))
        print('found by', look)
    except FileNotFoundError:
        pass
print(pathlib.Path('/proc/self/stat').exists(), os.path.isdir('/sys'), os.access('/dev/shm', os.R_OK))
"""
LOOKS = [LOOK, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LOOK!r}], check=True)"]


@pytest.mark.quick
@pytest.mark.parametrize("code", LOOKS, ids=["itself", "its children"])
def test_what_is_taken_away_is_gone(code: str) -> None:
    assert said("linux", code) == ["darwin False False False", "False False False", "False False False"]


PROCESSES = """
import os, subprocess, sys
from fsdplab.common.processes import descendants, gone, processor_seconds, state
busy = "import time\\nwhile time.process_time() < 2.5: pass\\nprint(flush=True)\\ninput()"
middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
child = subprocess.Popen([sys.executable, "-c", middle], stdin=-1, stdout=-1)
child.stdout.readline()
print(len(descendants(child.pid)), processor_seconds(child.pid) >= 2.0, state(child.pid)[1] == os.getpid())
print(gone(child.pid), gone(descendants(child.pid)[0]))
child.kill()
while state(child.pid)[0] != "Z":
    pass
print(gone(child.pid), child.wait(), state(child.pid), processor_seconds(child.pid))
"""


def test_ps_tells_of_processes() -> None:
    assert said("linux", PROCESSES) == ["1 True True", "False False", "True -9 ('', 0) None"]


def test_doctor_says_what_goes_a_second_way() -> None:
    done = fsdplab("linux", "doctor", "--json", "-")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    found = {each["name"]: each for each in answer["findings"]}
    assert found["Linux's calls"]["note"].startswith("second ways: torchrun for forks, gloo for shared memory")
    assert (found["rank starts"]["value"], found["CPU transport"]["value"]) == ("torchrun", "gloo")
    assert "over gloo" in answer["real"]


def test_a_comparison_on_a_text_agrees_with_the_twin(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 200)
    arguments = ["--world-size", "2", "--text", "text.txt", "--strategies", "no_shard,full_shard", "--keep", "kept"]
    done = fsdplab("linux", "compare", *TINY, *arguments, "--html", "page.html", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Losses agree with the unsharded twin's." in done.stdout
    records = [RunRecord.load(folder) for folder in sorted((tmp_path / "kept").iterdir()) if folder.is_dir()]
    for record in records:
        assert record.status == "finished" and record.environment["start"] == "torchrun"
        assert "forked on Linux only" in record.environment["not_forked"]
        assert record.summary.peak_memory_bytes and record.summary.resident_growth_by_rank in ((), (None, None))
    assert fsdplab("linux", "report", "kept", folder=tmp_path).stdout
    assert (tmp_path / "page.html").stat().st_size > 10**5


CELLS = """
import os, signal
from fsdplab.sessions.cell_ranks.ranks import StayingRanks
ranks = StayingRanks.start(2)
ranks.run("import torch, torch.distributed as dist; here = torch.ones(1) * rank")
ranks.run("dist.all_reduce(here); print(int(here))")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_live_ranks_run_cells_and_end_with_a_killed_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # which the command lines of launcher and ranks name
    done = python("linux", sys.executable, "-c", CELLS)
    assert done.returncode == -9 and done.stdout.count("1\n") == 2, (done.stdout, done.stderr)
    assert left_of(tmp_path) == []


OFFLOAD = """
import torch
from pathlib import Path
from fsdplab.engine.features import mapped
try:
    mapped.zeros(Path('.'), 100, 'a shard')
except OSError as error:
    print(error.strerror)
"""


def test_what_has_no_second_way_says_so() -> None:
    assert said("linux", OFFLOAD) == ["offload to files needs Linux, got darwin; use CPUOffloadPolicy"]


@pytest.mark.full("whole notebooks on another system")
@pytest.mark.skipif(CLONE is None, reason="runs notebooks of the clone")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("notebook", ["00_setup_and_tour", "05_one_sharded_unit"])
def test_a_notebook_passes_in_both_editions(notebook: str) -> None:
    words = ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"notebooks/{notebook}.ipynb"]
    done = python("linux", sys.executable, *words, folder=CLONE, limit=800.0)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]


# ---- without what Windows lacks

IMPORTS = """
import importlib, pkgutil
import fsdplab
for module in pkgutil.walk_packages(fsdplab.__path__, "fsdplab."):
    if not any(each in module.name for each in ("launch.starter", "exercises", "__main__")):
        importlib.import_module(module.name)
"""


def test_all_that_is_not_run_by_ranks_is_imported() -> None:
    assert said("posix", IMPORTS) == []


def test_plans_and_records_are_there(tmp_path: Path) -> None:
    for arguments in (["--help"], ["plan", "--model", "gpt2"], ["report", str(RECORD), "--html", "page.html"]):
        done = fsdplab("posix", *arguments, folder=tmp_path)
        assert done.returncode == 0 and done.stdout and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "page.html").stat().st_size > 10**5
    code = "from fsdplab.widgets.strategy_lab import StrategyLab; print(StrategyLab(directory='.').state.message)"
    assert python("posix", sys.executable, "-c", code, folder=tmp_path).stdout.startswith("ready to measure")


CELLS_REFUSED = """
from fsdplab.sessions.cell_ranks.ranks import StayingRanks
try:
    StayingRanks.start(2)
except ValueError as error:
    print(error)
"""


def test_ranks_are_refused_in_a_sentence_and_nothing_is_left_behind(tmp_path: Path) -> None:
    for arguments in (["run", *TINY], ["compare", *TINY], ["bench"]):
        done = fsdplab("posix", *arguments, folder=tmp_path)
        assert done.returncode == 2 and REFUSED in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert said("posix", CELLS_REFUSED)[0].startswith(REFUSED)
    assert list(tmp_path.iterdir()) == []

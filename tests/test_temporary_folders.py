"""Temporary folders are gone when their process is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdplab.common.temporary import folder_of_this_process, temporary_folder
from tests.test_warm_starts import until


@pytest.mark.quick
def test_all_of_a_process_lie_in_one_folder_and_a_forked_one_has_its_own() -> None:
    mine, own = temporary_folder("run"), folder_of_this_process()
    assert mine.parent == own and mine.is_dir() and own.stat().st_mode & 0o777 == 0o700
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, f"{folder_of_this_process().is_dir()} {folder_of_this_process()}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    was_there, other = os.read(reader, 1000).decode().split()
    assert other != str(own) and was_there == "True"
    assert until(lambda: not Path(other).exists()) and own.is_dir()


def test_a_process_that_ends_leaves_none(tmp_path: Path) -> None:
    """Of one that is killed, the starter removes them: test_warm_starts.py."""
    code = (
        "from fsdplab.common.temporary import temporary_folder\nfolder = temporary_folder('run')\n"
        "(folder / 'run.json').touch()\nprint(folder)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert tmp_path in Path(said.stdout.strip()).parents and list(tmp_path.iterdir()) == []


def test_a_folder_of_temporary_files_that_was_cleared_away_is_replaced(tmp_path: Path) -> None:
    """The job that it was of has ended, and the notebook goes on; Python looks for it once."""
    code = (
        "import os\nfrom fsdplab.common.temporary import temporary_folder\n"
        "temporary_folder('run')\nimport shutil\nshutil.rmtree(os.environ['TMPDIR'])\nprint(temporary_folder('run'))"
    )
    (tmp_path / "of_a_job").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "of_a_job"), "TEMP": str(tmp_path), "TMP": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert Path(said.stdout.strip()).parents[1] == tmp_path and list(tmp_path.iterdir()) == []


LEAVES = """
import os, signal, sys
from fsdplab.common.temporary import temporary_folder

def leave():
    (temporary_folder("run") / "run.json").touch()
    print("made", flush=True)
    {how}

leave()
"""


@pytest.mark.quick
@pytest.mark.parametrize(
    "how", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGTERM)", "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_neither_does_one_that_ends_without_ending_python(tmp_path: Path, how: str) -> None:
    """As the caller of torchrun's ranks, which has no starter, or a worker of multiprocessing."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LEAVES.format(how=how)], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "made\n"
    assert until(lambda: list(tmp_path.iterdir()) == [])

"""Temporary folders are gone when their process is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdplab.common.temporary import folder_of_this_process, temporary_folder


@pytest.mark.quick
def test_all_of_a_process_lie_in_one_folder_and_a_forked_one_has_its_own() -> None:
    mine, own = temporary_folder("run"), folder_of_this_process()
    assert mine.parent == own and mine.is_dir() and own.stat().st_mode & 0o777 == 0o700
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, str(folder_of_this_process()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    other = Path(os.read(reader, 1000).decode())
    assert other != own and other.is_dir()
    other.rmdir()


def test_a_process_that_ends_leaves_none(tmp_path: Path) -> None:
    """Of one that is killed, the starter removes them: test_warm_starts.py."""
    code = (
        "from fsdplab.common.temporary import temporary_folder\nfolder = temporary_folder('run')\n"
        "(folder / 'run.json').touch()\nprint(folder)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert tmp_path in Path(said.stdout.strip()).parents and list(tmp_path.iterdir()) == []

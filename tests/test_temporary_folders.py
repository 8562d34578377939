"""Temporary folders are gone when their process is, however it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdplab.common.temporary import folder_of_this_process, temporary_folder
from fsdplab.sessions.launch import warm

CALLER = """
import sys
from fsdplab.sessions import RunSpec, run
from fsdplab.sessions.launch.launcher import begin_starter
begin_starter()
record = run(RunSpec(model="gpt-tiny", steps=1, sequence_length=16, device="cpu", start=sys.argv[1]))
print(record.path, flush=True)
sys.stdin.readline()
"""


def eventually(true: Callable[[], bool], patience_s: float = 30.0) -> bool:
    deadline = time.monotonic() + patience_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


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


@pytest.mark.skipif(warm.why_not() is not None, reason="the starter removes them, and there is none here")
@pytest.mark.parametrize("how", [None, signal.SIGTERM, signal.SIGKILL], ids=str)
def test_a_caller_that_ends_or_is_killed_leaves_none(tmp_path: Path, how: signal.Signals | None) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", CALLER, "auto"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as caller:
        record = Path(caller.stdout.readline().strip())
        assert (record / "run.json").exists() and tmp_path in record.parents
        caller.stdin.write("\n") if how is None else caller.send_signal(how)
    assert eventually(lambda: list(tmp_path.glob("fsdplab-*")) == [])

"""Runs a module in a separate process: JupyterLab, the course, the check of a GPU.

The process has a session of its own, so that Ctrl-C in a terminal reaches this process alone, which passes it on once.
It ends with this process, even after `kill -9`.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import FrameType

from fsdplab.cli.errors import interrupted
from fsdplab.common.processes import asked_to_end
from fsdplab.common.pythons import run_of, with_this_checkout


def run_module(module: str, arguments: Sequence[str], instead: Mapping[int, int] | None = None) -> int:
    """Run `python -m module ...` and return its exit code; 128 + n where signal n killed it.

    SIGINT, SIGTERM and SIGHUP are passed on, as the signal that `instead` maps them to. A module that they end
    without an exit code of its own exits as an interrupted command does.
    """
    got: list[int] = []
    command = run_of("fsdplab.sessions.launch.parent_death", str(os.getpid()), module, *arguments)
    process = subprocess.Popen(
        command, env=with_this_checkout(os.environ), stdin=subprocess.DEVNULL, start_new_session=True
    )

    def hand_on(number: int, frame: FrameType | None) -> None:
        got.append(number)
        process.send_signal((instead or {}).get(number, number))

    with asked_to_end(hand_on):
        code = process.wait()
    if got and code in (0, -signal.SIGINT, 128 + signal.SIGINT, *(-number for number in got)):
        interrupted(got[0])
    return code if code >= 0 else 128 - code

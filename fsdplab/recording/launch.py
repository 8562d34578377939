"""Runs a command as it would run, with the environment in which its ranks record themselves (`fsdplab record`)."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fsdplab.common.files import write_whole
from fsdplab.common.processes import asked_to_end
from fsdplab.recording.settings import RecordingError, Settings, environment
from fsdplab.records.folder import MARKER, claim_folder
from fsdplab.sessions.launch.parent_death import end_with_parent


def prepare(settings: Settings, force: bool = False) -> None:
    """Claim the folder for a new record, and write what is recorded into it; RecordError as `claim_folder`."""
    claim_folder(Path(settings.folder), replace=force)
    settings.mailbox.folder.mkdir(exist_ok=True)
    write_whole(settings.file, settings.as_text() + "\n")


def clear(settings: Settings) -> None:
    """Remove what `prepare` wrote, and the folder where nothing else is in it."""
    folder = Path(settings.folder)
    for each in (*settings.mailbox.folder.glob("*"), folder / MARKER):
        each.unlink(missing_ok=True)
    for each in (settings.mailbox.folder, folder):
        with suppress(OSError):  # what somebody else has put there stays
            each.rmdir()


class JobEnd(NamedTuple):
    """How a job has ended: its exit code, 128 + N where signal N ended it, and the signal by which it was asked to end,
    None for none.
    """

    code: int
    asked_by: int | None = None


def run_job(command: Sequence[str], settings: Settings) -> JobEnd:
    """Run the command to its end, and return how it ended.

    Signals that ask this process to end are passed on, and the job's own end is waited for.
    """
    this = os.getpid()
    has_terminal = _foreground_group() is not None
    asked_by: int | None = None

    def begin() -> None:
        end_with_parent(this, signal.SIGTERM)  # also where this process is killed
        # without a terminal nothing but this process passes signals on, so that none reaches the job twice
        if not has_terminal:
            os.setpgid(0, 0)

    def pass_on(number: int, _: object) -> None:
        nonlocal asked_by
        asked_by = number
        # a terminal's Ctrl-C goes to all processes of its foreground group, so the job has it already
        if number != signal.SIGINT or _foreground_group() != os.getpgrp():
            job.send_signal(number)

    try:
        job = subprocess.Popen(command, env=environment(settings, os.environ.items()), preexec_fn=begin)
    except OSError as error:
        raise RecordingError(f"{command[0]} cannot be started: {error.strerror}") from None
    with asked_to_end(pass_on):
        code = job.wait()
    return _job_end(code, asked_by)


def _job_end(code: int, asked_by: int | None) -> JobEnd:
    """Return how a job has ended that was asked to end by a signal, or was not.

    torchrun and Python end with code 1 after a signal's exception; any other code is the job's own choice.
    """
    if code < 0:
        code = 128 - code
    if asked_by is not None and code == 1:
        code = 128 + asked_by
    return JobEnd(code, asked_by if code else None)


def _foreground_group() -> int | None:
    """Return the process group to which this process's terminal sends Ctrl-C; None where it has no terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return None
    try:
        return os.tcgetpgrp(terminal)
    except OSError:
        return None
    finally:
        os.close(terminal)

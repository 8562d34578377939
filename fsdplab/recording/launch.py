"""Runs a command as it would run, with the environment in which its ranks record themselves (`fsdplab record`)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

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


def run_job(command: Sequence[str], settings: Settings) -> int:
    """Run the command to its end, and return its exit code, 128 + N where signal N ended it.

    Signals that ask this process to end are passed on, and the job's own end is waited for.
    """
    this = os.getpid()
    try:
        job = subprocess.Popen(
            command,
            env=environment(settings, os.environ.items()),
            preexec_fn=lambda: end_with_parent(this, signal.SIGTERM),  # also where this process is killed
        )
    except OSError as error:
        raise RecordingError(f"{command[0]} cannot be started: {error.strerror}") from None
    with asked_to_end(lambda number, _: _pass_on(job, number)):
        code = job.wait()
    return code if code >= 0 else 128 - code


def _pass_on(job: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal on to the job; a terminal's Ctrl-C has reached it already, as one of the same process group."""
    if number != signal.SIGINT or not sys.stdin.isatty():
        job.send_signal(number)

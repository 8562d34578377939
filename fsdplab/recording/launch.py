"""`fsdplab record`: runs a command as it would run, with the environment in which its ranks record themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fsdplab.common.files import write_whole
from fsdplab.recording.assemble import SETTINGS_FILE
from fsdplab.recording.settings import RecordingError, Settings, environment
from fsdplab.records.folder import claim_folder


def prepare(settings: Settings, force: bool = False) -> None:
    """Claim the folder for a new record, and write what is recorded into it; RecordError as `claim_folder`."""
    claim_folder(Path(settings.folder), replace=force)
    settings.mailbox.folder.mkdir(exist_ok=True)
    write_whole(settings.mailbox.folder / SETTINGS_FILE, json.dumps(asdict(settings)) + "\n")


def run_job(command: Sequence[str], settings: Settings) -> int:
    """Run the command to its end, and return its exit code, 128 + N where signal N ended it.

    Signals that ask this process to end are passed on, and the job's own end is waited for.
    """
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        job = subprocess.Popen(command, env=environment(settings, os.environ.items()))
    except OSError as error:
        raise RecordingError(f"{command[0]} cannot be started: {error.strerror}") from None
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the job too
        for each in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, lambda number, _: job.send_signal(number))
        code = job.wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return code if code >= 0 else 128 - code

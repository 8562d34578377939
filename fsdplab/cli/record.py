"""Runs a training job that was not written for the lab (`fsdplab record`), records it, and shows the record."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdplab.cli.errors import refuse
from fsdplab.cli.options import whole_numbers
from fsdplab.cli.outputs import Outputs
from fsdplab.cli.runs import answer_of_runs, recorded_in
from fsdplab.recording.assemble import NothingRecorded, assemble, wait_for_ranks
from fsdplab.recording.launch import clear, prepare, run_job
from fsdplab.recording.settings import RecordingError, Settings, environment, steps_of
from fsdplab.records.folder import release_folder


def record_job(
    command: Sequence[str] | None, out: Path, steps: str, ranks: str | None, print_env: bool, outputs: Outputs
) -> int:
    """Run and record the command, or print the variables that make its ranks record themselves; its exit code."""
    if not command and not print_env:
        refuse("record got no command; give the one that starts the job behind --")
    command = command or []
    chosen = tuple(whole_numbers("--ranks", ranks)) if ranks else None
    settings = Settings(str(out.absolute()), *steps_of(steps), ranks=chosen, job=_name(command))
    if print_env:
        # the bootstrap goes before what the job has on its path
        above = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        for name, value in environment(settings, above.items()).items():
            print(f"export {name}={shlex.quote(value)}")
        return 0
    prepare(settings, outputs.force)
    try:
        ended = run_job(command, settings)
        sys.stdout.flush()
        # ranks of other nodes may end a little later
        wait_for_ranks(out)
        record = assemble(out, ended.code, ended.asked_by)
    except NothingRecorded as nothing:
        print(f"fsdplab: {nothing}", file=sys.stderr)
        clear(settings)
        return ended.code
    except RecordingError:
        clear(settings)
        raise
    finally:
        release_folder(out)
    outputs.give(answer_of_runs([record], None, outputs))
    outputs.show([recorded_in(out)])
    return ended.code


def _name(command: Sequence[str]) -> str:
    """Return what the record is called: the name of the job's program."""
    programs = [word for word in command if word.endswith(".py")]
    return Path([*programs, *command, "job"][0]).name

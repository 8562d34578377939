"""`fsdplab record`: runs a training job that was not written for the lab, records it, and shows what it found."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdplab.cli.options import whole_numbers
from fsdplab.cli.outputs import Outputs
from fsdplab.cli.render import show
from fsdplab.cli.runs import answer_of_runs, recorded_in
from fsdplab.recording.assemble import NothingRecorded, assemble, wait_for_ranks
from fsdplab.recording.launch import clear, prepare, run_job
from fsdplab.recording.settings import RecordingError, Settings, environment, steps_of
from fsdplab.records.folder import release_folder


def record_job(command: Sequence[str], out: Path, steps: str, ranks: str | None, outputs: Outputs) -> int:
    """Run and record the command; the job's own exit code."""
    settings = _settings(command, out, steps, ranks)
    prepare(settings, outputs.force)
    try:
        code = run_job(command, settings)
        sys.stdout.flush()
        wait_for_ranks(out)
        record = assemble(out, code)
    except NothingRecorded as nothing:
        print(f"fsdplab: {nothing}", file=sys.stderr)
        clear(settings)
        return code
    except RecordingError:
        clear(settings)
        raise
    finally:
        release_folder(out)
    outputs.give(answer_of_runs([record], None, outputs.detail))
    show(outputs.console(), [recorded_in(out)])
    return code


def print_environment(command: Sequence[str], out: Path, steps: str, ranks: str | None) -> None:
    """Print the two variables as lines of a shell."""
    above = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    for name, value in environment(_settings(command, out, steps, ranks), above.items()).items():
        print(f"export {name}={shlex.quote(value)}")


def _settings(command: Sequence[str], out: Path, steps: str, ranks: str | None) -> Settings:
    chosen = tuple(whole_numbers("--ranks", ranks)) if ranks else None
    return Settings(str(out.absolute()), *steps_of(steps), ranks=chosen, job=_name(command))


def _name(command: Sequence[str]) -> str:
    """What the record is called: the name of the job's program."""
    programs = [word for word in command if word.endswith(".py")]
    return Path([*programs, *command, "job"][0]).name

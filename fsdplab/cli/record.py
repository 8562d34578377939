"""`fsdplab record`: runs a training job that was not written for the lab, records it, and shows what it found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fsdplab.cli.answer import Line
from fsdplab.cli.outputs import Outputs
from fsdplab.cli.parse import whole_numbers
from fsdplab.cli.render import show
from fsdplab.cli.runs import answer_of_runs
from fsdplab.recording.assemble import NothingRecorded, assemble
from fsdplab.recording.launch import clear, prepare, run_job
from fsdplab.recording.settings import RecordingError, Settings, steps_of
from fsdplab.records.folder import release_folder


def record_job(command: Sequence[str], out: Path, steps: str, ranks: str | None, outputs: Outputs) -> int:
    """Run and record the command; the job's own exit code."""
    first, end = steps_of(steps)
    chosen = tuple(whole_numbers("--ranks", ranks)) if ranks else None
    settings = Settings(str(out.absolute()), first, end, chosen, _name(command))
    prepare(settings, outputs.force)
    try:
        code = run_job(command, settings)
        sys.stdout.flush()
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
    show(outputs.console(), [Line(f"recorded in {out}; show it again with: fsdplab report {out}")])
    return code


def _name(command: Sequence[str]) -> str:
    """What the record is called: the name of the job's program."""
    programs = [word for word in command if word.endswith(".py")]
    return Path(programs[0] if programs else command[0]).name

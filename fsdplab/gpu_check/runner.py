"""Runs one part in a process group of its own, ends it whole at its limit, and says how it went.

Whatever a part does (fail, hang, die, write nonsense), the answer is an `Outcome`; only Ctrl-C passes through, once the
part is gone.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdplab.sessions.launch import warm

from .plans import PartPlan
from .sheets import BadSheet, Sheet, read_sheet
from .tree import MARK, Process, end_tree

# "PID DEADLINE": the process with which a part ends, and when it will be ended (monotonic clock)
RUNNER = "FSDPLAB_GPU_CHECK_RUNNER"
REFUSED = 2
CHECKOUT = Path(__file__).resolve().parents[2]
STATUSES = ("finished", "failed", "refused", "timed out", "killed", "garbage", "not run")


@dataclass(frozen=True)
class Outcome:
    """How one part went: status, reason where it did not finish, seconds taken and allowed, and its sheet (None:
    nothing readable).
    """

    name: str
    status: str
    reason: str
    seconds: float
    limit_s: float
    sheet: Sheet | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; `Outcome(**outcome.as_dict()) == outcome`."""
        return asdict(self)

    @property
    def failed_checks(self) -> list[dict[str, Any]]:
        """The part's checks that did not pass."""
        return [check for check in (self.sheet or {}).get("checks", []) if not check["passed"]]


def not_run(plan: PartPlan, reason: str) -> Outcome:
    """The outcome of a part that was never started."""
    return Outcome(plan.name, "not run", reason, 0.0, 0.0, None)


def run_part(plan: PartPlan, device: str, scratch: Path, limit_s: float) -> Outcome:
    """Run the part; it works in `scratch/<name>`, and what it prints is in `scratch/<name>.log`."""
    folder, mark = scratch / plan.name, uuid.uuid4().hex
    folder.mkdir(parents=True, exist_ok=True)
    program = [
        "-m",
        plan.program,
        "--device",
        device,
        "--out",
        str(folder),
        "--seconds",
        f"{limit_s:.1f}",
        *plan.arguments,
    ]
    began = time.monotonic()
    process = _started(program, folder, scratch / f"{plan.name}.log", _environment(scratch, mark), began + limit_s)
    try:
        code = _wait(process, limit_s)
    finally:
        left = end_tree(process, mark)
    status, reason = _verdict(code, limit_s, scratch / f"{plan.name}.log")
    if left:
        reason += f"; processes {left} did not end"
    return _with_sheet(plan, status, reason.strip("; "), time.monotonic() - began, limit_s, folder)


def _environment(scratch: Path, mark: str) -> dict[str, str]:
    """A part finds this very code without an install, prints at once, and keeps its temporary files where they are
    deleted.
    """
    temporary = scratch / "tmp"
    temporary.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TMPDIR": str(temporary), MARK: mark}


def _started(
    program: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str], deadline: float
) -> Process:
    """The part's process: forked from this check's warm starter, in which torch is imported, or a new Python where that
    cannot be.
    """
    if warm.why_not() is None:
        try:
            return ForkedPart(program, log, folder, environment, deadline)
        except warm.StarterFailed as failed:
            print(f"parts start cold: {failed}", file=sys.stderr)
    tied = {**environment, RUNNER: f"{os.getpid()} {deadline}"}
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *program],
            cwd=folder,
            env=tied,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class ForkedPart:
    """A part forked from the warm starter, spoken to like a subprocess.Popen."""

    def __init__(
        self, program: Sequence[str], log: Path, folder: Path, environment: Mapping[str, str], deadline: float
    ) -> None:
        warm.begin(environment)
        tied = {**environment, RUNNER: f"{warm.starter_pid()} {deadline}"}  # its parent, which ends with this process
        log.touch()
        self._process = warm.start_process(program, log, folder, tied)
        self.pid = self._process.first_pid()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._code() if self._process.poll() is not None else None

    def wait(self, timeout: float = math.inf) -> int:
        """The exit code once it has ended; subprocess.TimeoutExpired when that takes longer."""
        self._process.wait(timeout)
        return self._code()

    def _code(self) -> int:
        return self._process.exits.get(0, -int(signal.SIGKILL))  # with the starter killed, its children were killed too


def _wait(process: Process, limit_s: float) -> int | None:
    """The exit code; None where the limit came first."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None


def _verdict(code: int | None, limit_s: float, log: Path) -> tuple[str, str]:
    if code == 0:
        return "finished", ""
    if code is None:
        return "timed out", f"ended at its limit of {limit_s:.0f} s"
    if code < 0:
        return "killed", f"by {_signal_name(-code)}"
    said = without_paths(last_line(log), log.parent)
    return ("refused" if code == REFUSED else "failed"), said or f"exit code {code}, nothing printed"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_line(log: Path, most: int = 300) -> str:
    """The last line printed that is not blank: of a traceback, the error itself."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")[:most]


def without_paths(text: str, scratch: Path) -> str:
    """The text without the places of this machine: a record is made to be handed on."""
    return text.replace(str(scratch), "(scratch)").replace(str(CHECKOUT), "(checkout)").replace(sys.prefix, "(python)")


def _with_sheet(plan: PartPlan, status: str, reason: str, seconds: float, limit_s: float, folder: Path) -> Outcome:
    """A part that ended well but left no readable sheet wrote garbage; one that ended badly keeps what it had."""
    try:
        sheet = read_sheet(folder / f"{plan.name}.json", plan.name)
    except BadSheet as error:
        status, reason = ("garbage", str(error)) if status == "finished" else (status, reason)
        return Outcome(plan.name, status, reason, round(seconds, 2), limit_s, None)
    sheet["records"] = [
        name for name in sheet["records"] if (folder / name / "run.json").is_file() and ".." not in Path(name).parts
    ]
    return Outcome(plan.name, status, reason, round(seconds, 2), limit_s, sheet)

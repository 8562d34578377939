"""Runs one part in a process group of its own, ends it whole at its limit, and says how it went.

Whatever a part does (fail, hang, die, write nonsense), the answer is an `Outcome`; only Ctrl-C passes through, once the
part is gone. This file says too which parts there are, how a part is ended for certain, and reads back what it wrote.
It loads no torch, so that it starts at once and nothing that breaks torch can break it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from fsdplab.common.processes import send, send_group, state
from fsdplab.common.words import did_you_mean
from fsdplab.sessions.launch import warm

LIMIT_S = 480.0  # what a borrowed machine grants
CLOSING_S = 8.0  # kept of the whole limit, to pack records and write the table
LEAST_S = 3.0  # a part is not started with less than this
# "PID DEADLINE": the process with which a part ends, and when it will be ended (monotonic clock)
RUNNER = "FSDPLAB_GPU_CHECK_RUNNER"
MARK = "FSDPLAB_GPU_CHECK_MARK"  # every process of a part inherits it, with a value of the part's own
REFUSED = 2
CHECKOUT = Path(__file__).resolve().parents[2]
STATUSES = ("finished", "failed", "refused", "timed out", "killed", "garbage", "not run")
Sheet = dict[str, Any]
_PATIENCE_S = 5.0
_LOOK_EVERY_S = 0.02
_LISTS = ("rows", "checks", "notes", "records")
_CHECK = {"name": str, "passed": bool, "got": str, "expected": str}
_FLAT = (str, int, float, bool, type(None))


# ---- which parts there are


@dataclass(frozen=True)
class PartPlan:
    """One part: its name (and module), and its limits in seconds. `arguments` are flags of its own."""

    name: str
    cuda_s: float
    cpu_s: float
    module: str = ""
    arguments: tuple[str, ...] = ()
    takes_the_rest: bool = False

    def seconds(self, device: str, left: float) -> float:
        """The limit on `device` where `left` seconds remain of the whole: `PartPlan("a", 40, 20).seconds("cuda",
        25) == 25`.
        """
        wanted = self.cuda_s if device == "cuda" else self.cpu_s
        return left if self.takes_the_rest else min(wanted, left)

    @property
    def program(self) -> str:
        """The module that Python runs."""
        return self.module or f"fsdplab.gpu_check.{self.name}"


# On CUDA the limits add up to LIMIT_S; what a part leaves over, the last one may use.
ENVIRONMENT = PartPlan("environment", 40, 60)
PARTS = (
    PartPlan("tests", 110, 90),  # the GPU tests
    PartPlan("one_rank", 150, 120),  # engines side by side
    PartPlan("several_ranks", 70, 120),  # on one GPU
    PartPlan("overlap", 30, 90),  # communication hidden behind compute
    PartPlan("memory", 40, 90),  # bytes by arithmetic and by the allocator
    PartPlan("traces", 40, 90),  # recorded runs with traces and memory timelines
    PartPlan("course", 40, 180, takes_the_rest=True),  # the notebooks, each to its end
)


def chosen(names: Sequence[str]) -> tuple[PartPlan, ...]:
    """The parts of these names in the check's order; all where none is named. ValueError with the nearest name for an
    unknown one.
    """
    known = [part.name for part in PARTS]
    for name in names:
        if name not in known:
            raise ValueError(f"--parts has {name!r}{did_you_mean(name, known)}; expected some of {', '.join(known)}")
    return tuple(part for part in PARTS if not names or part.name in names)


# ---- one part, from its start to its outcome


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
    flags = ["--device", device, "--out", str(folder), "--seconds", f"{limit_s:.1f}", *plan.arguments]
    program = ["-m", plan.program, *flags]
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
    """A part finds this very code without an install, and from its own folder what `PYTHONPATH=.:wheels` names; it
    prints at once, and keeps its temporary files where they are deleted.
    """
    temporary = scratch / "tmp"
    temporary.mkdir(exist_ok=True)
    given = [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    path = os.pathsep.join([str(CHECKOUT), *given])
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
            [sys.executable, *program], cwd=folder, env=tied, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


class ForkedPart:
    """A part forked from the warm starter, spoken to like a subprocess.Popen."""

    def __init__(
        self, program: Sequence[str], log: Path, folder: Path, environment: Mapping[str, str], deadline: float
    ) -> None:
        # without the part's mark, by which what a part leaves is found and killed: one starter serves all parts
        warm.begin({name: value for name, value in environment.items() if name != MARK})
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
    for place, word in ((scratch, "(scratch)"), (CHECKOUT, "(checkout)"), (sys.prefix, "(python)")):
        text = text.replace(str(place), word)
    for packages in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        text = text.replace(packages, "(packages)") if os.path.isabs(packages) else text
    return text


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


# ---- a part and all that it started, ended for certain


class Process(Protocol):
    """A part's process: a subprocess.Popen, or one that was forked from the warm starter."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float = ...) -> int: ...


def end_tree(process: Process, mark: str | None = None) -> list[int]:
    """Kill `process` with its group, its descendants and all that carry `mark`; returns those still there after five
    seconds.

    Ranks live in sessions of their own, so killing the part's group does not reach them; they would follow their
    parent, but only once the kernel tells them. The mark finds those that are left.
    """
    deadline = time.monotonic() + _PATIENCE_S
    left = {process.pid} if process.poll() is None else set()
    left |= descendants(process.pid) | marked(mark)
    while left and time.monotonic() < deadline:
        send_group(process.pid, signal.SIGKILL)
        for pid in left:
            send(pid, signal.SIGKILL)
        process.poll()
        time.sleep(_LOOK_EVERY_S)
        left = {pid for pid in left if running(pid)} | marked(mark)
    process.wait()
    return sorted(left)


def running(pid: int) -> bool:
    """Whether the process does anything still; a zombie, which only waits to be collected, does not."""
    return state(pid)[0] not in ("", "Z", "X")


def descendants(pid: int) -> set[int]:
    """Processes that stem from `pid` right now (Linux; elsewhere none are known)."""
    children: dict[int, list[int]] = defaultdict(list)
    for each in _all():
        children[state(each)[1]].append(each)
    found, todo = set(), [pid]
    while todo:
        fresh = [child for child in children[todo.pop()] if child not in found]
        found.update(fresh)
        todo += fresh
    return found


def marked(mark: str | None) -> set[int]:
    """Processes, other than this one, whose environment at their start held the mark."""
    if mark is None:
        return set()
    wanted = f"{MARK}={mark}".encode()
    return {pid for pid in _all() if pid != os.getpid() and wanted in _environ(pid) and running(pid)}


def _all() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return []


# ---- what a part wrote: taken only if it is whole and of the right shape


class BadSheet(ValueError):
    """A part's file is missing, cut short or of another shape; the message says which."""


def read_sheet(path: Path, part: str) -> Sheet:
    """The sheet of one part; BadSheet where there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadSheet(f"it wrote no {path.name}") from None
    except (OSError, ValueError) as error:
        raise BadSheet(f"its {path.name} is no JSON ({error})") from error
    complaint = _complaint(content, part)
    if complaint:
        raise BadSheet(f"its {path.name} {complaint}")
    return content


def _complaint(content: Any, part: str) -> str | None:
    if not isinstance(content, dict) or content.get("part") != part:
        return f"is not a sheet of the part {part!r}"
    wrong = [name for name in _LISTS if not isinstance(content.get(name), list)]
    if wrong:
        return f"has no list of {' and '.join(wrong)}"
    if not all(
        isinstance(row, dict) and all(isinstance(value, _FLAT) for value in row.values()) for row in content["rows"]
    ):
        return "has rows that are not flat"
    if not all(
        isinstance(check, dict) and all(isinstance(check.get(key), kind) for key, kind in _CHECK.items())
        for check in content["checks"]
    ):
        return "has checks without name, passed, got and expected"
    if not all(isinstance(text, str) for name in ("notes", "records") for text in content[name]):
        return "has notes or records that are no text"
    return None

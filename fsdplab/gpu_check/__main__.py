"""`python -m fsdplab.gpu_check`: every part in turn, each in its own process, within one limit, into one folder.

The folder is complete after every part, so that whatever ends the check, what was measured is there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import NoReturn

from fsdplab.common.words import harmless

from .check import Check, open_check
from .runner import (
    CLOSING_S,
    ENVIRONMENT,
    LEAST_S,
    LIMIT_S,
    PARTS,
    REFUSED,
    Outcome,
    PartPlan,
    chosen,
    not_run,
    run_part,
)

PASSED, NOT_PASSED, INTERRUPTED = 0, 1, 130
Tell = Callable[[str], None]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every fsdplab command does."""

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: {message}; see `fsdplab gpu-check --help`\n")


def parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    found = _Parser(
        prog="fsdplab gpu-check",
        description="Run and record all that needs a GPU: tests, benchmarks, traces, memory, the course.",
    )
    found.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run of the same code in tiny sizes"
    )
    found.add_argument("--out", type=Path, help="folder for the result, new or empty; default: gpu-check-DEVICE")
    found.add_argument("--parts", default="", help=f"comma-separated; default: {','.join(part.name for part in PARTS)}")
    found.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for everything; default: %(default)g")
    found.add_argument(
        "--notebooks", default="", help="of the part course: numbers such as 01,02; default: all from 01 to 13"
    )
    found.add_argument(
        "--wheels",
        type=Path,
        metavar="DIR",
        help="folder of installed packages (`pip install --target DIR ...`) for the parts tests and course",
    )
    found.add_argument("--commit", default="", help="the commit of this code, where git cannot be asked")
    found.add_argument(
        "--open",
        type=Path,
        metavar="FOLDER",
        help="print the table of a check that was made before, and do nothing else",
    )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 all passed, 1 something did not, 2 the request is invalid, 130 interrupted."""
    asked = parser().parse_args(arguments)
    try:
        if asked.open:
            print(harmless(str(open_check(asked.open))))
            return PASSED
        plans = planned(asked)
        if asked.wheels:
            put_on_path(asked.wheels)
        out = fresh_folder(asked.out or Path(f"gpu-check-{asked.device}"))
    except (ValueError, OSError) as error:
        print(f"fsdplab gpu-check: {harmless(str(error))}", file=sys.stderr)
        return REFUSED
    try:
        with _ended_in_order():
            return run_check(plans, asked.device, out, asked.limit, _said(asked))
    except OSError as error:
        said = f"the result could not be written ({error}); free some space, or give --out another place"
        print(f"fsdplab gpu-check: {said}", file=sys.stderr)
        return NOT_PASSED


def _said(asked: argparse.Namespace) -> str:
    """The command again, without the folder: a record tells nobody's paths."""
    flags = {
        "parts": asked.parts,
        "limit": "" if asked.limit == LIMIT_S else f"{asked.limit:g}",
        "notebooks": asked.notebooks,
        "wheels": asked.wheels and asked.wheels.name,
    }
    given = [f"--{name} {value}" for name, value in flags.items() if value]
    return " ".join(["python -m fsdplab.gpu_check --device", asked.device, *given])


def planned(asked: argparse.Namespace) -> tuple[PartPlan, ...]:
    """The environment, then the parts asked for, each with its own flags."""
    if not asked.limit > 0:
        raise ValueError(f"--limit is {asked.limit:g}; expected seconds above 0")
    own = {"course": ("--notebooks", asked.notebooks), "environment": ("--commit", asked.commit)}
    parts = [ENVIRONMENT, *chosen([name.strip() for name in asked.parts.split(",") if name.strip()])]
    return tuple(replace(part, arguments=own[part.name]) if own.get(part.name, ("", ""))[1] else part for part in parts)


def put_on_path(wheels: Path) -> None:
    """Every process after this one finds the packages of the folder; ValueError where it does not exist."""
    if not wheels.is_dir():
        raise ValueError(
            f"--wheels is {wheels}, which is no folder; on a machine with network make it with `pip install --target"
            " wheels pytest`, and copy it here"
        )
    path = filter(None, [str(wheels.resolve()), os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join(path)


def fresh_folder(folder: Path) -> Path:
    """The folder, made if need be; ValueError where something is in it already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"--out is {folder}, which is not empty; give a new or an empty folder, so that no earlier result is"
            " mixed in"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM ends the check as Ctrl-C does."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_check(
    plans: Sequence[PartPlan], device: str, out: Path, limit_s: float, command: str, tell: Tell = print
) -> int:
    """Run the parts in order into `out`, and `tell` how each went; the exit status of the command.

    A part that cannot be started any more within `limit_s` seconds is named as not run. Ctrl-C ends the part that runs
    and keeps what was there.
    """
    deadline = time.monotonic() + limit_s
    check = Check(
        {"device": device, "command": command, "began_utc": datetime.now(timezone.utc).isoformat(timespec="seconds")}
    )
    check.save(out)
    scratch = Path(tempfile.mkdtemp(prefix="fsdplab-check-"))
    try:
        refused = _run_parts(plans, device, check, scratch, deadline - min(CLOSING_S, limit_s / 10), tell)
        check.save_records(scratch)
    except KeyboardInterrupt:
        check.notes.append("interrupted: the parts after this were not run")
        check.save_records(scratch)
        tell("fsdplab gpu-check: interrupted")
        return INTERRUPTED
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if refused:
        _empty(out)
        print(f"fsdplab gpu-check: {refused.removeprefix('error: ')}", file=sys.stderr)
        return REFUSED
    tell(f"\n{check}\nwritten to {out}")
    return PASSED if check.passed else NOT_PASSED


def _empty(folder: Path) -> None:
    """Nothing was checked, so nothing is left that would stand in the way of the next try."""
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _run_parts(plans: Sequence[PartPlan], device: str, check: Check, scratch: Path, deadline: float, tell: Tell) -> str:
    """Runs every part; the reason where the first one says that nothing can be run here."""
    for plan in plans:
        outcome = _one(plan, device, scratch, deadline - time.monotonic())
        check.outcomes.append(outcome)
        _take_provenance(check, outcome)
        check.save(check.place)
        check.save_log(scratch)
        tell(
            f"{plan.name}: {' '.join(filter(None, [outcome.status, outcome.reason]))} ({outcome.seconds:.1f} s,"
            f" {len(outcome.failed_checks)} checks failed)"
        )
        if plan.name == ENVIRONMENT.name and outcome.status == "refused":
            return outcome.reason
    return ""


def _one(plan: PartPlan, device: str, scratch: Path, left: float) -> Outcome:
    if left < LEAST_S:
        return not_run(plan, "no time was left of the whole limit")
    return run_part(plan, device, scratch, plan.seconds(device, left))


def _take_provenance(check: Check, outcome: Outcome) -> None:
    """What the environment's sheet says about the machine belongs to the whole check."""
    if outcome.name == ENVIRONMENT.name and outcome.sheet and outcome.sheet["rows"]:
        check.provenance = {**outcome.sheet["rows"][0], **check.provenance}


if __name__ == "__main__":
    sys.exit(main())

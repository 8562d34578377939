"""`python -m fsdplab.gpu_check`: every part in turn, each in processes of its own, within one limit, into one folder.

The folder is complete after every process, so that whatever ends the check, what was found is there. This process loads
no torch: it starts at once, and nothing that breaks torch breaks it.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from fsdplab.common.arguments import OneLineParser
from fsdplab.common.processes import interrupt_by
from fsdplab.common.words import did_you_mean, harmless
from fsdplab.gpu_check.check import RECORDS, UNFINISHED, Check, Part, open_check
from fsdplab.gpu_check.commands import PARTS, Command, Refused, commands_of
from fsdplab.records import RecordError
from fsdplab.sessions.launch.limited import run_within, without_paths
from fsdplab.sessions.launch.parent_death import adopt_orphans

LIMIT_S = 480.0  # what a borrowed machine grants
PASSED, NOT_PASSED, REFUSED, INTERRUPTED = 0, 1, 2, 130
_LEAST_S = 3.0  # a command is not started with less than this
# what a command needs beside torch and numpy
_LACKING = re.compile(r"(?:No module named|import of) '?(typer|rich|pytest)")
_LOG_TAIL = 300_000  # bytes of one command's output that are kept


def parser() -> ArgumentParser:
    """The flags of the command."""
    flags = OneLineParser(
        prog="fsdplab gpu-check", description="Check a GPU machine, from the driver to the speed.",
        epilog="Examples:\n  fsdplab gpu-check\n  fsdplab gpu-check --device cpu --parts nccl,correctness",
    )  # fmt: skip
    cpu = "cpu: a dry run of the same code in tiny sizes"
    flags.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=cpu)
    flags.add_argument("--out", type=Path, help="folder for the result, new or empty; default: gpu-check-DEVICE")
    flags.add_argument("--parts", default="", help=f"comma-separated; default: {','.join(PARTS)}")
    more = "seconds for everything; default: %(default)g; with more, each command has more too"
    flags.add_argument("--limit", type=float, default=LIMIT_S, help=more)
    flags.add_argument("--open", type=Path, metavar="FOLDER", help="print the table of an earlier check, nothing else")
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 all passed, 1 something did not, 2 the request is invalid, 130 interrupted."""
    asked = parser().parse_args(arguments)
    try:
        if asked.open:
            print(harmless(str(open_check(asked.open))))
            return PASSED
        parts = chosen(asked.parts)
        if not asked.limit > 0:
            raise ValueError(f"--limit is {asked.limit:g}; expected seconds above 0")
        out = fresh_folder(asked.out or Path(f"gpu-check-{asked.device}"))
    except (ValueError, OSError) as error:
        return _refuse(error)
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    asked_for = {"device": asked.device, "parts": ",".join(parts), "limit_s": asked.limit, "began_utc": began}
    try:
        return run_check(Check(out, asked_for), parts, asked.limit)
    except OSError as error:
        said = f"the result could not be written ({error}); free some space, or give --out another place"
        print(f"fsdplab gpu-check: {said}", file=sys.stderr)
        return NOT_PASSED


def _refuse(why: object) -> int:
    print(f"fsdplab gpu-check: {harmless(str(why))}", file=sys.stderr)
    return REFUSED


def chosen(text: str) -> list[str]:
    """The parts asked for, in the check's order, after the environment; all where none is named."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PARTS:
            raise ValueError(f"--parts has {name!r}{did_you_mean(name, PARTS)}; expected some of {', '.join(PARTS)}")
    return [name for name in PARTS if not names or name == "environment" or name in names]


def fresh_folder(folder: Path) -> Path:
    """The folder, made if need be; ValueError where something is in it already."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"--out is {folder}, which is not empty; give a new folder, so that no earlier result is mixed in"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def run_check(check: Check, parts: Sequence[str], limit_s: float) -> int:
    """Run the parts in order, print how each went, and save after each command; the exit status of this one."""
    deadline = time.monotonic() + limit_s
    for name in (UNFINISHED, RECORDS):
        (check.folder / name).mkdir()
    adopt_orphans()
    try:
        for name in parts:
            reason = _stops(check)
            part = check.parts[name] = Part(name, reason=reason)
            if not reason:
                run_part(check, part, deadline)
            check.save()
            how = f"{part.status} ({part.seconds:.1f} s, {len(part.failed())} checks failed)"
            print(f"{name}: {how} {part.reason}".rstrip())
    except Refused as refused:
        shutil.rmtree(check.folder)  # nothing was checked, so nothing stands in the way of the next try
        return _refuse(refused)
    except KeyboardInterrupt:
        check.parts[name].status, check.parts[name].reason = "interrupted", "the parts after this were not run"
        check.save()
        print("fsdplab gpu-check: interrupted")
        return INTERRUPTED
    finally:
        shutil.rmtree(check.folder / UNFINISHED, ignore_errors=True)
    print(f"\n{check}\nwritten to {check.folder}")
    return PASSED if check.passed else NOT_PASSED


def _stops(check: Check) -> str:
    """Why nothing that rests on the environment can be run; "" where it can."""
    if check.parts and not check.gpus:
        return "the environment is not known"
    return next((f"no kernel runs on {gpu['device']}" for gpu in check.gpus if gpu["error"]), "")


def run_part(check: Check, part: Part, deadline: float) -> None:
    """Run the part's command lines, and look at what each has written."""
    began, part.limit_s, part.status = time.monotonic(), deadline - time.monotonic(), "finished"
    commands, slower = commands_of(part.name, check), max(1.0, check.provenance.get("limit_s", 0.0) / LIMIT_S)
    if not commands:
        part.notes.append("left out: it needs two GPUs that ranks may share, or for tests a clone of the repository")
    for command in commands:
        left = min(command.limit_s * slower, deadline - time.monotonic())
        if left < _LEAST_S:
            part.status, part.reason = "out of time", f"no time was left for {command.name}"
            break
        _run_and_look(check, part, command, left)
        part.seconds = time.monotonic() - began
        check.save()
    check.provenance |= part.facts


def _run_and_look(check: Check, part: Part, command: Command, limit_s: float) -> None:
    """Run one command line of a part. What this machine refuses is a note; one that fails is a check that failed."""
    kept, log = RECORDS if " --out " in command.words else UNFINISHED, check.folder / UNFINISHED / "log"
    out = check.folder / kept / command.name.replace(" ", "-")
    print(f"  {command.module} {command.words.replace('{out}', out.name)}", flush=True)
    words = [command.module, *command.words.replace("{out}", str(out)).split()]
    try:
        code, wrong = run_within(words, limit_s, log, command.folder)
    finally:
        _keep_log(check.folder / "log.txt", f"{part.name}: {command.name}", log)
    if code == REFUSED or _LACKING.search(wrong):
        part.notes.append(f"{command.name} is left out: {wrong.removeprefix('fsdplab: ')}")
    elif wrong:
        part.check(f"{command.name} runs", wrong)
    else:
        try:
            command.look(part, command, out if "{out}" in command.words else log)
        except (RecordError, json.JSONDecodeError, OSError) as error:
            part.check(f"{command.name} wrote its result", str(error).splitlines()[0])


def _keep_log(kept: Path, title: str, log: Path) -> None:
    tail = log.read_bytes()[-_LOG_TAIL:].decode(errors="replace")
    with kept.open("a", encoding="utf-8") as file:
        file.write(f"==== {title}\n{without_paths(tail)}\n")


if __name__ == "__main__":
    interrupt_by(signal.SIGTERM, signal.SIGINT)
    sys.exit(main())

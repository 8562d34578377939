"""`python -m fsdplab.gpu_check`: every part in turn, each in processes of its own, within one limit, into one folder.

The folder is complete after every process, so that whatever ends the check, what was found is there. This process loads
no torch: it starts at once, and nothing that breaks torch breaks it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import NoReturn

from fsdplab.common.processes import name_of
from fsdplab.common.pythons import run_of, with_this_checkout
from fsdplab.common.words import did_you_mean, harmless
from fsdplab.gpu_check.check import RECORDS, REFUSED, UNFINISHED, Check, Part, open_check
from fsdplab.gpu_check.commands import PARTS, Command, commands_of, judge, missing_for
from fsdplab.gpu_check.looks import Refused
from fsdplab.sessions.launch.parent_death import adopt_orphans, children, end_children

LIMIT_S = 480.0  # what a borrowed machine grants
PASSED, NOT_PASSED, INTERRUPTED = 0, 1, 130
_LEAST_S = 3.0  # a command is not started with less than this
_PATIENCE_S = 6.0  # for a command that is asked to end
_LOG_TAIL = 300_000  # bytes of one command's output that are kept


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every fsdplab command does."""

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: {message}; see `fsdplab gpu-check --help`\n")


def parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    examples = "Examples:\n  fsdplab gpu-check\n  fsdplab gpu-check --device cpu --parts nccl,correctness"
    flags = _Parser(
        prog="fsdplab gpu-check", description="Check a GPU machine, from the driver to the speed.", epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    cpu = "cpu: a dry run of the same code in tiny sizes"
    flags.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=cpu)
    flags.add_argument("--out", type=Path, help="folder for the result, new or empty; default: gpu-check-DEVICE")
    flags.add_argument("--parts", default="", help=f"comma-separated; default: {','.join(PARTS)}")
    flags.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for everything; default: %(default)g")
    flags.add_argument("--commit", default="", help="the commit of this code, where git cannot be asked")
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
    limit = "" if asked.limit == LIMIT_S else f" --limit {asked.limit:g}"
    command = (
        f"python -m fsdplab.gpu_check --device {asked.device}" + (asked.parts and f" --parts {asked.parts}") + limit
    )
    began = datetime.now(timezone.utc).isoformat(timespec="seconds")
    check = Check(out, {"device": asked.device, "commit": asked.commit, "command": command, "began_utc": began})
    try:
        with _signals_that_interrupt():
            return run_check(check, parts, asked.limit)
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


@contextmanager
def _signals_that_interrupt() -> Iterator[None]:
    """SIGTERM ends the check as Ctrl-C does, also where a shell has started it deaf to Ctrl-C."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_check(check: Check, parts: Sequence[str], limit_s: float) -> int:
    """Run the parts in order, print how each went, and save after each command; the exit status of this one."""
    deadline = time.monotonic() + limit_s
    unfinished = check.folder / UNFINISHED
    for folder in (unfinished, check.folder / RECORDS):
        folder.mkdir()
    adopt_orphans()
    check.save()
    try:
        for name in parts:
            part = Part(name, reason=_stops(check), values=check.values)
            check.parts.append(part)
            if not part.reason:
                run_part(check, part, deadline)
            check.save()
            how = f"{part.status} ({part.seconds:.1f} s, {len(part.failed())} checks failed)"
            print(f"{name}: {how} {part.reason}".rstrip())
            if part.status == "interrupted":
                check.notes.append("interrupted: the parts after this were not run")
                check.save()
                print("fsdplab gpu-check: interrupted")
                return INTERRUPTED
    except Refused as refused:
        shutil.rmtree(check.folder)  # nothing was checked, so nothing stands in the way of the next try
        return _refuse(refused)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"\n{check}\nwritten to {check.folder}")
    return PASSED if check.passed else NOT_PASSED


def _stops(check: Check) -> str:
    """Why nothing that rests on the environment can be run; "" where it can."""
    if not check.parts:
        return ""
    broken = [row["device"] for row in check.gpus if row.get("error")]
    if broken:
        return f"no kernel runs on {broken[0]}"
    return "" if check.gpus else "the environment is not known"


def run_part(check: Check, part: Part, deadline: float) -> None:
    """Run the part's command lines, and look at what each has written.

    What this machine refuses is a note; a command that fails is a check that failed.
    """
    began, part.limit_s = time.monotonic(), deadline - time.monotonic()
    part.status = "finished"
    for number, command in enumerate(commands_of(part.name, check)):
        if lacking := missing_for(command):
            part.note(f"{command.name} is left out: {lacking}")
            continue
        left = min(command.limit_s, deadline - time.monotonic())
        if left < _LEAST_S:
            part.status, part.reason = "out of time", f"no time was left for {command.name}"
            break
        status = _run_and_look(check, part, command, left, number)
        part.seconds = time.monotonic() - began
        check.save()
        if status == "interrupted":
            part.status = status
            break
    check.provenance |= {name: fact for name, fact in part.facts.items() if not check.provenance.get(name)}


def _run_and_look(check: Check, part: Part, command: Command, limit: float, number: int) -> str:
    """Run one command line of a part; its status."""
    out = check.folder / (RECORDS if " --out " in command.words else UNFINISHED) / command.name.replace(" ", "-")
    output = check.folder / UNFINISHED / f"{part.name}-{number}.log"
    print(f"  {command.module} {command.words.replace('{out}', out.name)}", flush=True)
    words = [command.module, *command.words.replace("{out}", str(out)).split()]
    status, wrong = run_program(words, limit, output, command.folder)
    if status != "interrupted":
        judge(part, command, status, wrong, out if "{out}" in command.words else output)
    return status


def run_program(words: Sequence[str], limit: float, output: Path, folder: Path | None = None) -> tuple[str, str]:
    """Run `python -m` with these words, end all that it started, and keep its output; its status and the reason."""
    tied = ("fsdplab.sessions.launch.parent_death", str(os.getpid()))  # it ends with this process
    others = children()
    with output.open("wb") as log:
        process = subprocess.Popen(
            run_of(*tied, *words), env=with_this_checkout(os.environ) | {"PYTHONUNBUFFERED": "1"},
            cwd=folder or output.parent, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status, reason = _ended(process.wait(limit), output)
        except subprocess.TimeoutExpired:
            status, reason = "out of time", f"ended at its limit of {limit:.0f} s"
        except KeyboardInterrupt:
            status, reason = "interrupted", ""
        finally:
            _end(process, others)
    _keep_log(output.parent.parent / "log.txt", output)
    return status, reason


def _ended(code: int, output: Path) -> tuple[str, str]:
    """Status and reason by the exit code: what a rank said that failed, or the last line, in a traceback the error."""
    if code == 0:
        return "finished", ""
    if code < 0:
        return "killed", f"by {name_of(-code)}"
    lines = without_paths(output.read_text(errors="replace")).strip().splitlines()
    lines = [line for line in lines if re.search(r"\bRank \d+ ", line)][:1] or lines[-1:]
    said = lines[0][:400] if lines else f"exit code {code}, nothing printed"
    return ("refused" if code == REFUSED else "failed"), said


def _end(process: subprocess.Popen[bytes], others: set[int]) -> None:
    """Ask the command to end, kill it after its time, and then all that it has left to this process."""
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    end_children(others)


def _keep_log(log: Path, output: Path) -> None:
    kept = output.read_bytes()[-_LOG_TAIL:].decode(errors="replace")
    with log.open("a", encoding="utf-8") as file:
        file.write(f"==== {output.stem}\n{without_paths(kept)}\n")


def without_paths(text: str) -> str:
    """The text without the folders of this machine: a result is made to be handed on."""
    for place, word in ((str(Path(__file__).resolve().parents[2]), "(checkout)"), (sys.prefix, "(python)")):
        text = text.replace(place, word)
    return text


if __name__ == "__main__":
    sys.exit(main())

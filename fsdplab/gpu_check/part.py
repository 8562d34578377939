"""What every part of the check shares: its command line, and the sheet on which it writes as it goes.

A part is a process of its own that may hang, run out of memory or be killed at its limit. So the sheet is saved after
every row, in one move, and whatever was finished before the end is kept.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch

from fsdplab.common.files import write_whole
from fsdplab.sessions.launch.parent_death import end_with_parent

from .runner import REFUSED, RUNNER

DONE, FAILED, INTERRUPTED = 0, 1, 130
Plain: TypeAlias = str | int | float | bool | None
Work = Callable[["Sheet", torch.device], None]


class Refused(ValueError):
    """A part cannot run here; the message is one line that says what to do."""


class Sheet:
    """What one part has found: rows of figures, checks, notes, records; every call saves `<folder>/<part>.json`.

    `seconds` is the part's limit, counted from the sheet's making (`left()`). Example::

        sheet = Sheet("memory", "cpu", folder, seconds=40.0)
        sheet.row(model="gpt-tiny", peak_bytes=1_048_576, mfu=None)
        sheet.check("peak within 3 %", passed=True, got="1.2 %", expected="at most 3 %")
    """

    def __init__(self, part: str, device: str, folder: Path, seconds: float) -> None:
        self.part, self.device, self.folder, self.seconds = part, device, folder, seconds
        self.rows: list[dict[str, Plain]] = []
        self.checks: list[dict[str, str | bool]] = []
        self.notes: list[str] = []
        self.records: list[str] = []
        self._began = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        self._save()

    @property
    def path(self) -> Path:
        """The file that holds the sheet."""
        return self.folder / f"{self.part}.json"

    def left(self) -> float:
        """Seconds of the limit that remain; negative once it has passed. Ask before a row that may not fit."""
        return self.seconds - (time.monotonic() - self._began)

    def row(self, **figures: object) -> None:
        """Adds one flat row. Values are str, int, float, bool or None (scalars of numpy and torch are taken out)."""
        self.rows.append({name: _plain(name, value) for name, value in figures.items()})
        self._save()

    def check(self, name: str, passed: bool, got: object, expected: object) -> None:
        """Adds one judgement: what was looked at, whether it held, what was seen and what should have been."""
        self.checks.append({"name": name, "passed": bool(passed), "got": str(got), "expected": str(expected)})
        self._save()

    def note(self, text: str) -> None:
        """Adds a sentence that the reader of the table should know."""
        self.notes.append(str(text))
        self._save()

    def record(self, folder_name: str) -> None:
        """Names a run record (a folder under the sheet's own, holding `run.json`) that the result should keep."""
        if not (self.folder / folder_name / "run.json").is_file():
            raise FileNotFoundError(
                f"no run record at {self.folder / folder_name}: expected a folder with run.json below {self.folder};"
                " save it there first"
            )
        self.records.append(folder_name)
        self._save()

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """Turns an exception of the block into a failed check called `name`, so that the next row still runs."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.check(name, False, first_line(error), "no exception")

    def _save(self) -> None:
        sheet = {
            "part": self.part, "device": self.device, "rows": self.rows, "checks": self.checks, "notes": self.notes,
            "records": self.records,
        }  # fmt: skip
        write_whole(self.path, json.dumps(sheet, indent=1, allow_nan=False))


def _plain(name: str, value: object) -> Plain:
    """`value` as JSON keeps it; a number that is not finite becomes its word ("nan", "inf")."""
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, (str, int, float, bool, type(None))):
        raise TypeError(
            f"figure {name!r} is a {type(value).__name__}: a row is flat; give str, int, float, bool or None"
        )
    return str(value) if isinstance(value, float) and value - value != 0.0 else value


def first_line(error: BaseException) -> str:
    """The error in one line of at most 300 characters: `RuntimeError: what it said first`."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}"[:300] if said else type(error).__name__


def need(part: str, *packages: str) -> None:
    """Refused where one of the packages is not installed: a borrowed machine may have torch and numpy alone."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise Refused(
            f"the part {part} needs {', '.join(missing)}, not found here; on a machine with network and the same Python"
            f" run `pip install --target wheels {' '.join(packages)}`, copy that folder, and give --wheels wheels"
        )


def part_parser(name: str) -> argparse.ArgumentParser:
    """The three flags of every part; a part with one more adds it before `run_part`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m fsdplab.gpu_check.{name}", description=f"The part {name!r} of fsdplab gpu-check, alone."
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the same work in tiny sizes, as a dry run"
    )
    parser.add_argument("--out", type=Path, required=True, help=f"folder for {name}.json and run records")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="time limit, which the part may plan by; the runner enforces it"
    )
    return parser


def device_of(word: str) -> torch.device:
    """`cpu` or the first CUDA device, made current; Refused where there is none."""
    if word == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Refused(
            f"--device cuda: torch {torch.__version__} finds no CUDA device; run on a machine with a GPU, or pass"
            " --device cpu for a dry run"
        )
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def run_part(name: str, work: Work, asked: argparse.Namespace) -> int:
    """Does the work of a parsed command line; the exit status:
    0 done, 1 an exception, 2 it cannot be, 130 interrupted.
    """
    seconds = _tied_to_runner(asked.seconds)
    try:
        device = device_of(asked.device)
        sheet = Sheet(name, device.type, asked.out.resolve(), seconds)
    except (Refused, OSError) as error:
        return _refuse(error)
    try:
        work(sheet, device)
    except Refused as refused:
        return _refuse(refused)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return FAILED
    return DONE


def _refuse(why: Exception) -> int:
    print(f"error: {why}", file=sys.stderr)
    return REFUSED


def _tied_to_runner(seconds: float) -> float:
    """The seconds that are left. If a runner started this process: it ends with it, and says where it stands before the
    limit, or on a crash.
    """
    runner = os.environ.pop(RUNNER, None)
    if runner is None:
        return seconds
    pid, deadline = runner.split()
    left = float(deadline) - time.monotonic()  # starting Python and torch took its part
    end_with_parent(int(pid))
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, left - 1.0))
    return left


def part_main(name: str, work: Work, arguments: Sequence[str] | None = None) -> int:
    """The `main` of a part: flags, device, sheet, exit status. A part ends with::

    if __name__ == "__main__":
        sys.exit(part_main("memory", work))
    """
    return run_part(name, work, part_parser(name).parse_args(arguments))

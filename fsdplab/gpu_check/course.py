"""The course as scripts: the code cells of notebooks 01 to 13 run on this machine, several notebooks at once where
cores allow.

On a machine without plotly and Jupyter the figures and sliders are left out and counted; sessions, checks and tables
run. What the limit did not hold is named.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .cells import NotebookError, script_of
from .part import REFUSED, Sheet, part_parser, run_part
from .runner import CHECKOUT

FIRST, LAST = 1, 13
ON_CPU = ("08",)  # a dry run shows that cells run; all of them would take it many minutes
# The longest first, so that none of them begins last.
HEAVY_FIRST = ("13", "11", "07", "01", "09", "05", "12", "04", "06", "03", "08")
_CORES_EACH = 2  # what the lessons are made for
_LOOK_EVERY_S = 0.1
_CLOSING_S = 3.0
_NOTHING: dict[str, Any] = {"cells_in_all": 0, "cells": [], "runs_on": {}, "ended": False}


@dataclass(frozen=True)
class Attempt:
    """One notebook to run. `on_the_gpu`: sessions that choose their device themselves take the GPU, which their ranks
    share.
    """

    number: str
    notebook: Path
    on_the_gpu: bool

    @property
    def name(self) -> str:
        """Its folder: `07`, or `07-on-the-gpu`."""
        return f"{self.number}-on-the-gpu" if self.on_the_gpu else self.number


@dataclass
class Running:
    """One attempt in a process of its own."""

    attempt: Attempt
    result: Path
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)


def notebooks(folder: Path, wanted: Sequence[str]) -> dict[str, Path]:
    """Number -> notebook, the heaviest first: those wanted, else all of 01 to 13 that exist. ValueError for one that
    does not.
    """
    found = {path.name[:2]: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    missing = [number for number in wanted if number not in found]
    if missing:
        raise ValueError(
            f"--notebooks has {missing[0]!r}; expected some of"
            f" {', '.join(found) or 'none: there are no notebooks beside this package'}"
        )
    chosen = wanted or [number for number in found if FIRST <= int(number) <= LAST]
    return {
        number: found[number]
        for number in sorted(chosen, key=lambda each: (HEAVY_FIRST.index(each) if each in HEAVY_FIRST else -1, each))
    }


def run_all(sheet: Sheet, waiting: list[Attempt], folder: Path, at_once: int) -> None:
    """Runs the notebooks, at most `at_once` at a time, and writes a row and a check for each as it ends; all are gone
    at the end.

    One that fails on the GPU is run once more, last, as it would run for a learner there: with ranks on CPU.
    """
    waiting = list(waiting)
    going: list[Running] = []
    try:
        while (waiting or going) and sheet.left() > _CLOSING_S:
            while waiting and len(going) < at_once:
                going += _started(sheet, waiting.pop(0), folder)
            for one in [one for one in going if one.process.poll() is not None]:
                going.remove(one)
                report(sheet, one, "ran" if one.process.returncode == 0 else "failed")
                if one.process.returncode and one.attempt.on_the_gpu:
                    waiting.append(replace(one.attempt, on_the_gpu=False))
            time.sleep(_LOOK_EVERY_S)
    finally:
        _end([one.process for one in going])
    for one in going:
        report(sheet, one, "did not fit")
    for attempt in waiting:
        sheet.row(**row_of(attempt, "not started", _NOTHING, 0.0))
    late = sorted([*(one.attempt.name for one in going), *(attempt.name for attempt in waiting)])
    sheet.check(
        "every notebook fitted into the limit",
        not late,
        f"not {', '.join(late)}" if late else "all of them",
        "all of them",
    )


def _started(sheet: Sheet, attempt: Attempt, folder: Path) -> list[Running]:
    """The notebook's process; none where it cannot be exported, which is a failed check."""
    place = folder / attempt.name
    place.mkdir(parents=True, exist_ok=True)
    script, result = place / f"notebook_{attempt.number}.py", place / "result.json"
    try:
        script.write_text(script_of(attempt.notebook), encoding="utf-8")
    except NotebookError as error:
        sheet.check(f"notebook {attempt.name} is a script", False, error, "cells and magics that a script can say")
        return []
    environment = {
        **os.environ,
        "FSDPLAB_HOME": str(place / "my_fsdp"),
        "FSDPLAB_SHARE_A_GPU": "1" if attempt.on_the_gpu else "",
    }
    with (place / "log.txt").open("wb") as log:
        command = [sys.executable, "-m", "fsdplab.gpu_check.script", str(script), str(result)]
        process = subprocess.Popen(
            command, cwd=place, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    return [Running(attempt, result, process)]


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ctrl-C for all, at which sessions end their ranks; what has not ended two seconds later is killed."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + _CLOSING_S - 1.0
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def report(sheet: Sheet, one: Running, status: str) -> None:
    """The row of one notebook, its check, and the end of what it printed where it failed."""
    found = _result(one.result)
    cells = found["cells"]
    failed = next((cell for cell in cells if cell["error"]), None) if status != "did not fit" else None
    if status == "failed" and failed is None:
        failed = {
            "number": cells[-1]["number"] if cells else 0,
            "id": "its process",
            "error": f"ended with code {one.process.returncode}",
        }
    row = row_of(one.attempt, status, found, time.monotonic() - one.began)
    sheet.row(**row, failed_cell=failed and f"{failed['number']} {failed['id']}", error=failed and failed["error"])
    if failed:
        print(f"==== notebook {one.attempt.name}\n{_tail(one.result.parent / 'log.txt')}", flush=True)
    if status == "did not fit":
        return
    got = (
        f"{status} at cell {failed['number']} ({failed['id']}): {failed['error']}"
        if failed
        else f"{status}, {row['cells_ran']} of {row['cells']} cells"
    )
    sheet.check(
        f"notebook {one.attempt.name} runs to its end", status == "ran", got, "every cell, or only packages missing"
    )


def row_of(attempt: Attempt, status: str, found: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The figures of one notebook: cells in all, run (wholly or in part), left out as a whole, what they needed, and
    where its records ran.
    """
    cells = found["cells"]
    whole = [cell for cell in cells if cell["ran"] and not cell["left_out"] and not cell["error"]]
    partly = [cell for cell in cells if cell["ran"] and cell["left_out"] and not cell["error"]]
    return {
        "notebook": attempt.number, "on_the_gpu": attempt.on_the_gpu, "status": status,
        "cells": found["cells_in_all"], "cells_ran": len(whole) + len(partly), "of_these_in_part": len(partly),
        "left_out": sum(1 for cell in cells if cell["left_out"] and not cell["ran"]),
        "needs": " ".join(sorted({package for cell in cells for package in cell["needs"]})) or None,
        "runs_on_cuda": found["runs_on"].get("cuda", 0), "runs_on_cpu": found["runs_on"].get("cpu", 0),
        "seconds": round(seconds, 1),
    }  # fmt: skip


def _result(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it died before its first cell
        return _NOTHING


def _tail(log: Path, characters: int = 4000) -> str:
    return log.read_text(errors="replace")[-characters:]


def main(arguments: list[str] | None = None) -> int:
    """The part with its one flag more."""
    parser = part_parser("course")
    parser.add_argument(
        "--notebooks",
        default="",
        help=f"numbers, comma-separated; default: all from 01 to 13 on cuda, {','.join(ON_CPU)} on cpu",
    )
    parser.add_argument("--folder", type=Path, default=CHECKOUT / "notebooks", help="where the notebooks lie")
    asked = parser.parse_args(arguments)
    wanted = tuple(each.strip() for each in asked.notebooks.split(",") if each.strip()) or (
        ON_CPU if asked.device == "cpu" else ()
    )
    try:
        chosen = notebooks(asked.folder, wanted)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    return run_part("course", lambda sheet, device, folder, seconds: _work(sheet, chosen, device, folder), asked)


def _work(sheet: Sheet, chosen: dict[str, Path], device: torch.device, folder: Path) -> None:
    if not chosen:
        return sheet.check(
            "there are notebooks", False, "none beside this package", "run from a checkout of the repository"
        )
    at_once = max(1, (os.cpu_count() or 1) // _CORES_EACH)
    sheet.note(
        f"{len(chosen)} notebooks, {at_once} at once; runs_on_cuda counts their run records that were made on the GPU"
    )
    run_all(sheet, [Attempt(number, path, device.type == "cuda") for number, path in chosen.items()], folder, at_once)


if __name__ == "__main__":
    sys.exit(main())

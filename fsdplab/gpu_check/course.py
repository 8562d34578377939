"""The course on this machine: each notebook run to its end, as the teacher edition, several at once where cores allow.

A notebook is run as `fsdplab course test` runs it, in a process of its own and in a folder of its own. That needs the
notebook tools; where they are missing the part is refused. What the limit did not hold is named.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fsdplab.common.places import shared_folder

from .part import Refused, Sheet, need, part_parser, run_part
from .runner import end_tree, last_line

FIRST, LAST = 1, 13
ON_CPU = ("08",)  # a dry run shows that notebooks run; all of them would take it many minutes
# The longest first, so that none of them begins last.
HEAVY_FIRST = ("13", "11", "07", "01", "09", "05", "12", "04", "06", "03", "08")
NEEDS = ("nbclient", "nbformat", "ipykernel", "ipywidgets", "anywidget", "plotly")
_CORES_EACH = 2  # what the lessons are made for
_MOST_S = 240.0  # of one notebook, so that one that hangs leaves time for others
_CLOSING_S = 3.0


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


@dataclass(frozen=True)
class Ended:
    """How an attempt went: `ran`, `failed` (with its first error), `did not fit` into its limit, or `not started`."""

    attempt: Attempt
    status: str
    seconds: float = 0.0
    error: str | None = None


def notebooks(folder: Path, wanted: Sequence[str]) -> dict[str, Path]:
    """Number -> notebook, the heaviest first: those wanted, else all of 01 to 13 that exist. Refused for one that does
    not.
    """
    found = {path.name[:2]: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    missing = [number for number in wanted if number not in found]
    if missing:
        raise Refused(
            f"--notebooks has {missing[0]!r}; expected some of"
            f" {', '.join(found) or 'none: there are no notebooks beside this package'}"
        )
    chosen = wanted or [number for number in found if FIRST <= int(number) <= LAST]
    return {
        number: found[number]
        for number in sorted(chosen, key=lambda each: (HEAVY_FIRST.index(each) if each in HEAVY_FIRST else -1, each))
    }


def run_all(sheet: Sheet, attempts: Sequence[Attempt], at_once: int) -> list[Attempt]:
    """Run the notebooks, at most `at_once` at a time, and write a row and a check for each as it ends; those that
    failed, and none is left running.
    """
    failed = []
    with ThreadPoolExecutor(at_once) as pool:
        for done in as_completed([pool.submit(run_one, sheet, attempt) for attempt in attempts]):
            ended = done.result()
            report(sheet, ended)
            failed += [ended.attempt] if ended.status == "failed" else []
    return failed


def run_one(sheet: Sheet, attempt: Attempt) -> Ended:
    """One notebook in a process of its own, which is ended with all that it started when its time is up."""
    limit = min(sheet.left() - _CLOSING_S, _MOST_S)
    if limit <= 0:
        return Ended(attempt, "not started")
    place = sheet.folder / attempt.name
    place.mkdir(parents=True, exist_ok=True)
    shutil.copy(attempt.notebook, place)
    began = time.monotonic()
    with (place / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "fsdplab.teaching", "test", "--edition", "teacher", str(place)],
            env={**os.environ, "FSDPLAB_SHARE_A_GPU": "1" if attempt.on_the_gpu else ""},
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return Ended(attempt, "did not fit", time.monotonic() - began)
    finally:
        end_tree(process)
    seconds = time.monotonic() - began
    return Ended(attempt, "failed", seconds, first_error(place / "log.txt")) if code else Ended(attempt, "ran", seconds)


def first_error(log: Path) -> str:
    """Cell and error of the first that failed, as `fsdplab course test` says it; else the last line printed."""
    told = re.search(r": FAILED\n(.*?)(, \d+ s)?$", log.read_text(errors="replace"), re.MULTILINE)
    return told[1][:300] if told else last_line(log) or "nothing was printed"


def report(sheet: Sheet, ended: Ended) -> None:
    """The row of one notebook, its check, and what it printed where it failed."""
    attempt = ended.attempt
    sheet.row(
        notebook=attempt.number, on_the_gpu=attempt.on_the_gpu, status=ended.status, seconds=round(ended.seconds, 1),
        error=ended.error,
    )  # fmt: skip
    if ended.status in ("ran", "failed"):
        got = f"{ended.status}{f': {ended.error}' if ended.error else ''}"
        sheet.check(f"notebook {attempt.name} runs to its end", ended.status == "ran", got, "every cell")
    if ended.status == "failed":
        log = sheet.folder / attempt.name / "log.txt"
        print(f"==== notebook {attempt.name}\n{log.read_text(errors='replace')[-4000:]}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """The part with flags of its own."""
    parser = part_parser("course")
    parser.add_argument(
        "--notebooks",
        default="",
        help=f"numbers, comma-separated; default: all from 01 to 13 on cuda, {','.join(ON_CPU)} on cpu",
    )
    parser.add_argument("--folder", type=Path, default=shared_folder("notebooks"), help="where the notebooks lie")
    asked = parser.parse_args(arguments)
    return run_part("course", lambda sheet, device: _work(sheet, device, asked), asked)


def _work(sheet: Sheet, device: torch.device, asked: argparse.Namespace) -> None:
    wanted = tuple(each.strip() for each in asked.notebooks.split(",") if each.strip())
    chosen = notebooks(asked.folder, wanted or (ON_CPU if device.type == "cpu" else ()))
    need("course", *NEEDS)
    if not chosen:
        where = "run from a checkout of the repository"
        return sheet.check("there are notebooks", False, "none beside this package", where)
    at_once = max(1, (os.cpu_count() or 1) // _CORES_EACH)
    sheet.note(f"{len(chosen)} notebooks, {at_once} at once")
    attempts = [Attempt(number, path, device.type == "cuda") for number, path in chosen.items()]
    again = [replace(each, on_the_gpu=False) for each in run_all(sheet, attempts, at_once) if each.on_the_gpu]
    run_all(sheet, again, at_once)  # as they would run for a learner there: with ranks on CPU
    late = sorted(str(row["notebook"]) for row in sheet.rows if row["status"] in ("did not fit", "not started"))
    got = f"not {', '.join(late)}" if late else "all of them"
    sheet.check("every notebook fitted into the limit", not late, got, "all of them")


if __name__ == "__main__":
    sys.exit(main())

"""How long the course takes: each notebook's minutes and its measured machine time, and the tracks for a day and less.

Minutes are those that a notebook's title names, for reading and exercises. Machine seconds come from a run of all
notebooks (`fsdplab course test --times FILE`), one at a time; the course's own are in `data/course_times.csv`.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fsdplab.common.files import read_file, write_output
from fsdplab.common.places import shared_folder

from .course import CourseError, notebooks_in, read
from .course_run import NotebookRun

TIMES = "course_times.csv"
_LARGEST_FILE = 10**6  # bytes
_COLUMNS = ("notebook", "edition", "seconds", "bytes", "outcome")
_MINUTES = re.compile(r"\*(\d+) minutes")


@dataclass(frozen=True)
class Track:
    """Lessons for a given time: `minutes` replaces a lesson's own where it is only shown by the teacher."""

    name: str
    lessons: tuple[str, ...]
    at_most: int  # minutes
    shown: Mapping[str, int]  # a lesson -> minutes for which the teacher shows it


TRACKS = (
    Track("half a day", ("00", "01", "02", "05"), 195, {"11": 20}),
    Track("a day", ("00", "01", "02", "05", "07", "10", "11", "14"), 360, {"17": 25}),
)


@dataclass(frozen=True)
class Cost:
    """What a notebook takes: minutes of a learner, seconds of the machine (None where it was not run), and bytes."""

    notebook: str
    minutes: int
    seconds: float | None
    nbytes: int


def costs(sources: Path | str, times: Path | None = None) -> dict[str, Cost]:
    """Return what every notebook of a folder takes, by its number; CourseError where one names no minutes."""
    own_times = shared_folder("data") / TIMES
    measured = {}
    if times or own_times.is_file():
        measured = seconds_of(times or own_times)
    by_number = {}
    for path in notebooks_in(sources):
        minutes = _MINUTES.search(read(path).cells[0].source)
        if minutes is None:
            raise CourseError(f"{path.name} names no minutes; its first cell says, for example, *50 minutes. ...*")
        number = path.name[:2]
        by_number[number] = Cost(path.name, int(minutes[1]), measured.get(path.name), path.stat().st_size)
    return by_number


def seconds_of(times: Path) -> dict[str, float]:
    """Return the longest measured run of each notebook, over its editions; CourseError for a file of anything else."""
    longest: dict[str, float] = {}
    try:
        for row in csv.DictReader(read_file(times, _LARGEST_FILE).decode().splitlines()):
            seconds = float(row["seconds"])
            if not 0 <= seconds < math.inf:
                raise ValueError(f"{seconds} seconds")
            longest[row["notebook"]] = max(seconds, longest.get(row["notebook"], 0.0))
    except (KeyError, TypeError, ValueError):
        longest.clear()
    if not longest:
        raise CourseError(f"{times} holds no times of notebooks; expected a file of `fsdplab course test --times FILE`")
    return longest


def write_times(path: Path, runs: Sequence[NotebookRun], directory: Path) -> None:
    """Write the runs of a course as CSV, a notebook and edition a row."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(_COLUMNS)
    for run in runs:
        nbytes = (directory / run.notebook).stat().st_size
        outcome = "failed" if run.failure else "ended"
        rows.writerow([run.notebook, run.edition, f"{run.seconds:.0f}", nbytes, outcome])
    write_output(path, text.getvalue())


def table_of(by_number: Mapping[str, Cost]) -> list[str]:
    """Return the lines of a table: a notebook each, then what all of them take, then each track."""
    lines = [f"{'notebook':<46}{'minutes':>8}{'machine, s':>12}{'kB':>6}"]
    measured = []
    for cost in by_number.values():
        seconds = ""
        if cost.seconds is not None:
            measured.append(cost.seconds)
            seconds = f"{cost.seconds:.0f}"
        lines.append(f"{cost.notebook:<46}{cost.minutes:>8}{seconds:>12}{cost.nbytes / 1e3:>6.0f}")
    if measured:
        longest, total = f"at most {max(measured):.0f} s", f"all {sum(measured) / 60:.0f} min"
        lines.append(f"machine time: median {median(measured):.0f} s, {longest}, {total}")
    lines.append("")
    for track in TRACKS:
        lines.append(line_of(track, by_number))
    return lines


def minutes_of(track: Track, by_number: Mapping[str, Cost]) -> float:
    """Return the minutes of a track with its machine time, of those of its lessons that there are."""
    minutes = 0.0
    for name in track.lessons:
        if name in by_number:
            cost = by_number[name]
            minutes += cost.minutes + (cost.seconds or 0.0) / 60
    for name, shown_minutes in track.shown.items():
        if name in by_number:
            minutes += shown_minutes
    return minutes


def line_of(track: Track, by_number: Mapping[str, Cost]) -> str:
    """Return a track's line: `half a day: 00, 01, 02, 05; shown: 11 (20 min): 3:04 of at most 3:15`."""
    lessons = ", ".join(name for name in track.lessons if name in by_number)
    shown = ", ".join(f"{name} ({minutes} min)" for name, minutes in track.shown.items() if name in by_number)
    if shown:
        lessons = f"{lessons}; shown: {shown}"
    taken = minutes_of(track, by_number)
    line = f"{track.name}: {lessons}: {clock(taken)} of at most {clock(track.at_most)}"
    if taken > track.at_most:
        line = f"{line} TOO LONG"
    return line


def clock(minutes: float) -> str:
    """Return minutes as hours and minutes: `3:05` for 185."""
    whole = round(minutes)
    return f"{whole // 60}:{whole % 60:02}"

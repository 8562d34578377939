"""How long the course takes: each notebook's minutes and its measured machine time, and the tracks for a day and less.

Minutes are those that a notebook's title names, for reading and exercises. Machine seconds come from a run of all
notebooks (`fsdplab course test --times FILE`), one at a time; the course's own are in `data/course_times.csv`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fsdplab.common.places import shared_folder

from .course import CourseError, notebooks_in, read
from .course_run import NotebookRun

TIMES = "course_times.csv"
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
    """Every notebook of a folder by its number; CourseError where one names no minutes."""
    measured = seconds_of(times or shared_folder("data") / TIMES)
    found = {}
    for path in notebooks_in(sources):
        said = _MINUTES.search(read(path).cells[0].source)
        if said is None:
            raise CourseError(f"{path.name} names no minutes; its first cell says, for example, *50 minutes. ...*")
        seconds = measured.get(path.name)
        found[path.name[:2]] = Cost(path.name, int(said.group(1)), seconds, path.stat().st_size)
    return found


def seconds_of(times: Path) -> dict[str, float]:
    """The longest measured run of each notebook, over its editions; {} where nothing was measured."""
    if not times.is_file():
        return {}
    longest: dict[str, float] = {}
    with times.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            longest[row["notebook"]] = max(float(row["seconds"]), longest.get(row["notebook"], 0.0))
    return longest


def write_times(path: Path, runs: Sequence[NotebookRun], directory: Path) -> None:
    """The runs of a course as CSV, a notebook and edition a row."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(_COLUMNS)
        for run in runs:
            nbytes = (directory / run.notebook).stat().st_size
            rows.writerow(
                [run.notebook, run.edition, f"{run.seconds:.0f}", nbytes, run.failure and "failed" or "ended"]
            )


def table_of(found: Mapping[str, Cost]) -> list[str]:
    """Lines of a table: a notebook each, then what all of them take, then each track."""
    lines = [f"{'notebook':<46}{'minutes':>8}{'machine, s':>12}{'kB':>6}"]
    for each in found.values():
        seconds = "" if each.seconds is None else f"{each.seconds:.0f}"
        lines.append(f"{each.notebook:<46}{each.minutes:>8}{seconds:>12}{each.nbytes / 1e3:>6.0f}")
    measured = [each.seconds for each in found.values() if each.seconds is not None]
    if measured:
        most, every = f"at most {max(measured):.0f} s", f"all {sum(measured) / 60:.0f} min"
        lines.append(f"machine time: median {median(measured):.0f} s, {most}, {every}")
    return [*lines, "", *(line_of(track, found) for track in TRACKS)]


def minutes_of(track: Track, found: Mapping[str, Cost]) -> float:
    """Minutes of a track with its machine time, of those of its lessons that there are."""
    there = [found[name] for name in track.lessons if name in found]
    shown = [minutes for name, minutes in track.shown.items() if name in found]
    return sum(each.minutes + (each.seconds or 0.0) / 60 for each in there) + sum(shown)


def line_of(track: Track, found: Mapping[str, Cost]) -> str:
    """`half a day: 00, 01, 02, 05; shown: 11 (20 min): 3:04 of at most 3:15`."""
    names = ", ".join(name for name in track.lessons if name in found)
    shown = ", ".join(f"{name} ({minutes} min)" for name, minutes in track.shown.items() if name in found)
    taken = minutes_of(track, found)
    verdict = "" if taken <= track.at_most else " TOO LONG"
    beside = f"; shown: {shown}" if shown else ""
    return f"{track.name}: {names}{beside}: {clock(taken)} of at most {clock(track.at_most)}{verdict}"


def clock(minutes: float) -> str:
    """`3:05` for 185 minutes."""
    whole = round(minutes)
    return f"{whole // 60}:{whole % 60:02}"

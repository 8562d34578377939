"""The cost of starting: the same requests cold (new Pythons, by torch.distributed.run) and warm (forked), in one run.

    python -m tests.starts [--repetitions 3] [--quick] [--json FILE]

A quantity is a name and two callables; each is called once unmeasured where it is warm (the starter has then imported
what it forks), and then a few times, cold and warm in turn, so that a machine that slows down slows both. Commands are
timed as whole processes, as a user waits for them. Cold is what a `%%ranks` cell and a check took before ranks were
forked: torch.distributed.run and new Pythons.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Table

from fsdplab.common.files import write_output
from fsdplab.common.pythons import run_of, with_this_checkout
from fsdplab.sessions.launch import warm
from fsdplab.sessions.remote_call import call_on_ranks
from fsdplab.sessions.run_and_record import run
from fsdplab.sessions.spec import RunSpec
from fsdplab.teaching.core.cell_runs import run_ranks
from fsdplab.teaching.core.checking import grade
from fsdplab.teaching.core.course_state import current, open_course
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.registry import find

COLD, WARM = "torchrun", "warm"
_ANSWER = "def answer(rank, world_size, payload):\n    return rank\n"
_COMMANDS = {
    "import fsdplab": ("-c", "import fsdplab"),
    "fsdplab --help": run_of("fsdplab", "--help")[1:],
    "fsdplab doctor": run_of("fsdplab", "doctor")[1:],
}
FIRST_ROW, WHOLE = "fsdplab compare: first row", "fsdplab compare: all of it"
CHECKED = "05.reduce"  # runs on ranks, three of them
_CELL = "import torch.distributed as dist\nprint(dist.get_rank())\n"
OnRow = Callable[["Row"], None]


class StartsFailed(RuntimeError):
    """A timed command failed; the message is one line."""


@dataclass(frozen=True)
class Row:
    """Seconds of one quantity, every repetition; `cold` is empty where cold and warm are the same."""

    name: str
    cold: tuple[float, ...]
    warm: tuple[float, ...]

    def median(self, which: str) -> float | None:
        """The median of `"cold"` or `"warm"`; None where it was not measured."""
        seconds = getattr(self, which)
        return statistics.median(seconds) if seconds else None

    @property
    def ratio(self) -> float | None:
        """Cold over warm: 60.0 where ranks that took 6 s take 0.1 s."""
        cold, warm = self.median("cold"), self.median("warm")
        return cold / warm if cold and warm else None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: the name, all seconds, medians and their ratio."""
        medians = {f"{which}_median_s": self.median(which) for which in ("cold", "warm")}
        return {"name": self.name, "cold_s": list(self.cold), "warm_s": list(self.warm), **medians, "ratio": self.ratio}


def in_turn(name: str, ask: Callable[[str], object], repetitions: int) -> Row:
    """Time `ask("torchrun")` and `ask("warm")` in turn, after one warm call that is not counted."""
    ask(WARM)
    seconds: dict[str, list[float]] = {COLD: [], WARM: []}
    for _ in range(repetitions):
        for start in (COLD, WARM):
            seconds[start].append(_seconds(lambda: ask(start)))
    return Row(name, tuple(seconds[COLD]), tuple(seconds[WARM]))


def of_ranks(repetitions: int, on_row: OnRow) -> None:
    """Ranks that answer, and a whole run of gpt-tiny."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "answer.py"
        source.write_text(_ANSWER)
        on_row(
            in_turn(
                "ranks that answer",
                lambda start: call_on_ranks(source, "answer", world_size=2, start=start, time_limit=90.0),
                repetitions,
            )
        )
    on_row(
        in_turn(
            "run, gpt-tiny, 2 steps", lambda start: run(RunSpec(model="gpt-tiny", steps=2, start=start)), repetitions
        )
    )


def of_the_course(repetitions: int, on_row: OnRow) -> None:
    """A cell on ranks, and a check of notebook 05."""
    with tempfile.TemporaryDirectory() as folder:
        open_course("learner", folder)
        current().workspace.save(CHECKED, find(CHECKED, Exercise).reference)
        for name, ask in (("%%ranks cell", lambda: run_ranks("2", _CELL)), (f"check({CHECKED!r})", _check_once)):
            on_row(in_turn(name, lambda start: _started(start, ask), repetitions))


def _check_once() -> None:
    verdict = grade(CHECKED)
    if not verdict.passed:
        raise StartsFailed(str(verdict))


def _started(start: str, ask: Callable[[], None]) -> None:
    """Call `ask` with ranks of torchrun, or with forked ones, and discard its output."""
    how: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if start == COLD:
        how = mock.patch.object(warm, "why_not", lambda: "torchrun is timed")
    with how, contextlib.redirect_stdout(io.StringIO()):
        ask()


def of_commands(repetitions: int, on_row: OnRow) -> None:
    """Commands without ranks, each a new process."""
    for name, arguments in _COMMANDS.items():
        command = [sys.executable, *arguments]
        on_row(Row(name, (), tuple(_seconds(lambda: _succeed(command)) for _ in range(repetitions))))


def of_compare(on_row: OnRow, settings: Sequence[str] = ()) -> None:
    """`fsdplab compare` once cold and once warm: until its first row, and until its end."""
    cold, warm = (_rows_of_compare([*settings, "--start", start]) for start in (COLD, WARM))
    on_row(Row(FIRST_ROW, (cold[0],), (warm[0],)))
    on_row(Row(WHOLE, (cold[1],), (warm[1],)))


def _rows_of_compare(settings: Sequence[str]) -> tuple[float, float]:
    """Seconds until the first row (the line after the headline), and until the end."""
    began, first, lines = time.perf_counter(), None, []
    command = [sys.executable, "-u", *run_of("fsdplab", "compare", *settings)[1:]]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_environment(),
    ) as process:
        assert process.stdout is not None  # a pipe
        for line in process.stdout:
            lines.append(line)
            if len(lines) == 2:
                first = time.perf_counter() - began
    if process.returncode or first is None:
        raise StartsFailed(
            f"`fsdplab compare {' '.join(settings)}` ended with exit code {process.returncode}: {_last(''.join(lines))}"
        )
    return first, time.perf_counter() - began


def _succeed(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=_environment())
    if done.returncode:
        raise StartsFailed(
            f"`{' '.join(command)}` ended with exit code {done.returncode}: {_last(done.stderr or done.stdout)}"
        )


def _environment() -> dict[str, str]:
    """A checkout that is not installed is found too, wherever the command runs."""
    return with_this_checkout(os.environ)


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")


def _seconds(ask: Callable[[], object]) -> float:
    began = time.perf_counter()
    ask()
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print each row as it comes and then the table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description="What starting costs, cold beside warm.")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="leave compare out, which takes minutes")
    parser.add_argument("--json", type=Path, help="write all seconds, medians and ratios to this file")
    asked = parser.parse_args(arguments)
    if asked.repetitions < 1:
        parser.error(f"--repetitions is {asked.repetitions}; expected at least 1")
    console, rows = Console(width=100), []

    def keep(row: Row) -> None:
        rows.append(row)
        console.print("  ".join(cells(row)), highlight=False, style="dim")

    for measured in (of_ranks, of_the_course, of_commands):
        measured(asked.repetitions, keep)
    if not asked.quick:
        of_compare(keep)
    table = Table("what", "cold", "warm", "cold / warm", box=None)
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    if asked.json is not None:
        found = {"repetitions": asked.repetitions, "rows": [row.as_dict() for row in rows]}
        write_output(asked.json, json.dumps(found, indent=1) + "\n")


def cells(row: Row) -> tuple[str, str, str, str]:
    """The row as the table shows it: name, cold, warm, ratio."""
    cold, warm, ratio = row.median("cold"), row.median("warm"), row.ratio
    return row.name, _shown(cold), _shown(warm), "–" if ratio is None else f"{ratio:.1f}"


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


if __name__ == "__main__":
    main()

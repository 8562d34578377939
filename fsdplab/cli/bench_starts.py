"""`fsdplab bench --starts`: the cost of starting, cold and warm, in one table of one run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from fsdplab.cli.errors import refusals, refuse
from fsdplab.cli.outputs import Outputs, check_file
from fsdplab.common.files import write_output
from fsdplab.records import FORMAT

if TYPE_CHECKING:
    from fsdplab.sessions.starts import Row


def bench_starts(repetitions: int, quick: bool, json_file: Path | None) -> None:
    """Measure, print each row as it comes and then the table, and write JSON if asked; `quick` leaves `fsdplab compare`
    out.
    """
    from fsdplab.sessions.starts import Row, StartsFailed, of_commands, of_compare, of_ranks

    if repetitions < 1:
        refuse(f"--repetitions is {repetitions}; expected at least 1")
    if json_file is not None:
        check_file("--json", json_file)
    console, rows = Outputs().console(), []

    def keep(row: Row) -> None:
        rows.append(row)
        console.print("  ".join(cells(row)), highlight=False, style="dim")

    with refusals():
        try:
            of_ranks(repetitions, keep)
            for row in _of_the_course(repetitions):
                keep(Row(row["name"], tuple(row["cold_s"]), tuple(row["warm_s"])))
            of_commands(repetitions, keep)
            if not quick:
                of_compare(keep)
        except StartsFailed as error:
            refuse(str(error))
    console.print(_table(rows))
    console.print(
        f"measured: medians of {repetitions}, cold and warm in turn (compare: once each); cold: torchrun and new"
        " Pythons",
        highlight=False,
    )
    if json_file is not None:
        found = {"format": FORMAT, "repetitions": repetitions, "rows": [row.as_dict() for row in rows]}
        write_output(json_file, json.dumps(found, indent=1) + "\n")


def _of_the_course(repetitions: int) -> list[dict[str, Any]]:
    """The rows of the course, measured in a separate process (the command line imports no `teaching`); none without the
    notebook tools.
    """
    if importlib.util.find_spec("IPython") is None:
        return []
    done = subprocess.run(
        [sys.executable, "-m", "fsdplab.teaching.authoring.starts", str(repetitions)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        refuse(
            "the course's part could not be measured:"
            f" {(done.stderr.strip().splitlines() or ['it printed nothing'])[-1]}"
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


def cells(row: Row) -> tuple[str, str, str, str]:
    """The row as the table shows it: name, cold, warm, ratio."""
    cold, warm, ratio = row.median("cold"), row.median("warm"), row.ratio
    return row.name, _seconds(cold), _seconds(warm), "–" if ratio is None else f"{ratio:.1f}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, header_style="bold")
    for name in ("what", "cold", "warm", "cold / warm"):
        table.add_column(name, justify="left" if name == "what" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    return table

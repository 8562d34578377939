"""Showing finished runs: the table with its footer in the terminal, the page and the JSON as files."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fsdplab.cli_errors import refuse
from fsdplab.cli_exports import Exports
from fsdplab.cli_findings import print_findings
from fsdplab.figures.table import AGREE, COLUMNS, DIFFER, EQUAL, LEGEND, cells, verdict
from fsdplab.figures.units import MISSING
from fsdplab.figures.view import RunView, provenance, view
from fsdplab.records import RecordError, RunRecord, comparison_json

WIDTH = 146  # columns of the table where no terminal says how wide it is
STYLES = {AGREE: "bold green", EQUAL: "green", DIFFER: "bold red", "out of memory": "bold red", "failed": "bold red"}
NUMBERS = ("step", "tokens/s", "peak", "sent", "loss")


@dataclass(frozen=True)
class Outputs:
    """Where results go besides the terminal: JSON (a file, or `-` for stdout), a page, a folder of records."""

    json_file: str | None = None
    html_file: Path | None = None
    keep: Path | None = None

    def check(self) -> Outputs:
        """Refuse, before anything runs, a place that cannot be written and a page that cannot be drawn."""
        if self.html_file and importlib.util.find_spec("plotly") is None:
            refuse('--html needs plotly; run: pip install "fsdplab[lab]"')
        for flag, path in (("--json", self.json_file), ("--html", self.html_file)):
            if path and str(path) != "-":
                _check_place(flag, Path(path))
        if self.keep and self.keep.exists() and not self.keep.is_dir():
            refuse(f"--keep {self.keep} is a file; expected a folder")
        return self

    def console(self) -> Console:
        """Where the table goes: stdout, or stderr when stdout carries the JSON; wide where it is no terminal."""
        console = Console(stderr=self.json_file == "-")
        return console if console.is_terminal else Console(stderr=self.json_file == "-", width=WIDTH)

    def write(self, comparison: dict, shown: Sequence[RunView], records: Sequence[RunRecord]) -> None:
        """Write what was asked for."""
        text = json.dumps(comparison, indent=1)
        if self.json_file == "-":
            sys.stdout.write(text + "\n")
        elif self.json_file:
            Path(self.json_file).write_text(text + "\n", encoding="utf-8")
        if self.html_file:
            from fsdplab.figures import comparison_page, findings_of

            self.html_file.write_text(
                comparison_page(comparison, shown, findings_of(records), records), encoding="utf-8"
            )


def _check_place(flag: str, path: Path) -> None:
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        refuse(f"{flag} {path} cannot be written; expected a file name in an existing folder that is writable")


def board(shown: Sequence[RunView], width: int, unknown: str = MISSING) -> Group:
    """The comparison as one rich table, or as two where the terminal is narrow.

    `unknown` stands for a verdict on the losses that is not there (yet).
    """
    rows = [dict(zip(COLUMNS, cells(run, unknown)), run=run.label) for run in shown]
    if width >= WIDTH:
        return Group(_table(COLUMNS, rows))
    memory = [name for name in COLUMNS if name.startswith(("peak", "="))]
    others = [name for name in COLUMNS if name not in (*memory, "strategy", "engine")]
    return Group(_table(["run", *others], rows), _table(["run", *memory], rows))


def _table(columns: Sequence[str], rows: list[dict[str, str]]) -> Table:
    table = Table(header_style="bold", pad_edge=False, padding=(0, 1, 0, 0), box=SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="right" if name in NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[name], STYLES.get(verdict(row[name]), "")) for name in columns))
    return table


def with_verdicts(records: Sequence[RunRecord], comparison: dict) -> list[RunView]:
    """The records as a table shows them, each with the comparison's verdict on its losses."""
    return [
        replace(view(record), matches=entry["matches_reference"])
        for record, entry in zip(records, comparison["runs"], strict=True)
    ]


def show(console: Console, shown: Sequence[RunView], reference: RunRecord | None) -> None:
    """Print the table, what its words mean, and what of it is real."""
    console.print(board(shown, console.width))
    console.print(f"[dim]{LEGEND}[/]", highlight=False)
    for word, what in provenance(list(shown)):
        console.print(f"[bold]{word}[/]: {what}", highlight=False)
    if reference is not None:
        console.print(
            "[bold]losses[/]: beside the unsharded twin, one process that replays every rank's batches", highlight=False
        )
    for run in shown:
        if run.matches is False:
            console.print(
                f"[bold red]{run.label}: its losses differ from the reference's beyond rounding[/]", highlight=False
            )


def report_records(paths: Sequence[Path], outputs: Outputs, exports: Exports = Exports()) -> None:
    """Load recorded runs, show them, write what was asked for; a finished record of the twin is the reference."""
    outputs.check()
    loaded = load_all(paths)
    twins = [record for record in loaded if record.spec.get("engine") == "twin"]
    records = [record for record in loaded if record not in twins] or loaded
    reference = twins[0] if twins else None
    comparison = comparison_json(records, reference)
    shown = with_verdicts(records, comparison)
    show(outputs.console(), shown, reference)
    print_findings(outputs.console(), records)
    outputs.write(comparison, shown, records)
    exports.write(records, outputs.console())


def load_all(paths: Sequence[Path]) -> list[RunRecord]:
    """Folders are records; files are traces, all of one run."""
    from fsdplab.profiling.chrome import TraceError
    from fsdplab.profiling.foreign import record_of_traces

    traces = [path for path in paths if path.is_file()]
    try:
        loaded = [RunRecord.load(path) for path in paths if path not in traces]
        return loaded + ([record_of_traces(traces)] if traces else [])
    except (RecordError, TraceError) as error:
        refuse(str(error))

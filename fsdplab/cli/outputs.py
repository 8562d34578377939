"""Finished runs: the table with its legend in the terminal, the page and the JSON as files."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, JustifyMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fsdplab.cli.console import console_beside
from fsdplab.cli.errors import failed, refuse
from fsdplab.common.files import try_folder, try_output, write_output
from fsdplab.common.places import how_to_install
from fsdplab.common.words import plural
from fsdplab.figures.conclusion import clock_words, conclusion
from fsdplab.figures.fastest import core_words, step_words
from fsdplab.figures.table import EVERY_COLUMN, NUMBERS, SPLIT, WRAPPED, brief, cells, legend, mood
from fsdplab.figures.view import RunView, provenance, view, views
from fsdplab.records import RunRecord, drift_sentence

if TYPE_CHECKING:
    from fsdplab.profiling.tables import TablesOf

WIDTH = 161  # columns of the table without a terminal: none of them wraps
STYLES = {"good": "bold green", "bad": "bold red", "": ""}


class Detail(Enum):
    """How much is printed: the result (-q); also progress, legend and findings; or also every step and the ranks'
    output (-v).
    """

    QUIET, NORMAL, VERBOSE = range(3)

    @classmethod
    def of(cls, quiet: bool, verbose: bool) -> Detail:
        """The level of the two flags; both together are an error."""
        if quiet and verbose:
            refuse("--quiet and --verbose were given; expected one of them, or none")
        return cls.QUIET if quiet else cls.VERBOSE if verbose else cls.NORMAL


@dataclass(frozen=True)
class Outputs:
    """The targets of results: how much to the terminal; JSON (a file, or `-` for stdout), a page, a folder of
    records.
    """

    json_file: str | None = None
    html_file: Path | None = None
    keep: Path | None = None
    detail: Detail = Detail.NORMAL
    force: bool = False  # whether records in the folder may be replaced

    def check(self) -> Outputs:
        """Fail, before anything runs, for an unwritable target or a page without plotly."""
        if self.html_file and importlib.util.find_spec("plotly") is None:
            refuse(f"--html needs plotly; run: {how_to_install('lab')}")
        for flag, path in (("--json", self.json_file), ("--html", self.html_file)):
            if path and str(path) != "-":
                check_file(flag, Path(path))
        if self.keep:
            check_folder("--keep", self.keep)
        return self

    def console(self) -> Console:
        """The console of the table: stdout, or stderr when stdout carries the JSON; wide if not a terminal."""
        return console_beside(self.json_file, WIDTH)

    def write(
        self,
        comparison: dict[str, Any],
        shown: Sequence[RunView],
        records: Sequence[RunRecord],
        tables_of: TablesOf | None = None,
    ) -> None:
        """Write the requested files; `tables_of` gives the tables of a record's traces where they are made already."""
        text = json.dumps(comparison, indent=1)
        if self.json_file == "-":
            sys.stdout.write(text + "\n")
        elif self.json_file:
            write_output(Path(self.json_file), text + "\n")
        if self.html_file:
            from fsdplab.figures import comparison_page

            page = comparison_page(comparison, shown, records=records, tables_of=tables_of)
            write_output(self.html_file, page)


def check_file(flag: str, path: Path) -> None:
    """Refuse a file that is not writable, before a command takes its time."""
    try:
        try_output(path)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        refuse(
            f"{flag} {path} cannot be written ({getattr(error, 'strerror', None) or error}); expected a file name in an"
            " existing folder that is writable"
        )


def check_folder(flag: str, path: Path) -> None:
    """Refuse a folder in which no file can be made."""
    if path.exists() and not path.is_dir():
        refuse(f"{flag} {path} is a file; expected a folder")
    try:
        try_folder(path)
    except (OSError, ValueError) as error:
        refuse(
            f"{flag} {path} cannot be written ({getattr(error, 'strerror', None) or error}); expected a folder, or a"
            " name for one, where there is free space"
        )


def board(shown: Sequence[RunView]) -> Table:
    """The comparison in six columns, which fit a terminal; a line below says whether the losses agree."""
    columns = tuple(name for name in brief(shown)[1:] if name != "losses")
    return _table(("run", *columns), [(run.label, *cells(run, columns)) for run in shown])


def whole_board(shown: Sequence[RunView]) -> Group:
    """Every column, as two tables: memory, and all else."""
    memory = ("peak", SPLIT, "predicted")
    others = tuple(name for name in EVERY_COLUMN if name not in (*memory, "strategy", "engine"))
    return Group(*(_table(("run", *part), [(run.label, *cells(run, part)) for run in shown])
                   for part in (others, memory)))  # fmt: skip


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(header_style="bold", pad_edge=False, padding=(0, 1, 0, 0), box=SIMPLE_HEAD)
    for name in columns:
        # a table that fits 80 characters breaks names there, and no number from its unit
        whole = len(columns) < 8 and name not in ("run", "peak", *WRAPPED)
        side: JustifyMethod = "right" if name in NUMBERS else "left"
        table.add_column(name.replace(", ", "\n"), justify=side, no_wrap=whole, overflow="fold")
    for row in rows:
        table.add_row(*(Text(text, STYLES[mood(text)]) for text in row))
    return table


def show(console: Console, shown: Sequence[RunView], reference: RunRecord | None, detail: Detail) -> None:
    """Print the answer in one sentence, the table, and what its times are; verbose also every column, the legend, and
    what was measured, emulated or simulated. Before all else, what the ranks lacked of cores.
    """
    timed = [run for run in shown if run.step_median and run.engine != "twin"]
    if core := core_words(shown):
        console.print(f"[bold red]{escape(core)}[/]", highlight=False)
    if answer := conclusion(shown):
        console.print(f"[bold]{escape(answer)}[/]", highlight=False)
    console.print(board(shown))
    if shown and all(run.matches for run in shown):
        console.print("Losses agree with the unsharded twin's.", highlight=False)
    if detail is not Detail.QUIET:
        if clock := clock_words(shown):
            console.print(escape(clock), highlight=False)
        if len(timed) > 1 and not core:
            shares = [run.summary.cpu_share for run in timed if run.summary.cpu_share is not None]
            cores = f"; ranks had a core for at least {100 * min(shares):.0f} % of their steps" if shares else ""
            console.print(f"Measured: {escape(step_words(timed))}{cores}.", highlight=False)
    if detail is Detail.VERBOSE:
        _explain(console, shown, reference)
    for run in shown:
        if run.matches is False:
            console.print(
                f"[bold red]{escape(run.label)}: its losses differ from the reference's beyond rounding[/]",
                highlight=False,
            )


def _explain(console: Console, shown: Sequence[RunView], reference: RunRecord | None) -> None:
    console.print(whole_board(shown))
    console.print(f"[dim]{legend(EVERY_COLUMN)}[/]", highlight=False)
    for word, what in provenance(list(shown)):
        console.print(f"[bold]{word}[/]: {escape(what)}", highlight=False)
    if reference is not None:
        console.print(
            f"[bold]losses[/]: of {plural(len(reference.summary.losses), 'step')}, beside the unsharded twin, one"
            " process that replays every rank's batches",
            highlight=False,
        )


def print_drift(console: Console, comparison: dict[str, Any]) -> None:
    """Print by how much the machine's speed drifted, where the runs did not take turns and it drifted noticeably."""
    if sentence := drift_sentence(comparison):
        console.print(sentence, style="bold", highlight=False, markup=False)


def print_findings(console: Console, records: Sequence[RunRecord], detail: Detail) -> None:
    """Of several runs the three costliest findings in all; verbose, or of one run, at most five a run."""
    from fsdplab.figures.findings import costliest

    if len(records) == 1 or detail is Detail.VERBOSE:
        _print_all_findings(console, records)
        return
    for number, (label, finding) in enumerate(costliest(records), start=1):
        console.print(f"{number}. {label}: {finding.title}.", highlight=False, markup=False)
        console.print(f"   -> {finding.remedy}", highlight=False, markup=False, style="dim")


def _print_all_findings(console: Console, records: Sequence[RunRecord]) -> None:
    from fsdplab.figures.findings import findings_by_run
    from fsdplab.profiling.findings import profiling_cost

    costs = {shown.label: profiling_cost(record) for shown, record in zip(views(records), records)}
    for label, found in findings_by_run(records):
        memory = ", and what fills its memory" if any(finding.of == "memory" for finding in found) else ""
        console.print(f"\n[bold]{escape(label)}[/]: what a step lost time to{memory}", highlight=False)
        if cost := costs.get(label):
            console.print(f"  {cost}", highlight=False, markup=False)
        for number, finding in enumerate(found, start=1):
            console.print(f"  {number}. {finding.title}. {finding.text}", highlight=False, markup=False)
            console.print(f"     -> {finding.remedy}", highlight=False, markup=False, style="dim")
        if not found:
            console.print("  nothing stands out in the profiled steps", highlight=False)


def end_if_failed(records: Sequence[RunRecord]) -> None:
    """Exit with code 1 and the reports of the runs that failed; do nothing where none did."""
    reports = [f"{view(record).label}: {report_of(record)}" for record in records if record.status == "failed"]
    if reports:
        failed("\n\n".join(reports))


def report_of(record: RunRecord) -> str:
    """The report of a failed run: the message, then the traceback."""
    failure = record.failure or {}
    return "\n".join(text for text in (failure.get("message"), failure.get("traceback")) if text)


def print_output_of_ranks(console: Console, records: Sequence[RunRecord]) -> None:
    """Print the output of the ranks of these runs, each line with its run and rank."""
    for record in records:
        for path in sorted((record.path / "ranks").glob("rank*.*")):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                console.print(f"{view(record).label}, {path.stem}: {line}", highlight=False, markup=False)

"""The output while runs go on: a live table in a terminal, else one line a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fsdplab.cli.outputs import Detail, board
from fsdplab.common.sizes import size
from fsdplab.common.words import MISSING, plural
from fsdplab.figures.table import cells
from fsdplab.figures.view import RunView, view
from fsdplab.records import RunRecord

if TYPE_CHECKING:
    from fsdplab.sessions import RunSpec

PENDING = "…"  # the verdict on the losses, until the twin has run
MEASURING = "measuring"  # in the place of the step time of a run that waits for its turns


class ProgressTable:
    """Rows of runs that have ended or wait for their turns, and the progress of the current one; `detail` says how
    much.
    """

    def __init__(self, console: Console, planned: int, detail: Detail = Detail.NORMAL) -> None:
        self._console, self._planned, self._detail = console, planned, detail
        self._rows: dict[Path, RunView] = {}  # by the folder of the record
        self._now = Text("starting the first ranks", style="dim")
        live = console.is_terminal and detail is not Detail.QUIET
        self._live = Live(self._draw(), console=console, transient=True, refresh_per_second=4) if live else None

    def __enter__(self) -> ProgressTable:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    @property
    def live(self) -> bool:
        """Whether rows may change after they have appeared."""
        return self._live is not None

    def note(self, sentence: str) -> None:
        """One sentence on how the runs go on."""
        if self._live:
            self._now = Text(sentence, style="dim")
            self._live.update(self._draw())
        elif self._detail is not Detail.QUIET:
            self._console.print(sentence, highlight=False, markup=False)

    def ready(self, record: RunRecord) -> None:
        """A run has warmed up: its row appears, without the times that are still measured."""
        self._put(record, replace(view(record), status=MEASURING))

    def finished(self, record: RunRecord) -> None:
        """A run ended: its row appears, or is completed. The twin has no row: it is the reference."""
        self._put(record, view(record))
        if not self._live and self._detail is not Detail.QUIET and record.path in self._rows:
            row = cells(self._rows[record.path], PENDING)
            self._console.print("  ".join(text for text in row if text != MISSING), highlight=False, markup=False)

    def step(self, spec: RunSpec, step: int, steps: int, loss: float) -> None:
        """Rank 0 of the current run finished a step."""
        name = "the twin, for reference" if spec.engine == "twin" else f"{spec.strategy} ({spec.engine})"
        measuring = sum(row.status == MEASURING for row in self._rows.values())
        done = f"{len(self._rows) - measuring} of {plural(self._planned, 'run')} done"
        others = f", {measuring} being measured" if measuring else ""
        self._now = Text(f"{name}: step {step} of {steps}, loss {loss:.4f}  ({done}{others})", style="dim")
        if self._live:
            self._live.update(self._draw())
        if self._detail is Detail.VERBOSE:
            self._console.print(f"{name}: step {step} of {steps}, loss {loss:.4f}", highlight=False)

    def _put(self, record: RunRecord, row: RunView) -> None:
        if record.spec["engine"] != "twin":
            self._rows[record.path] = row
        if self._live:
            self._live.update(self._draw())

    def _draw(self) -> Group:
        return Group(board([*self._rows.values()], self._console.width, PENDING), self._now)


def headline(spec: RunSpec, card: int | None) -> str:
    """One line on the run that starts."""
    work = (
        f"{spec.model}, {plural(spec.world_size, 'rank')} on {spec.device_type}, batch {spec.batch_size} x"
        f" {spec.sequence_length} a rank, {spec.precision}"
    )
    return (
        f"[bold]{work}, {plural(spec.steps, 'timed step')}[/],"
        f" {f'emulated card of {size(card)}' if card else 'no emulated card'}"
    )

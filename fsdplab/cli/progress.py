"""The output while runs go on: a live table in a terminal, else one line a run."""

from __future__ import annotations

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


class ProgressTable:
    """Rows of finished runs, and the progress of the current one; `detail` says how much."""

    def __init__(self, console: Console, planned: int, detail: Detail = Detail.NORMAL) -> None:
        self._console, self._planned, self._detail = console, planned, detail
        self._rows: list[RunView] = []
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

    def finished(self, record: RunRecord) -> None:
        """A run ended: its row appears. The twin has no row: it is the reference."""
        if record.spec["engine"] == "twin":
            return
        self._rows.append(view(record))
        if self._live:
            self._live.update(self._draw())
        elif self._detail is not Detail.QUIET:
            self._console.print(
                "  ".join(text for text in cells(self._rows[-1], PENDING) if text != MISSING),
                highlight=False,
                markup=False,
            )

    def step(self, spec: RunSpec, step: int, steps: int, loss: float) -> None:
        """Rank 0 of the current run finished a step."""
        name = "the twin, for reference" if spec.engine == "twin" else f"{spec.strategy} ({spec.engine})"
        self._now = Text(
            f"{name}: step {step} of {steps}, loss {loss:.4f}  ({len(self._rows)} of {plural(self._planned, 'run')}"
            " done)",
            style="dim",
        )
        if self._live:
            self._live.update(self._draw())
        if self._detail is Detail.VERBOSE:
            self._console.print(f"{name}: step {step} of {steps}, loss {loss:.4f}", highlight=False)

    def _draw(self) -> Group:
        return Group(board(self._rows, self._console.width, PENDING), self._now)


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

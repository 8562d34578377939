"""Shows the progress of runs: a live table in a terminal, or else one line per run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fsdplab.cli.answer import Line
from fsdplab.cli.outputs import Detail
from fsdplab.cli.render import drawn
from fsdplab.cli.runs import board
from fsdplab.common.sizes import size
from fsdplab.common.words import plural
from fsdplab.figures.table import peak_of, step_of
from fsdplab.figures.view import RunView, view, views
from fsdplab.records import RunRecord, Summary
from fsdplab.sessions.steady_card import steady_step
from fsdplab.workloads.own.sources import name_of

if TYPE_CHECKING:
    from fsdplab.sessions import RunSpec

WAITING, MEASURING = "waits", "measuring"  # in the place of the step time: of a run to come, and of one in its turns


class ProgressTable:
    """A row for each planned run, by the folder of its record, and the progress of the current run.

    A row has its simulated step at once, and its measured values when they are known. `detail` is how much is printed.
    """

    def __init__(self, console: Console, planned: Mapping[Path, RunSpec], detail: Detail = Detail.NORMAL) -> None:
        self._console, self._detail = console, detail
        self._rows = {folder: _to_come(spec) for folder, spec in planned.items() if spec.engine != "twin"}
        labels = [row.label for row in self._shown]
        self._labels = dict(zip([spec for spec in planned.values() if spec.engine != "twin"], labels))
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

    @property
    def _shown(self) -> list[RunView]:
        return views(self._rows.values())

    @property
    def _done(self) -> int:
        return sum(row.status not in (WAITING, MEASURING) for row in self._rows.values())

    def note(self, sentence: str) -> None:
        """Show a sentence about how the runs continue."""
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
            row = self._shown[[*self._rows].index(record.path)]
            told = f"{row.label}: step {step_of(row)}, peak {peak_of(row)}"
            self._console.print(f"{told} ({self._done} of {len(self._rows)} runs)", highlight=False, markup=False)

    def begins(self, spec: RunSpec) -> None:
        """The ranks of a run start: until their first step they build their model, which may take long."""
        if spec.own_model:
            self._now = Text(f"{self._name(spec)}: building the model", style="dim")
        if self._live:
            self._live.update(self._draw())

    def _name(self, spec: RunSpec) -> str:
        own = RunView(spec.strategy, spec.engine, spec.world_size).label
        return "the twin, for reference" if spec.engine == "twin" else self._labels.get(spec, own)

    def step(self, spec: RunSpec, step: int, steps: int, loss: float) -> None:
        """Rank 0 of the current run finished a step."""
        name = self._name(spec)
        at = _which(spec, step, steps)
        done = f"{self._done} of {plural(len(self._rows), 'run')} done"
        measuring = sum(row.status == MEASURING for row in self._rows.values())
        others = f", {measuring} being measured" if measuring else ""
        self._now = Text(f"{name}: {at}, loss {loss:.4f}  ({done}{others})", style="dim")
        if self._live:
            self._live.update(self._draw())
        if self._detail is Detail.VERBOSE:
            self._console.print(f"{name}: {at}, loss {loss:.4f}", highlight=False)

    def _put(self, record: RunRecord, row: RunView) -> None:
        if record.spec["engine"] != "twin":
            self._rows[record.path] = row
        if self._live:
            self._live.update(self._draw())

    def _draw(self) -> Group:
        return Group(drawn(board(self._shown)), self._now)


def _which(spec: RunSpec, step: int, steps: int) -> str:
    """`timed step 3 of 4`: the steps before them warm up, and those after them are profiled."""
    untimed, timed = spec.untimed, spec.untimed + spec.steps
    if step <= untimed:
        return f"warm-up step {step} of {untimed}"
    if step <= timed:
        return f"timed step {step - untimed} of {spec.steps}"
    return f"profiled step {step - timed} of {steps - timed}"


def _to_come(spec: RunSpec) -> RunView:
    """A run before it starts: the steady card's step is known."""
    summary = Summary(steady=steady_step(spec))
    return RunView(spec.strategy, spec.engine, spec.world_size, summary, WAITING, spec.as_dict())


def headline(spec: RunSpec, card: int | None) -> Line:
    """The model, ranks, batch and precision of the run that starts, and what is emulated."""
    links = [words for words in (spec.link, spec.link_across and f"{spec.link_across} across groups") if words]
    parts = [f"a link of {' and '.join(links)}"] * bool(links) + [f"a card of {size(card)}"] * bool(card)
    emulated = f"emulated: {', '.join(parts)}" if parts else "no emulated card"
    why = f" ({spec.why_this_device})" if spec.why_this_device else ""
    tokens = spec.tokens_per_rank is not None
    batch = f"batch {spec.batch_size} x {spec.sequence_length} a rank" if tokens else "batches of its own"
    return Line(
        f"{name_of(spec.model)}, {plural(spec.world_size, 'rank')} on {spec.device_type}, {batch}, {spec.precision},"
        f" {plural(spec.steps, 'timed step')}, {emulated}{why}",
        mood="bold",
    )

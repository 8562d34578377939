"""Shows the progress of runs: a live table in a terminal, or else one line per run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fsdplab.cli.answer import Line
from fsdplab.cli.outputs import Outputs
from fsdplab.cli.render import drawn
from fsdplab.cli.runs import board
from fsdplab.cli.terminal import look_for_signals
from fsdplab.common.sizes import size
from fsdplab.common.words import plural
from fsdplab.figures.table import peak_of, step_of
from fsdplab.figures.view import RunView, view, views
from fsdplab.records import RunRecord, Summary
from fsdplab.sessions.spec import RunSpec
from fsdplab.sessions.steady_card import steady_step
from fsdplab.sessions.watcher import Watcher, loss_words, step_words
from fsdplab.workloads.own.sources import name_of

WAITING, MEASURING = "waits", "measuring"  # in the place of the step time: of a run to come, and of one in its turns


class ProgressTable(Watcher):
    """A row for each planned run, by the folder of its record, and the progress of the current run.

    A row has its simulated step at once, and its measured values when they are known. The twin has no row: it is the
    reference.
    """

    def __init__(self, console: Console, planned: Mapping[Path, RunSpec], outputs: Outputs = Outputs()) -> None:
        self._console = console
        self._outputs = outputs
        # the twin is seen in the verdict on the runs' losses alone
        with_row = {folder: spec for folder, spec in planned.items() if spec.engine != "twin"}
        self._rows = {folder: _to_come(spec) for folder, spec in with_row.items()}
        self._labels = dict(zip(with_row.values(), (row.label for row in self._shown)))
        self._now = "starting the first ranks"
        self._live: Live | None = None
        if console.is_terminal and not outputs.quiet:
            self._live = Live(self._draw(), console=console, transient=True, refresh_per_second=4)

    def __enter__(self) -> ProgressTable:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._live:
            self._live.stop()

    def look(self) -> None:
        """End the command if a signal has asked for that."""
        look_for_signals()

    @property
    def _shown(self) -> list[RunView]:
        return views(self._rows.values())

    @property
    def _done(self) -> int:
        return sum(row.status not in (WAITING, MEASURING) for row in self._rows.values())

    def note(self, sentence: str) -> None:
        """Show a sentence about how the runs continue."""
        self._draw_again(sentence)
        if not self._live and not self._outputs.quiet:
            self._print(sentence)

    def ready(self, record: RunRecord) -> None:
        """Show the row of a run that has warmed up, without the times that are still measured.

        Where rows cannot change after they have appeared, nothing is shown.
        """
        if self._live:
            self._put(record, replace(view(record), status=MEASURING))

    def ended(self, record: RunRecord) -> None:
        """Show or complete the row of a run that has ended."""
        self._put(record, view(record))
        # a log has one line a run, when it has ended
        if not self._live and not self._outputs.quiet and record.path in self._rows:
            shown_by_folder = dict(zip(self._rows, self._shown))
            row = shown_by_folder[record.path]
            result = f"{row.label}: step {step_of(row)}, peak {peak_of(row)}"
            self._print(f"{result} ({self._done} of {len(self._rows)} runs)")

    def started(self, spec: RunSpec) -> None:
        """Show that the ranks of a run build a model of one's own, which may take long."""
        now = self._now
        if spec.own_model:
            now = f"{self._name(spec)}: building the model"
        self._draw_again(now)

    def progressed(self, spec: RunSpec, step: int, total: int, loss: float) -> None:
        """Show the step that rank 0 of the current run has ended."""
        sentence = f"{self._name(spec)}: {step_words(spec, step, total)}, {loss_words(spec, loss)}"
        others = ""
        measuring = sum(row.status == MEASURING for row in self._rows.values())
        if measuring:
            others = f", {measuring} being measured"
        self._draw_again(f"{sentence}  ({self._done} of {plural(len(self._rows), 'run')} done{others})")
        if self._outputs.verbose:
            self._print(sentence)

    def _name(self, spec: RunSpec) -> str:
        if spec.engine == "twin":
            return "the twin, for reference"
        # a wind tunnel gives each run its link, and then its spec is not the planned one
        alone = RunView(spec.strategy, spec.engine, spec.world_size).label
        return self._labels.get(spec, alone)

    def _put(self, record: RunRecord, row: RunView) -> None:
        if record.spec["engine"] != "twin":
            self._rows[record.path] = row
        self._draw_again(self._now)

    def _draw_again(self, now: str) -> None:
        self._now = now
        if self._live:
            self._live.update(self._draw())

    def _draw(self) -> Group:
        return Group(drawn(board(self._shown)), Text(self._now, style="dim"))

    def _print(self, sentence: str) -> None:
        self._console.print(sentence, highlight=False, markup=False)


def _to_come(spec: RunSpec) -> RunView:
    """Return the row of a run before it starts: the steady card's step is known."""
    summary = Summary(steady=steady_step(spec))
    return RunView(spec.strategy, spec.engine, spec.world_size, summary, WAITING, spec.as_dict())


def headline(spec: RunSpec, card: int | None) -> Line:
    """Name the model, ranks, batch and precision of the run that starts, and what is emulated."""
    batch = "batches of its own"
    if spec.tokens_per_rank is not None:
        batch = f"batch {spec.batch_size} x {spec.sequence_length} a rank"
    why = f" ({spec.why_this_device})" if spec.why_this_device else ""
    return Line(
        f"{name_of(spec.model)}, {plural(spec.world_size, 'rank')} on {spec.device_type}, {batch}, {spec.precision},"
        f" {plural(spec.steps, 'timed step')}, {_emulated(spec, card)}{why}",
        mood="bold",
    )


def _emulated(spec: RunSpec, card: int | None) -> str:
    """Name the emulated links and the emulated card: `emulated: a link of 150MB/s, a card of 330 MB`."""
    links = []
    if spec.link:
        links.append(spec.link)
    if spec.link_across:
        links.append(f"{spec.link_across} across groups")
    parts = []
    if links:
        parts.append(f"a link of {' and '.join(links)}")
    if card:
        parts.append(f"a card of {size(card)}")
    if not parts:
        return "no emulated card"
    return f"emulated: {', '.join(parts)}"

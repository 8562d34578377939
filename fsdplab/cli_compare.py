"""Running from the terminal: rows that appear as runs finish, then the whole comparison; and one run, recorded."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fsdplab.cli_errors import failed, refusals, refuse
from fsdplab.cli_findings import print_findings
from fsdplab.cli_report import Outputs, board, show, with_verdicts
from fsdplab.figures.table import cells
from fsdplab.figures.units import MISSING, plural, size
from fsdplab.figures.view import RunView, view
from fsdplab.records import RunRecord, comparison_json

PENDING = "…"  # the verdict on the losses, until the twin has run


class Progress:
    """What is on the screen while runs go on: a live table in a terminal, one line a run elsewhere."""

    def __init__(self, console: Console, planned: int) -> None:
        self._console, self._planned = console, planned
        self._rows: list[RunView] = []
        self._now = Text("starting the first ranks", style="dim")
        self._live = (
            Live(self._draw(), console=console, transient=True, refresh_per_second=4) if console.is_terminal else None
        )

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def finished(self, record: RunRecord) -> None:
        """A run ended: its row appears. The twin is no row, it is what the rows are checked against."""
        if record.spec["engine"] == "twin":
            return
        self._rows.append(view(record))
        if self._live:
            self._live.update(self._draw())
        else:
            self._console.print(
                "  ".join(text for text in cells(self._rows[-1], PENDING) if text != MISSING), highlight=False
            )

    def step(self, spec: object, step: int, steps: int, loss: float) -> None:
        """Rank 0 of the run that is going on finished a step."""
        name = "the twin, for reference" if spec.engine == "twin" else f"{spec.strategy} ({spec.engine})"
        self._now = Text(
            f"{name}: step {step} of {steps}, loss {loss:.4f}  ({len(self._rows)} of {plural(self._planned, 'run')}"
            " done)",
            style="dim",
        )
        if self._live:
            self._live.update(self._draw())

    def _draw(self) -> Group:
        return Group(board(self._rows, self._console.width, PENDING), self._now)


def compare_runs(strategies: list[str], engines: list[str], common: dict, outputs: Outputs) -> None:
    """Run every strategy on the lab's engine and every other engine, then the twin;
    show, write, exit 1 if one failed.
    """
    from fsdplab.sessions import RunSpec, compare

    outputs.check()
    with refusals():
        specs = [RunSpec(**own(name, common)) for name in strategies] + [_peer(name, common) for name in engines]
        twin = RunSpec(engine="twin", **own("full_shard", dict(common, card=None, prefetch=1)) | dict(memory=False))
        if not specs:
            refuse("nothing to compare; expected strategies or engines, such as --strategies no_shard,full_shard")
    console = outputs.console()
    console.print(_headline(twin, common["card"]), highlight=False)
    with refusals(), _folder(outputs.keep) as folder:
        with Progress(console, len(specs)) as progress:
            records = compare([*specs, twin], directory=folder, on_record=progress.finished, on_progress=progress.step)
        _conclude(records[:-1], records[-1], console, outputs)


def _peer(engine: str, common: dict) -> object:
    """The spec of another engine under the strategy that it is best known for."""
    from fsdplab.sessions import ENGINES, RunSpec

    if engine not in ENGINES or engine in ("lab", "twin"):
        peers = [name for name in ENGINES if name not in ("lab", "twin")]
        refuse(
            f"--engines has {engine!r}; expected some of {', '.join(peers)} (the lab's own engine runs --strategies)"
        )
    return RunSpec(
        engine=engine,
        **own(
            ENGINES[engine][0], dict(common, prefetch=1, units=common["units"] if engine == "torch-fsdp2" else "auto")
        ),
    )


def own(strategy: str, common: dict) -> dict:
    """What of the common settings concerns a strategy: only hybrid_shard has shard groups."""
    groups = {} if strategy == "hybrid_shard" else dict(shard_size=None, link_across=None)
    return {**common, "strategy": strategy, **groups}


def _headline(spec: object, card: int | None) -> str:
    """What is about to run, in one line."""
    work = (
        f"{spec.model}, {plural(spec.world_size, 'rank')} on {spec.place}, batch {spec.batch_size} x"
        f" {spec.sequence_length} a rank, {spec.precision}"
    )
    return (
        f"[bold]{work}, {plural(spec.steps, 'timed step')}[/],"
        f" {f'emulated card of {size(card)}' if card else 'no emulated card'}"
    )


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Where the records of a comparison live: the folder to keep, or one that is gone afterwards."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="fsdplab-compare-") as folder:
        yield Path(folder)


def _conclude(records: list[RunRecord], twin: RunRecord, console: Console, outputs: Outputs) -> None:
    """Show and write the whole comparison; a run that failed ends the command with its report and exit code 1."""
    reference = twin if twin.status == "finished" else None
    comparison = comparison_json(records, reference)
    shown = with_verdicts(records, comparison)
    show(console, shown, reference)
    print_findings(console, records)
    outputs.write(comparison, shown, records)
    reports = [f"{view(record).label}: {report_of(record)}" for record in [*records, twin] if record.status == "failed"]
    if reports:
        failed("\n\n".join(reports))


def report_of(record: RunRecord) -> str:
    """The report of a failed run as its ranks left it: the message, then the traceback."""
    failure = record.failure or {}
    return "\n".join(text for text in (failure.get("message"), failure.get("traceback")) if text)


def record_run(settings: dict, folder: Path, runner: Callable[..., RunRecord] | None = None) -> None:
    """Run one spec into a folder that `fsdplab report` reads, and show its row; `runner` is `sessions.run` unless
    given.
    """
    from fsdplab.sessions import RunSpec, run

    console = Outputs().console()
    with refusals():
        spec = RunSpec(**settings)
        if folder.exists() and not folder.is_dir():
            refuse(f"--out {folder} is a file; expected a folder")
        if (
            folder.exists()
            and any(folder.iterdir())
            and not any((folder / name).exists() for name in ("run.json", "ranks"))
        ):
            refuse(f"--out {folder} holds other files; expected a new folder, or that of an earlier run")
        console.print(_headline(spec, spec.card), highlight=False)
        with Progress(console, planned=1) as progress:
            record = (runner or run)(spec, directory=folder, on_progress=lambda *where: progress.step(spec, *where))
    show(console, [view(record)], None)
    print_findings(console, [record])
    console.print(f"recorded in {folder}; show it again with: fsdplab report {folder}", highlight=False)

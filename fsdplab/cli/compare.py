"""`fsdplab compare`: runs several strategies and engines side by side, shows their progress, then the comparison."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdplab.cli.answer import Line
from fsdplab.cli.calibrate import calibrate_if_needed
from fsdplab.cli.errors import refuse
from fsdplab.cli.outputs import Detail, Outputs
from fsdplab.cli.progress import ProgressTable, headline
from fsdplab.cli.render import show
from fsdplab.cli.runs import answer_of_runs, end_if_failed
from fsdplab.cli.terminal import look_for_signals
from fsdplab.common.names import IN_GROUPS
from fsdplab.common.temporary import folder_of_this_process
from fsdplab.figures.conclusion import change_words
from fsdplab.figures.view import SETTINGS, views
from fsdplab.records import RunRecord
from fsdplab.sessions.spec import ENGINES, PEERS, RunSpec


def compare_runs(strategies: list[str], engines: list[str], common: dict[str, Any], outputs: Outputs) -> None:
    """Run every strategy on the lab's engine, every other engine, and the twin; then show and write the comparison.

    Raises RunError with the reports of the runs that failed.
    """
    variants = dict.fromkeys(_variant(text, common) for text in strategies)
    specs = [*variants, *(_peer(name, common) for name in engines)]
    if not specs:
        refuse("nothing to compare; expected strategies or engines, such as --strategies no_shard,full_shard")
    # what is profiled has been trained by then: the twin needs no more steps for a verdict on the losses
    as_twin = dict(memory=False, profile=0)
    twin = RunSpec(engine="twin", **own("full_shard", dict(common, card=None, prefetch=1)) | as_twin)
    from fsdplab.sessions import compare
    from fsdplab.sessions.compare_runs import folders_of

    console = outputs.console()
    if outputs.detail is not Detail.QUIET:
        show(console, [headline(twin, common["card"])])
    with _folder(outputs, [*specs, twin]) as folder:
        calibrate_if_needed(specs, console, outputs.detail)
        planned = dict(zip(folders_of([*specs, twin], folder), [*specs, twin]))
        with ProgressTable(console, planned, outputs.detail) as progress:
            records = compare(
                [*specs, twin],
                directory=folder,
                on_record=progress.finished,
                on_ready=progress.ready if progress.live else None,
                on_note=progress.note,
                on_progress=progress.step,
                on_look=look_for_signals,
            )
        reference = records[-1] if records[-1].status == "finished" else None
        next_steps = [] if outputs.detail is Detail.QUIET else [*_next_steps(records[:-1], outputs)]
        outputs.give(answer_of_runs(records[:-1], reference, outputs.detail, next_steps))
        end_if_failed(records)


def _peer(engine: str, common: dict[str, Any]) -> RunSpec:
    """The spec of another engine under the strategy that it is best known for."""
    if engine not in PEERS:
        refuse(
            f"--engines has {engine!r}; expected some of {', '.join(PEERS)} (the lab's own engine runs --strategies)"
        )
    units = common["units"] if engine == "torch-fsdp2" else "auto"
    return RunSpec(engine=engine, **own(ENGINES[engine][0], dict(common, prefetch=1, units=units)))


def _variant(text: str, common: dict[str, Any]) -> RunSpec:
    """The spec of `full_shard`, or of `full_shard:prefetch=0`, which differs from the others in these settings."""
    strategy, *edits = (part.strip() for part in text.split(":"))
    changed = dict(_setting(text, edit) for edit in edits)
    return RunSpec(**own(strategy, common) | changed)


def _setting(text: str, edit: str) -> tuple[str, Any]:
    """`prefetch=0` -> ("prefetch", 0): a field of RunSpec, as a whole number where it is one."""
    name, equals, value = (part.strip() for part in edit.partition("="))
    if not equals or name not in SETTINGS or name in ("model", "world_size"):
        able = ", ".join(each for each in SETTINGS if each not in ("model", "world_size"))
        refuse(f"--strategies has {text!r}; expected settings such as full_shard:prefetch=0, of {able}")
    return name, int(value) if value.isascii() and value.isdigit() else value


def own(strategy: str, common: dict[str, Any]) -> dict[str, Any]:
    """The common settings that a strategy uses: not all have shard groups."""
    groups = {} if strategy in IN_GROUPS else dict(shard_size=None, link_across=None)
    return {**common, "strategy": strategy, **groups}


@contextmanager
def _folder(outputs: Outputs, specs: Sequence[RunSpec]) -> Iterator[Path]:
    """The folder of a comparison's records: the one to keep, or one that is deleted afterwards."""
    from fsdplab.records.folder import claim_folder
    from fsdplab.sessions.compare_runs import folders_of

    if outputs.keep is not None:
        for own in folders_of(specs, outputs.keep):  # all of them, before the first run takes its time
            claim_folder(own, replace=outputs.force)
        yield outputs.keep
        return
    with tempfile.TemporaryDirectory(prefix="compare-", dir=folder_of_this_process()) as folder:
        yield Path(folder)


def _next_steps(records: Sequence[RunRecord], outputs: Outputs) -> Iterator[Line]:
    """The most valuable change to the most sharded run, with its gain; and where to see more."""
    if words := change_words(views(records)):
        yield Line(words)
    page = f"open {outputs.html}" if outputs.html else "fsdplab compare --html page.html"
    yield Line(
        f"Next: timelines, memory and all findings: {page}; every number: --verbose; learn why: fsdplab lab.",
        mood="dim",
    )

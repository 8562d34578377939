"""Runs several strategies and engines side by side (`fsdplab compare`), shows their progress, then the comparison.

`fsdplab run` records one run in a folder.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdplab.cli.answer import Line
from fsdplab.cli.doctor import calibrate_if_needed
from fsdplab.cli.errors import refuse
from fsdplab.cli.options import RUN, card_of, link_of
from fsdplab.cli.outputs import Outputs
from fsdplab.cli.progress import ProgressTable, headline
from fsdplab.cli.runs import answer_of_runs, end_if_failed, recorded_in
from fsdplab.common.names import IN_GROUPS
from fsdplab.common.temporary import folder_of_this_process
from fsdplab.common.words import harmless
from fsdplab.figures.conclusion import change_words
from fsdplab.figures.view import SETTINGS, views
from fsdplab.records import RunRecord
from fsdplab.records.folder import claim_folder, claim_free_folder
from fsdplab.sessions.spec import ENGINES, PEERS, STRATEGIES, RunSpec, SpecError, near_matches
from fsdplab.sessions.spec.parts import WorkloadPart

# Too small for a whole copy of the default model and its states, and large enough for a shard. Of another model it says
# nothing.
CARD_OF_THE_DEFAULT = "330MB"
COMPARED = ("lab", *PEERS)  # the twin takes part by itself


def compare_runs(
    strategies: list[str], engines: list[str], card: str, settings: dict[str, Any], outputs: Outputs
) -> None:
    """Run every strategy on every engine that does it, and the twin; then show and write the comparison.

    Pairs that cannot be are left out with a note. Raises RunError with the reports of the runs that failed.
    """
    unless_given = CARD_OF_THE_DEFAULT if settings["model"] == WorkloadPart.model else "none"
    common = settings | {"card": card_of(card, settings, unless_given), "link": link_of(settings, engines, "150MB/s")}
    specs, left_out = _pairs(strategies, engines, common)
    if not specs:
        why = f" ({'; '.join(left_out)})" if left_out else ""
        refuse(f"nothing to compare{why}; expected such as --strategies no_shard,full_shard --engines lab,torch-fsdp2")
    if left_out:
        print(harmless(f"fsdplab: left out: {'; '.join(left_out)}"), file=sys.stderr)
    twin = _twin(common)
    from fsdplab.sessions import compare
    from fsdplab.sessions.compare_runs import folders_of

    if not outputs.quiet:
        outputs.show([headline(twin, common["card"])])
    with _folder(outputs, [*specs, twin]) as folder:
        calibrate_if_needed(specs, outputs)
        planned = dict(zip(folders_of([*specs, twin], folder), [*specs, twin]))
        with ProgressTable(outputs.console(), planned, outputs) as progress:
            *records, of_twin = compare([*specs, twin], directory=folder, watcher=progress)
        # without it losses are compared with nothing
        reference = of_twin if of_twin.status == "finished" else None
        next_steps = [] if outputs.quiet else [*_next_steps(records, outputs)]
        outputs.give(answer_of_runs(records, reference, outputs, next_steps))
        end_if_failed([*records, of_twin])


def _twin(common: dict[str, Any]) -> RunSpec:
    """Return the spec of the unsharded reference, of which only the losses are compared."""
    settings = settings_for("full_shard", dict(common, card=None, prefetch=1))
    # what is profiled has been trained by then: the twin needs no more steps for a verdict on the losses
    settings |= dict(memory=False, profile=0)
    return RunSpec(engine="twin", **settings)


def _pairs(strategies: list[str], engines: list[str], common: dict[str, Any]) -> tuple[list[RunSpec], list[str]]:
    """Return the spec of each engine under each strategy that it does, once, and a sentence on each pair left out."""
    for engine in engines:
        if engine not in COMPARED:
            refuse(f"--engines has {engine!r}{near_matches(engine, COMPARED)}; expected some of {', '.join(COMPARED)}")
    # a set in order: the same run under two spellings is made once
    specs: dict[RunSpec, None] = {}
    left_out = []
    for engine in engines:
        not_done = []
        for text in strategies:
            strategy, changed = _parts(text)
            if strategy in STRATEGIES and strategy not in ENGINES[engine]:
                not_done.append(strategy)
                continue
            try:
                specs[RunSpec(**_settings_under(engine, strategy, common) | changed)] = None
            except SpecError as error:
                # wrong for all runs is an error; a setting behind one strategy is left out where an engine lacks it
                if engine == "lab" or error.field not in changed:
                    raise
                left_out.append(f"{engine} does not do {text}")
        if not_done:
            left_out.append(f"{engine} does not do {', '.join(dict.fromkeys(not_done))}")
    return list(specs), left_out


def _settings_under(engine: str, strategy: str, common: dict[str, Any]) -> dict[str, Any]:
    """Return the common settings, but for those that an engine has its own rule for."""
    settings = dict(common, engine=engine)
    if engine != "lab":
        settings["prefetch"] = 1
        if engine != "torch-fsdp2":
            settings["units"] = "auto"
    return settings_for(strategy, settings)


def _parts(text: str) -> tuple[str, dict[str, Any]]:
    """Split `full_shard:prefetch=0` into its strategy and the settings in which it differs from the others."""
    strategy, *edits = (part.strip() for part in text.split(":"))
    return strategy, dict(_setting(text, edit) for edit in edits)


def _setting(text: str, edit: str) -> tuple[str, Any]:
    """Read `prefetch=0` as ("prefetch", 0): a field of RunSpec, as a whole number where it is one."""
    name, equals, value = (part.strip() for part in edit.partition("="))
    # runs that are compared train one model on as many ranks
    able = [field for field in SETTINGS if field not in ("model", "world_size")]
    if not equals or name not in able:
        refuse(f"--strategies has {text!r}; expected settings such as full_shard:prefetch=0, of {', '.join(able)}")
    if value.isascii() and value.isdigit():
        return name, int(value)
    return name, value


def settings_for(strategy: str, common: dict[str, Any]) -> dict[str, Any]:
    """Return the common settings that a strategy uses: not all have shard groups."""
    settings = {**common, "strategy": strategy}
    if strategy not in IN_GROUPS:
        settings |= dict(shard_size=None, link_across=None)
    return settings


@contextmanager
def _folder(outputs: Outputs, specs: Sequence[RunSpec]) -> Iterator[Path]:
    """Yield the folder of a comparison's records: the one to keep, or one that is deleted afterwards."""
    from fsdplab.sessions.compare_runs import folders_of

    if outputs.keep is not None:
        for folder_of_run in folders_of(specs, outputs.keep):  # all of them, before the first run takes its time
            claim_folder(folder_of_run, replace=outputs.force)
        yield outputs.keep
        return
    with tempfile.TemporaryDirectory(prefix="compare-", dir=folder_of_this_process()) as folder:
        yield Path(folder)


def _next_steps(records: Sequence[RunRecord], outputs: Outputs) -> Iterator[Line]:
    """Yield the most valuable change to the most sharded run, with its gain; and where to see more."""
    # "" where none gains enough
    change = change_words(views(records))
    if change:
        yield Line(change)
    page = f"open {outputs.html}" if outputs.html else "fsdplab compare --html page.html"
    yield Line(
        f"Next: timelines, memory and all findings: {page}; every number: --verbose; learn why: fsdplab lab.",
        mood="dim",
    )


# ---- one run


def record_run(named: str | None, card: str, out: Path | None, settings: dict[str, Any], outputs: Outputs) -> None:
    """Run one spec into a folder, which `fsdplab report` reads, and show its row."""
    if named and settings["strategy"] not in (named, RUN["strategy"].default):
        refuse(f"{named} and --strategy {settings['strategy']} were given; expected one strategy")
    settings |= {"strategy": named or settings["strategy"], "card": card_of(card, settings, "none")}
    spec = RunSpec(**settings)
    from fsdplab.sessions import run

    folder = _claimed(outputs, out, Path("runs") / f"{spec.strategy}-{spec.engine}")
    if not outputs.quiet:
        outputs.show([headline(spec, spec.card)])
    with ProgressTable(outputs.console(), {folder: spec}, outputs) as progress:
        progress.started(spec)
        record = run(spec, directory=folder, watcher=progress)
    outputs.give(answer_of_runs([record], None, outputs))
    outputs.show([recorded_in(folder)])


def _claimed(outputs: Outputs, out: Path | None, usual: Path) -> Path:
    """Claim the folder that was given, or a new one: `usual`, or one beside it. Only `--force` replaces a record."""
    if out or outputs.force:
        return claim_folder(out or usual, replace=outputs.force)
    return claim_free_folder(usual)

"""`fsdplab run`: records one run in a folder, on this machine or on virtual nodes with a real link between them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdplab.cli.errors import refuse
from fsdplab.cli.outputs import Detail, Outputs
from fsdplab.cli.progress import ProgressTable, headline
from fsdplab.cli.render import show
from fsdplab.cli.runs import answer_of_runs, recorded_in
from fsdplab.cli.terminal import look_for_signals
from fsdplab.records import RunRecord


def record_run(settings: dict[str, Any], outputs: Outputs, runner: Callable[..., RunRecord] | None = None) -> None:
    """Run one spec into a folder, which `fsdplab report` reads, and show its row; `runner` is `sessions.run` unless
    given.
    """
    from fsdplab.sessions import RunSpec, run

    console, spec, detail = outputs.console(), RunSpec(**settings), outputs.detail
    folder = _claimed(outputs, Path("runs") / f"{spec.strategy}-{spec.engine}")
    if detail is not Detail.QUIET:
        show(console, [headline(spec, spec.card)])
    with ProgressTable(console, {folder: spec}, detail) as progress:
        progress.begins(spec)
        record = (runner or run)(
            spec, directory=folder, on_progress=lambda *where: progress.step(spec, *where), on_look=look_for_signals
        )
    outputs.give(answer_of_runs([record], None, detail))
    show(console, [recorded_in(folder)])


def record_on_nodes(common: dict[str, Any], nodes: int, ranks_per_node: int | None, outputs: Outputs) -> None:
    """Record one run on `nodes` network namespaces, or behind an emulated link if namespaces cannot be made."""
    from fsdplab.planning.links import parse_link
    from fsdplab.sessions import RunSpec
    from fsdplab.sessions.virtual_nodes import run_nodes, why_no_nodes

    each = _ranks_of_a_node(common["world_size"], nodes, ranks_per_node)
    settings = dict(common, world_size=nodes * each)
    if (why := why_no_nodes()) is not None:
        instead = "the link between all ranks is emulated instead"
        print(f"fsdplab: no nodes can be made here ({why}); {instead}", file=sys.stderr)
        record_run(settings, outputs)
        return
    link = parse_link(common["link"]) if common["link"] else None

    def on_nodes(spec: RunSpec, **how: Any) -> RunRecord:
        return run_nodes(spec, nodes, each, link, **how)

    record_run(dict(settings, link=None), outputs, on_nodes)


def _claimed(outputs: Outputs, usual: Path) -> Path:
    """The folder that was asked for, or a new one: `usual`, or one beside it. Only `--force` replaces a record."""
    from fsdplab.records.folder import claim_folder, claim_free_folder

    if outputs.keep or outputs.force:
        return claim_folder(outputs.keep or usual, replace=outputs.force)
    return claim_free_folder(usual)


def _ranks_of_a_node(ranks: int, nodes: int, given: int | None) -> int:
    for flag, count in (("--nodes", nodes), ("--ranks-per-node", given)):
        if count is not None and count < 1:
            refuse(f"{flag} is {count}; expected a whole number of at least 1")
    if ranks % nodes and given is None:
        expected = "expected a divisor of the ranks, or give --ranks-per-node"
        refuse(f"--nodes {nodes} with --world-size {ranks}; {expected}")
    return given or ranks // nodes

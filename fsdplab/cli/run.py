"""`fsdplab run`: one run, recorded in a folder; on this machine, or on several nodes with a real link between them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdplab.cli.errors import refusals, refuse
from fsdplab.cli.outputs import Detail, Outputs, print_findings, print_output_of_ranks, show
from fsdplab.cli.progress import ProgressTable, headline
from fsdplab.cli.terminal import look_for_signals
from fsdplab.figures.view import view
from fsdplab.records import RunRecord


@dataclass(frozen=True)
class Where:
    """Where a record goes: the folder, and whether it may replace an earlier record there."""

    folder: Path
    force: bool


def where(out: Path | None, default: Path, force: bool) -> Where:
    """`--out`, or a folder below runs/ that is free: an earlier record stays unless it is to be replaced."""
    from fsdplab.records.folder import free_folder

    return Where(out or (default if force else free_folder(default)), force)


def record_run(
    settings: dict[str, Any], place: Where, detail: Detail, runner: Callable[..., RunRecord] | None = None
) -> None:
    """Run one spec into a folder that `fsdplab report` reads, and show its row; `runner` is `sessions.run` unless
    given.
    """
    from fsdplab.records.folder import claim_folder
    from fsdplab.sessions import RunSpec, run

    console = Outputs().console()
    with refusals():
        spec = RunSpec(**settings)
        folder = claim_folder(place.folder, replace=place.force)
        if detail is not Detail.QUIET:
            console.print(headline(spec, spec.card), highlight=False)
        with ProgressTable(console, {folder: spec}, detail) as progress:
            record = (runner or run)(
                spec, directory=folder, on_progress=lambda *where: progress.step(spec, *where), on_look=look_for_signals
            )
    show(console, [view(record)], None, detail)
    if detail is not Detail.QUIET:
        print_findings(console, [record], detail)
    if detail is Detail.VERBOSE:
        print_output_of_ranks(console, [record])
    console.print(f"recorded in {folder}; show it again with: fsdplab report {folder}", highlight=False, markup=False)


def record_on_nodes(
    common: dict[str, Any], nodes: int, ranks_per_node: int | None, place: Where, detail: Detail
) -> None:
    """Record one run on `nodes` network namespaces, or behind an emulated link where these cannot be made."""
    from fsdplab.planning.links import LinkError, parse_link
    from fsdplab.sessions import RunSpec
    from fsdplab.sessions.virtual_nodes import run_nodes, why_no_nodes

    if nodes < 1:
        refuse(f"--nodes is {nodes}; expected a whole number of at least 1")
    if common["world_size"] % nodes and ranks_per_node is None:
        refuse(
            f"--nodes {nodes} with --world-size {common['world_size']}; expected a divisor of the ranks, or give"
            " --ranks-per-node"
        )
    if ranks_per_node is not None and ranks_per_node < 1:
        refuse(f"--ranks-per-node is {ranks_per_node}; expected a whole number of at least 1")
    each = ranks_per_node or common["world_size"] // nodes
    settings = dict(common, world_size=nodes * each)
    if (why := why_no_nodes()) is not None:
        print(
            f"fsdplab: no nodes can be made here ({why}); the link between all ranks is emulated instead",
            file=sys.stderr,
        )
        record_run(settings, place, detail)
        return
    try:
        link = parse_link(common["link"]) if common["link"] else None
    except LinkError as error:
        refuse(str(error))

    def on_nodes(spec: RunSpec, **how: Any) -> RunRecord:
        return run_nodes(spec, nodes, each, link, **how)

    record_run(dict(settings, link=None), place, detail, on_nodes)

"""Networks and cards from the terminal: the wind tunnel's card, and runs on several nodes with a real link between
them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fsdplab.cli_compare import record_run
from fsdplab.cli_errors import refusals, refuse
from fsdplab.cli_parse import parse_size
from fsdplab.records import RunRecord


def card_of(text: str, common: dict, otherwise: str) -> int | None:
    """Bytes of the emulated card; `auto` is the wind tunnel's card where there is one, else `otherwise`."""
    if text != "auto":
        return parse_size(text)
    if not (common["emulate"] and common["as_model"]):
        return parse_size(otherwise)
    from fsdplab.sessions import RunSpec
    from fsdplab.sessions.fabric import scaled_card

    names = ("emulate", "as_model", "model", "world_size", "device")
    with refusals():
        return scaled_card(RunSpec(**{name: common[name] for name in names}))


def record_on_nodes(common: dict, nodes: int, ranks_per_node: int | None, folder: Path) -> None:
    """Record one run on `nodes` network namespaces;
    behind an emulated link where the system does not let us make them.
    """
    from fsdplab.planning.links import LinkError, parse_link
    from fsdplab.sessions import RunSpec
    from fsdplab.sessions.nodes import run_nodes, shaping_refused

    if nodes < 1 or common["world_size"] % nodes and ranks_per_node is None:
        refuse(
            f"--nodes {nodes} with --world-size {common['world_size']}; expected a divisor of the ranks, or give"
            " --ranks-per-node"
        )
    each = ranks_per_node or common["world_size"] // nodes
    settings = dict(common, world_size=nodes * each)
    if (why := shaping_refused()) is not None:
        print(
            f"fsdplab: no nodes can be made here ({why}); the link between all ranks is emulated instead",
            file=sys.stderr,
        )
        record_run(settings, folder)
        return
    try:
        link = parse_link(common["link"]) if common["link"] else None
    except LinkError as error:
        refuse(str(error))

    def on_nodes(spec: RunSpec, **how: object) -> RunRecord:
        return run_nodes(spec, nodes, each, link, **how)

    record_run(dict(settings, link=None), folder, on_nodes)

"""Networks and cards from the terminal: the wind tunnel's card, and runs on several nodes with a real link between them."""

from __future__ import annotations

from pathlib import Path

from fsdplab.cli_errors import refusals, refuse
from fsdplab.cli_parse import parse_size


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
    """Record one run on `nodes` network namespaces; behind an emulated link where the system does not let us make them."""
    raise NotImplementedError

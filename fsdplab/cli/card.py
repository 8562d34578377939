"""The emulated card of a request: a size, none, or the wind tunnel's own."""

from __future__ import annotations

from typing import Any

from fsdplab.cli.errors import refusals
from fsdplab.cli.parse import parse_card


def card_of(text: str, common: dict[str, Any], otherwise: str) -> int | None:
    """Bytes of the emulated card; `auto` is the wind tunnel's card where there is one, else `otherwise`."""
    if text != "auto":
        return parse_card(text)
    if not (common["emulate"] and common["as_model"]):
        return parse_card(otherwise)
    from fsdplab.sessions import RunSpec
    from fsdplab.sessions.worker.emulated_network import scaled_card

    names = ("emulate", "as_model", "model", "world_size", "device")
    with refusals():
        return scaled_card(RunSpec(**{name: common[name] for name in names}))

"""Parses flags whose text is not the value: sizes, links, comma-separated names and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdplab.cli.errors import refuse
from fsdplab.cli.options import RUN
from fsdplab.common.names import STRATEGIES
from fsdplab.common.sizes import parse_size
from fsdplab.sessions.spec import Network, Placement, WorkloadPart, near_matches


def parse_card(text: str) -> int | None:
    """Bytes of `300MB`, `1.5GB`, `2GiB` or a plain number; None for `none`. Anything else is an error."""
    if text.strip().lower() == "none":
        return None
    try:
        return parse_size(text)
    except ValueError:
        refuse(f"--card is {text!r}; expected a size such as 300MB, 1.5GB or 2GiB, or none")


def card_of(text: str, common: dict[str, Any], otherwise: str) -> int | None:
    """Bytes of the emulated card; `auto` is the wind tunnel's card where there is one, else `otherwise`."""
    if text != "auto":
        return parse_card(text)
    if not (common["emulate"] and common["as_model"]):
        return parse_card(otherwise)
    network = Network(emulate=common["emulate"], as_model=common["as_model"])
    ranks = Placement(world_size=common["world_size"]).world_size
    return network.scaled_card(WorkloadPart(model=common["model"]), ranks)


def link_of(common: dict[str, Any], engines: list[str], otherwise: str) -> str | None:
    """The emulated link; `none` is none, and `auto` is `otherwise` between CPU ranks that can be put behind it."""
    from fsdplab.sessions.spec.choices import ON_SHARED_MEMORY

    link = common["link"]
    if link != "auto":
        return None if link is None or link.strip().lower() == "none" else str(link)
    apart = common["emulate"] or common["link_across"] or not set(engines) <= {"lab", *ON_SHARED_MEMORY}
    device = Placement(world_size=common["world_size"], device=common["device"]).device_type
    return None if apart or device != "cpu" else otherwise


def names(text: str) -> list[str]:
    """`"a, b"` -> `["a", "b"]`; empty parts are dropped."""
    return [part.strip() for part in text.split(",") if part.strip()]


def check_strategies(found: Sequence[str]) -> None:
    """Refuse an unknown strategy; settings may follow a name, as in `full_shard:prefetch=0`."""
    for name in (text.partition(":")[0].strip() for text in found):
        if name not in STRATEGIES:
            near = near_matches(name, tuple(STRATEGIES))
            refuse(f"unknown strategy {name!r}{near}; expected one of {', '.join(STRATEGIES)}")


def one_strategy(named: str | None, flag: str) -> str:
    """The strategy of `run zero1` or of `run --strategy zero1`; two different ones are an error."""
    if named and flag not in (named, RUN["strategy"].default):
        refuse(f"{named} and --strategy {flag} were given; expected one strategy")
    return named or flag


def whole_numbers(flag: str, text: str) -> list[int]:
    """`"0, 1"` -> `[0, 1]`; anything else than whole numbers of at least 0 is an error that names the flag."""
    parts = names(text)
    if not parts or not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        refuse(f"{flag} has {text!r}; expected whole numbers of at least 0, such as 0,1,2")
    return [int(part) for part in parts]

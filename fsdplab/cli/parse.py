"""Texts of the command line -> values: sizes, and comma-separated names."""

from __future__ import annotations

from fsdplab.cli.errors import refuse
from fsdplab.common.sizes import parse_size


def parse_card(text: str) -> int | None:
    """Bytes of `300MB`, `1.5GB`, `2GiB` or a plain number; None for `none`. Anything else is refused in one line."""
    if text.strip().lower() == "none":
        return None
    try:
        return parse_size(text)
    except ValueError:
        refuse(f"--card is {text!r}; expected a size such as 300MB, 1.5GB or 2GiB, or none")


def names(text: str) -> list[str]:
    """`"a, b"` -> `["a", "b"]`; empty parts are dropped."""
    return [part.strip() for part in text.split(",") if part.strip()]

"""Texts of the command line -> values: sizes, and comma-separated names."""

from __future__ import annotations

import re

from fsdplab.cli.errors import refuse

_SCALE = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_size(text: str) -> int | None:
    """Bytes of `300MB`, `1.5GB`, `2GiB` or a plain number; None for `none`. Anything else is refused in one line."""
    if text.strip().lower() == "none":
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower().replace("_", ""))
    nbytes = int(float(found[1]) * _SCALE[found[2]]) if found and found[2] in _SCALE else 0
    if nbytes < 1:
        refuse(f"--card is {text!r}; expected a size such as 300MB, 1.5GB or 2GiB, or none")
    return nbytes


def names(text: str) -> list[str]:
    """`"a, b"` -> `["a", "b"]`; empty parts are dropped."""
    return [part.strip() for part in text.split(",") if part.strip()]

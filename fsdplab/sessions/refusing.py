"""How a request that cannot be is refused: one line that says what was wrong, what was got, what is possible and what
to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence


class SpecError(ValueError):
    """A run that cannot be; the message is one line: what, got, expected, what to do."""


def near_matches(got: object, expected: Sequence[str]) -> str:
    """`" (did you mean full_shard?)"` for `fullshard`; empty when nothing is near."""
    if str(got).lower().replace("-", "").replace("_", "") == "zero3" and "full_shard" in expected:
        return " (ZeRO-3 is full_shard here)"
    near = difflib.get_close_matches(str(got).lower().replace("-", "_"), expected, n=2, cutoff=0.5)
    near = near or difflib.get_close_matches(str(got).lower(), expected, n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def check_whole(name: str, got: object, least: int, remark: str = "") -> None:
    """SpecError unless `got` is a whole number of at least `least`."""
    if isinstance(got, bool) or not isinstance(got, int) or got < least:
        raise SpecError(f"{name} is {got!r}; expected a whole number of at least {least}{remark}")

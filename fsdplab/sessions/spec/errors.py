"""How a request that cannot be is refused: one line that says what was wrong, what was got, what is possible and what
to do.
"""

from __future__ import annotations


class SpecError(ValueError):
    """A run that cannot be; the message is one line: what, got, expected, what to do."""


def check_whole(name: str, got: object, least: int, remark: str = "") -> None:
    """SpecError unless `got` is a whole number of at least `least`."""
    if isinstance(got, bool) or not isinstance(got, int) or got < least:
        raise SpecError(f"{name} is {got!r}; expected a whole number of at least {least}{remark}")

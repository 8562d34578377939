"""Words for messages: near matches of an unknown word, and plurals."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

MISSING = "–"  # shown in tables where nothing was measured
NO_UNIT = "no unit named in this trace"
OFF_LINK = ", copying or waiting"  # after the kind, in the name of exposed time in which no message moves
OUTSIDE_UNITS = "outside the units"  # where other work has a unit
# control characters but tab and line feed, other ends of lines, and signs that change the direction of writing
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def near(got: object, known: Iterable[str], most: int = 2) -> list[str]:
    """Find the known words that `got` resembles, whatever its case, blanks, dashes and dots: at most `most`.

    >>> near("Full-Shard", ["full_shard", "no_shard"])
    ['full_shard', 'no_shard']
    """
    words: Mapping[str, str] = {squeezed(word): word for word in known}
    matches = difflib.get_close_matches(squeezed(str(got)), words, n=most, cutoff=0.55)
    return [words[match] for match in matches]


def did_you_mean(got: object, known: Iterable[str]) -> str:
    """Write the text after an unknown word in a message; empty where nothing is near.

    >>> did_you_mean("fulshard", ["full_shard", "zero1"])
    ' (did you mean full_shard?)'
    """
    matches = near(got, known)
    if not matches:
        return ""
    return f" (did you mean {' or '.join(matches)}?)"


def plural(count: int, noun: str, several: str = "") -> str:
    """Count a noun: `plural(2, "rank") == "2 ranks"`, `plural(1, "rank") == "1 rank"`.

    `several` is an unusual plural.
    """
    if count == 1:
        return f"{count} {noun}"
    return f"{count} {several or noun + 's'}"


def harmless(text: str) -> str:
    """Remove the characters that steer a terminal: those of escape sequences, and of the direction of writing.

    >>> harmless("gemm\\x1b[2J\\u202e")
    'gemm[2J'
    """
    return _STEERING.sub("", text)


def squeezed(text: str) -> str:
    """Remove case, blanks, dashes and dots: `squeezed("ZeRO-3") == "zero3"`."""
    return re.sub(r"[\s_.-]", "", text.lower())

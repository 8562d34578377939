"""Reading back what a part wrote: a sheet is taken only if it is whole and of the right shape.

The runner loads no torch, so that it starts at once and nothing that breaks torch can break it; this file is its half
of part.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Sheet = dict[str, Any]
_LISTS = ("rows", "checks", "notes", "records")
_CHECK = {"name": str, "passed": bool, "got": str, "expected": str}
_FLAT = (str, int, float, bool, type(None))


class BadSheet(ValueError):
    """A part's file is missing, cut short or of another shape; the message says which."""


def read_sheet(path: Path, part: str) -> Sheet:
    """The sheet of one part; BadSheet where there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadSheet(f"it wrote no {path.name}") from None
    except (OSError, ValueError) as error:
        raise BadSheet(f"its {path.name} is no JSON ({error})") from error
    complaint = _complaint(content, part)
    if complaint:
        raise BadSheet(f"its {path.name} {complaint}")
    return content


def _complaint(content: Any, part: str) -> str | None:
    if not isinstance(content, dict) or content.get("part") != part:
        return f"is not a sheet of the part {part!r}"
    wrong = [name for name in _LISTS if not isinstance(content.get(name), list)]
    if wrong:
        return f"has no list of {' and '.join(wrong)}"
    if not all(
        isinstance(row, dict) and all(isinstance(value, _FLAT) for value in row.values()) for row in content["rows"]
    ):
        return "has rows that are not flat"
    if not all(
        isinstance(check, dict) and all(isinstance(check.get(key), kind) for key, kind in _CHECK.items())
        for check in content["checks"]
    ):
        return "has checks without name, passed, got and expected"
    if not all(isinstance(text, str) for name in ("notes", "records") for text in content[name]):
        return "has notes or records that are no text"
    return None

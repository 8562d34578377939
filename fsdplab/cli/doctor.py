"""`fsdplab doctor`: shows the capabilities of this machine, and what it is ready for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from fsdplab.cli.answer import Answer, Line, Part, Table
from fsdplab.records import FORMAT
from fsdplab.sessions.capabilities import Readiness, capabilities, readiness, reality


def capabilities_answer() -> Answer:
    """The findings and the verdict; as JSON `{"format": 2, "findings": [...], "real": ..., "emulated": ...,
    "simulated": ..., "verdict": [{"use": ..., "lacks": ..., "remedy": ...}, ...]}`.
    """
    found = capabilities()
    verdict = readiness({item.name: item.present for item in found}, {item.name: item.note for item in found})
    columns = ("", "there", "found", "note")
    rows = [(item.name, "yes" if item.present else "no", item.value, item.note) for item in found]
    real = [part for word, what in reality(found).items() for part in (Line(""), Line(what, word))]
    table = Table(columns, rows, columns, folds=columns[1:])
    parts: list[Part] = [table, *real, Line(""), *verdict_lines(verdict)]
    said = {"findings": [asdict(item) for item in found], **reality(found)}
    return Answer(parts, {"format": FORMAT, **said, "verdict": [asdict(each) for each in verdict]})


def verdict_lines(found: Sequence[Readiness]) -> list[Line]:
    """`ready for: a; b`, then `not for: c: lacks d; do: e` for each that is not ready, unbroken as it has a command."""
    ready = "; ".join(each.use for each in found if not each.lacks)
    absent = [(f"{each.use}: lacks {each.lacks}; do: {each.remedy}") for each in found if each.lacks]
    return [Line(ready or "nothing yet", "ready for"), *(Line(text, "not for", whole=True) for text in absent)]

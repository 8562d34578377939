"""`fsdplab doctor`: shows the capabilities of this machine, and what it is ready for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

from fsdplab.cli.answer import Answer, Line, Part, Table
from fsdplab.common.temporary import temporary_folder
from fsdplab.records import FORMAT
from fsdplab.sessions.capabilities import NEEDED_IN_A_ROOM, Readiness, capabilities, readiness, reality


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


def room_answer() -> tuple[bool, Answer]:
    """(whether the course runs here, one line that says so): a tiny training on two ranks is tried.

    As JSON `{"format": 2, "ready": ..., "found": {...}, "lacks": [...], "seconds": ...}`.
    """
    from fsdplab.sessions import RunSpec, run

    found = {item.name: item for item in capabilities()}
    verdict = readiness(
        {name: item.present for name, item in found.items()}, {name: i.note for name, i in found.items()}
    )
    lacks = [
        f"lacks {each.lacks}; do: {each.remedy}" for each in verdict if each.use in NEEDED_IN_A_ROOM and each.lacks
    ]
    seconds = None
    if not lacks:
        began = time.monotonic()
        tried = run(RunSpec(model="gpt-tiny", steps=1, device="cpu"), directory=temporary_folder("room"))
        seconds = time.monotonic() - began
        lacks = [] if tried.status == "finished" else [f"two ranks did not train: {tried.failure}"]
    what = {name: found[name].value for name in ("cores", "memory", "torch", "bf16 on the CPU")}
    here = f"{what['cores']} cores, {what['memory']}, torch {what['torch']}, bf16 {what['bf16 on the CPU']}"
    trained = "" if seconds is None else f", two ranks trained in {seconds:.1f} s"
    line = Line("; ".join(lacks), "NOT READY", whole=True) if lacks else Line(f"{here}{trained}", "READY", whole=True)
    said = {"format": FORMAT, "ready": not lacks, "found": what, "lacks": lacks, "seconds": seconds}
    return not lacks, Answer([line], said)

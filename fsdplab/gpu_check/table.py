"""The check as a table for readers: what ran, what did not hold, then every part's figures. Plain text and Markdown.

Pure: from outcomes to text. A column that no row fills is left out, so a dry run on CPU shows no empty columns of CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .runner import Outcome

Table = tuple[list[str], list[list[str]]]
_FIRST = (
    "gpu",
    "driver",
    "torch",
    "cuda",
    "nccl",
    "python",
    "commit",
    "source_sha256",
    "device",
    "command",
    "began_utc",
)
_MOST_COLUMNS = 16  # a row with more figures stands upright


def figure(value: object) -> str:
    """A figure in at most four digits: `figure(0.123456) == "0.1235"`, `figure(None) == "-"`,
    `figure(True) == "yes"`.
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def outcomes_table(outcomes: Sequence[Outcome]) -> Table:
    """One row a part: how it went, how long, how many checks held, and why not."""
    rows = []
    for each in outcomes:
        checks = (each.sheet or {}).get("checks", [])
        held = f"{len(checks) - len(each.failed_checks)} of {len(checks)}" if checks else "-"
        shown = str(len((each.sheet or {}).get("rows", [])))
        rows.append([each.name, each.status, f"{each.seconds:.1f}", f"{each.limit_s:.0f}", shown, held, each.reason])
    return ["part", "status", "seconds", "limit", "rows", "checks held", "reason"], rows


def failed_table(outcomes: Sequence[Outcome]) -> Table:
    """One row a check that did not hold."""
    rows = [
        [each.name, check["name"], check["got"], check["expected"]] for each in outcomes for check in each.failed_checks
    ]
    return ["part", "check that failed", "got", "expected"], rows


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A part's rows, in the order in which columns first appear; wide ones stand upright, a figure a line."""
    columns = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if any(row.get(name) is not None for row in rows)
    ]
    cells = [[figure(row.get(name)) for name in columns] for row in rows]
    if len(columns) > _MOST_COLUMNS and len(rows) <= 8:
        return ["figure", *(str(number) for number in range(1, len(rows) + 1))], [
            [name, *each] for name, each in zip(columns, zip(*cells, strict=True), strict=True)
        ]
    return columns, cells


def ran_on(provenance: Mapping[str, Any]) -> list[str]:
    """What the check ran on, a line each, the most asked for first."""
    names = [*(name for name in _FIRST if name in provenance), *(name for name in provenance if name not in _FIRST)]
    return [f"{name}: {provenance[name]}" for name in names if provenance[name] is not None]


def as_text(provenance: Mapping[str, Any], outcomes: Sequence[Outcome], notes: Sequence[str] = ()) -> str:
    """The whole check as plain text."""
    parts = ["\n".join(ran_on(provenance)), _text(outcomes_table(outcomes))]
    parts += [_text(failed_table(outcomes))] if any(each.failed_checks for each in outcomes) else []
    parts += [f"{title}\n{body}" for title, body in _sections(outcomes, _text)]
    return "\n\n".join([*parts, *(f"note: {note}" for note in notes)]) + "\n"


def as_markdown(provenance: Mapping[str, Any], outcomes: Sequence[Outcome], notes: Sequence[str] = ()) -> str:
    """The whole check as Markdown."""
    parts = ["# GPU check", "\n".join(f"- {line}" for line in ran_on(provenance)), _markdown(outcomes_table(outcomes))]
    parts += (
        ["## Checks that failed", _markdown(failed_table(outcomes))]
        if any(each.failed_checks for each in outcomes)
        else []
    )
    parts += [f"## {title}\n\n{body}" for title, body in _sections(outcomes, _markdown)]
    return "\n\n".join([*parts, *(f"Note: {note}" for note in notes)]) + "\n"


def _sections(outcomes: Sequence[Outcome], render: Callable[[Table], str]) -> list[tuple[str, str]]:
    """(part, its rows and notes) of every part that left any."""
    found = []
    for each in outcomes:
        sheet = each.sheet or {"rows": [], "notes": []}
        # its row stands on top
        body = [render(rows_table(sheet["rows"]))] if sheet["rows"] and each.name != "environment" else []
        body += [f"note: {note}" for note in sheet["notes"]]
        if body:
            found.append((each.name, "\n\n".join(body) if render is _markdown else "\n".join(body)))
    return found


def _text(table: Table) -> str:
    header, rows = table
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, rule, *rows]
    )


def _markdown(table: Table) -> str:
    header, rows = table
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )

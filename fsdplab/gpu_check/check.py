"""A check on disk: one small folder that `gpu-check --open FOLDER` prints and that data/ can keep.

check.json   what it ran on, and for every part its outcome, checks, figures and notes
log.txt      what the parts printed
records/     the run records that are kept, one folder each

It is saved after every line, so that whatever ends the check, what it found is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdplab.common.files import read_file, write_whole

FORMAT = "fsdplab gpu check 2"
UNFINISHED = ".unfinished"  # in the folder: what commands write while they run
RECORDS = "records"
REFUSED = 2  # exit code of this command and of those that it runs: the request cannot be done here
HELD, FAILED, NOT_JUDGED = "held", "failed", "not judged"
Row = dict[str, Any]
_LARGEST_FILE = 10**8  # bytes of a check.json


class CheckError(ValueError):
    """A folder holds no check, or a damaged one; the message says what to do."""


@dataclass
class Part:
    """One part: how it ended and why, its seconds and their limit, and what it has found.

    `values` is whether kernels compute: without, what rests on their values is not judged. Example::

        part.row(engine="lab", step_ms=12.5)
        part.check("the trace has kernels", "" if kernels else "it has none")
        part.check_value("all_gather", "values are wrong: got 0.0, expected 3.0")
    """

    name: str
    status: str = "not run"
    reason: str = ""
    seconds: float = 0.0
    limit_s: float = 0.0
    rows: list[Row] = field(default_factory=list)
    checks: list[dict[str, str]] = field(default_factory=list)  # name, state, got
    notes: list[str] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    facts: Row = field(default_factory=dict)  # for the provenance of the check
    values: bool = True

    def failed(self) -> list[dict[str, str]]:
        """The checks that failed."""
        return [check for check in self.checks if check["state"] == FAILED]

    def row(self, **figures: Any) -> None:
        """Add a row of figures: texts, numbers, None."""
        self.rows.append(figures)

    def check(self, name: str, wrong: str) -> None:
        """Add a check, which held where nothing is wrong."""
        self._judged(name, FAILED if wrong else HELD, wrong)

    def check_value(self, name: str, wrong: str) -> None:
        """Add a check that needs kernels to compute."""
        self._judged(name, NOT_JUDGED if not self.values else FAILED if wrong else HELD, wrong)

    def _judged(self, name: str, state: str, wrong: str) -> None:
        self.checks.append({"name": name, "state": state, "got": wrong})

    def note(self, text: str) -> None:
        """Add a sentence for the reader of the table."""
        self.notes.append(text)


@dataclass
class Check:
    """A whole check. `provenance`: GPU, driver, torch, NCCL, commit, command, ...

    >>> print(open_check("data/gpu"))                            # doctest: +SKIP
    >>> [row["step_ms"] for row in open_check("data/gpu").part("speed").rows]  # doctest: +SKIP
    """

    folder: Path
    provenance: Row
    parts: list[Part] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every part ended well and no check failed."""
        return bool(self.parts) and all(each.status == "finished" and not each.failed() for each in self.parts)

    @property
    def gpus(self) -> list[Row]:
        """The environment's row of each GPU; [] before that part has ended."""
        return next((part.rows for part in self.parts if part.name == "environment"), [])

    @property
    def values(self) -> bool:
        """Whether kernels give right values on every GPU, as far as that is known."""
        return all(gpu["sum"] == 8.0 for gpu in self.gpus)

    @property
    def device(self) -> str:
        """cuda or cpu."""
        return str(self.provenance["device"])

    @property
    def ranks(self) -> int:
        """One for each GPU, and two that share a single one, unless its compute mode forbids that."""
        alone = 1 if any(gpu["exclusive"] for gpu in self.gpus) else 2
        return len(self.gpus) if len(self.gpus) > 1 else alone

    def part(self, name: str) -> Part:
        """One part; LookupError where it was not asked for."""
        for each in self.parts:
            if each.name == name:
                return each
        raise LookupError(f"this check has no part {name!r}; it has {', '.join(each.name for each in self.parts)}")

    def save(self) -> None:
        """Write check.json in one move."""
        content = {"format": FORMAT, "provenance": self.provenance, "parts": [asdict(each) for each in self.parts]}
        write_whole(self.folder / "check.json", json.dumps(content | {"notes": self.notes}, indent=1) + "\n")

    def records(self) -> list[Path]:
        """The folders of the run records, for `RunRecord.load`."""
        return [self.folder / RECORDS / name for part in self.parts for name in part.records]

    def __str__(self) -> str:
        made = "\n".join(f"{name}: {value}" for name, value in self.provenance.items() if value is not None)
        sections = [made, table([_outcome(each) for each in self.parts])]
        wrong = [{"part": part.name, **check} for part in self.parts for check in part.checks if check["got"]]
        sections += [table(wrong)] if wrong else []
        sections += [f"{each.name}\n" + "\n".join(_body(each)) for each in self.parts if each.rows or each.notes]
        return "\n\n".join([*sections, *(f"note: {note}" for note in self.notes)]) + "\n"


def open_check(folder: Path | str) -> Check:
    """The check in `folder`; CheckError where there is none."""
    path = Path(folder) / "check.json"
    try:
        content = json.loads(read_file(path, _LARGEST_FILE))
        if content["format"] != FORMAT:
            raise CheckError(f"{path} has the format {content['format']!r}, expected {FORMAT!r}; run the check again")
        parts = [Part(**each) for each in content["parts"]]
        check = Check(Path(folder), content["provenance"], parts, content["notes"])
        str(check)  # of what it is made, every piece is there
        return check
    except FileNotFoundError:
        raise CheckError(f"{folder} holds no check.json; give the folder that `fsdplab gpu-check` wrote") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckError):
            raise
        raise CheckError(f"{path} is damaged ({error}); copy the folder again, or run the check again") from error


# ---- the table


def _outcome(part: Part) -> Row:
    states = [check["state"] for check in part.checks]
    return {
        "part": part.name, "status": part.status, "seconds": f"{part.seconds:.1f}", "limit": f"{part.limit_s:.0f}",
        **{state: states.count(state) for state in (HELD, FAILED, NOT_JUDGED)}, "reason": part.reason,
    }  # fmt: skip


def _body(part: Part) -> list[str]:
    return [*([table(part.rows)] if part.rows else []), *(f"note: {note}" for note in part.notes)]


def shown(value: Any) -> str:
    """A figure in at most four digits: `shown(0.123456)` is "0.1235", `shown(None)` is "-"."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return "-" if value is None else f"{value:,}" if type(value) is int else str(value)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text, without columns that no row fills."""
    columns = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if any(row.get(name) not in (None, "") for row in rows)
    ]
    lines = [columns, *([shown(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)

"""A check on disk: one small folder that `gpu-check --open FOLDER` prints and that data/ can keep.

check.json   what it ran on, and for every part its outcome, checks, figures and notes
log.txt      what the parts printed
records/     the run records that are kept, one folder each

It is saved after every command, so that whatever ends the check, what it found is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdplab.common.files import read_file, write_whole
from fsdplab.common.rows import aligned

FORMAT = "fsdplab gpu check 3"
UNFINISHED = ".unfinished"  # in the folder: what commands write while they run
RECORDS = "records"
Row = dict[str, Any]
_LARGEST_FILE = 10**8  # bytes of a check.json


class CheckError(ValueError):
    """A folder holds no check, or a damaged one; the message says what to do."""


@dataclass
class Part:
    """One part: how it ended and why, its seconds and their limit, and what it has found.

    `rows` are figures: texts, numbers, None. `facts` are for the provenance of the check.
    """

    name: str
    status: str = "not run"
    reason: str = ""
    seconds: float = 0.0
    limit_s: float = 0.0
    rows: list[Row] = field(default_factory=list)
    checks: list[dict[str, str]] = field(default_factory=list)  # name, wrong
    notes: list[str] = field(default_factory=list)
    records: list[str] = field(default_factory=list)
    facts: Row = field(default_factory=dict)

    def row(self, **figures: Any) -> None:
        """Add a row of figures."""
        self.rows.append(figures)

    def check(self, name: str, wrong: str) -> None:
        """Add a check, which held where nothing is wrong: `part.check("the trace has kernels", "")`."""
        self.checks.append({"name": name, "wrong": wrong})

    def failed(self) -> list[dict[str, str]]:
        """The checks that failed."""
        return [check for check in self.checks if check["wrong"]]


@dataclass
class Check:
    """A whole check. `provenance`: GPU, driver, torch, NCCL, commit, parts, ...

    >>> print(open_check("data/gpu"))                            # doctest: +SKIP
    >>> [row["step_ms"] for row in open_check("data/gpu").parts["speed"].rows]  # doctest: +SKIP
    """

    folder: Path
    provenance: Row
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every part ended well and no check failed."""
        parts = self.parts.values()
        return bool(parts) and all(each.status == "finished" and not each.failed() for each in parts)

    @property
    def gpus(self) -> list[Row]:
        """The environment's row of each GPU; [] before that part has ended."""
        return self.parts["environment"].rows if "environment" in self.parts else []

    @property
    def ranks(self) -> int:
        """One for each GPU, and two that share a single one, unless its compute mode forbids that."""
        alone = 1 if any(gpu["exclusive"] for gpu in self.gpus) else 2
        return len(self.gpus) if len(self.gpus) > 1 else alone

    @property
    def records(self) -> list[Path]:
        """The folders of the run records, for `RunRecord.load`."""
        return [self.folder / RECORDS / name for part in self.parts.values() for name in part.records]

    def save(self) -> None:
        """Write check.json in one move."""
        parts = [asdict(each) for each in self.parts.values()]
        content = {"format": FORMAT, "provenance": self.provenance, "parts": parts}
        write_whole(self.folder / "check.json", json.dumps(content, indent=1) + "\n")

    def __str__(self) -> str:
        made = "\n".join(f"{name}: {value}" for name, value in self.provenance.items() if value is not None)
        parts = self.parts.values()
        sections = [made, table([_outcome(each) for each in parts])]
        wrong = [{"part": part.name, **check} for part in parts for check in part.failed()]
        sections += [table(wrong)] if wrong else []
        for part in parts:
            body = [*([table(part.rows)] if part.rows else []), *(f"note: {note}" for note in part.notes)]
            sections += ["\n".join([part.name, *body])] if body else []
        return "\n\n".join(sections) + "\n"


def open_check(folder: Path | str) -> Check:
    """The check in `folder`; CheckError where there is none."""
    path = Path(folder) / "check.json"
    try:
        content = json.loads(read_file(path, _LARGEST_FILE))
        if content["format"] != FORMAT:
            raise CheckError(f"{path} has the format {content['format']!r}, expected {FORMAT!r}; run the check again")
        parts = {each["name"]: Part(**each) for each in content["parts"]}
        check = Check(Path(folder), content["provenance"], parts)
        str(check)  # of what it is made, every piece is there
        return check
    except FileNotFoundError:
        raise CheckError(f"{folder} holds no check.json; give the folder that `fsdplab gpu-check` wrote") from None
    except CheckError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckError(f"{path} is damaged ({error}); copy the folder again, or run the check again") from error


# ---- the table


def _outcome(part: Part) -> Row:
    return {
        "part": part.name, "status": part.status, "seconds": f"{part.seconds:.1f}", "limit": f"{part.limit_s:.0f}",
        "checks": len(part.checks), "failed": len(part.failed()), "reason": part.reason,
    }  # fmt: skip


def shown(value: Any) -> str:
    """A figure in at most four digits: `shown(0.123456)` is "0.1235", `shown(None)` is "-"."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return "-" if value is None else f"{value:,}" if type(value) is int else str(value)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text, without columns that no row fills."""
    named = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in named if any(row.get(name) not in (None, "") for row in rows)]
    return "\n".join(aligned([columns, *([shown(row.get(name)) for name in columns] for row in rows)]))

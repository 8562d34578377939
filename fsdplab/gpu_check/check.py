"""A check on disk: a folder of at most seven files, written again after every part and opened with `open_check`.

check.json       provenance, and every part's outcome with its sheet
table.txt, .md   the same for readers
log.txt          what the parts printed
records.tar.gz   the run records that the parts left (and -2, -3 where one is not enough)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdplab.common.files import write_whole

from .packing import pack, unpack
from .runner import STATUSES, Outcome, without_paths
from .table import as_markdown, as_text

FORMAT = "fsdplab gpu check 1"
_LOG_HEAD, _LOG_TAIL = 100_000, 400_000  # bytes of one part's log that are kept


class CheckError(ValueError):
    """A folder is no check, or a damaged one; the message says what to do."""


@dataclass
class Check:
    """One whole check. `provenance`: GPU, driver, torch, NCCL, commit, command, ...; `outcomes` in the order of the
    parts.

    >>> check = open_check("data/gpu-check")             # doctest: +SKIP
    >>> print(check)                                     # doctest: +SKIP
    >>> [row["step_ms"] for row in check.rows("one_rank")]  # doctest: +SKIP
    """

    provenance: dict[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    folder: Path | None = None

    @property
    def passed(self) -> bool:
        """Whether every part ran to its end and every check held."""
        return bool(self.outcomes) and all(
            each.status == "finished" and not each.failed_checks for each in self.outcomes
        )

    @property
    def place(self) -> Path:
        """The folder of a check that was saved."""
        assert self.folder is not None, "this check was not saved yet"
        return self.folder

    def outcome(self, part: str) -> Outcome:
        """One part's outcome; LookupError where it was not asked for."""
        for each in self.outcomes:
            if each.name == part:
                return each
        raise LookupError(f"this check has no part {part!r}; it has {', '.join(each.name for each in self.outcomes)}")

    def rows(self, part: str) -> list[dict[str, Any]]:
        """The rows of figures of one part; none where it wrote nothing readable."""
        return (self.outcome(part).sheet or {}).get("rows", [])

    def __str__(self) -> str:
        return as_text(self.provenance, self.outcomes, self.notes)

    def unpack_records(self, target: Path) -> list[Path]:
        """Write the run records below `target` and return their folders, for `RunRecord.load`."""
        return unpack(self.folder, target) if self.folder else []

    def save(self, folder: Path) -> None:
        """Write check.json and both tables, each in one move."""
        parts = [each.as_dict() for each in self.outcomes]
        content = {
            "format": FORMAT,
            "passed": self.passed,
            "provenance": self.provenance,
            "parts": parts,
            "notes": self.notes,
        }
        write_whole(folder / "check.json", json.dumps(content, indent=1) + "\n")
        write_whole(folder / "table.txt", str(self))
        write_whole(folder / "table.md", as_markdown(self.provenance, self.outcomes, self.notes))
        self.folder = folder

    def save_log(self, scratch: Path) -> None:
        """Write log.txt from the parts' logs in `scratch`, the middle of long ones left out."""
        logs = [
            f"==== {each.name}: {each.status} {each.reason}\n{_shortened(scratch / f'{each.name}.log')}\n"
            for each in self.outcomes
        ]
        write_whole(self.place / "log.txt", "".join(logs))

    def save_records(self, scratch: Path) -> None:
        """Pack the records that the parts named; what did not fit becomes a note."""
        named = [(each.name, record) for each in self.outcomes for record in (each.sheet or {}).get("records", [])]
        self.notes += pack([(f"{part}/{record}", scratch / part / record) for part, record in named], self.place)
        self.save(self.place)


def open_check(folder: Path | str) -> Check:
    """The check in `folder`; `print(open_check("data/gpu-check"))` shows its table. CheckError where there is none."""
    path = Path(folder) / "check.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckError(
                f"{path} has the format {content['format']!r}; expected {FORMAT!r}: run the check again with this"
                " version"
            )
        outcomes = [Outcome(**part) for part in content["parts"]]
        strange = [each.status for each in outcomes if each.status not in STATUSES]
        if strange:
            raise CheckError(
                f"{path} has the status {strange[0]!r}; expected one of {', '.join(STATUSES)}: copy the folder again"
            )
        return Check(content["provenance"], outcomes, content["notes"], Path(folder))
    except FileNotFoundError:
        raise CheckError(
            f"{folder} holds no check.json, so it is no check; give the folder that `fsdplab gpu-check` wrote"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, CheckError):
            raise
        raise CheckError(
            f"{path} is damaged ({type(error).__name__}: {error}); copy the folder again from where it was made"
        ) from error


def _shortened(log: Path) -> str:
    if not log.exists():
        return ""
    text = log.read_bytes()
    if len(text) > _LOG_HEAD + _LOG_TAIL:
        left_out = f"\n... {len(text) - _LOG_HEAD - _LOG_TAIL} bytes left out ...\n".encode()
        text = text[:_LOG_HEAD] + left_out + text[-_LOG_TAIL:]
    return without_paths(text.decode(errors="replace"), log.parent)

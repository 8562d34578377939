"""A check on disk: a folder of at most seven files, written again after every part and opened with `open_check`.

check.json       provenance, and every part's outcome with its sheet
table.txt, .md   the same for readers: what ran, what did not hold, then every part's figures
log.txt          what the parts printed
records.tar.gz   the run records that the parts left (and -2, -3 where one is not enough)

A borrowed machine lets few files out, each under 16 MB: a record that does not fit goes without its traces, and if that
is still too large it is left out and named.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdplab.common.files import read_file, write_whole

from .runner import STATUSES, Outcome, without_paths

FORMAT = "fsdplab gpu check 1"
MOST_BYTES = 15_000_000  # in an archive, before compression; tar's own blocks come on top
MOST_ARCHIVES = 3
_LARGEST_FILE = 10**8  # bytes of a check.json
_LOG_HEAD, _LOG_TAIL = 100_000, 400_000  # bytes of one part's log that are kept
_PER_FILE = 1536  # a tar header and padding, about
Table = tuple[list[str], list[list[str]]]
_FIRST = (
    "gpu", "driver", "torch", "cuda", "nccl", "python", "commit", "source_sha256", "device", "command", "began_utc",
)  # fmt: skip
_MOST_COLUMNS = 16  # a row with more figures stands upright


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
            "format": FORMAT, "passed": self.passed, "provenance": self.provenance, "parts": parts, "notes": self.notes,
        }  # fmt: skip
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
        content = json.loads(read_file(path, _LARGEST_FILE))
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


# ---- the table: pure, from outcomes to plain text and Markdown


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
    failed = [(each, check) for each in outcomes for check in each.failed_checks]
    rows = [[each.name, check["name"], check["got"], check["expected"]] for each, check in failed]
    return ["part", "check that failed", "got", "expected"], rows


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A part's rows, in the order in which columns first appear; wide ones stand upright, a figure a line.

    A column that no row fills is left out, so a dry run on CPU shows no empty columns of CUDA.
    """
    known = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in known if any(row.get(name) is not None for row in rows)]
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
    if any(each.failed_checks for each in outcomes):
        parts += ["## Checks that failed", _markdown(failed_table(outcomes))]
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


# ---- run records, in a few archives


@dataclass(frozen=True)
class Load:
    """One record to pack: its name in the archive, its folder, the files taken, and their bytes."""

    name: str
    folder: Path
    files: tuple[Path, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in an archive before compression."""
        return sum(path.stat().st_size + _PER_FILE for path in self.files)


def load_of(name: str, folder: Path, traces: bool = True) -> Load:
    """The files of a record; without `traces`, all but its traces/ folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return Load(name, folder, tuple(path for path in files if traces or path.relative_to(folder).parts[0] != "traces"))


def pack(records: Sequence[tuple[str, Path]], target: Path, most_bytes: int = MOST_BYTES) -> list[str]:
    """Write `target/records.tar.gz` (and -2, -3) from (name, folder) pairs; returns a sentence for each record not
    whole in them.
    """
    archives: list[list[Load]] = []
    complaints = []
    for name, folder in records:
        whole, bare = load_of(name, folder), load_of(name, folder, traces=False)
        if _placed(whole, archives, most_bytes):
            continue
        without = bare.nbytes < whole.nbytes and _placed(bare, archives, most_bytes)
        kept = "is kept without its traces" if without else "is left out"
        complaints.append(f"the record {name} ({whole.nbytes / 1e6:.1f} MB) {kept}: the archives were full")
    for path in target.glob("records*.tar.gz"):
        path.unlink()
    for number, loads in enumerate(archives, 1):
        _write(target / ("records.tar.gz" if number == 1 else f"records-{number}.tar.gz"), loads)
    return complaints


def _placed(load: Load, archives: list[list[Load]], most_bytes: int) -> bool:
    """Put the load where there is room, in a new archive if one may still be begun."""
    for loads in archives:
        if sum(each.nbytes for each in loads) + load.nbytes <= most_bytes:
            loads.append(load)
            return True
    if len(archives) < MOST_ARCHIVES and load.nbytes <= most_bytes:
        archives.append([load])
        return True
    return False


def _write(path: Path, loads: Sequence[Load]) -> None:
    unfinished = path.with_name(path.name + ".new")
    with tarfile.open(unfinished, "w:gz", compresslevel=6) as archive:
        for load in loads:
            for file in load.files:
                archive.add(
                    file, f"{load.name}/{file.relative_to(load.folder).as_posix()}", recursive=False, filter=_anonymous
                )
    unfinished.replace(path)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the names and numbers of a machine's users: a record is made to be handed on."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def unpack(folder: Path, target: Path) -> list[Path]:
    """The record folders of the archives in `folder`, written below `target`; ValueError for an archive that points
    outside of it.
    """
    found = set()
    for path in sorted(folder.glob("records*.tar.gz")):
        with tarfile.open(path) as archive:
            for entry in archive.getmembers():
                place = _inside(target, entry, path)
                place.parent.mkdir(parents=True, exist_ok=True)
                content = archive.extractfile(entry)
                assert content is not None  # a plain file, by _inside
                place.write_bytes(content.read())
                if place.name == "run.json":
                    found.add(place.parent)
    return sorted(found)


def _inside(target: Path, entry: tarfile.TarInfo, archive: Path) -> Path:
    place = (target / entry.name).resolve()
    if not entry.isfile() or not place.is_relative_to(target.resolve()):
        raise ValueError(
            f"{archive} holds {entry.name!r}, expected plain files of run records only; copy the archive again from"
            " where it was made"
        )
    return place

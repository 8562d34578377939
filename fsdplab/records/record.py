"""A run on disk: one folder with run.json and its tables, written whole and read back strictly.

    run.json         spec, environment, status, failure, summary, provenance, and how many rows each table has
    steps.csv.gz     one row a rank and step: loss and time
    ledger.csv.gz    one row a collective (empty for engines that keep no ledger)
    memory.csv.gz    bytes by category over one step (empty when memory was not measured)
    timeline, breakdown, idle, exposed, life   what profiled steps did (empty when none was)
    model_source.txt the text of a model of one's own, which nothing runs again
    traces/          each rank's own trace, as PyTorch's profiler wrote it (profiled runs)

The tables are written before run.json, and run.json is renamed into place last: a folder with a run.json is a complete
record. `provenance` says for each quantity whether it was measured, emulated or simulated; everything that shows a
record must show that too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdplab.common.files import read_file, write_whole
from fsdplab.common.places import how_to_install

from .folder import MARKER
from .spread import Spread, step_seconds
from .summary import Summary
from .tables import LATER_TABLES, TABLES, RecordError, Row, file_name, of_today, read_table, write_table
from .typed import LongText, Scalar, WrongType, plain, read, shown

if TYPE_CHECKING:
    import pandas

FORMAT = "fsdplab run record 2"
_MOST_BYTES = 10**8  # of a run.json
STATUSES = ("finished", "out_of_memory", "failed")
ORIGINS = ("measured", "emulated", "simulated")


@dataclass(frozen=True)
class _Content:
    """What run.json holds, beside its format."""

    spec: Mapping[str, Scalar]
    environment: Mapping[str, Any]
    status: str
    failure: Mapping[str, Any] | None
    summary: Summary
    provenance: Mapping[str, str]
    rows: Mapping[str, int]


# what readers take from objects that hold more
_NEEDED: dict[str, dict[str, Any]] = {
    "spec": {"strategy": str, "engine": str, "world_size": int},
    "environment": {"device": str | None},
    "failure": {"message": LongText | None, "traceback": LongText | None},
}
_ALL = tuple(_Content.__dataclass_fields__)
_FIELDS = tuple(name for name in _ALL if name != "rows")


@dataclass
class RunRecord:
    """One run. `table("steps")` gives rows, `frame("steps")` the same as a pandas DataFrame.

    >>> record = RunRecord.load("runs/full_shard-lab-2-ranks")        # doctest: +SKIP
    >>> record.status, record.summary.step_time_s.median            # doctest: +SKIP
    ('finished', 0.41)
    """

    path: Path
    spec: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    status: str = "finished"
    failure: dict[str, Any] | None = None
    summary: Summary = Summary()
    provenance: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[Row]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        self.tables = {**{name: [] for name in TABLES}, **self.tables}
        if self.status not in STATUSES:
            raise ValueError(f"A record's status is one of {', '.join(STATUSES)}; got {self.status!r}.")
        unknown = {name: origin for name, origin in self.provenance.items() if origin not in ORIGINS}
        if unknown:
            raise ValueError(f"A record's provenance is one of {', '.join(ORIGINS)}; got {unknown}.")

    def table(self, name: str) -> list[Row]:
        """Return the rows of `steps`, `ledger`, `memory`, ...; none where the run did not measure it."""
        if name not in TABLES:
            raise RecordError(f"A record has no table {name!r}. Expected one of {', '.join(TABLES)}.")
        return self.tables.get(name, [])

    def frame(self, name: str) -> pandas.DataFrame:
        """Return the table as a pandas DataFrame; RecordError with the install command where pandas is missing."""
        try:
            import pandas
        except ImportError:
            raise RecordError(
                f"record.frame() needs pandas, which is not installed. Run: {how_to_install('lab')}"
            ) from None
        return pandas.DataFrame(self.table(name), columns=list(TABLES[name]))

    def save(self) -> RunRecord:
        """Write the folder, run.json last, and return the record; a table that was not measured is written empty."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in TABLES:
            write_table(self.path, name, self.table(name))
        content = {"format": FORMAT, **{name: plain(getattr(self, name)) for name in _FIELDS}}
        content["rows"] = {name: len(self.table(name)) for name in TABLES}
        # signs as they are and not as escapes, so that a byte of a path which is no text is written as a question mark
        text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
        write_whole(self.path / "run.json", text + "\n")
        return self

    @classmethod
    def load(cls, path: str | Path) -> RunRecord:
        """Read a record folder; RecordError names the file and the remedy when it is missing, damaged or not a
        record.
        """
        folder = Path(path)
        content = _read_run_json(folder)
        try:
            record = cls(folder, **{name: content[name] for name in _FIELDS})
        except ValueError as error:
            raise RecordError(f"{folder / 'run.json'} is damaged: {error} Record the run again.") from error
        for name in TABLES:
            expected = content["rows"].get(name)
            if name in LATER_TABLES and name not in content["rows"] and not (folder / file_name(name)).exists():
                continue  # an earlier version had no such table
            rows = read_table(folder, name)
            record.tables[name] = rows
            if len(rows) != expected:
                raise RecordError(
                    f"{folder / file_name(name)} has {len(rows)} rows; run.json says {expected}. The files are of two"
                    " runs: copy the whole folder again."
                )
        seconds = step_seconds(record.table("steps"))
        if record.summary.step_time_s.count is None and seconds:  # an earlier version kept the median and the minimum
            record.summary = replace(record.summary, step_time_s=Spread.of(seconds))
        return record


def _read_run_json(folder: Path) -> dict[str, Any]:
    """What run.json holds, every field of its type; the summary as an object."""
    path = folder / "run.json"
    try:
        content = json.loads(read_file(path, _MOST_BYTES), parse_constant=_no_number)
        json.dumps(content, ensure_ascii=False).encode()  # ValueError for halves of signs, which no file can hold
    except (FileNotFoundError, NotADirectoryError):
        if not folder.exists():
            raise RecordError(
                f"{folder} does not exist. Give the folder that `fsdplab run` printed, or the file of a trace."
            ) from None
        if (folder / MARKER).is_file():
            raise RecordError(
                f"{folder} holds no run.json: its run was interrupted, or has not ended yet. Wait for its end, or"
                " record it again."
            ) from None
        raise RecordError(
            f"{folder} holds no run.json, so it is no run record, and no trace (.json, .json.gz). Give the folder that"
            " `fsdplab run` printed, or a folder of traces."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(
            f"{path} cannot be read ({error}). Copy it again from where it was recorded, or record the run again."
        ) from error
    format_ = content.get("format") if isinstance(content, dict) else None
    if format_ != FORMAT:
        raise RecordError(
            f"{path} has the format {shown(format_)}; expected {FORMAT!r}. Record the run again with this version of"
            " fsdplab."
        )
    missing = [name for name in _ALL if name not in content]
    if missing:
        raise RecordError(f"{path} lacks {', '.join(missing)}: it is damaged. Record the run again.")
    try:
        content["summary"] = read(_Content, content | {"summary": of_today(content["summary"])}, "").summary
        for place, kinds in _NEEDED.items():
            for name, kind in kinds.items():
                read(kind, (content[place] or {}).get(name), f"{place}.{name}")
    except WrongType as wrong:
        raise RecordError(
            f"{path} is damaged: {wrong}. Copy it again from where it was recorded, or record the run again."
        ) from None
    return content


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")

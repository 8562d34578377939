"""The tables of a record, as compressed CSV with a declared type for every column.

CSV because every tool opens it, and because a diff of two records is readable. CSV has no types, so the schema is here:
a file that does not match it is an error, so that a damaged record never becomes a wrong figure. An empty cell means
"not measured" and reads as None (in a column of names it is the empty name: the root's, for one).
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any

from fsdplab.common.collectives import LANES_OF_COLLECTIVES
from fsdplab.common.errors import UserError
from fsdplab.common.files import read_file, write_whole
from fsdplab.common.names import CATEGORIES

from .typed import shown


class RecordError(UserError, RuntimeError):
    """A record folder is missing, damaged or of another kind; the message names the file and the remedy."""


def _flag(text: str) -> bool:
    return {"True": True, "False": False}[text]


def _whole(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{text[:20]}... has more than 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]!r} is no finite number")
    return value


# the categories of memory as records of earlier versions name them
OLD_CATEGORIES = {
    "parameter_slices": "sharded_parameters",
    "gathered_parameters": "unsharded_parameters",
    "gradient_slices": "sharded_gradients",
    "whole_gradients": "unsharded_gradients",
}

Row = dict[str, Any]
Schema = dict[str, Callable[[str], Any]]
_MOST_BYTES = 500_000_000  # of a table: some millions of rows
_TYPES: Schema = {
    **dict.fromkeys(("unit", "phase", "kind", "dtype", "lane", "name", "cause", "group", "members", "state"), str),
    **dict.fromkeys(("emulated", "is_peak"), _flag),
    **dict.fromkeys(("step_time_s", "loading_s", "cpu_s", "core_wait_s"), _finite),
    "loss": float,  # that of a run which diverged is no finite number
}


def _table(*columns: str) -> Schema:
    """Columns in order; one that is not in `_TYPES` holds whole numbers: ranks, steps, bytes, nanoseconds."""
    return {name: _TYPES.get(name, _whole) for name in columns}


IDLE_PARTS = (
    "host_bound_ns",
    "kernel_gap_ns",
    "data_loading_ns",
    "synchronisation_ns",
    "copies_ns",
    "device_copies_ns",
    "no_core_ns",
    "rest_ns",
)
# exposed time is on the link (the transport moves bytes), copying (the host or the device), waiting for a peer, or
# waiting for a core
PARTS_OF_EXPOSED = ("on_link_ns", "copying_ns", "waiting_ns", "no_core_ns")
# the same of one collective: copying is packing what is sent and unpacking what has come
PARTS_OF_COLLECTIVE = ("on_link_ns", "packing_ns", "unpacking_ns", "waiting_ns", "no_core_ns")
_WHERE = ("rank", "step", "unit", "phase", "kind")

TABLES: dict[str, Schema] = {
    # step_time_s is empty for the steps that are not timed (warm-up, and the step whose memory was measured); loading_s
    # is what the rank took to get the step's data, which step_time_s does not hold; cpu_s is the CPU time of all its
    # threads, core_wait_s how long it waited for a core (empty where the system does not count that)
    "steps": _table("rank", "step", "loss", "step_time_s", "tokens", "loading_s", "cpu_s", "core_wait_s"),
    "ledger": _table(
        *_WHERE,
        "logical_bytes",
        "wire_bytes",
        "padding_bytes",
        "dtype",
        "start_ns",
        "end_ns",
        "emulated",
        "waited_ns",
        "issue_ns",
    ),
    "memory": _table("rank", "step", "time_ns", *CATEGORIES, "is_peak"),
    # profiled steps: one row an interval, in the lanes of a figure
    "timeline": _table("rank", "step", "lane", "unit", "phase", "name", "start_ns", "end_ns", "emulated"),
    # one row a rank and profiled step; compute only + overlapped + exposed + other = the step, to the nanosecond, and
    # on the link + copying + waiting for a peer + without a core = exposed; `core_wait_ns` is of the whole step
    "breakdown": _table(
        "rank",
        "step",
        "step_ns",
        "compute_ns",
        "compute_only_ns",
        "overlapped_ns",
        "exposed_ns",
        "other_ns",
        *PARTS_OF_EXPOSED,
        "device_busy_ns",
        "core_wait_ns",
    ),
    # where communication was exposed, and why
    "exposed": _table(*_WHERE, "communication_ns", "exposed_ns", "cause", *PARTS_OF_EXPOSED),
    # one row a collective of the profiled steps, as the trace shows it: when the rank issued it, when bytes moved, its
    # process group and the ranks that are its members, the parts of its exposed time, and why it was exposed
    "collectives": _table(
        *_WHERE,
        "issue_ns",
        "start_ns",
        "end_ns",
        "logical_bytes",
        "group",
        "group_size",
        "members",
        "exposed_ns",
        *PARTS_OF_COLLECTIVE,
        "cause",
        "emulated",
    ),
    # when a unit was gathered and dropped
    "life": _table("rank", "step", "unit", "state", "phase", "time_ns"),
    # one row a rank and profiled step: the part "other" of the step by cause, which sum to it
    "idle": _table("rank", "step", *IDLE_PARTS),
    # of recorded jobs: what a rank did in a step besides training (recording/activities.py), and what a trace counts
    "activities": _table("rank", "step", "name", "count", "took_ns", "nbytes"),
}
LATER_TABLES = ("idle", "collectives", "activities")  # records of earlier versions lack their files
# columns in which a cell may be empty: the run did not measure it, or its trace does not tell
_MAY_BE_EMPTY: dict[str, tuple[str, ...]] = {
    "steps": ("loss", "step_time_s", "tokens", "loading_s", "cpu_s", "core_wait_s"),
    "ledger": ("waited_ns", "issue_ns"),
    "memory": CATEGORIES,
    "breakdown": ("device_busy_ns", "core_wait_ns"),
    "collectives": ("logical_bytes", "group_size"),
}
# columns that records of earlier versions lack; a table in which no row has one is written without it
_LATER = {
    "steps": ("loading_s", "cpu_s", "core_wait_s"),
    "ledger": ("issue_ns",),
    "breakdown": (*PARTS_OF_EXPOSED, "device_busy_ns", "core_wait_ns"),
    "exposed": PARTS_OF_EXPOSED,
    "idle": ("no_core_ns", "device_copies_ns"),
    "collectives": ("members",),
}
LANES = ("step", "compute", *LANES_OF_COLLECTIVES, "exposed", "waiting")
CAUSES = ("hidden", "late_start", "link_busy", "nothing_to_hide_behind", "waiting_for_peer", "unknown")


def file_name(table: str) -> str:
    """Name the table's file in a record folder: `steps` -> `steps.csv.gz`."""
    return f"{table}.csv.gz"


def write_table(folder: Path, table: str, rows: list[Row]) -> None:
    """Write one table; a row with missing or unknown columns is a ValueError (`{"rank": 0, "step":
    1}` lacks `loss`).
    """
    columns = _columns(table, rows[0]) if rows else list(TABLES[table])
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        if row.keys() != set(columns):
            raise ValueError(
                f"A row of `{table}` has columns {sorted(row)}; expected {sorted(TABLES[table])}. Give every column,"
                " and no other."
            )
        writer.writerow(["" if row[name] is None else row[name] for name in columns])
    # mtime=0: the same rows give the same bytes, so that records kept in version control do not change by themselves
    write_whole(folder / file_name(table), gzip.compress(text.getvalue().encode(errors="replace"), mtime=0))


def read_table(folder: Path, table: str) -> list[Row]:
    """Read one table as a list of typed rows; RecordError when the file is missing, damaged or has other columns."""
    path = folder / file_name(table)
    lines = _lines(path)
    header = [OLD_CATEGORIES.get(name, name) for name in next(lines, [])]
    if header != _columns(table, header):
        raise RecordError(
            f"{path} has columns {shown(header)}; expected {list(TABLES[table])}. Record the run again with this"
            " version of fsdplab."
        )
    optional = _MAY_BE_EMPTY.get(table, ())
    columns = [(name, TABLES[table][name], name in optional) for name in header]
    return [_typed_row(path, columns, number, cells) for number, cells in enumerate(lines, start=2)]


def _columns(table: str, given: Container[str]) -> list[str]:
    """The table's columns in order, less those of later versions that were not given."""
    return [name for name in TABLES[table] if name in given or name not in _LATER.get(table, ())]


def _lines(path: Path) -> Iterator[list[str]]:
    """The lines one after the other: that of a damaged table ends the reading."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(read_file(path, _MOST_BYTES))) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise OSError(f"it unpacks to more than {_MOST_BYTES:,} bytes")
        yield from csv.reader(io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", newline="\n"))
    except FileNotFoundError:
        raise RecordError(
            f"{path} is missing: the record is incomplete. Copy the whole record folder, or record the run again."
        ) from None
    except (OSError, EOFError, zlib.error, csv.Error, UnicodeDecodeError) as error:  # no gzip, no text, a huge cell
        raise RecordError(
            f"{path} is damaged ({error}). Copy it again from where it was recorded, or record the run again."
        ) from error


def _typed_row(path: Path, columns: list[tuple[str, Callable[[str], Any], bool]], number: int, cells: list[str]) -> Row:
    if len(cells) != len(columns):
        raise RecordError(
            f"{path}, line {number}, has {len(cells)} cells; expected {len(columns)}. Record the run again."
        )
    try:
        row: Row = {}
        for (name, convert, optional), cell in zip(columns, cells):
            row[name] = None if optional and not cell else convert(cell)
        return row
    except (ValueError, KeyError) as error:
        raise RecordError(
            f"{path}, line {number}, holds a value of the wrong type ({error}). Record the run again."
        ) from error


def of_today(content: Any) -> Any:
    """Rename memory's categories to today's names in what JSON holds, at every depth.

    >>> of_today({"total": 3, "by_category": {"parameter_slices": 2, "other": 1}})
    {'total': 3, 'by_category': {'sharded_parameters': 2, 'other': 1}}
    """
    if isinstance(content, dict):
        return {OLD_CATEGORIES.get(name, name): of_today(part) for name, part in content.items()}
    if isinstance(content, list):
        return [of_today(part) for part in content]
    return content

"""Where the time of operators and kernels went, by name and by unit.

Time is self time a step: an operator without the operators that it called (HTA and TraceLens have the same column), a
kernel as long as it ran. Shares are of all work of the same kind: communication's kernels wait for peers, and would
make every other share small.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fsdplab.common.sizes import seconds
from fsdplab.profiling.tables.table import Column, Row, Table
from fsdplab.profiling.tables.work import KERNEL, KINDS, OPERATOR, Work, work_in

_COLUMNS = (
    Column("kind", "kind"), Column("name", "name"), Column("shapes", "given"), Column("unit", "unit"),
    Column("time_ns", "time a step", "ns"),
    Column("count", "calls a step", "count"), Column("mean_ns", "time a call", "ns"), Column("share", "share", "share"),
)  # fmt: skip


def operators(
    trace: Work | str | Path, *, by_unit: bool = False, by_shape: bool = False, comm_patterns: Sequence[str] = ()
) -> Table:
    """Operators of the host and kernels of the device of one rank's trace by their time a step, longest first.

    `by_unit`, `by_shape`: a row for each unit in which a name ran ("" is none), for each shape that it was given.
    Raises TraceError. Of two steps with 48 calls of `aten::mm` of 1 ms each:
    `{"name": "aten::mm", "time_ns": 24e6, "count": 24, ...}`.
    """
    work = work_in(trace, comm_patterns, shapes=by_shape)
    rows = _rows(work, by_unit, by_shape)
    kind = KERNEL if any(row["kind"] == KERNEL for row in rows) else OPERATOR
    most = next((row for row in rows if row["kind"] == kind), None)
    unit = f" of {most['unit']}" if most and most["unit"] else ""
    sentence = "Nothing was computed in the profiled steps." if most is None else (
        f"{short(most['name'])}{unit} takes {most['share']:.0%} of the {kind}s' time:"
        f" {seconds(most['time_ns'] / 1e9)} a step in {most['count']:.3g} calls."
    )  # fmt: skip
    shown = {"unit": by_unit, "shapes": by_shape}
    columns = tuple(column for column in _COLUMNS if shown.get(column.key, True))
    return Table("operators", "Operators and kernels", sentence, columns, tuple(rows))


def _rows(work: Work, by_unit: bool, by_shape: bool) -> list[Row]:
    nothing, numbers = np.zeros_like(work.unit), {"": 0}
    shape = [numbers.setdefault(each, len(numbers)) for each in work.shapes] if by_shape else nothing
    keys = np.stack([work.kind, work.found.name[work.rows], work.unit if by_unit else nothing, shape])
    shapes = list(numbers)
    groups, index = np.unique(keys, axis=1, return_inverse=True)
    index = index.reshape(-1)
    own, counts = np.bincount(index, work.own_ns).tolist(), np.bincount(index).tolist()
    of_kind = np.bincount(work.kind, work.own_ns, minlength=len(KINDS)).tolist()
    rows = []
    for at in sorted(range(len(own)), key=lambda at: -own[at]):
        kind, name, unit, given = groups[:, at].tolist()
        rows.append({
            "kind": KINDS[kind], "name": work.found.names[name], "shapes": dimensions(shapes[given]),
            "unit": work.units[unit] if by_unit else "",
            "time_ns": own[at] / work.steps, "count": counts[at] / work.steps, "mean_ns": own[at] / counts[at],
            "share": own[at] / of_kind[kind] if of_kind[kind] else 0.0,
        })  # fmt: skip
    return rows


def dimensions(shapes: str) -> str:
    """The tensors that an operator was given: `dimensions('[[[4, 8], [], [8, 2]], null]')` is `4x8, 8x2`."""
    given = json.loads(shapes)[0] if shapes else []
    return ", ".join(map(_tensor, (each for each in given if isinstance(each, list) and each)))


def _tensor(dims: list[Any]) -> str:
    """A list of tensors by their number."""
    return f"{len(dims)} tensors" if isinstance(dims[0], list) else "x".join(map(str, dims))


def short(name: str, most: int = 60) -> str:
    """A kernel's name without its template arguments and parameters, at most `most` characters:
    `void at::native::add<float>(int)` is `at::native::add`.
    """
    plain = name.removeprefix("void ")
    plain = plain.split("(")[0] if "(" in plain[1:] else plain
    plain = plain.split("<")[0] if "<" in plain[1:] else plain
    return plain if len(plain) <= most else f"{plain[: most - 1]}…"

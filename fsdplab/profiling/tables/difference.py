"""Two runs side by side: which parts of the step differ, and which operators and kernels make the difference.

The differences of all rows of a table sum to the difference of the whole, so nothing is left unexplained. Whether a
part differs beyond its spread is said beside it: over the profiled steps of both runs, one range must lie apart from
the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from fsdplab.common.sizes import seconds
from fsdplab.profiling.step_summary import step_summary
from fsdplab.profiling.tables.bandwidth import WORDS
from fsdplab.profiling.tables.operators import operators, short
from fsdplab.profiling.tables.table import Column, Row, Table
from fsdplab.profiling.tables.work import COMMUNICATION, COPY, KERNEL, KINDS, OPERATOR, Work, work_in
from fsdplab.records import PARTS_OF_EXPOSED, RunRecord

_COLUMNS = (
    Column("kind", "kind"),
    Column("name", "name"),
    Column("shapes", "given"),
    Column("unit", "unit"),
    Column("before_ns", "first", "ns"),
    Column("after_ns", "second", "ns"),
    Column("difference_ns", "difference", "ns"),
    Column("before_count", "calls, first", "count"),
    Column("after_count", "calls, second", "count"),
    Column("state", "in both"),
)
_PARTS = (
    Column("part", "part of a step"),
    Column("before_ns", "first", "ns"),
    Column("after_ns", "second", "ns"),
    Column("difference_ns", "difference", "ns"),
    Column("beyond", "beyond the spread"),
)
# columns of a record's tables `breakdown` and `idle` -> how they are called here
_OF_STEP = {"compute_only_ns": "compute only", "overlapped_ns": "overlapped"}
_OF_STEP |= {name: f"exposed: {name.removesuffix('_ns').replace('_', ' ')}" for name in PARTS_OF_EXPOSED}
_OF_IDLE = {name: f"idle: {words}" for name, words in WORDS.items()}


def difference(
    first: Work | str | Path,
    second: Work | str | Path,
    *,
    by_unit: bool = False,
    by_shape: bool = False,
    comm_patterns: Sequence[str] = (),
) -> Table:
    """Time a step of every operator and kernel in two traces, the largest difference first; what only one of them has
    is new or gone.

    Both are one rank's; they need not have equally many steps. `aten::mm` 24 ms in the first and 30 in the second:
    `{"difference_ns": 6e6, ...}`. Raises TraceError.
    """
    of_first = operators(first, by_unit=by_unit, by_shape=by_shape, comm_patterns=comm_patterns)
    of_second = operators(second, by_unit=by_unit, by_shape=by_shape, comm_patterns=comm_patterns)
    before = _by_name(of_first)
    after = _by_name(of_second)
    # the first's rows in their order, and behind them what only the second has
    rows = []
    for key in {**before, **after}:
        rows.append(_row(key, before.get(key), after.get(key)))
    rows.sort(key=lambda row: -abs(row["difference_ns"]))
    total = sum(row["difference_ns"] for row in rows)
    shown = {"unit": by_unit, "shapes": by_shape}
    columns = tuple(column for column in _COLUMNS if shown.get(column.key, True))
    return Table("difference", "Difference of operators and kernels", _sentence(rows, total), columns, tuple(rows))


def _by_name(table: Table) -> dict[tuple[str, str, str, str], Row]:
    """Rows of the table of operators by what tells them apart."""
    by_name: dict[tuple[str, str, str, str], Row] = {}
    for row in table.rows:
        by_name[row["kind"], row["name"], row["shapes"], row["unit"]] = row
    return by_name


_OF_MODULES = (
    Column("unit", "unit"),
    Column("kind", "kind"),
    Column("before_ns", "first", "ns"),
    Column("after_ns", "second", "ns"),
    Column("difference_ns", "difference", "ns"),
    Column("state", "in both"),
)


def difference_by_module(first: Work | str | Path, second: Work | str | Path) -> Table:
    """Time a step of each unit of two traces by kind of work, the largest difference first; of traces without units, of
    each module, where they were recorded with `with_stack=True`.

    On a GPU only the device's work counts. A unit that computes for 24 ms in the first and 30 in the second:
    `{"unit": "blocks.0", "kind": "kernel", "difference_ns": 6e6, ...}`.
    """
    before = _by_module(first)
    after = _by_module(second)
    rows: list[Row] = []
    for key in {**before, **after}:
        unit, kind = key
        before_ns = before.get(key, 0.0)  # what one of the two does not have takes no time there
        after_ns = after.get(key, 0.0)
        rows.append(
            {
                "unit": unit,
                "kind": kind,
                "before_ns": before_ns,
                "after_ns": after_ns,
                "difference_ns": after_ns - before_ns,
                "state": _state(key in before, key in after),
            }
        )
    rows.sort(key=lambda row: -abs(row["difference_ns"]))
    return Table("module_difference", "Difference by module", _of_modules(rows), _OF_MODULES, tuple(rows))


def _by_module(trace: Work | str | Path) -> dict[tuple[str, str], float]:
    """ns a step of each unit and kind of work; of a trace with a device without the host's operators."""
    work = work_in(trace, shapes=True)
    on_device = work.computes == KERNEL
    sums: dict[tuple[str, str], float] = {}
    for module, kind, own_ns in zip(work.modules, work.kind.tolist(), work.own_ns.tolist()):
        if on_device and KINDS[kind] == OPERATOR:  # it only launched, and runs while the device works
            continue
        key = module, KINDS[kind]
        # a mean step, so that traces with unlike numbers of steps can be compared
        sums[key] = sums.get(key, 0.0) + own_ns / work.steps
    return sums


def _of_modules(rows: Sequence[Row]) -> str:
    """The module that differs most, and by how much all of them do."""
    total = sum(row["difference_ns"] for row in rows)
    same_way = [row for row in rows if row["difference_ns"] * total > 0]
    if not same_way:
        return "No module takes longer in one of the two."
    most = same_way[0]
    module = most["unit"] or "What is in no module"
    way = "more" if total > 0 else "less"
    return (
        f"{module} differs most: {seconds(abs(most['difference_ns']) / 1e9)} a step {way} in its"
        f" {_PLURAL[most['kind']]}, of {seconds(abs(total) / 1e9)} in all."
    )


_PLURAL = {OPERATOR: "operators", KERNEL: "kernels", COMMUNICATION: "communication", COPY: "copies"}


def _state(in_first: bool, in_second: bool) -> str:
    """Whether a row is of both runs, gone in the second, or new in it."""
    if in_first and in_second:
        return "both"
    return "gone" if in_first else "new"


def difference_of_steps(first: RunRecord, second: RunRecord) -> Table:
    """The parts of a mean step of two records, of each the rank that is exposed longest; they sum to the difference of
    the steps. The last row, loading data, lies inside the other parts, or before the step.
    """
    before = _parts(first)
    after = _parts(second)
    rows = []
    for part in dict.fromkeys([*before, *after]):
        is_unknown = part not in before or part not in after
        if part == _LOADING and is_unknown:  # nobody noted it in one of the runs
            continue
        # the values of the profiled steps, one each
        values_before = before.get(part, [0.0])
        values_after = after.get(part, [0.0])
        mean_before = fmean(values_before)
        mean_after = fmean(values_after)
        if mean_before or mean_after:
            rows.append(
                {
                    "part": part,
                    "before_ns": mean_before,
                    "after_ns": mean_after,
                    "difference_ns": mean_after - mean_before,
                    "beyond": _apart(values_before, values_after),
                }
            )
    beyond = _apart(_wholes(before), _wholes(after))
    sentence = _of_steps(rows, beyond)
    return Table("step_difference", "Difference of the steps", sentence, _PARTS, tuple(rows))


_LOADING = "loading data"


def _parts(record: RunRecord) -> dict[str, list[float]]:
    """Each part of a step, in every profiled step of the rank that is exposed longest."""
    worst = step_summary(record.table("breakdown"))
    if worst is None:
        return {}
    breakdown = [row for row in record.table("breakdown") if row["rank"] == worst.rank]
    idle = [row for row in record.table("idle") if row["rank"] == worst.rank]

    # computing, exposed and idle time: these sum to the step
    parts = {words: _column(breakdown, name) for name, words in _OF_STEP.items()}
    if breakdown[0].get("on_link_ns") is None:  # a record of before
        # then all exposed time counts as the link's
        parts["exposed: on link"] = _column(breakdown, "exposed_ns")
    if idle:
        parts |= {words: _column(idle, name) for name, words in _OF_IDLE.items()}
    else:
        parts[_OF_IDLE["rest_ns"]] = _column(breakdown, "other_ns")

    # loading data, which lies inside of them
    steps = {row["step"] for row in breakdown}
    loading = []
    for row in record.table("steps"):
        if row["rank"] == worst.rank and row["step"] in steps and row.get("loading_s") is not None:
            loading.append(1e9 * row["loading_s"])
    if loading:
        parts[_LOADING] = loading
    return parts


def _column(rows: Sequence[Row], name: str) -> list[float]:
    """A column of a table; 0 where a record of an earlier version does not have it."""
    return [float(row.get(name) or 0) for row in rows]


def _wholes(parts: dict[str, list[float]]) -> list[float]:
    """The length of each step: all its parts, but for loading data, which lies inside the others."""
    of_step = [values for name, values in parts.items() if name != _LOADING]
    return [sum(values) for values in zip(*of_step)]


def _apart(before: Sequence[float], after: Sequence[float]) -> str:
    """Whether two ranges of at least two steps each do not touch: "yes", "no", or "one step" where that says nothing.

    Of 80, 84 and 90, 95: yes. Of 80, 92 and 90, 95: no.
    """
    if min(len(before), len(after)) < 2:
        return "one step"
    is_apart = max(before) < min(after) or max(after) < min(before)
    return "yes" if is_apart else "no"


def _row(key: tuple[str, str, str, str], before: Row | None, after: Row | None) -> Row:
    """A row of the difference, from the rows of one operator or kernel in both runs; None in the run without it."""
    kind, name, shapes, unit = key
    state = _state(before is not None, after is not None)
    # a row that one run lacks took no time there
    nothing = {"time_ns": 0.0, "count": 0.0}
    before = before or nothing
    after = after or nothing
    return {
        "kind": kind,
        "name": name,
        "shapes": shapes,
        "unit": unit,
        "before_ns": before["time_ns"],
        "after_ns": after["time_ns"],
        "difference_ns": after["time_ns"] - before["time_ns"],
        "before_count": before["count"],
        "after_count": after["count"],
        "state": state,
    }


_IN_ONE_ONLY = {"new": ", which the first does not have", "gone": ", which the second does not have"}


def _sentence(rows: Sequence[Row], total: float) -> str:
    """The difference in all, and of what makes it the most: of rows that go the same way."""
    same_way = [row for row in rows if row["difference_ns"] * total > 0]
    if not same_way:
        return "Both runs spent the same time in every operator and kernel."
    most = max(same_way, key=lambda row: abs(row["difference_ns"]))
    longer, more = ("longer", "more") if total > 0 else ("shorter", "less")
    return (
        f"The second is {seconds(abs(total) / 1e9)} a step {longer} in operators and"
        f" kernels; {short(most['name'])} makes the largest difference, {seconds(abs(most['difference_ns']) / 1e9)}"
        f" {more}{_IN_ONE_ONLY.get(most['state'], '')}."
    )


def _of_steps(rows: Sequence[Row], beyond: str) -> str:
    """Whether the steps differ beyond their spread, and the part that differs most: in the same direction, then."""
    parts = [row for row in rows if row["part"] != _LOADING]
    # loading lies inside the other parts and would count twice
    total = sum(row["difference_ns"] for row in parts)
    # a difference inside of the spread is none, though a part may still differ beyond its own
    is_same = beyond == "no" or not total
    if is_same:
        whole = "The steps do not differ beyond their spread"
        nothing = ", and neither does any part of them."
    else:
        way = "longer" if total > 0 else "shorter"
        whole = f"A profiled step of the second is {seconds(abs(total) / 1e9)} {way}"
        nothing = "; no part differs beyond its spread."
    worth_saying = []
    for row in parts:
        if row["beyond"] != "no" and (is_same or row["difference_ns"] * total > 0):
            worth_saying.append(row)
    if not worth_saying:
        return f"{whole}{nothing}"
    most = max(worth_saying, key=lambda row: abs(row["difference_ns"]))
    way = "more" if most["difference_ns"] > 0 else "less"
    return f"{whole}; the part that changes most is {most['part']}, {seconds(abs(most['difference_ns']) / 1e9)} {way}."

"""Notebook 04, first exercise: who owns which rows. A wrong partition is told by the first row with no owner, or with
two.
"""

from __future__ import annotations

from fsdplab.teaching.core.exercise import Case, Exercise, Trial, Wrong, edited
from fsdplab.teaching.core.findings import Difference

from . import grading

RANKS = 3
_ROWS = '''\
def rows_of(rows, rank, n):
    """The rows [start, stop) that `rank` owns: blocks of ceil(rows / n), the last ones short or empty."""
    {}
'''
_ROWS_REFERENCE = _ROWS.format(
    "size = -(-rows // n)  # rounded up\n    return min(rank * size, rows), min((rank + 1) * size, rows)"
)
_QUESTIONS = [(6, 3), (8, 2), (10, 3), (4, 3), (2, 4), (1, 3), (257, 8)]


def _spans(rows: int, n: int) -> list[tuple[int, int]]:
    """The partition that torch's FSDP2 and this package use: `_spans(10, 3) == [(0, 4), (4, 8), (8, 10)]`."""
    size = -(-rows // n)
    return [(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(n)]


def _row_cases() -> list[Case]:
    expected = {f"{rows} rows on {n} ranks": _spans(rows, n) for rows, n in _QUESTIONS}
    return [Case("who owns which rows", ((_QUESTIONS,),) * RANKS, (expected,) * RANKS)]


def _explain_rows(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    """What is wrong with the first partition that differs: rows with no owner, with two, or owned in another way."""
    question = next((name for name in case.expected[0] if f"'{name}'" in difference.tensor), None)
    given = None if question is None else trial.returned.get(question)
    if (
        question is None
        or not isinstance(given, list)
        or not all(isinstance(span, list) and len(span) == 2 for span in given)
    ):
        return None, "return two whole numbers, `start, stop`; the rows are those of `tensor[start:stop]`"
    if not all(isinstance(edge, int) for span in given for edge in span):
        return None, "row numbers are whole: `//` divides without a fraction, and -(-rows // n) rounds up"
    return None, f"{question} gives {given}: {_fault(given, case.expected[0][question], int(question.split()[0]))}"


def _fault(given: list[list[int]], right: list[tuple[int, int]], rows: int) -> str:
    if any(start > stop for start, stop in given):
        return "a rank with no rows must get start == stop: clamp both ends to `rows`"
    if any(stop > rows or start > rows for start, stop in given):
        return f"there are only {rows} rows: clamp the ends with min(..., rows)"
    owners = [sum(start <= row < stop for start, stop in given) for row in range(rows)]
    if 0 in owners:
        missing = owners.index(0)
        return (
            f"row {missing} has no owner, so nobody would ever update it (rounded down? `stop` is not included, as in a"
            " slice)"
        )
    if max(owners) > 1:
        return f"row {owners.index(max(owners))} has two owners (`stop` is not included, as in a slice)"
    sizes = [stop - start for start, stop in given]
    if sizes == sorted(sizes) and sizes != sorted(sizes, reverse=True):
        return "every row has one owner, but the short block comes first; here the first ranks have full blocks"
    if max(sizes) == right[0][1]:
        return (
            "balanced, and every row has one owner; but then a block does not begin at rank * ceil(rows / n), where an"
            " all_gather puts it. Full blocks first, the rest is short"
        )
    return "every row has one owner, but a full block has ceil(rows / n) rows"


rows_of = Exercise(
    id="04.rows_of",
    title="Who owns which rows?",
    statement="Write rows_of(rows, rank, n): the rows [start, stop) that a rank owns, in blocks of ceil(rows / n).",
    stub=_ROWS.format("..."),
    reference=_ROWS_REFERENCE,
    hints=(
        "How large is a full block? Where would block number `rank` begin if there were rows without end?",
        (
            "A block has -(-rows // n) rows (rounded up). It runs from rank * size to (rank + 1) * size, unless the"
            " rows end before."
        ),
        "`size = -(-rows // n)`, then `return min(rank * size, rows), min((rank + 1) * size, rows)`.",
    ),
    cases=_row_cases,
    explain=_explain_rows,
    world_size=RANKS,
    driver=(grading.DRIVERS, "spans"),
    wrong=(
        Wrong("rounded down", edited(_ROWS_REFERENCE, ("-(-rows // n)", "rows // n")), "has no owner"),
        Wrong("start not clamped", edited(_ROWS_REFERENCE, ("min(rank * size, rows)", "rank * size")), "start == stop"),
        Wrong(
            "nothing clamped",
            edited(
                _ROWS_REFERENCE,
                ("min(rank * size, rows)", "rank * size"),
                ("min((rank + 1) * size, rows)", "(rank + 1) * size"),
            ),
            "clamp the ends",
        ),
        Wrong(
            "stop included",
            edited(_ROWS_REFERENCE, ("min((rank + 1) * size, rows)", "min((rank + 1) * size, rows) - 1")),
            "`stop` is not included",
        ),
        Wrong(
            "balanced",
            _ROWS.format(
                "whole, rest = divmod(rows, n)\n    start = rank * whole + min(rank, rest)\n    return start, start +"
                " whole + (rank < rest)"
            ),
            "Full blocks first",
        ),
        Wrong(
            "the last takes the rest",
            _ROWS.format("size = rows // n\n    return rank * size, rows if rank == n - 1 else (rank + 1) * size"),
            "short block comes first",
        ),
        Wrong("a fraction", edited(_ROWS_REFERENCE, ("-(-rows // n)", "rows / n")), "whole"),
        Wrong(
            "overlapping",
            edited(_ROWS_REFERENCE, ("min((rank + 1) * size, rows)", "min((rank + 1) * size + 1, rows)")),
            "two owners",
        ),
        Wrong("start and length", edited(_ROWS_REFERENCE, ("min((rank + 1) * size, rows)", "size")), "start == stop"),
        Wrong("only the start", edited(_ROWS_REFERENCE, (", min((rank + 1) * size, rows)", "")), "two whole numbers"),
        Wrong("nothing", _ROWS.format("size = -(-rows // n)"), "two whole numbers"),
    ),
)

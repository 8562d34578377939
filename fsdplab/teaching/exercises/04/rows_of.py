"""Who owns which rows?

Write rows_of(rows, rank, n): the rows [start, stop) that a rank owns, in blocks of ceil(rows / n).

1. How large is a full block? Where would block number `rank` begin if there were rows without end?
2. A block has -(-rows // n) rows (rounded up). It runs from rank * size to (rank + 1) * size, unless the rows end
   before.
3. `size = -(-rows // n)`, then `return min(rank * size, rows), min((rank + 1) * size, rows)`.
"""


def rows_of(rows, rank, n):
    """The rows [start, stop) of `rank`: blocks of ceil(rows / n), the last ones short or empty."""
    ### BEGIN SOLUTION
    size = -(-rows // n)  # rounded up
    return min(rank * size, rows), min((rank + 1) * size, rows)
    ### END SOLUTION


# ---- check: pure, facts only


def cases(rank, n):
    for rows, ranks in ((10, 3), (6, 3), (8, 2), (4, 3), (2, 4), (1, 3), (257, 8)):
        yield f"{rows} rows on {ranks} ranks", rows, ranks


def _empty(span):
    return isinstance(span, (list, tuple)) and len(span) == 2 and span[0] == span[1] and isinstance(span[0], int)


def observe(rows_of, rows, n):
    spans = [rows_of(rows, rank, n) for rank in range(n)]
    spans = [span.tolist() if hasattr(span, "tolist") else span for span in spans]
    spans = [(rows, rows) if _empty(span) else span for span in spans]  # no rows are no rows, wherever they begin
    whole = all(isinstance(span, (list, tuple)) and all(isinstance(edge, int) for edge in span) for span in spans)
    return {"(start, stop) of every rank": spans if whole else str(spans), "_rows": rows}  # 4.0 cuts no tensor


def fault(got, right):
    spans, rows = got["(start, stop) of every rank"], got["_rows"]
    if "." in str(spans):
        return "row numbers are whole: `//` divides without a fraction, and -(-rows // n) rounds up"
    if isinstance(spans, str) or any(len(span) != 2 for span in spans):
        return "return two whole numbers, `start, stop`; the rows are those of `tensor[start:stop]`"
    size = right["(start, stop) of every rank"][0][1]
    sizes = [stop - start for start, stop in spans]
    owners = [sum(start <= row < stop for start, stop in spans) for row in range(rows)]
    ends = "(`stop` is not included, as in a slice)"
    for holds, cause in (
        (len(set(map(tuple, spans))) == 1, "every rank gets the same rows: `rank` says which block is its own"),
        (min(spans)[0] < 0, "a start below 0: ranks count from 0, so rank 0 owns the first rows"),
        (
            all(
                span == [start, stop - start]
                for span, (start, stop) in zip(spans, right["(start, stop) of every rank"])
                if start != stop - start  # which reads as no rows
            ),
            "the second number is the row where the block stops, not how many rows it has",
        ),
        (max(sizes) < 0, "every start lies behind its stop: return `start, stop`, in this order"),
        (min(sizes) < 0, "a rank with no rows must get start == stop: clamp both ends to `rows`"),
        (max(map(max, spans)) > rows, f"there are only {rows} rows: clamp the ends with min(..., rows)"),
        (
            0 in owners,
            f"row {[*owners, 0].index(0)} has no owner, so nobody would ever update it (rounded down?) {ends}",
        ),
        (max(owners) > 1, f"row {owners.index(max(owners))} has two owners {ends}"),
        (
            sizes == sorted(sizes) and sizes[0] < sizes[-1],
            "every row has one owner, but the short block comes first; the first ranks have full ones",
        ),
        (
            max(sizes) == size,
            "balanced, and every row has one owner; but then a block does not begin at rank * ceil(rows / n), where an"
            " all_gather puts it. Full blocks first, the rest is short",
        ),
    ):
        if holds:
            return f"{spans}: {cause}"
    return f"{spans}: every row has one owner, but a full block has ceil(rows / n) rows"


SAYS = {"(start, stop) of every rank": fault}

"""Which pieces of which files

`rows` rows were saved by `saved` ranks. Write pieces(rows, saved, rank, ranks): what `rank` of `ranks` reads, as a list
of (saved rank, first row in its file, end), in the order of the rows. Nothing else is read.

1. Which rows of the whole tensor does this rank keep, and which did each saved rank keep? `span` says both.
2. Two spans overlap from the larger beginning to the smaller end, if there is anything between.
3. `low, high = max(begin, start), min(end, stop)`; a file begins at its own rank's first row: `low - start`.
"""


def span(rows, rank, ranks):
    """The rows of a rank: FSDP gives each the same number, rounded up, and the last what is left."""
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def pieces(rows, saved, rank, ranks):
    """What a rank reads of the files of `saved` ranks: [(saved rank, first row in its file, end)]."""
    begin, end = span(rows, rank, ranks)
    found = []
    ### BEGIN SOLUTION  for each saved rank: what of its rows is ours?
    for owner in range(saved):
        start, stop = span(rows, owner, saved)
        low, high = max(begin, start), min(end, stop)
        if low < high:
            found.append((owner, low - start, high - start))
    return found
    ### END SOLUTION


# ---- check: pure


def cases(rank, n):
    for rows, saved, ranks in (
        (12, 4, 2),
        (12, 2, 4),
        (12, 4, 3),
        (10, 4, 3),
        (5, 4, 2),
        (7, 3, 4),
        (3, 2, 1),
        (9, 5, 1),
    ):
        for each in range(ranks):
            yield f"{rows} rows, saved by {saved}, rank {each} of {ranks}", rows, saved, each, ranks


def observe(pieces, rows, saved, rank, ranks):
    return {"pieces": pieces(rows, saved, rank, ranks), "_asked": (rows, saved, rank, ranks)}


def said(got, right):
    found, wanted, (rows, saved, rank, ranks) = got["pieces"], right["pieces"], got["_asked"]
    if not isinstance(found, list) or not all(isinstance(each, (list, tuple)) and len(each) == 3 for each in found):
        return "return a list of tuples: (saved rank, first row in its file, end)"
    if [sorted(each) for each in found] == [sorted(each) for each in wanted]:
        return "the three numbers stand in another order: (saved rank, first row in its file, end)"
    if [(each[0] - 1, *each[1:]) for each in found] == [tuple(each) for each in wanted]:
        return "the first of the saved ranks is rank 0"
    mine, owners = span(rows, rank, ranks), [owner for owner, _, _ in wanted]
    for owner, low, high in wanted:
        start, stop = span(rows, owner, saved)
        both = f"rank {rank} of {ranks} keeps rows {up_to(*mine)}, and saved rank {owner} of {saved} had"
        both += f" {up_to(start, stop)}: rows {up_to(start + low, start + high)} are in both, "
        there = [each for each in found if each[0] == owner]
        if not there:
            return f"{both}and nothing of that file is read"
        if len(there) > 1:
            return "rows that stand side by side in one file are one piece"
        if list(there[0][1:]) != [low, high]:
            return f"{both}which in the file are rows {up_to(low, high)}, and this says {up_to(*there[0][1:])}"
    extra = next((owner for owner, _, _ in found if owner not in owners), 0)
    return f"rank {rank} of {ranks} keeps rows {up_to(*mine)}: nothing in the file of saved rank {extra} is among them"


def up_to(begin, end):
    return f"{begin} up to {end}"


SAYS = {"pieces": said}

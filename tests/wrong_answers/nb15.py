"""Wrong answers to the exercises of notebook 15, written from their statements alone; of each, what its report says."""


def span(rows, rank, ranks):
    each = -(-rows // ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def pieces__only_the_ends(rows, saved, rank, ranks):
    begin, end = span(rows, rank, ranks)
    each = -(-rows // saved)
    if begin == end:
        return []
    first, last = begin // each, (end - 1) // each
    if first == last:
        return [(first, begin - first * each, end - first * each)]
    return [(first, begin - first * each, each), (last, 0, end - last * each)]


def pieces__rounded_down(rows, saved, rank, ranks):
    def mine(rank, ranks):
        each = rows // ranks
        return rank * each, (rank + 1) * each if rank < ranks - 1 else rows

    begin, end = mine(rank, ranks)
    found = []
    for s in range(saved):
        start, stop = mine(s, saved)
        low, high = max(begin, start), min(end, stop)
        if low < high:
            found.append((s, low - start, high - start))
    return found


def pieces__other_order_in_the_tuple(rows, saved, rank, ranks):
    begin, end = span(rows, rank, ranks)
    found = []
    for s in range(saved):
        start, stop = span(rows, s, saved)
        low, high = max(begin, start), min(end, stop)
        if low < high:
            found.append((low - start, high - start, s))
    return found


def pieces__end_not_relative(rows, saved, rank, ranks):
    begin, end = span(rows, rank, ranks)
    found = []
    for s in range(saved):
        start, stop = span(rows, s, saved)
        low, high = max(begin, start), min(end, stop)
        if low < high:
            found.append((s, low - start, high))
    return found


def pieces__row_for_row(rows, saved, rank, ranks):
    begin, end = span(rows, rank, ranks)
    found = []
    for row in range(begin, end):
        for s in range(saved):
            start, stop = span(rows, s, saved)
            if start <= row < stop:
                found.append((s, row - start, row - start + 1))
    return found


def pieces__loops_over_ranks(rows, saved, rank, ranks):
    begin, end = span(rows, rank, ranks)
    found = []
    for s in range(ranks):
        start, stop = span(rows, s, saved)
        low, high = max(begin, start), min(end, stop)
        if low < high:
            found.append((s, low - start, high - start))
    return found


def newest__total_size(folder):
    steps = []
    for name, e in folder.items():
        if (
            name.startswith("step-")
            and e["manifest"] is not None
            and sum(e["files"].values()) >= sum(e["manifest"].values())
        ):
            steps.append(int(name[5:]))
    return max(steps, default=0)


def newest__stops_at_the_first_broken(folder):
    best = 0
    for name in sorted((n for n in folder if n.startswith("step-")), key=lambda n: int(n[5:])):
        e = folder[name]
        if e["manifest"] is None or e["files"] != e["manifest"]:
            break
        best = int(name[5:])
    return best


def newest__deletes_from_the_folder(folder):
    for name in list(folder):
        e = folder[name]
        if not name.startswith("step-") or e["manifest"] is None or e["files"] != e["manifest"]:
            del folder[name]
    return max((int(n[5:]) for n in folder), default=0)


def newest__last_digit(folder):
    steps = []
    for name, e in folder.items():
        if name.startswith("step-") and e["manifest"] is not None and e["files"] == e["manifest"]:
            steps.append(int(name[-1]))
    return max(steps, default=0)


def newest__only_the_newest(folder):
    names = [n for n in folder if n.startswith("step-")]
    if not names:
        return 0
    last = max(names, key=lambda n: int(n[5:]))
    e = folder[last]
    if e["manifest"] is not None and e["files"] == e["manifest"]:
        return int(last[5:])
    return 0


def newest__every_whole_step(folder):
    steps = []
    for name, e in folder.items():
        if name.startswith("step-") and e["manifest"] is not None and e["files"] == e["manifest"]:
            steps.append(int(name[5:]))
    return sorted(steps)


def newest__none_for_none(folder):
    steps = []
    for name, e in folder.items():
        if name.startswith("step-") and e["manifest"] is not None and e["files"] == e["manifest"]:
            steps.append(int(name[5:]))
    return max(steps, default=None)


def newest__sizes_at_least(folder):
    steps = []
    for name, e in folder.items():
        if (
            name.startswith("step-")
            and e["manifest"] is not None
            and all(e["files"].get(f, -1) >= s for f, s in e["manifest"].items())
        ):
            steps.append(int(name[5:]))
    return max(steps, default=0)


def newest__minus_one(folder):
    steps = []
    for name, e in folder.items():
        if name.startswith("step-") and e["manifest"] is not None and e["files"] == e["manifest"]:
            steps.append(int(name[5:]))
    return max(steps, default=-1)

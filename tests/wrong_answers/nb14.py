"""Wrong answers to the exercises of notebook 14, written from their statements alone."""

from itertools import zip_longest
from statistics import median


def late__last_most_often(arrivals):
    # who is last most often
    last = [t.index(max(t)) for t in arrivals]
    return [max(set(last), key=last.count)]


def late__beyond_the_median(arrivals):
    out = []
    for r in range(len(arrivals[0])):
        d = [t[r] - median(t) for t in arrivals]
        if median(d) > 1:
            out.append(r)
    return out


def late__spread_with_the_last(arrivals):
    hits = [0] * len(arrivals[0])
    for t in arrivals:
        s = sorted(t)
        if s[-1] - s[-2] > s[-1] - s[0]:
            hits[t.index(s[-1])] += 1
    return [r for r, h in enumerate(hits) if h > len(arrivals) / 2]


def late__a_number_or_none(arrivals):
    hits = [0] * len(arrivals[0])
    for t in arrivals:
        s = sorted(t)
        if s[-1] - s[-2] > s[-2] - s[0]:
            hits[t.index(s[-1])] += 1
    return hits.index(max(hits)) if max(hits) > len(arrivals) / 2 else None


def late__late_once(arrivals):
    hits = {}
    for t in arrivals:
        s = sorted(t)
        if s[-1] - s[-2] > s[-2] - s[0]:
            hits[t.index(s[-1])] = hits.get(t.index(s[-1]), 0) + 1
    return list(hits)


def late__step_by_step(arrivals):
    worst = [max(t) - min(t) for t in arrivals]
    return [t.index(max(t)) for t, w in zip(arrivals, worst) if w > sum(worst) / len(worst)]


def first_mismatch__rank_0_is_right(calls):
    for i, (a, *rest) in enumerate(zip(*calls)):
        odd = [r + 1 for r, c in enumerate(rest) if c != a]
        if odd:
            return i, odd
    return min(map(len, calls)), []


def first_mismatch__a_list_that_ends_differs(calls):
    for i, col in enumerate(zip_longest(*calls)):
        if len(set(col)) > 1:
            best = max(col, key=col.count)
            return i, [r for r, x in enumerate(col) if x != best]
    return len(calls[0]), []


def first_mismatch__kinds_alone(calls):
    for i, col in enumerate(zip(*calls)):
        if len({kind for kind, size in col}) > 1:
            kinds = [k for k, s in col]
            best = max(kinds, key=kinds.count)
            return i, [r for r, k in enumerate(kinds) if k != best]
    return min(map(len, calls)), []


def first_mismatch__all_that_ever_differ(calls):
    bad = set()
    place = None
    for i, col in enumerate(zip(*calls)):
        if len(set(col)) > 1:
            place = i if place is None else place
            best = max(col, key=col.count)
            bad |= {r for r, x in enumerate(col) if x != best}
    return (min(map(len, calls)) if place is None else place), sorted(bad)


def first_mismatch__the_other_way_round(calls):
    for i, col in enumerate(zip(*calls)):
        if len(set(col)) > 1:
            best = max(col, key=col.count)
            return [r for r, x in enumerate(col) if x != best], i
    return [], min(map(len, calls))


def first_mismatch__one_rank_no_list(calls):
    for i, col in enumerate(zip(*calls)):
        if len(set(col)) > 1:
            best = max(col, key=col.count)
            return i, next(r for r, x in enumerate(col) if x != best)
    return min(map(len, calls)), []

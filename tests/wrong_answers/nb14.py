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


def late__three_ranks_only(arrivals):
    counts = [0] * len(arrivals[0])
    for times in arrivals:
        s = sorted(times)
        if s[-1] - s[-2] > s[-2] - s[-3]:
            counts[times.index(s[-1])] += 1
    return [rank for rank, count in enumerate(counts) if count > len(arrivals) / 2]


def late__at_least(arrivals):
    counts = [0] * len(arrivals[0])
    for times in arrivals:
        *others, last = sorted(times)
        if last - others[-1] >= others[-1] - others[0]:
            counts[times.index(last)] += 1
    return [rank for rank, count in enumerate(counts) if count > len(arrivals) / 2]


def late__beyond_the_mean(arrivals):
    counts = [0] * len(arrivals[0])
    for times in arrivals:
        *others, last = sorted(times)
        if last - sum(others) / len(others) > others[-1] - others[0]:
            counts[times.index(last)] += 1
    return [rank for rank, count in enumerate(counts) if count > len(arrivals) / 2]


def late__sorts_in_place(arrivals):
    counts = [0] * len(arrivals[0])
    for times in arrivals:
        times.sort()
        if times[-1] - times[-2] > times[-2] - times[0]:
            counts[times.index(times[-1])] += 1
    return [rank for rank, count in enumerate(counts) if count > len(arrivals) / 2]


def late__removes_from_the_argument(arrivals):
    counts = [0] * len(arrivals[0])
    for times in arrivals:
        last = max(times)
        rank = times.index(last)
        times.remove(last)
        if last - max(times) > max(times) - min(times):
            counts[rank] += 1
    return [rank for rank, count in enumerate(counts) if count > len(arrivals) / 2]


def late__return_in_the_loop(arrivals):
    counts = [0] * len(arrivals[0])
    for times in arrivals:
        *others, last = sorted(times)
        if last - others[-1] > others[-1] - others[0]:
            counts[times.index(last)] += 1
        return [rank for rank, count in enumerate(counts) if count > len(arrivals) / 2]


def late__repeated(arrivals):
    found = []
    for times in arrivals:
        *others, last = sorted(times)
        if last - others[-1] > others[-1] - others[0]:
            found.append(times.index(last))
    return [rank for rank in found if found.count(rank) > len(arrivals) / 2]


def first_mismatch__two_ranks_only(calls):
    place = 0
    for a, b in zip(calls[0], calls[1]):
        if a != b:
            return place, [1]
        place += 1
    return place, []


def first_mismatch__one_rank(calls):
    for place, there in enumerate(zip(*calls)):
        usual = max(there, key=there.count)
        for rank, call in enumerate(there):
            if call != usual:
                return place, [rank]
    return min(map(len, calls)), []


def first_mismatch__last_place_where_alike(calls):
    for place, there in enumerate(zip(*calls)):
        if len(set(there)) > 1:
            usual = max(there, key=there.count)
            return place, [r for r, c in enumerate(there) if c != usual]
    return place, []


def first_mismatch__equal_places_in_all(calls):
    alike, ranks = 0, []
    for there in zip(*calls):
        if len(set(there)) == 1:
            alike += 1
        elif not ranks:
            usual = max(there, key=there.count)
            ranks = [r for r, c in enumerate(there) if c != usual]
    return alike, ranks


def first_mismatch__all_differing_ranks_later(calls):
    first, ranks = None, set()
    for place, there in enumerate(zip(*calls)):
        usual = max(there, key=there.count)
        odd = [r for r, c in enumerate(there) if c != usual]
        if odd and first is None:
            first = place
        ranks.update(odd)
    return (min(map(len, calls)) if first is None else first), sorted(ranks)


def first_mismatch__pops_from_the_argument(calls):
    done = 0
    while all(calls):
        heads = [c.pop(0) for c in calls]
        usual = max(heads, key=heads.count)
        odd = [r for r, h in enumerate(heads) if h != usual]
        if odd:
            return done, odd
        done += 1
    return done, []


def first_mismatch__none_where_alike(calls):
    for place, there in enumerate(zip(*calls)):
        if len(set(there)) > 1:
            usual = max(there, key=there.count)
            return place, [r for r, c in enumerate(there) if c != usual]


def late__twice_the_spread(arrivals):
    counts = [0] * len(arrivals[0])
    for times in arrivals:
        *others, last = sorted(times)
        if last - others[-1] > 2 * (others[-1] - others[0]):
            counts[times.index(last)] += 1
    return [r for r, c in enumerate(counts) if c > len(arrivals) / 2]


def first_mismatch__ranks_from_one(calls):
    for place, there in enumerate(zip(*calls)):
        if len(set(there)) > 1:
            usual = max(there, key=there.count)
            return place, [r for r, c in enumerate(there, 1) if c != usual]
    return min(map(len, calls)), []


def first_mismatch__total_calls(calls):
    for place, there in enumerate(zip(*calls)):
        if len(set(there)) > 1:
            usual = max(there, key=there.count)
            return place * len(calls), [r for r, c in enumerate(there) if c != usual]
    return min(map(len, calls)) * len(calls), []

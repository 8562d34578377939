"""Right answers to the exercises of notebook 14, besides the references."""

import statistics
from collections import Counter

import torch


def late__by_a_mask(arrivals):
    times = torch.tensor(arrivals, dtype=torch.float64)
    ordered = times.sort(dim=1).values
    beyond = ordered[:, -1] - ordered[:, -2] > ordered[:, -2] - ordered[:, 0]
    last = times.argmax(dim=1)[beyond]
    return [rank for rank in range(times.shape[1]) if int((last == rank).sum()) * 2 > len(arrivals)]


def late__rank_by_rank(arrivals):
    found = []
    for rank in range(len(arrivals[0])):
        steps = 0
        for times in arrivals:
            others = [time for other, time in enumerate(times) if other != rank]
            steps += times[rank] - max(others) > max(others) - min(others)
        if steps / len(arrivals) > 0.5:
            found.append(rank)
    return tuple(found)


def late__the_median_step(arrivals):
    margins = []
    for rank in range(len(arrivals[0])):
        others = [[time for other, time in enumerate(times) if other != rank] for times in arrivals]
        margins.append([times[rank] - 2 * max(rest) + min(rest) for times, rest in zip(arrivals, others)])
    return {rank for rank, margin in enumerate(margins) if statistics.median_low(margin) > 0}


def first_mismatch__with_a_counter(calls):
    shortest = min(len(own) for own in calls)
    for place in range(shortest):
        (usual, votes), *_ = Counter(own[place] for own in calls).most_common()
        if votes < len(calls):
            return place, [rank for rank in range(len(calls)) if calls[rank][place] != usual]
    return shortest, []


def first_mismatch__by_prefixes(calls):
    alike = 0
    while all(len(own) > alike for own in calls) and len({own[alike] for own in calls}) == 1:
        alike += 1
    there = [own[alike] if len(own) > alike else None for own in calls]
    if None in there:
        return [alike, []]
    return [alike, [rank for rank, call in enumerate(there) if there.count(call) * 2 < len(calls)]]

"""Right answers to the exercises of notebook 07, besides the references."""

from fsdplab.profiling.intervals import length, subtract


def exposed__a_sweep(communication, compute):
    events = [(a, 0, 1) for a, _ in communication] + [(b, 0, -1) for _, b in communication]
    events += [(a, 1, 1) for a, _ in compute] + [(b, 1, -1) for _, b in compute]
    open_, total, last = [0, 0], 0.0, 0
    for at, which, step in sorted(events):
        total += (at - last) * (open_[0] > 0 and open_[1] == 0)
        open_[which] += step
        last = at
    return total


def exposed__the_librarys(communication, compute):
    ns = lambda pairs: [(round(a * 1e6), round(b * 1e6)) for a, b in pairs]
    return length(subtract(ns(communication), ns(compute))) / 1e6


def ahead__a_loop(order, position, depth):
    found = []
    for name in order[position + 1 :]:
        if len(found) < depth:
            found.append(name)
    return found


def hide__by_keyword():
    settings = dict(prefetch=1, link_queues=2)
    return dict(settings, batch_size=2, units="block")

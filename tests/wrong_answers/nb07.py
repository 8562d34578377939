"""Wrong answers to the exercises of notebook 07, written from their statements alone."""


def exposed__in_seconds(communication, compute):
    edges = sorted({t for span in communication + compute for t in span})
    inside = lambda spans, a, b: any(s <= a and b <= e for s, e in spans)
    pieces = [(a, b) for a, b in zip(edges, edges[1:]) if inside(communication, a, b) and not inside(compute, a, b)]
    return sum(b - a for a, b in pieces) / 1000


def exposed__without_the_last_edge(communication, compute):
    edges = sorted({t for span in communication + compute for t in span})
    total = 0
    for i in range(len(edges) - 2):
        a, b = edges[i], edges[i + 1]
        if any(s <= a and b <= e for s, e in communication) and not any(s <= a and b <= e for s, e in compute):
            total += b - a
    return total


def exposed__returns_in_the_loop(communication, compute):
    edges = sorted({t for span in communication + compute for t in span})
    total = 0
    for a, b in zip(edges, edges[1:]):
        if any(s <= a and b <= e for s, e in communication) and not any(s <= a and b <= e for s, e in compute):
            total += b - a
            return total
    return total


def ahead__takes_them_from_the_list(order, position, depth):
    units = []
    while len(units) < depth and position + 1 < len(order):
        units.append(order.pop(position + 1))
    return units

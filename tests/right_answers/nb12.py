"""Right answers to the exercises of notebook 12, besides the references."""


def traffic__the_other_way_round(P, s, r):
    slice_ = P / s
    return {"across": slice_ * 2 - 2 * slice_ / r, "within": 3 * (P - slice_)}


def traffic__whole_numbers(P, s, r):
    return dict(within=3 * (P // s) * (s - 1), across=2 * (P // s) * (r - 1) // r)


def mesh_for__backwards(ranks, per_node, state, card):
    s = next(s for s in range(per_node, ranks + 1) if ranks % s == 0 and state / s <= card)
    order = list(range(ranks))[::-1]
    return tuple(tuple(order[first : first + s]) for first in range(0, ranks, s))


def mesh_for__tries_all(ranks, per_node, state, card):
    def cost(s):
        slow = 10 if s > per_node else 1
        return slow * 3 * (s - 1) / s + 20 / s * (ranks - s) / ranks

    s = min((s for s in (1, 2, 4) if state / s <= card and s <= ranks), key=cost)
    return [[s * row + column for column in range(s)] for row in range(ranks // s)]

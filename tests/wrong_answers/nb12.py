"""Wrong answers to the exercises of notebook 12, written from their statements alone."""


def traffic__of_all_ranks(P, s, r):
    n = s * r
    return {"within": n * 3 * P * (s - 1) / s, "across": n * 2 * P / s * (r - 1) / r}


def traffic__the_shard_of_the_other_ring(P, s, r):
    return {"within": 3 * P * (s - 1) / s, "across": 2 * (P / r) * (r - 1) / r}


def traffic__two_all_reduces(P, s, r):
    return {"within": 3 * P * (s - 1) / s, "across": 4 * (P / s) * (r - 1) / r}


def traffic__a_fraction_subtracted(P, s, r):
    return {"within": 3 * P * s - 1 / s, "across": 2 * P / s * r - 1 / r}


def traffic__both_rings(P, s, r):
    across = 2 * (P / s) * (r - 1) / r
    return {"within": 3 * P * (s - 1) / s + across, "across": across}


def traffic__whole_parts(P, s, r):
    return {"within": 3 * P * ((s - 1) // s), "across": 2 * P // s * ((r - 1) // r)}


def traffic__another_key(P, s, r):
    return {"within": 3 * P * (s - 1) / s, "accross": 2 * (P / s) * (r - 1) / r}


def traffic__nothing_for_one_group(P, s, r):
    return {"within": 3 * P * (s - 1) / s, "across": 2 * (P / s) * (r - 1) / r if r > 1 else None}


def mesh_for__too_large_where_it_just_fits(ranks, per_node, state, card):
    group = per_node
    while state / group >= card:
        group *= 2
    return [list(range(first, first + group)) for first in range(0, ranks, group)]


def mesh_for__all_ranks_where_a_node_is_too_small(ranks, per_node, state, card):
    group = per_node if state / per_node <= card else ranks
    return [list(range(first, first + group)) for first in range(0, ranks, group)]


def mesh_for__doubled_once(ranks, per_node, state, card):
    group = per_node if state / per_node <= card else 2 * per_node
    return [list(range(first, first + group)) for first in range(0, ranks, group)]


def mesh_for__one_more_at_a_time(ranks, per_node, state, card):
    group = per_node
    while state / group > card:
        group += 1
    return [list(range(first, first + group)) for first in range(0, ranks, group)]

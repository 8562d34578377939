"""The mesh for a network

Write mesh_for(ranks, per_node, state, card): rows of ranks whose shards fit the card, with the least time on the links.

1. Which of the two rings carries more bytes a step? It should find the fast link. And what, if the shards are then
   still too large?
2. A row is one node: all-gathers stay on the fast link, and across goes P/s. Only where state / per_node exceeds the
   card must a row span nodes.
3. Begin with group = per_node, and double it while state / group > card.
"""


def mesh_for(ranks, per_node, state, card):
    """Rows of ranks, each a shard group; the first per_node of the ranks are on node 0, and so on.

    state: MB of model state to cut over the ranks of a row. card: MB that a rank has for its shard.
    """
    ### BEGIN SOLUTION
    ## group = ...  # ranks in a row
    group = per_node
    while state / group > card:
        group *= 2
    ### END SOLUTION
    return [list(range(first, first + group)) for first in range(0, ranks, group)]


# ---- check: on 4 ranks, within 0.02, in 30 s, facts only


def cases(rank, n):
    yield "two nodes of two, half the state just fits", 4, 2, 64, 32
    yield "two nodes of two, all of it would fit", 4, 2, 64, 80
    yield "two nodes of two, a quarter fits", 4, 2, 64, 20
    yield "one node of four, a quarter fits", 4, 4, 64, 20
    yield "four nodes of one, all of it fits", 4, 1, 64, 80
    yield "sixteen nodes of one, a third fits", 16, 1, 64, 22  # by the formula: the check has four ranks


def observe(mesh_for, ranks, per_node, state, card):
    from fsdplab.teaching.lessons.nb12_hybrid import on_ranks

    rows = mesh_for(ranks, per_node, state, card)
    if refused := on_ranks.complaint(rows, ranks):
        return {"mesh": refused}
    s, over = len(rows[0]), max(0, state / len(rows[0]) - card)
    spans = s > per_node
    mixed = not spans and s > 1 and not on_ranks.on_one_node(rows, per_node)
    moved = (on_ranks.on_the_links_ms if ranks == 4 else on_ranks.expected_ms)(rows, per_node)
    return {"mesh": "", "MB over the card": over, "ms on the links": moved, "_mixed": mixed, "_spans": spans}


def slow(got, right):
    if got["_mixed"]:
        return (
            "a row has ranks of different nodes, so all-gathers and reductions cross the slow link: the ranks of one"
            " node belong in one row"
        )
    if got["_spans"]:
        return (
            "a row spans nodes, so all-gathers and reductions go at the slow link's pace, and the card does not ask for"
            " it (a shard as large as `card` fits): shorter rows, of `per_node` ranks where they fit"
        )
    return (
        "rows are shorter than a node: then more of the gradient, P/s a rank, is all-reduced over the slow link. Shard"
        " over the whole node, even where it would fit without"
    )


SAYS = {
    "mesh": lambda got, right: got["mesh"],
    "MB over the card": "a rank keeps more of the state than its card has, state / (ranks in a row), both in MB: longer"
    " rows",
    "ms on the links": slow,
    "hung": "the ranks wait for each other: return the same rows on every rank",
}

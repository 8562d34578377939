"""The prefetch rule

Write ahead(order, position, depth): the units to unshard now, while order[position] computes.

1. Which unit is needed next? It stands right behind the one that computes.
2. A slice of a list: from position + 1 on, and `depth` names long.
3. order[position + 1 : position + 1 + depth]: a slice may end behind the list, and is then shorter.
"""


def ahead(order, position, depth):
    """The units to unshard now, while order[position] computes: those of the next `depth` places."""
    ### BEGIN SOLUTION  order: the names of the units, as this phase will use them
    return order[position + 1 : position + 1 + depth]
    #! return order[position : position + depth]
    #: order[position] computes now, so it is whole already: begin with the unit behind it
    #! return order[position : position + 1 + depth]
    #: as above
    #! return order[position + 1 :]
    #: all later units would be whole at once, which full sharding is to avoid: at most `depth` of them
    #! return order[max(0, position - depth) : position]
    #: `order` is already the order of this phase, in the backward too: do not turn it round
    #! return order[position + 1 : position + 1 + depth][::-1]
    #: as above
    #! return order[position + depth : position + depth + 1] if depth else []
    #: the units between are left out: the next one is needed first
    #! return sorted(order[position + 1 : position + 1 + depth])
    #: as above
    #! return order[position + 1 : position + 1 + min(1, depth)]
    #: only one unit is unsharded ahead; `depth` may be more
    #! return order[position + 1 : position + depth]
    #: one unit too few: a slice ends before its second number
    #! return order[position + 1 : position + 2 + depth]
    #: one unit too many: a slice ends before its second number
    #! return list(range(position + 1, min(len(order), position + 1 + depth)))
    #: these are places in `order`; the names that stand there are wanted
    #! return order[position + 1]
    #: raises: a slice, `a[i:j]`, may
    #! return order[min(position + 1, len(order) - 1)]
    #: return a list of names, empty where nothing is to be unsharded
    ### END SOLUTION


# ---- check: pure

FORWARD = ["root", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
BACKWARD = ["root", "blocks.3", "blocks.2", "blocks.1", "blocks.0"]


def cases(rank, n):
    for name, order, position, depth in (
        ("one ahead, in the forward", FORWARD, 1, 1),
        ("two ahead, in the forward", FORWARD, 1, 2),
        ("one ahead, in the backward", BACKWARD, 1, 1),
        ("two ahead, in the backward", BACKWARD, 1, 2),
        ("two ahead, one unit is left", BACKWARD, 3, 2),
        ("the last unit", FORWARD, 4, 1),
        ("none ahead", FORWARD, 2, 0),
    ):
        yield f"{name}: order={order}, position={position}, depth={depth}", order, position, depth


def observe(ahead, order, position, depth):
    names = ahead(order, position, depth)
    return {"a list": isinstance(names, (list, tuple)), "units": ", ".join(map(str, names)) if names else ""}


SAYS = {
    "a list": "return a list of names, empty where nothing is to be unsharded",
    "units": "count from position + 1, and stop after `depth` names, or where the list ends",
}

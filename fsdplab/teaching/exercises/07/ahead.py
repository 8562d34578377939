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

"""The groups around a rank

Write groups_of(rank, shape): for each axis of the mesh, the ranks that a collective over that axis joins with `rank`.

1. Draw 2 x 2: the ranks 0 1 above 2 3. Who differs from rank 3 in the row only? In the column only?
2. A step along an axis moves on by the product of all later sizes; on the last axis that is 1.
3. `stride = prod(shape[axis + 1 :])`; the place on the axis is `rank // stride % size`; go back so many strides and
   list `size` ranks.
"""

from math import prod


def groups_of(rank, shape):
    """For each axis of a row-major mesh: the ranks that differ from `rank` on it only, in order."""
    groups = []
    for axis, size in enumerate(shape):
        ### BEGIN SOLUTION  how far apart are neighbours on this axis? where does the group begin?
        stride = prod(shape[axis + 1 :])
        first = rank - rank // stride % size * stride
        groups.append([first + step * stride for step in range(size)])
        ### END SOLUTION
    return groups


# ---- check: pure


def cases(rank, n):
    for shape, chosen in ([2, 2], range(4)), ([1, 4], range(4)), ([2, 3, 4], (0, 7, 13, 23)):
        for each in chosen:
            yield f"rank {each} of {' x '.join(map(str, shape))}", each, shape


def observe(groups_of, rank, shape):
    groups = groups_of(rank, shape)
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        return {"groups": groups}
    return {"groups": len(groups), "_rank": rank} | {
        f"group on axis {axis}": list(group) for axis, group in enumerate(groups)
    }


def on_axis(axis):
    def said(got, right):
        group, expected = got[f"group on axis {axis}"], right[f"group on axis {axis}"]
        if not all(isinstance(each, (int, float)) for each in group):
            return "a group is a list of ranks, and one is wanted for each axis: the one that the rank is in"
        if sorted(group) == [each for each in expected if each != right["_rank"]]:
            return "the rank itself is missing: it takes part in its own collectives"
        if sorted(group) == expected:
            return "the right ranks in another order: a group counts upwards along its axis"
        if len(group) != len(expected):
            return f"the group has {len(group)} ranks, the axis {len(expected)} places"
        if expected[1:] and (stride := expected[1] - expected[0]) != group[1] - group[0]:
            return f"neighbours on this axis are {stride} ranks apart, the product of all later sizes"
        return f"where on the axis does the rank stand? So many strides before it its group begins, at {expected[0]}"

    return said


SAYS = {"groups": lambda got, right: f"return a list with one list of ranks for each axis, here {right['groups']}"}
SAYS |= {f"group on axis {axis}": on_axis(axis) for axis in range(3)}

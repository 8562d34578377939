"""Which units are whole at an instant

Write holding(life, at): the units whose whole parameters take memory at an instant.

1. A unit's state at an instant is what its last row before that instant says.
2. Go through the rows in order, up to `at`, and keep the newest state of each unit in a dict. Two of the three states
   take memory.
3. state[row["unit"]] = row["state"] for rows with time_ns <= at; then all units whose state is not "sharded".
"""


def holding(life, at):
    """The names of the units whose whole parameters take memory at instant `at`."""
    ### BEGIN SOLUTION  life: dicts with "unit", "state" and "time_ns", in order of time
    state = {}
    for row in life:
        if row["time_ns"] <= at:
            state[row["unit"]] = row["state"]
    return [unit for unit, now in state.items() if now != "sharded"]
    ### END SOLUTION


# ---- check: pure

from collections.abc import Iterable

STEP = (
    (1, "root", "unsharding"), (3, "root", "unsharded"), (3, "blocks.0", "unsharding"), (6, "blocks.0", "unsharded"),
    (6, "blocks.1", "unsharding"), (9, "blocks.0", "sharded"), (10, "blocks.1", "unsharded"),
    (14, "blocks.1", "sharded"), (16, "blocks.1", "unsharding"), (19, "blocks.1", "unsharded"),
    (20, "blocks.0", "unsharding"), (24, "blocks.1", "sharded"), (25, "blocks.0", "unsharded"),
    (29, "blocks.0", "sharded"), (31, "root", "sharded"),
)  # fmt: skip


def cases(rank, n):
    life = [
        {"unit": unit, "state": state, "phase": "forward" if time < 16 else "backward", "time_ns": time}
        for time, unit, state in STEP
    ]
    for name, at in (
        ("one block whole, the next on its way", 8),
        ("before anything is unsharded", 0),
        ("the root is on its way", 2),
        ("after the forward of the last block", 15),
        ("the instant of a reshard", 9),
        ("the instant of an all-gather", 16),
        ("in the backward: both blocks", 22),
        ("the end of the step", 40),
    ):
        yield f"{name}, at = {at}", life, at


def observe(holding, life, at):
    got = holding(life, at)
    names = list(got) if isinstance(got, Iterable) and not isinstance(got, (str, bytes)) else [None]
    many = all(isinstance(name, str) for name in names)
    return {"several names": many, "units": ", ".join(sorted(names)) if many else str(got)}


def which(got, right):
    """The names that are missing or too many."""
    ours, theirs = (facts["units"].split(", ") if facts["units"] else [] for facts in (got, right))
    missing, more = sorted(set(theirs) - set(ours)), sorted(set(ours) - set(theirs))
    twice = sorted({unit for unit in ours if ours.count(unit) > 1})
    told = (("missing", missing), ("named, and without memory at that instant", more), ("named more than once", twice))
    found = "; ".join(f"{what}: {', '.join(units)}" for what, units in told if units)
    return f"{found}. Note for each unit its newest state up to `at`; it holds memory unless that is sharded"


SAYS = {"several names": "return the names: a list, or a set, of texts", "units": which}

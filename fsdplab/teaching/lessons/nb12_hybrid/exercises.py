"""Notebook 12: bytes within and across shard groups, what leaves a node, and the mesh for a given network."""

from __future__ import annotations

import ast

from fsdplab.teaching.core.exercise import Case, Choice, Exercise, Question, Slip, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference

from . import on_ranks
from .overlapping_axes import leaving_a_node

_TWO, _FOUR = 2, 4

# --- traffic

_TRAFFIC = '''\
def traffic(P, s, r):
    """Bytes that a rank sends in one step; P bytes of parameters, shard groups of s ranks, r such groups."""
    return {{
        "within": {within},  # its shard group: two gathers and a reduce-scatter
        "across": {across},  # the groups: an all-reduce over r ranks
    }}
'''
_WITHIN, _ACROSS = "3 * P * (s - 1) / s", "2 * (P / s) * (r - 1) / r"
_TRAFFIC_STUB = _TRAFFIC.format(within="...", across="...")
_REFERENCE = _TRAFFIC.format(within=_WITHIN, across=_ACROSS)
_MESHES = {
    "four groups of eight": (9600, 8, 4),
    "two groups of two": (1200, 2, 2),
    "eight groups of four": (4800, 4, 8),
    "one group of four: full_shard": (1200, 4, 1),
    "four groups of one: no_shard": (1200, 1, 4),
}


def traffic_reference(P: float, s: int, r: int) -> dict[str, float]:
    """`traffic_reference(1200, 2, 2) == {"within": 1800.0, "across": 600.0}`."""
    return {"within": 3 * P * (s - 1) / s, "across": 2 * (P / s) * (r - 1) / r}


def _traffic_cases() -> list[Case]:
    return [
        Case(name, (arguments,) * _TWO, (traffic_reference(*arguments),) * _TWO) for name, arguments in _MESHES.items()
    ]


def _explain_traffic(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    axis = next((name for name in ("within", "across") if f"'{name}'" in difference.tensor), None)
    if axis is None or not isinstance(trial.returned, dict):
        return None, "return the dict with `within` and `across`, a number of bytes each"
    (P, s, r), got = case.arguments[0], trial.returned[axis]
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        return None, f"{axis}: a number of bytes is expected in place of the dots"
    n = s * r
    suspects = {
        "within": (
            (
                2 * P * (s - 1) / s,
                "two of the three: forward gathers, backward gathers again, then the gradient is reduced",
            ),
            (3 * P * (n - 1) / n, "the ring has the s ranks of one group, not all of them: (s-1)/s"),
            (3 * P / s, "P/s is a rank's slice; in a ring it sends s-1 of them, its own and those that it passes on"),
            (3 * P, "a rank need not send what its neighbours have: (s-1)/s of P"),
            (3 * P * (r - 1) / r, "the ring within a group has s ranks; r counts the groups"),
        ),
        "across": (
            (
                2 * P * (r - 1) / r,
                "after the reduce-scatter a rank has 1/s of the gradient, and only that slice is all-reduced",
            ),
            ((P / s) * (r - 1) / r, "an all-reduce is a reduce-scatter and an all-gather: it counts twice"),
            (P * (r - 1) / r, "an all-reduce counts twice, and only the slice P/s is all-reduced"),
            (2 * (P / s) * (s - 1) / s, "the ring across has r ranks, one of each group"),
            (2 * (P / s) * (n - 1) / n, "the ring across has r ranks, one of each group, not all n"),
            (2 * P / s, "a ring of r ranks sends (r-1)/r of its payload; with one group nothing travels"),
            (
                3 * (P / s) * (r - 1) / r,
                "parameters never travel across: each group gathers its own. Only gradients do, in an all-reduce",
            ),
        ),
    }[axis]
    right = case.expected[0][axis]
    cause = next(
        (
            words
            for wrong, words in suspects
            if abs(got - wrong) <= 1e-9 * abs(wrong) and abs(wrong - right) > 1e-9 * right
        ),
        None,
    )
    rule = (
        "payload x (members of the ring - 1) / members, once for each gather or reduce-scatter, twice for an all-reduce"
    )
    return None, f"{axis}: {cause or rule}"


traffic = Exercise(
    id="12.traffic",
    title="Bytes within and across",
    statement=(
        "Write traffic(P, s, r): the bytes that a rank sends in a step within its shard group, and across the groups."
    ),
    stub=_TRAFFIC_STUB,
    reference=_REFERENCE,
    hints=(
        "Two rings. How many ranks are in each, and what is the payload that goes round it?",
        (
            "Within: s ranks, payload P, three times. Across: r ranks, and the payload is what a rank has after the"
            " reduce-scatter."
        ),
        "3 P (s-1)/s within; across an all-reduce of P/s over r ranks: 2 (P/s) (r-1)/r.",
    ),
    cases=_traffic_cases,
    explain=_explain_traffic,
    world_size=_TWO,
    tolerance=1e-9,
    wrong=(
        Wrong("one gather", edited(_REFERENCE, (_WITHIN, "2 * P * (s - 1) / s")), "backward gathers again"),
        Wrong("a ring of all", edited(_REFERENCE, (_WITHIN, "3 * P * (s * r - 1) / (s * r)")), "not all of them"),
        Wrong("slices", edited(_REFERENCE, (_WITHIN, "3 * P / s")), "sends s-1 of them"),
        Wrong("everything", edited(_REFERENCE, (_WITHIN, "3 * P")), "need not send"),
        Wrong("groups for ranks", edited(_REFERENCE, (_WITHIN, "3 * P * (r - 1) / r")), "r counts the groups"),
        Wrong("whole gradient across", edited(_REFERENCE, (_ACROSS, "2 * P * (r - 1) / r")), "only that slice"),
        Wrong("all-reduce once", edited(_REFERENCE, (_ACROSS, "(P / s) * (r - 1) / r")), "it counts twice"),
        Wrong("whole and once", edited(_REFERENCE, (_ACROSS, "P * (r - 1) / r")), "only the slice P/s"),
        Wrong("ring of the group", edited(_REFERENCE, (_ACROSS, "2 * (P / s) * (s - 1) / s")), "one of each group"),
        Wrong("ring of all, across", edited(_REFERENCE, (_ACROSS, "2 * (P / s) * (s * r - 1) / (s * r)")), "not all n"),
        Wrong("no (r-1)/r", edited(_REFERENCE, (_ACROSS, "2 * P / s")), "nothing travels"),
        Wrong("parameters across", edited(_REFERENCE, (_ACROSS, "3 * (P / s) * (r - 1) / r")), "never travel across"),
        Wrong("dots left", edited(_REFERENCE, (_ACROSS, "...")), "in place of the dots"),
        Wrong(
            "a sum",
            edited(_REFERENCE, ("return {", "return sum({"), ("    }\n", "    }.values())\n")),
            "`within` and `across`",
        ),
    ),
)

# --- questions

_FULL, _HYBRID = leaving_a_node(8, 16, 8)

node = Question(
    id="12.node",
    statement=(
        "16 nodes of 8 GPUs. Under full_shard a ring of all 128 GPUs leaves a node once, in each of three collectives"
        " of P bytes. Under hybrid_shard (a group a node) all 8 GPUs of a node all-reduce their slices, P/8 each, over"
        " 16 nodes. How many times as many bytes leave a node under full_shard?"
    ),
    unit="x",
    expected=_FULL / _HYBRID,
    tolerance=0.01,
    slips=(
        Slip("that is for one GPU's end of the link; all 8 GPUs of a node send across under hybrid_shard", factor=8.0),
        Slip("the other way round: hybrid over full", value=_HYBRID / _FULL),
        Slip("the all-reduce counts twice", factor=2.0),
        Slip("under full_shard there are three collectives: two gathers and a reduce-scatter", factor=2 / 3),
    ),
    hints=(
        "Full: 3 P (n-1)/n with n = 128.",
        "Hybrid: 8 GPUs x 2 (P/8) (r-1)/r with r = 16. The 8 cancels.",
        "3 x 127/128 over 2 x 15/16.",
    ),
    explanation=(
        "Per node the gain tends to 3/2, not to 8. The rest of the gain: no gather waits for the slow network, and its"
        " rings are short."
    ),
)

grow = Choice(
    id="12.grow",
    statement=(
        "A job runs under hybrid_shard with a shard group a node. You double the number of nodes. What happens to the"
        " model state that a GPU keeps?"
    ),
    options={
        "a": "it halves, as under full_shard",
        "b": "it stays as it is",
        "c": "it doubles, for there are twice as many replicas",
    },
    right="b",
    because={
        "a": (
            "under full_shard the slices get smaller with every node; here a slice is 1/s of the model, and s is still"
            " one node."
        ),
        "b": (
            "a slice is 1/s, and s is one node. What no longer fits 8 GPUs does not fit 800 either: then the group must"
            " span nodes."
        ),
        "c": "more replicas in the cluster, but on a GPU there is one slice of one.",
    },
)

# --- the mesh

_MESH_HEAD = '''\
def mesh_for(ranks, per_node, state, card):
    """Rows of ranks, each a shard group; the first per_node of the ranks are on node 0, and so on.

    state: MB of model state to cut over the ranks of a row. card: MB that a rank has for its slice.
    """
'''
_MESH_STUB = (
    _MESH_HEAD
    + "    group = ...  # ranks in a row\n    return [list(range(first, first + group)) for first in range(0, ranks,"
    " group)]\n"
)
_MESH = (
    _MESH_HEAD
    + "    group = per_node\n    while state / group > card:\n        group *= 2\n    return [list(range(first, first +"
    " group)) for first in range(0, ranks, group)]\n"
)
_ROWS = "[list(range(first, first + group)) for first in range(0, ranks, group)]"
_NETWORKS = {
    "two nodes of two, half the state fits": (4, 2, 64, 40),
    "two nodes of two, all of it would fit": (4, 2, 64, 80),
    "two nodes of two, a quarter fits": (4, 2, 64, 20),
    "one node of four, a quarter fits": (4, 4, 64, 20),
    "four nodes of one, all of it fits": (4, 1, 64, 80),
}


def _mesh_cases() -> list[Case]:
    expected = {"mesh": "", "MB over the card": 0, "ms over the best mesh": 0}
    return [Case(name, (arguments,) * _FOUR, (expected,) * _FOUR) for name, arguments in _NETWORKS.items()]


def _explain_mesh(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    got = trial.returned
    if got["mesh"]:
        return None, got["mesh"]
    ranks, per_node, state, card = case.arguments[0]
    printed, times = trial.printed.strip().splitlines()[-2:]
    rows = ast.literal_eval(printed)
    step = f"the mesh {rows}: {times}"
    if got["MB over the card"]:
        return (
            step,
            (
                f"a rank keeps {state}/{len(rows[0])} = {state / len(rows[0]):g} MB of state, and its card has {card}:"
                " longer rows"
            ),
        )
    return step, _slow_because(rows, per_node)


def _slow_because(rows: list[list[int]], per_node: int) -> str:
    s = len(rows[0])
    if s > 1 and s <= per_node and not on_ranks.on_one_node(rows, per_node):
        return (
            "a row has ranks of different nodes, so gathers and reductions cross the slow link: the ranks of one node"
            " belong in one row"
        )
    if s > per_node:
        return (
            "a row spans nodes, so gathers and reductions go at the slow link's pace, and the card does not ask for it:"
            " shorter rows"
        )
    return (
        "rows are shorter than a node: then more of the gradient, P/s a rank, is all-reduced over the slow link. Shard"
        " over the whole node, even where it would fit without"
    )


mesh_for = Exercise(
    id="12.mesh_for",
    title="The mesh for a network",
    statement=(
        "Write mesh_for(ranks, per_node, state, card): rows of ranks whose slices fit the card, with the least time on"
        " the links."
    ),
    stub=_MESH_STUB,
    reference=_MESH,
    hints=(
        (
            "Which of the two rings carries more bytes a step? It should find the fast link. And what, if the slices"
            " are then still too large?"
        ),
        (
            "A row is one node: gathers stay on the fast link, and across goes P/s. Only where state / per_node exceeds"
            " the card must a row span nodes."
        ),
        "Begin with group = per_node, and double it while state / group > card.",
    ),
    cases=_mesh_cases,
    explain=_explain_mesh,
    hung="the ranks wait for each other: return the same rows on every rank",
    world_size=_FOUR,
    time_limit=30.0,
    driver=(str(on_ranks.__file__), "drive_mesh"),
    wrong=(
        Wrong(
            "across the nodes",
            edited(_MESH, (_ROWS, "[list(range(first, ranks, ranks // group)) for first in range(ranks // group)]")),
            "belong in one row",
        ),
        Wrong("full sharding", edited(_MESH, ("group = per_node", "group = ranks")), "shorter rows"),
        Wrong("as little as fits", edited(_MESH, ("group = per_node", "group = 1")), "Shard over the whole node"),
        Wrong(
            "always a node", edited(_MESH, ("    while state / group > card:\n        group *= 2\n", "")), "longer rows"
        ),
        Wrong("always two", edited(_MESH, ("group = per_node", "group = 2")), "shorter rows"),
        Wrong("ranks left out", edited(_MESH, (_ROWS, "[list(range(group))]")), "exactly one row"),
        Wrong("uneven rows", edited(_MESH, (_ROWS, "[list(range(1)), list(range(1, ranks))]")), "equally long"),
        Wrong("a number", edited(_MESH, (_ROWS, "group")), "expected a list of rows"),
    ),
)

ITEMS = (traffic, node, grow, mesh_for)

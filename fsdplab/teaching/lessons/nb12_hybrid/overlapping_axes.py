"""Lesson 12 in the notebook's process: four ranks on two emulated nodes, and what travels within a shard group and
between the groups.

P are the bytes of all parameters, s the ranks of a shard group, r the groups that hold the same slices: r s = n ranks.
Every rank has its own end of each link, and a ring goes at the pace of the slowest link in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from fsdplab.common.sizes import seconds, size
from fsdplab.planning.links import parse_link
from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec
from fsdplab.teaching.core.display import Note, Table, table

from .figures import link_figure, memory_figure
from .network import ACROSS, WITHIN, by_collective, groups_of, parameter_bytes, sent, slow
from .on_ranks import complaint, expected_ms

__all__ = [
    "ACROSS",
    "WITHIN",
    "banner",
    "beside_the_formula",
    "blocked_factor",
    "job",
    "leaving_a_node",
    "link_figure",
    "memory_figure",
    "mesh_table",
    "node_table",
    "seen",
    "steps",
    "waits",
    "weighed",
]

JOB = {"model": "gpt-20m", "world_size": 4, "batch_size": 1, "sequence_length": 32, "steps": 3, "time_limit": 300.0}
MB = 1e6


def job(strategy: str, **choices: Any) -> RunSpec:
    """A run on four ranks: `job("hybrid_shard", shard_size=2, link=WITHIN, link_across=ACROSS)`, or over all ranks
    `job("full_shard", link=ACROSS)`.
    """
    return RunSpec(**{**JOB, "strategy": strategy, **choices})


def banner() -> Note:
    """The network of the notebook's runs."""
    within, across = (parse_link(link).words for link in (WITHIN, ACROSS))
    return Note(
        (
            (
                "Network of this notebook, emulated: ranks 0 and 1 are one node, ranks 2 and 3 another. Within a node"
                f" {within}, between nodes {across}."
            ),
            "Ranks, bytes and computing are real. A collective goes at the pace of the slowest link between its ranks.",
        )
    )


def beside_the_formula(traffic: Callable[[float, int, int], dict[str, float]], runs: Sequence[RunRecord]) -> Table:
    """The learner's `traffic(P, s, r)` beside the ledger's bytes of each run, in MB."""
    rows = []
    for record in runs:
        s, r = groups_of(record)
        formula, ledger = traffic(parameter_bytes(record), s, r), sent(record)
        cells = [f"{each[axis] / MB:.1f}" for axis in ("within", "across") for each in (formula, ledger)]
        rows.append([record.spec["strategy"], s, r, *cells])
    header = ["run", "s", "r", "within, formula MB", "within, ledger MB", "across, formula MB", "across, ledger MB"]
    return table(
        header,
        rows,
        "A step and rank. The ledger has a little less within: the root unit is gathered once, not twice, because it"
        " stays.",
    )


# ---- what the figures showed, in a sentence


def blocked_factor(full: RunRecord, hybrid: RunRecord) -> float:
    """How many times as long ranks are blocked for messages under `full` as under `hybrid`, on the emulated clock."""
    return full.summary["comm"]["blocked_s"] / hybrid.summary["comm"]["blocked_s"]


def seen(full: RunRecord, hybrid: RunRecord) -> Note:
    """Bytes at the slow link's pace of both runs, and for how long their ranks were blocked."""
    first, second = ((slow(record), record.summary["comm"]["blocked_s"]) for record in (full, hybrid))
    words = (
        f"Seen here: {size(first[0])} against {size(second[0])} a rank at the slow link's pace"
        f" ({first[0] / second[0]:.2f} times as much); "
    )
    return Note(
        (
            words
            + f"blocked {seconds(first[1])} against {seconds(second[1])} a step ({first[1] / second[1]:.1f} times as"
            " long).",
        )
    )


def waits(*runs: RunRecord) -> Table:
    """Time on the links and the part of it for which a rank was blocked, by collective; medians over the timed steps of
    the worst rank.
    """
    rows = []
    for record in runs:
        for kind, (_, spent) in by_collective(record).items():
            rows.append([record.spec["strategy"], kind, f"{1e3 * spent:.0f}", f"{1e3 * blocked_s(record, kind):.0f}"])
    return table(
        ["run", "collective", "on the links, ms", "blocked for it, ms"],
        rows,
        "In one step, on the clock of the emulated links.",
    )


def blocked_s(record: RunRecord, kind: str) -> float:
    """Seconds of a step that a rank was blocked for one kind of collective: the worst rank's median over the timed
    steps.
    """
    timed = {row["step"] for row in record.table("steps") if row["step_time_s"] is not None}
    found: dict[int, dict[int, int]] = defaultdict(lambda: dict.fromkeys(timed, 0))
    for row in record.table("ledger"):
        if row["step"] in timed and row["kind"] == kind:
            found[row["rank"]][row["step"]] += row["waited_ns"]
    return max((median(by_step.values()) / 1e9 for by_step in found.values()), default=0.0)


def weighed(full: RunRecord, hybrid: RunRecord) -> Note:
    """The peaks of both runs, and the model state that a rank keeps under each."""
    peaks = [record.summary["peak_memory_bytes"]["total"] for record in (full, hybrid)]
    states = [16 * parameter_bytes(record) / 4 / groups_of(record)[0] for record in (full, hybrid)]
    return Note(
        (
            (
                f"Seen here: the peak went from {size(peaks[0])} to {size(peaks[1])}. Model state alone, 16 bytes a"
                f" parameter: {size(states[0])} and {size(states[1])} a rank."
            ),
        )
    )


def steps(runs: dict[str, RunRecord]) -> Table:
    """Step, time blocked for messages, and link of each run by its name."""
    rows = []
    for name, record in runs.items():
        # without a link a rank waits for cores more than for bytes
        blocked = record.summary["comm"]["blocked_s"] if record.summary["link"] else None
        rows.append(
            [
                name,
                f"{1e3 * record.summary['step_time_s']['median']:.0f}",
                "-" if blocked is None else f"{1e3 * blocked:.0f}",
                "emulated" if record.summary["link"] else "none: raw transport",
            ]
        )
    return table(
        ["run", "step, ms", "blocked, ms", "link"],
        rows,
        "Steps measured: four ranks share this machine's cores. Blocked for a link: emulated clock.",
    )


# ---- larger clusters, computed


def leaving_a_node(billions: float, nodes: int, per_node: int) -> tuple[float, float]:
    """GB that leave one node in a step under (full_shard over all, hybrid_shard with a group a node), parameters and
    gradients in bf16.

    A ring over all ranks enters and leaves a node once; a node's s all-reduces all leave it: `leaving_a_node(1, 2, 2)
    == (4.5, 2.0)`.
    """
    payload, n = 2 * billions, nodes * per_node
    return 3 * payload * (n - 1) / n, 2 * payload * (nodes - 1) / nodes


def node_table(billions: float, nodes: int, per_node: int) -> Table:
    """The bytes that leave a node in a step, and that a GPU keeps, under both strategies."""
    full, hybrid = leaving_a_node(billions, nodes, per_node)
    state = 16 * billions
    rows = [
        ["full_shard over all GPUs", f"{full:,.1f}", nodes * per_node, f"{state / (nodes * per_node):,.1f}"],
        ["hybrid_shard, a group a node", f"{hybrid:,.1f}", nodes, f"{state / per_node:,.1f}"],
    ]
    ratio = f"{full / hybrid:.2f} times as much" if hybrid else "nothing leaves a single node's groups"
    caption = (
        f"Computed for bf16 parameters and gradients: {ratio}. State: 16 bytes a parameter, activations and gathered"
        " units on top."
    )
    return table(["", "GB leaving a node, a step", "ranks in a ring across", "GB of state on a GPU"], rows, caption)


def mesh_table(mesh_for: Callable[[int, int, float, float], list[list[int]]]) -> Table:
    """What `mesh_for` chooses on several networks of up to 32 ranks, and the time on the links that it leads to, for
    the exercise's small model.
    """
    rows = []
    for ranks, per_node, state, card in (
        (4, 2, 64, 40),
        (4, 2, 64, 80),
        (4, 2, 64, 20),
        (32, 8, 64, 10),
        (32, 8, 64, 2),
    ):
        mesh = mesh_for(ranks, per_node, state, card)
        refused = complaint(mesh, ranks)
        shown = refused or f"{len(mesh)} row{'s' * (len(mesh) > 1)} of {len(mesh[0])}"
        rows.append(
            [
                f"{ranks // per_node} x {per_node}",
                state,
                card,
                shown,
                "-" if refused else f"{expected_ms(mesh, per_node):.0f}",
            ]
        )
    header = ["nodes x ranks", "state, MB", "card, MB", "mesh", "on the links, ms"]
    return table(
        header,
        rows,
        "Computed with the formulas of this notebook; the fast link has ten times the bandwidth of the slow one.",
    )

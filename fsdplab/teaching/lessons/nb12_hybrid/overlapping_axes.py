"""Lesson 12 in the notebook's process: four ranks on two emulated nodes, and what travels within a shard group and
between the groups.

P are the bytes of all parameters, s the ranks of a shard group, r the groups that hold the same slices: r s = n ranks.
Every rank has its own end of each link, and a ring goes at the pace of the slowest link in it. Bytes and memory are
those of real runs; what is said about time comes from the steady card, whose times are the same on every machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from fsdplab.common.sizes import seconds, size
from fsdplab.figures import alt_text
from fsdplab.figures.fastest import fastest_words
from fsdplab.figures.view import views
from fsdplab.planning.links import parse_link
from fsdplab.records import RunRecord, known
from fsdplab.sessions import RunSpec
from fsdplab.sessions.steady_card import GIGAFLOPS, steady
from fsdplab.teaching.core.display import Note, Shown, Table, table

from .figures import link_figure, memory_figure, mesh_figure
from .gradient_diagram import gradient_diagram
from .network import ACROSS, WITHIN, groups_of, parameter_bytes, sent, slow
from .on_ranks import complaint, expected_ms

__all__ = [
    "ACROSS",
    "WITHIN",
    "banner",
    "beside_the_formula",
    "card_note",
    "exposed_factor",
    "gradient_diagram",
    "job",
    "leaving_a_node",
    "link_figure",
    "memory_figure",
    "mesh_of",
    "mesh_table",
    "node_table",
    "raw_words",
    "seen",
    "steady",
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


def card_note() -> Note:
    """The card on which the lesson compares times."""
    return Note(
        (
            f"The steady card computes {GIGAFLOPS:g} GFLOP/s in fp32. Links as above, emulated.",
            "Simulated: its clock. Real: the engine's own order of gathers and reductions.",
        )
    )


def exposed_factor(full: RunRecord, hybrid: RunRecord) -> float:
    """How many times as long `full` is exposed as `hybrid`."""
    return known(full.summary.comm.exposed_s) / known(hybrid.summary.comm.exposed_s)


def seen(full: RunRecord, hybrid: RunRecord) -> Note:
    """Bytes at the slow link's pace of both runs, as their ledgers have them."""
    first, second = slow(full), slow(hybrid)
    return Note(
        (
            f"Seen here: {size(first)} against {size(second)} a rank at the slow link's pace ({first / second:.2f}"
            " times as much).",
        )
    )


def waits(full: RunRecord, hybrid: RunRecord) -> Table:
    """Time on the links and the part of it that is exposed, by collective and phase, of both runs on the card."""
    rows = []
    for record in (full, hybrid):
        found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for row in (row for row in record.table("exposed") if row["rank"] == 0):
            found[row["kind"], row["phase"]][0] += row["communication_ns"]
            found[row["kind"], row["phase"]][1] += row["exposed_ns"]
        for (kind, phase), (moved, shown) in found.items():
            rows.append([record.spec["strategy"], f"{kind} in {phase}", f"{moved / 1e6:.0f}", f"{shown / 1e6:.0f}"])
    totals = " and ".join(
        f"{record.spec['strategy']} {seconds(record.summary.comm.exposed_s)}" for record in (full, hybrid)
    )
    caption = f"One step on the steady card, simulated. Exposed in all: {totals}."
    return table(["run", "collective", "on the links, ms", "exposed, ms"], rows, caption)


def weighed(full: RunRecord, hybrid: RunRecord) -> Note:
    """The peaks of both runs, and the model state that a rank keeps under each."""
    peaks = [known(record.summary.peak_memory_bytes.total) for record in (full, hybrid)]
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
    """Step and link of each run by its name."""
    rows = [[name, f"{_step_ms(record):.0f}", _link(record)] for name, record in runs.items()]
    caption = "Steps measured: four ranks share this machine's cores, so run the cells again and they change."
    return table(["run", "step, ms", "link"], rows, caption)


def _step_ms(record: RunRecord) -> float:
    return 1e3 * known(record.summary.step_time_s.median)


def _link(record: RunRecord) -> str:
    return "emulated" if record.summary.link else "none: raw transport"


def raw_words(full: RunRecord, hybrid: RunRecord) -> Note:
    """The two raw steps beside each other, and whether one is shorter beyond chance."""
    first, second = _step_ms(full), _step_ms(hybrid)
    return Note((f"Raw: {first:.0f} ms against {second:.0f}; {fastest_words(views([full, hybrid]))}.",))


# ---- larger clusters, computed


def mesh_of(nodes: int, per_node: int, shard_group: int) -> Shown | Note:
    """The mesh figure for sliders: `nodes` x `per_node` ranks in shard groups of `shard_group`."""
    if nodes * per_node % shard_group or shard_group > nodes * per_node:
        return Note((f"{nodes * per_node} ranks make no groups of {shard_group}: choose a smaller group.",))
    figure = mesh_figure(nodes, per_node, shard_group)
    return Shown(figure, alt_text(figure))


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

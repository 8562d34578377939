"""Runs on several nodes of one machine, with a slow network between them: not emulated, the kernel delays the packets.

    with shaped_nodes(2, 2, parse_link("200mbit")):
        run(RunSpec(world_size=4))              # ranks 0 and 1 are node 0, ranks 2 and 3 node 1

Ranks of one node may share memory; nodes share the network only (netns.py). Its bandwidth is limited; its latency is
that of two cables in the kernel, about 0.1 ms.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fsdplab.common.pythons import run_of
from fsdplab.planning.links import LinkSpec
from fsdplab.records import RunRecord
from fsdplab.records.summary import Link, Nodes
from fsdplab.sessions.launch.failure_report import RanksFailed
from fsdplab.sessions.launch.inherited import rank_environment
from fsdplab.sessions.launch.launcher import ranks_started_by
from fsdplab.sessions.launch.mailbox import Mailbox
from fsdplab.sessions.launch.served import ExecutedRanks, execute
from fsdplab.sessions.run_and_record import run
from fsdplab.sessions.spec import RunSpec, SpecError, check_whole
from fsdplab.sessions.spec.rules import Rule

MOST_NODES = 8
_LEAST_BYTES_PER_S = 125e3  # 1 Mbit/s; below, the rendezvous times out
# The latency of a cable in the kernel: links with less are accepted, higher latency cannot be set.
_OWN_LATENCY_S = 100e-6


class NodesUnavailable(RuntimeError):
    """This system cannot limit a network's rate; the message is one line with the reason and what to do."""


def run_nodes(spec: RunSpec, nodes: int, ranks_per_node: int, link: LinkSpec | None, **others: Any) -> RunRecord:
    """Run one spec on `nodes` x `ranks_per_node` ranks with `link` between the nodes, and return its record, as `run`
    does, which gets all other arguments.

    Rank r is on node r // ranks_per_node. The record says `link: measured`. SpecError when the numbers do not fit the
    spec, NodesUnavailable where the system cannot limit a rate (give the spec an emulated `link` instead), RanksFailed
    as `run`. `link=None`: no limit.
    """
    check_nodes(spec, nodes, ranks_per_node, link)
    with shaped_nodes(nodes, ranks_per_node, link):
        try:
            record = run(spec, **others)
        except RanksFailed as failed:
            assert failed.record is not None  # run() adds it
            failed.record = _on_nodes(failed.record, nodes, ranks_per_node, link)
            raise
    return _on_nodes(record, nodes, ranks_per_node, link)


@contextmanager
def shaped_nodes(nodes: int, ranks_per_node: int, link: LinkSpec | None) -> Iterator[None]:
    """Inside, the ranks that this thread starts (`run`, `call_on_ranks`) are on nodes; raises NodesUnavailable.

    Every run has a network of its own, which ends with the run.
    """
    _check_link(link)
    if (why := why_no_nodes()) is not None:
        raise NodesUnavailable(f"No nodes can be made here: {why}. Give the run an emulated link instead of nodes.")

    def start(program: Sequence[str], mailbox: Mailbox, world_size: int) -> ExecutedRanks:
        if world_size != nodes * ranks_per_node:
            raise SpecError(
                f"{world_size} ranks on {nodes} nodes with {ranks_per_node} ranks each; expected"
                f" {nodes * ranks_per_node} ranks"
            )
        words = [nodes, ranks_per_node, link and link.bytes_per_s, *program]
        return execute("fsdplab.sessions.launch.netns", words, mailbox, rank_environment())

    with ranks_started_by(start):
        yield


def why_no_nodes() -> str | None:
    """Why nodes cannot be made here, in one line; None if they can. Tries it once, in a fifth of a second."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, and this is {sys.platform}"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"the command {' and '.join(missing)} is not installed (package iproute2)"
    words = run_of("fsdplab.sessions.launch.netns", "trial")
    try:
        tried = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=rank_environment(), timeout=20
        )
    except subprocess.TimeoutExpired:
        return "trying it did not end within 20 s"
    output = (tried.stdout or tried.stderr).strip().splitlines()
    return None if tried.returncode == 0 else output[-1] if output else f"the trial ended with {tried.returncode}"


_ON_NODES = (
    Rule(
        ("engine",), lambda s: s.engine != "twin", "the twin is one process, which has no nodes", "give another engine"
    ),
    Rule(
        ("device",), lambda s: s.device_type == "cpu",
        "nodes are made for CPU ranks, whose gloo packets can be shaped, but this run is on cuda", "give device='cpu'",
    ),
    Rule(
        ("transport",), lambda s: s.transport != "shm", "transport is shm, which does not reach from node to node",
        "leave transport='auto'",
    ),
    Rule(
        ("link", "emulate"), lambda s: not s.linked,
        "the spec has an emulated link as well as nodes with a real one",
        "give the link to the nodes and leave the spec's out",
    ),
)  # fmt: skip


def check_nodes(spec: RunSpec, nodes: int, ranks_per_node: int, link: LinkSpec | None) -> None:
    """Raise SpecError when `spec` cannot run on such nodes, without starting anything."""
    check_whole("nodes", nodes, 2)
    check_whole("ranks_per_node", ranks_per_node, 1)
    if nodes > MOST_NODES:
        raise SpecError(
            f"nodes is {nodes}; expected at most {MOST_NODES}, since all of them share this machine", "nodes"
        )
    if spec.world_size != nodes * ranks_per_node:
        raise SpecError(
            f"world_size is {spec.world_size}, but {nodes} nodes x {ranks_per_node} ranks are {nodes * ranks_per_node};"
            " give that",
            "world_size",
        )
    for rule in _ON_NODES:
        rule.check(spec)
    _check_link(link)


def _check_link(link: LinkSpec | None) -> None:
    if link is None:
        return
    if link.bytes_per_s < _LEAST_BYTES_PER_S:
        raise SpecError(f"link {link.name} carries {link.words}; nodes need at least 1mbit to find each other", "link")
    if link.latency_s > _OWN_LATENCY_S:
        raise SpecError(
            f"link {link.name} has a latency of {link.latency_s * 1e6:g} us, but between nodes only bandwidth is"
            " shaped; give the bandwidth alone, or an emulated link",
            "link",
        )


def _on_nodes(record: RunRecord, nodes: int, ranks_per_node: int, link: LinkSpec | None) -> RunRecord:
    """The record, saved again, with where its ranks were; the latency is unknown, because it was not set."""
    if link is not None:
        record.summary = replace(record.summary, link=Link(link.name, link.bytes_per_s))
        record.provenance["link"] = "measured"
    record.summary = replace(record.summary, nodes=Nodes(nodes, ranks_per_node))
    return record.save()

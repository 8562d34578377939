"""Nodes on one machine: the network between them is the only way, it keeps to its rate, and nothing of it is left,
however a run ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fsdplab.planning.links import LinkSpec, parse_link
from fsdplab.records import RunRecord
from fsdplab.records.summary import Nodes
from fsdplab.sessions import RanksFailed, RunSpec, SpecError, call_on_ranks
from fsdplab.sessions.launch.mailbox import Mailbox, read_heartbeat
from fsdplab.sessions.launch.netns import NetworkSetupError, address, bucket, shape
from fsdplab.sessions.launch.served import Ranks, tell
from fsdplab.sessions.virtual_nodes import NodesUnavailable, check_nodes, run_nodes, shaped_nodes, why_no_nodes
from tests.leftovers import until

ROOT = Path(__file__).resolve().parents[1]
TINY = {"model": "gpt-tiny", "world_size": 2, "steps": 4, "sequence_length": 32, "device": "cpu"}
SLOW = parse_link("40mbit")
WHY_NOT = why_no_nodes()
needs_nodes = pytest.mark.skipif(WHY_NOT is not None, reason=f"this system shapes no network: {WHY_NOT}")

ON_NODES = """
import os, time
import torch, torch.distributed as dist
from fsdplab.engine.transport.shared_memory.arena import machine_of_this_rank

def sent():
    cable = [line.split(":")[1].split() for line in open("/proc/net/dev") if "cable" in line]
    return int(cable[0][8])

def gather(rank, world_size, nbytes):
    mine, whole = torch.full((nbytes // 4,), float(rank)), torch.empty(world_size * nbytes // 4)
    dist.barrier()
    before, start = sent(), time.perf_counter()
    dist.all_gather_into_tensor(whole, mine)
    seconds = time.perf_counter() - start
    dist.barrier()
    right = all(bool((part == index).all()) for index, part in enumerate(whole.chunk(world_size)))
    where = {"node": os.environ["GROUP_RANK"], "machine": " ".join(machine_of_this_rank())}
    return {"seconds": seconds, "sent": sent() - before, "right": right, **where}
"""


def interfaces() -> set[str]:
    return {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines() if ":" in line}


def processes_of(folder: Path) -> dict[str, str]:
    """Living processes that name a folder (the switch, the agents and the ranks of its run), and the network namespace
    each is in.
    """
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in command:
                found[f"{entry.name} {command}"] = os.readlink(entry / "ns/net")
        except OSError:  # ended while we looked
            continue
    return found


def in_use(networks: set[str]) -> set[str]:
    """Those of the network namespaces that some process, whosever, is still in."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(entry))
        except OSError:
            continue
    return found & networks


# ---- on real nodes


@needs_nodes
def test_ranks_of_different_nodes_have_the_network_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "on_nodes.py").write_text(ON_NODES)
    before, nbytes = interfaces(), 200_000
    with shaped_nodes(2, 2, SLOW):
        told = call_on_ranks(tmp_path / "on_nodes.py", "gather", world_size=4, payload=nbytes, time_limit=120)
    assert all(each["right"] for each in told)
    assert [each["node"] for each in told] == ["0", "0", "1", "1"]
    machines = [each["machine"] for each in told]
    assert machines[0] == machines[1] != machines[2] == machines[3]
    # what one node has must reach the other through its cable: two slices at the least, and no faster than the cable's
    # rate
    assert all(each["sent"] >= 2 * nbytes for each in told)
    allowed_at_once = 3 * int(bucket(SLOW.bytes_per_s)[3])
    assert max(each["seconds"] for each in told) >= (2 * nbytes - allowed_at_once) / SLOW.bytes_per_s
    assert interfaces() == before


@needs_nodes
def test_a_run_on_nodes_is_recorded_as_measured(tmp_path: Path) -> None:
    seen: list[int] = []
    record = run_nodes(
        RunSpec(**TINY), 2, 1, SLOW, directory=tmp_path / "run", on_progress=lambda step, *_: seen.append(step)
    )
    assert record.status == "finished" and seen == [1, 2, 3, 4, 5, 6]
    again = RunRecord.load(tmp_path / "run")
    assert again.provenance["link"] == "measured" and again.summary.link.bytes_per_s == 5e6
    assert again.summary.nodes == Nodes(2, 1)
    comm = again.summary.comm
    passed_at_once = comm.collectives_per_step * 2 * int(bucket(SLOW.bytes_per_s)[3])
    assert again.summary.step_time_s.min >= (comm.bytes_per_step - passed_at_once) / SLOW.bytes_per_s
    assert processes_of(tmp_path) == {}


@needs_nodes
def test_a_rank_that_dies_on_another_node_is_blamed_and_nothing_is_left(tmp_path: Path) -> None:
    folder, before, networks = tmp_path / "run", interfaces(), set()

    def kill_rank_1(step: int, *_: object) -> None:
        if step == 3:
            networks.update(processes_of(tmp_path).values())
            os.kill(read_heartbeat(Mailbox(folder / "ranks").of(1, "heartbeat")).pid, signal.SIGKILL)

    with pytest.raises(RanksFailed, match="Rank 1 died") as failed:
        run_nodes(RunSpec(**{**TINY, "steps": 200}), 2, 1, SLOW, directory=folder, on_progress=kill_rank_1)
    assert failed.value.report.kind == "died" and "SIGKILL" in str(failed.value)
    assert RunRecord.load(folder).status == "failed" and failed.value.record.provenance["link"] == "measured"
    assert len(networks) == 3  # the switch's and the nodes'
    assert processes_of(tmp_path) == {} and interfaces() == before and in_use(networks) == set()


@needs_nodes
def test_a_killed_caller_leaves_nothing(tmp_path: Path) -> None:
    calling = (
        "from fsdplab.sessions import RunSpec; from fsdplab.sessions.virtual_nodes import run_nodes; from"
        f" fsdplab.planning.links import parse_link\nrun_nodes(RunSpec(**{ {**TINY, 'steps': 10_000} }), 2, 1,"
        f" parse_link('40mbit'), directory={str(tmp_path / 'run')!r})"
    )
    caller = subprocess.Popen([sys.executable, "-c", calling], cwd=ROOT)
    heartbeat = Mailbox(tmp_path / "run" / "ranks").of(1, "heartbeat")
    assert until(lambda: (now := read_heartbeat(heartbeat)) is not None and now.step is not None, 120)
    networks = set(processes_of(tmp_path).values()) - {os.readlink("/proc/self/ns/net")}
    assert len(networks) == 3
    caller.kill()
    caller.wait()
    assert until(lambda: not processes_of(tmp_path) and not in_use(networks), 30), processes_of(tmp_path)


# ---- without any


def test_a_system_that_refuses_says_why_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    refused = why_no_nodes()
    assert "ip and tc" in refused and "iproute2" in refused and "\n" not in refused
    with pytest.raises(NodesUnavailable, match="Give the run an emulated link"), shaped_nodes(2, 1, SLOW):
        pass
    with pytest.raises(NetworkSetupError, match="tc is not installed"):
        shape("lo", 1e6)


@pytest.mark.parametrize(
    "changed,nodes,per_node,said",
    [
        ({}, 3, 1, "world_size is 2, but 3 nodes x 1 ranks are 3"),
        ({}, 1, 2, "nodes is 1; expected a whole number of at least 2"),
        ({}, 2.0, 1, "nodes is 2.0"), ({}, True, 1, "nodes is True"), ({}, 2, 0, "ranks_per_node is 0"),
        ({"world_size": 9}, 9, 1, "at most 8"),
        ({"engine": "twin"}, 2, 1, "the twin is one process"), ({"transport": "shm"}, 2, 1, "leave transport='auto'"),
        ({"link": "200mbit"}, 2, 1, "an emulated link as well"),
    ],
)  # fmt: skip
def test_what_cannot_run_on_nodes_is_refused_before_anything_starts(
    changed: dict, nodes: int, per_node: int, said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        check_nodes(RunSpec(**{**TINY, **changed}), nodes, per_node, SLOW)


@pytest.mark.parametrize(
    "link,said",
    [(parse_link("200mbit,1ms"), "only bandwidth is shaped"), (LinkSpec("thin", 1000.0, 0.0), "at least 1mbit")]
)  # fmt: skip
def test_a_link_that_cannot_be_shaped_is_refused(link: LinkSpec, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        check_nodes(RunSpec(**TINY), 2, 1, link)
    check_nodes(RunSpec(**TINY), 2, 1, parse_link("eth10"))  # 30 us, less than the kernel takes itself


@needs_nodes
def test_another_number_of_ranks_than_the_nodes_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "on_nodes.py").write_text(ON_NODES)
    with shaped_nodes(2, 2, SLOW), pytest.raises(SpecError, match="3 ranks on 2 nodes with 2 ranks each; expected 4"):
        call_on_ranks(tmp_path / "on_nodes.py", "gather", world_size=3)


def test_the_bucket_is_the_rate_and_a_little_at_once() -> None:
    assert bucket(25e6) == ["rate", "200000000bit", "burst", "25000", "limit", "5025000"]
    assert bucket(5e6)[3] == "18000"  # two jumbo frames
    assert [address(node) for node in (0, 1, 255)] == ["10.77.0.1", "10.77.0.2", "10.77.1.0"]


def test_the_exits_of_all_nodes_come_together() -> None:
    own, theirs = socket.socketpair()
    ranks = Ranks(own)
    for exits in ({0: 1}, {}, {4: -9}):
        tell(theirs, exits=exits)
    assert ranks.running() and ranks.failed() == {0: 1, 4: -9}
    theirs.close()
    own.close()

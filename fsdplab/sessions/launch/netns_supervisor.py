"""The process between the caller and the agents of several nodes: the switch of their network, ended when the caller
ends.

    caller  ->  this: python -m ... CONNECTION CALLER_PID NODES RANKS_PER_NODE RATE PROGRAM...
            ->  one a node, in a namespace of its own: python -m ... node CONNECTION SUPERVISOR_PID ...  ->  ranks

The caller uses it like a single agent: it ends after the ranks, and SIGTERM ends all; when a launcher was killed it
ends by the same signal. Switch and agents hold CONNECTION open (served.py), so its end says that all are gone, and each
agent tells the exit codes of its own ranks. RATE is in bytes per second, or None.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from fsdplab.common.processes import Asked, end_as_if_by, raise_when_asked
from fsdplab.common.pythons import run_of
from fsdplab.sessions.launch import netns
from fsdplab.sessions.launch.inherited import signals_of_the_lab
from fsdplab.sessions.launch.parent_death import end_with_parent
from fsdplab.sessions.launch.program import as_ranks_of_torchrun

_PORT = 29500  # fixed: the first node's namespace has no other process
_LOOK_EVERY_S = 0.05
# When one node's agent has failed, the others' ranks fail after it: their agents get this long to write the exit
# codes.
_OTHERS_FOLLOW_S = 2.0
_PATIENCE_S = 2.0  # for agents that were asked to end; less than launcher.py has for the switch
_GO = "go\n"

Agents = Sequence["subprocess.Popen[str]"]


def main(connection: str, caller: str, nodes: str, per_node: str, rate: str, *program: str) -> None:
    """Build the network, start the nodes, and wait for their ranks; exit code 1 when a rank failed."""
    signals_of_the_lab()
    netns.enter_new_network()  # first: a new user namespace resets the parent-death signal
    end_with_parent(int(caller), signal.SIGTERM)
    raise_when_asked()
    netns.build_switch()
    agents: list[subprocess.Popen[str]] = []
    try:
        for node in range(int(nodes)):
            agents.append(_start_node(connection, node, nodes, per_node, rate, program))
            netns.plug(node, agents[-1].pid, _bytes_per_s(rate))
        for agent in agents:
            assert agent.stdin is not None  # a pipe, by _start_node
            agent.stdin.write(_GO)
            agent.stdin.flush()
        failed = _wait(agents)
        killed_by = max((-agent.returncode for agent in agents if agent.returncode is not None), default=0)
    except Asked:
        failed, killed_by = True, signal.SIGTERM
    finally:
        _end(agents)
    if killed_by > 0:  # the launcher of a node, or this process: no rank is to blame
        end_as_if_by(killed_by)
    sys.exit(1 if failed else 0)


def node_main(connection: str, switch: str, node: str, nodes: str, per_node: str, rate: str, *program: str) -> None:
    """Be the agent of one node: wait until its cable is there, bring it up, and run torchrun."""
    if sys.stdin.readline() != _GO:
        sys.exit(1)  # the switch ended before it had plugged the cable in
    netns.open_cable(int(node), _bytes_per_s(rate))
    os.environ["GLOO_SOCKET_IFNAME"] = netns.CABLE
    from fsdplab.sessions.launch import agent

    agent.main(
        connection, switch, f"--nnodes={nodes}", f"--node-rank={node}", f"--master-addr={netns.address(0)}",
        f"--master-port={_PORT}", *as_ranks_of_torchrun(program, per_node, netns.address(int(node))),
        when_orphaned=signal.SIGKILL,  # the switch sends SIGTERM first (see _end)
    )  # fmt: skip


def _start_node(
    connection: str, node: int, nodes: str, per_node: str, rate: str, program: Sequence[str]
) -> subprocess.Popen[str]:
    words = [connection, str(os.getpid()), str(node), nodes, per_node, rate, *program]
    return subprocess.Popen(
        run_of("fsdplab.sessions.launch.netns_supervisor", "node", *words),
        stdin=subprocess.PIPE, text=True, preexec_fn=netns.enter_new_network, pass_fds=(int(connection),),
    )  # fmt: skip


def _bytes_per_s(rate: str) -> float | None:
    return None if rate == "None" else float(rate)


def _wait(agents: Agents) -> bool:
    """Return when all agents have ended, or soon after one has failed; whether one did."""
    deadline = None
    while any(agent.poll() is None for agent in agents):
        if deadline is None and any(agent.poll() for agent in agents):
            deadline = time.monotonic() + _OTHERS_FOLLOW_S
        if deadline is not None and time.monotonic() > deadline:
            return True
        time.sleep(_LOOK_EVERY_S)
    return any(agent.returncode for agent in agents)


def _end(agents: Agents) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not end this before the agents have ended
    for agent in agents:
        agent.terminate()
    deadline = time.monotonic() + _PATIENCE_S
    for agent in agents:
        with suppress(subprocess.TimeoutExpired):
            agent.wait(max(0.0, deadline - time.monotonic()))
    for agent in agents:
        agent.kill()  # which ends its ranks, see parent_death.py
        agent.wait()


if __name__ == "__main__":
    try:
        node_main(*sys.argv[2:]) if sys.argv[1] == "node" else main(*sys.argv[1:])
    except netns.NetworkSetupError as error:
        sys.exit(f"The network of the nodes could not be built: {error}")

"""The process between the caller and the agents of several nodes: the switch of their network, ended when the caller
ends.

    caller  ->  this: python -m ... CALLER_PID FOLDER NOTES NODES RANKS_PER_NODE RATE ALIVE PROGRAM...
            ->  one a node, in a namespace of its own: python -m ... node SUPERVISOR_PID ...  ->  ranks

launcher.py uses it like a single agent: it ends after the ranks, with 1 when one failed, and SIGTERM ends all; when a
launcher was killed it ends by the same signal. FOLDER is the mailbox, NOTES a folder of its own, RATE in bytes per
second or None. ALIVE is a pipe that switch and agents hold open and never use: its reader sees when all are gone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fsdplab.common.processes import end_as_if_by
from fsdplab.common.pythons import run_of
from fsdplab.common.temporary import TEMPORARY
from fsdplab.sessions.launch.mailbox import Mailbox
from fsdplab.sessions.launch.netns import (
    CABLE,
    NetworkSetupError,
    address,
    build_switch,
    enter_new_network,
    open_cable,
    plug,
)
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


def main(caller: str, folder: str, notes: str, nodes: str, per_node: str, rate: str, alive: str, *program: str) -> None:
    """Build the network, start the nodes, and wait for their ranks; exit code 1 when a rank failed."""
    enter_new_network()  # first: a new user namespace resets the parent-death signal
    end_with_parent(int(caller), signal.SIGTERM)
    signal.signal(signal.SIGTERM, _leave)
    build_switch()
    agents: list[subprocess.Popen[str]] = []
    try:
        for node in range(int(nodes)):
            agents.append(_start_node(node, notes, nodes, per_node, rate, alive, program))
            plug(node, agents[-1].pid, _bytes_per_s(rate))
        for agent in agents:
            assert agent.stdin is not None  # a pipe, by _start_node
            agent.stdin.write(_GO)
            agent.stdin.flush()
        failed = _wait(agents)
        killed_by = max((-agent.returncode for agent in agents if agent.returncode is not None), default=0)
    except _Asked:
        failed, killed_by = True, signal.SIGTERM
    finally:
        _end(agents)
    if failed and Path(notes).is_dir():  # it is gone with a caller that has ended
        _join_exits(Path(notes), Mailbox(Path(folder)))
    if os.getppid() != int(caller):
        shutil.rmtree(os.environ[TEMPORARY], ignore_errors=True)
    if killed_by > 0:  # the launcher of a node, or this process: no rank is to blame
        end_as_if_by(killed_by)
    sys.exit(1 if failed else 0)


class _Asked(Exception):
    """This process was asked to end."""


def _leave(*_: object) -> NoReturn:
    raise _Asked


def node_main(switch: str, notes: str, node: str, nodes: str, per_node: str, rate: str, *program: str) -> None:
    """Be the agent of one node: wait until its cable is there, bring it up, and run torchrun."""
    if sys.stdin.readline() != _GO:
        sys.exit(1)  # the switch ended before it had plugged the cable in
    open_cable(int(node), _bytes_per_s(rate))
    os.environ["GLOO_SOCKET_IFNAME"] = CABLE
    from fsdplab.sessions.launch import agent

    agent.main(
        switch, notes, f"--nnodes={nodes}", f"--node-rank={node}", f"--nproc-per-node={per_node}", "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--log-dir={os.devnull}", f"--master-addr={address(0)}", f"--master-port={_PORT}",
        f"--local-addr={address(int(node))}", *as_ranks_of_torchrun(program),
        when_orphaned=signal.SIGKILL,  # the switch sends SIGTERM first (see _end)
    )  # fmt: skip


def _start_node(
    node: int, notes: str, nodes: str, per_node: str, rate: str, alive: str, program: Sequence[str]
) -> subprocess.Popen[str]:
    own = Path(notes) / f"node{node}"  # each agent writes the exit codes of its own ranks
    own.mkdir()
    words = [str(os.getpid()), str(own), str(node), nodes, per_node, rate, *program]
    return subprocess.Popen(
        run_of("fsdplab.sessions.launch.netns_supervisor", "node", *words),
        stdin=subprocess.PIPE, text=True, preexec_fn=enter_new_network, pass_fds=(int(alive),),
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
    while any(agent.poll() is None for agent in agents) and time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
    for agent in agents:
        agent.kill()  # which ends its ranks, see parent_death.py
        agent.wait()


def _join_exits(notes: Path, mailbox: Mailbox) -> None:
    parts = [json.loads(path.read_text()) for node in sorted(notes.iterdir()) if (path := Mailbox(node).exits).exists()]
    mailbox.exits.write_text(json.dumps({rank: code for part in parts for rank, code in part.items()}))


if __name__ == "__main__":
    try:
        node_main(*sys.argv[2:]) if sys.argv[1] == "node" else main(*sys.argv[1:])
    except NetworkSetupError as error:
        sys.exit(f"The network of the nodes could not be built: {error}")

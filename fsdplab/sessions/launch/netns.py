"""Network namespaces and rate-limited cables: several nodes, with a slow network between them, on one machine.

A network namespace is a network stack of its own: ranks in two of them reach each other through the cable between them
and through nothing else (shared memory aside, which the engine refuses across namespaces). Each node has one, and so
has the switch in the middle:

    [ node 0: cable ]====port0[ switch: bridge ]port1====[ node 1: cable ]         ==== is a veth pair

Both ends of a cable send at the link's rate (`tc`, token bucket), so a node is as slow to receive as to send. The
namespaces have no names: they live as long as a process is in them, and take bridge, cables and rates with them.
Nothing is left, whichever process is killed.

    caller  ->  the switch: python -m fsdplab.sessions.launch.netns CONNECTION CALLER_PID NODES PER_NODE RATE PROGRAM...
            ->  one a node, in a namespace of its own: python -m ... node CONNECTION SWITCH_PID NODE ...  ->  ranks

The caller uses the switch like a single agent: it ends after the ranks, and SIGTERM ends all; when a launcher was
killed it ends by the same signal. Switch and agents hold CONNECTION open (served.py), so its end says that all are
gone, and each agent tells the exit codes of its own ranks. RATE is in bytes per second, or None. `python -m ... trial`
makes such a network once and ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fsdplab.common.processes import Asked, end_as_if_by, raise_when_asked
from fsdplab.common.pythons import run_of
from fsdplab.sessions.launch.inherited import signals_of_the_lab
from fsdplab.sessions.launch.parent_death import end_with_parent
from fsdplab.sessions.launch.program import as_ranks_of_torchrun

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # linux/sched.h
CABLE = "cable"  # the node's end, and so the name of its interface
# Jumbo frames: at 1,500 bytes headers are 4.4 % of what is sent, and every packet costs processor time that the ranks
# need.
_FRAME = 9000
# for what TCP has in flight: a full queue drops packets, and TCP halves its speed
_QUEUE_S, _QUEUE_LEAST = 0.2, 4_000_000
_PORT = 29500  # fixed: the first node's namespace has no other process
_LOOK_EVERY_S = 0.05
# When one node's agent has failed, the others' ranks fail after it: their agents get this long to write the exit
# codes.
_OTHERS_FOLLOW_S = 2.0
_PATIENCE_S = 2.0  # for agents that were asked to end; less than launcher.py has for the switch
_GO = "go\n"

Agents = Sequence["subprocess.Popen[str]"]


class NetworkSetupError(RuntimeError):
    """A namespace, a cable or its rate could not be set up; one line."""


def enter_new_network() -> None:
    """Put this process, which must have one thread, into its own network namespace; NetworkSetupError if forbidden.

    Without the right to do so it enters a user namespace too, in which it is root and has that right.
    """
    if sys.platform != "linux":
        raise NetworkSetupError(f"network namespaces are Linux's; this is {sys.platform}")
    if _unshare(_NEW_NETWORK) == 0:
        return
    user, group = os.geteuid(), os.getegid()
    if (code := _unshare(_NEW_USER | _NEW_NETWORK)) != 0:
        raise NetworkSetupError(
            f"the system allows no network namespaces, neither to root nor to users ({os.strerror(code)})"
        )
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny")  # the kernel wants it before the groups
    (own / "uid_map").write_text(f"0 {user} 1")
    (own / "gid_map").write_text(f"0 {group} 1")


def _unshare(what: int) -> int:
    return 0 if ctypes.CDLL(None, use_errno=True).unshare(what) == 0 else ctypes.get_errno()


def address(node: int) -> str:
    """The node's address: 10.77.0.1 for node 0. It is invisible outside, so it cannot clash."""
    return f"10.77.{(node + 1) // 256}.{(node + 1) % 256}"


def build_switch() -> None:
    """Make the bridge that joins all cables, in this process's namespace."""
    _command("ip", "link", "set", "lo", "up")
    _command("ip", "link", "add", "bridge", "mtu", str(_FRAME), "type", "bridge")
    _command("ip", "link", "set", "bridge", "up")


def plug(node: int, process: int, bytes_per_s: float | None) -> None:
    """Connect the switch to the namespace of `process`; the switch sends to it at the given rate."""
    port = f"port{node}"
    ends = ("type", "veth", "peer", "name", CABLE, "mtu", str(_FRAME), "netns", str(process))
    _command("ip", "link", "add", port, "mtu", str(_FRAME), *ends)
    shape(port, bytes_per_s)
    # no addresses of IPv6: gloo would take the interface's first, and they take seconds to be usable
    _command("ip", "link", "set", port, "addrgenmode", "none", "master", "bridge", "up")


def open_cable(node: int, bytes_per_s: float | None) -> None:
    """Bring up the node's end, with its rate and address, in this process's namespace."""
    _command("ip", "link", "set", "lo", "up")
    shape(CABLE, bytes_per_s)
    _command("ip", "address", "add", f"{address(node)}/16", "dev", CABLE)
    _command("ip", "link", "set", CABLE, "addrgenmode", "none", "up")


def shape(interface: str, bytes_per_s: float | None) -> None:
    """Limit what the interface sends to `bytes_per_s`; None: no limit."""
    if bytes_per_s is not None:
        _command("tc", "qdisc", "add", "dev", interface, "root", "tbf", *bucket(bytes_per_s))


def bucket(bytes_per_s: float) -> list[str]:
    """tc's token bucket for a rate: `rate 200000000bit burst 25000 limit 5025000` for 25 MB/s.

    The burst leaves at once after a pause, so it is kept small: what the link carries in a millisecond, and at least
    two frames.
    """
    burst = max(2 * _FRAME, int(bytes_per_s * 1e-3))
    limit = burst + max(_QUEUE_LEAST, int(bytes_per_s * _QUEUE_S))
    return ["rate", f"{int(bytes_per_s * 8)}bit", "burst", str(burst), "limit", str(limit)]


def _command(*words: str) -> None:
    if shutil.which(words[0]) is None:
        raise NetworkSetupError(f"the command {words[0]} is not installed; install the package iproute2")
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise NetworkSetupError(
            f"`{' '.join(words)}` failed: {output[-1] if output else f'exit code {done.returncode}'}"
        )


# ---- the switch and its nodes


def main(connection: str, caller: str, nodes: str, per_node: str, rate: str, *program: str) -> None:
    """Build the network, start the nodes, and wait for their ranks; exit code 1 when a rank failed."""
    signals_of_the_lab()
    enter_new_network()  # first: a new user namespace resets the parent-death signal
    end_with_parent(int(caller), signal.SIGTERM)
    raise_when_asked()
    build_switch()
    agents: list[subprocess.Popen[str]] = []
    try:
        for node in range(int(nodes)):
            agents.append(_start_node(connection, node, nodes, per_node, rate, program))
            plug(node, agents[-1].pid, _bytes_per_s(rate))
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
    open_cable(int(node), _bytes_per_s(rate))
    os.environ["GLOO_SOCKET_IFNAME"] = CABLE
    from fsdplab.sessions.launch import agent

    agent.main(
        connection, switch, f"--nnodes={nodes}", f"--node-rank={node}", f"--master-addr={address(0)}",
        f"--master-port={_PORT}", *as_ranks_of_torchrun(program, per_node, address(int(node))),
        when_orphaned=signal.SIGKILL,  # the switch sends SIGTERM first (see _end)
    )  # fmt: skip


def _start_node(
    connection: str, node: int, nodes: str, per_node: str, rate: str, program: Sequence[str]
) -> subprocess.Popen[str]:
    words = [connection, str(os.getpid()), str(node), nodes, per_node, rate, *program]
    return subprocess.Popen(
        run_of("fsdplab.sessions.launch.netns", "node", *words),
        stdin=subprocess.PIPE, text=True, preexec_fn=enter_new_network, pass_fds=(int(connection),),
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


def trial() -> None:
    """Try all of it once, on a cable to this process; print the reason and exit with 1 if it fails."""
    try:
        enter_new_network()
        build_switch()
        plug(0, os.getpid(), 25e6)
        open_cable(0, 25e6)
    except (NetworkSetupError, OSError) as error:
        print(str(error).replace("\n", " "))
        sys.exit(1)


if __name__ == "__main__":
    what, *others = sys.argv[1:]
    try:
        if what == "trial":
            trial()
        elif what == "node":
            node_main(*others)
        else:
            main(what, *others)
    except NetworkSetupError as error:
        sys.exit(f"The network of the nodes could not be built: {error}")

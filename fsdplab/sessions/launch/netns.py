"""Network namespaces and rate-limited cables: several nodes, with a slow network between them, on one machine.

A network namespace is a network stack of its own: ranks in two of them reach each other through the cable between them
and through nothing else (shared memory aside, which the engine refuses across namespaces). Each node has one, and so
has the switch in the middle:

    [ node 0: cable ]====port0[ switch: bridge ]port1====[ node 1: cable ]         ==== is a veth pair

Both ends of a cable send at the link's rate (`tc`, token bucket), so a node is as slow to receive as to send. The
namespaces have no names: they live as long as a process is in them, and take bridge, cables and rates with them.
Nothing is left, whichever process is killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # linux/sched.h
CABLE = "cable"  # the node's end, and so the name of its interface
# Jumbo frames: at 1,500 bytes headers are 4.4 % of what is sent, and every packet costs processor time that the ranks
# need.
_FRAME = 9000
# for what TCP has in flight: a full queue drops packets, and TCP halves its speed
_QUEUE_S, _QUEUE_LEAST = 0.2, 4_000_000


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


def main() -> None:
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
    main()

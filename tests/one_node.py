"""Machines of one network, for programs that a test starts by itself: each in a network namespace, at a switch.

    switch = Switch()                                    # as root
    node = subprocess.Popen(node_command(0, words), stdin=PIPE, preexec_fn=enter_new_network)
    switch.plug(node)                                    # brings its cable up; then `words` begin

A machine that is killed takes its namespace and its end of the cable along, as one whose plug is pulled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import IO

from fsdplab.sessions.launch.netns import address, build_switch, enter_new_network, open_cable, plug

_PLUGGED = "plugged\n"


class Switch:
    """The bridge in the middle, in a process with a namespace of its own."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, "switch"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=enter_new_network,
        )  # fmt: skip

    def plug(self, node: int, process: subprocess.Popen[str]) -> None:
        """Connect the machine and let its program begin."""
        _say(self._process.stdin, json.dumps([node, process.pid, self.bytes_per_s]) + "\n")
        assert self._process.stdout is not None and self._process.stdout.readline() == _PLUGGED
        _say(process.stdin, _PLUGGED)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def node_command(node: int, bytes_per_s: float, words: list[str]) -> list[str]:
    """The command line of machine `node`, which waits until it is plugged in and then is `words`."""
    return [sys.executable, "-m", __name__, "node", str(node), str(bytes_per_s), *words]


def _say(pipe: IO[str] | None, line: str) -> None:
    assert pipe is not None  # every process here has one
    pipe.write(line)
    pipe.flush()


def _be_switch() -> None:
    build_switch()
    for line in sys.stdin:
        node, process, rate = json.loads(line)
        # A machine that came back has the same port; the old one may not have left with its namespace yet.
        subprocess.run(["ip", "link", "delete", f"port{node}"], capture_output=True)
        plug(node, process, rate)
        print(_PLUGGED, end="", flush=True)


def _be_node(node: str, rate: str, *words: str) -> None:
    if sys.stdin.readline() != _PLUGGED:
        sys.exit("the switch ended before this machine was plugged in")
    open_cable(int(node), float(rate))
    os.execvp(words[0], words)


__all__ = ["Switch", "address", "enter_new_network", "node_command"]

if __name__ == "__main__":
    {"switch": _be_switch, "node": _be_node}[sys.argv[1]](*sys.argv[2:])

"""docs/examples/pretrain.py under torchrun: a machine is lost, the other goes on, and both when it is back.

Tried on two agents that share the loopback, and on two machines of a network (namespaces, 25 MB/s between them) of
which one disappears with its end of the cable, so that no process of it says goodbye.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fsdplab.checkpoint import published
from tests.crash_test import _children
from tests.examples import EXAMPLES, tiny_llama
from tests.forking_starter import _free_port
from tests.one_node import Switch, address, enter_new_network, node_command

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers 5.23 needs Python 3.11")
ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 240.0
# a run of everything tries one of the networks
# The first one is of the default tier: only root makes network namespaces.
KINDS = ["namespaces", "loopback"] if os.geteuid() == 0 else ["loopback", "namespaces"]
CONF = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


@dataclass(frozen=True)
class Loopback:
    """Both machines are this one."""

    port: int

    def address(self, node: int) -> str:
        return "127.0.0.1"

    def start(self, node: int, words: list[str], **how: object) -> subprocess.Popen[str]:
        return subprocess.Popen(words, **how)

    interface = "lo"


@dataclass(frozen=True)
class Namespaces:
    """Each machine has a network of its own and a cable to a switch."""

    switch: Switch
    port: int = 29400

    def address(self, node: int) -> str:
        return address(node)

    def start(self, node: int, words: list[str], **how: object) -> subprocess.Popen[str]:
        program = node_command(node, self.switch.bytes_per_s, words)
        process = subprocess.Popen(program, stdin=subprocess.PIPE, preexec_fn=enter_new_network, **how)
        self.switch.plug(node, process)
        return process

    interface = "cable"


@contextmanager
def network_of(kind: str) -> Iterator[Loopback | Namespaces]:
    if kind == "loopback":
        yield Loopback(_free_port())
        return
    with ExitStack() as at_end:
        switch = Switch(25e6)
        at_end.callback(switch.close)
        yield Namespaces(switch)


class Machine:
    """A torchrun with one rank, and what they print; machine 0 keeps the rendezvous of all."""

    def __init__(self, folder: Path, network: Loopback | Namespaces, node: int) -> None:
        words = [
            "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=job",
            f"--rdzv-endpoint={network.address(0)}:{network.port}", f"--rdzv-conf={CONF},is_host={node == 0}",
            f"--local-addr={network.address(node)}", f"--log-dir={os.devnull}",
            str(EXAMPLES / "pretrain.py"), "--config", str(tiny_llama(folder)), "--data", str(folder / "text.txt"),
            "--sequence-length=16", "--batch-size=4", "--micro-batch-size=2", "--steps=1000000", "--save-every=20",
            "--checkpoints", str(folder / "checkpoints"),
        ]  # fmt: skip
        there = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        self.agent = network.start(
            node, [sys.executable, "-m", "torch.distributed.run", *words],
            env={**os.environ, **there, "GLOO_SOCKET_IFNAME": network.interface,
                 "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        threading.Thread(target=lambda: self.lines.extend(self.agent.stdout), daemon=True).start()

    def kill(self) -> None:
        for process in (self.agent.pid, *_children(self.agent.pid)):
            os.kill(process, signal.SIGKILL)
        self.agent.wait()


@contextmanager
def machine(folder: Path, network: Loopback | Namespaces, node: int) -> Iterator[Machine]:
    made = Machine(folder, network, node)
    try:
        yield made
    finally:
        if made.agent.poll() is None:
            made.kill()


def begun(machines: list[Machine], ranks: int, after: int = -1) -> int | None:
    """The step from which so many ranks went on, later than `after`."""
    lines = [line for each in machines for line in list(each.lines)]
    steps = [int(found[1]) for line in lines if (found := re.match(rf"begin (\d+) on {ranks} ranks", line))]
    return next((step for step in reversed(steps) if step > after), None)


def until(come: Callable[[], object], machines: list[Machine]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not come():
        assert time.monotonic() < deadline, "\n".join(line for each in machines for line in each.lines[-20:])
        time.sleep(0.05)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_machine_is_done_without_and_taken_back(tmp_path: Path, kind: str) -> None:
    if kind == "namespaces" and os.geteuid() != 0:
        pytest.skip("only root connects network namespaces that other processes live in")
    (tmp_path / "text.txt").write_bytes(Path(__file__).read_bytes())
    newest = lambda: max(published(tmp_path / "checkpoints"), default=0)  # noqa: E731
    with network_of(kind) as network, machine(tmp_path, network, 0) as first, machine(tmp_path, network, 1) as second:
        both = [first, second]
        until(lambda: begun(both, 2) == 0, both)
        until(newest, both)
        lost_at = newest()
        second.kill()
        until(lambda: begun([first], 1) is not None, [first])
        assert begun([first], 1) >= lost_at
        until(lambda: newest() > begun([first], 1), [first])
        with machine(tmp_path, network, 1) as third:
            both = [first, third]
            until(lambda: begun(both, 2, after=lost_at) is not None, both)
            assert begun(both, 2, after=lost_at) >= begun([first], 1)
            first.agent.send_signal(signal.SIGTERM)
            first.agent.wait(PATIENCE_S)

"""docs/examples/pretrain.py under torchrun: a machine is lost, the other goes on, and both when it is back.

Two agents share the loopback; a lost machine is one whose processes are all killed at once.
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
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsdplab.checkpoint import published
from tests.crash_test import _children
from tests.examples import EXAMPLES, tiny_llama
from tests.forking_starter import _free_port

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers 5.23 needs Python 3.11")
ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 240.0
# An agent that is not heard for 20 s is lost. With 3 s, one that waits for a core would be: the other machine then
# begins a job of its own, which the folder of checkpoints refuses.
CONF = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=20"


class Machine:
    """A torchrun with one rank, and what they print; machine 0 keeps the rendezvous of all."""

    def __init__(self, folder: Path, port: int, node: int) -> None:
        words = [
            "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=job",
            f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={CONF},is_host={node == 0}",
            "--local-addr=127.0.0.1", f"--log-dir={os.devnull}",
            str(EXAMPLES / "pretrain.py"), "--config", str(tiny_llama(folder)), "--data", str(folder / "text.txt"),
            "--sequence-length=16", "--batch-size=4", "--micro-batch-size=2", "--steps=1000000", "--save-every=20",
            "--checkpoints", str(folder / "checkpoints"),
        ]  # fmt: skip
        there = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        there |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.agent = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words], env={**os.environ, **there},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        threading.Thread(target=lambda: self.lines.extend(self.agent.stdout), daemon=True).start()

    def kill(self) -> None:
        for process in (self.agent.pid, *_children(self.agent.pid)):
            os.kill(process, signal.SIGKILL)
        self.agent.wait()


@contextmanager
def machine(folder: Path, port: int, node: int) -> Iterator[Machine]:
    made = Machine(folder, port, node)
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


def _said(machines: list[Machine]) -> str:
    """What the machines have printed, but for their steps."""
    lines = [line for machine in machines for line in list(machine.lines) if not line.startswith("step")]
    return "".join(lines)


def until(come: Callable[[], object], machines: list[Machine]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not come():
        assert time.monotonic() < deadline, _said(machines)
        time.sleep(0.05)


@pytest.mark.timeout(900)
def test_a_lost_machine_is_done_without_and_taken_back(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(Path(__file__).read_bytes())
    newest = lambda: max(published(tmp_path / "checkpoints"), default=0)  # noqa: E731
    port = _free_port()
    with machine(tmp_path, port, 0) as first, machine(tmp_path, port, 1) as second:
        both = [first, second]
        until(lambda: begun(both, 2) == 0, both)
        until(newest, both)
        lost_at = newest()
        second.kill()
        until(lambda: begun([first], 1) is not None, [first])
        assert begun([first], 1) >= lost_at
        until(lambda: newest() > begun([first], 1), [first])
        with machine(tmp_path, port, 1) as third:
            both = [first, third]
            until(lambda: begun(both, 2, after=lost_at) is not None, both)
            assert begun(both, 2, after=lost_at) >= begun([first], 1)
            first.agent.send_signal(signal.SIGTERM)
            first.agent.wait(PATIENCE_S)

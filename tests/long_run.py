"""What a long job costs as it goes on: step times, memory in use, files and threads of docs/examples/pretrain.py.

    python -m tests.long_run --steps 4000 [--engine torch] [--save-every 50]

Resident memory grows for the first thousand steps of any program of torch, as the allocator fills its lists of free
blocks. So the table has what malloc has handed out, too: that grows if something is kept, and only then.
"""

from __future__ import annotations

import argparse
import builtins
import ctypes
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

from tests.examples import source, tiny_llama

TABLE_ROWS = 8


class MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, mallinfo(3)."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def bytes_in_use() -> int:
    """Bytes that malloc has handed out and that were not freed, mapped blocks included."""
    ask = ctypes.CDLL("libc.so.6").mallinfo2
    ask.restype = MallInfo
    now = ask()
    return int(now.uordblks + now.hblkhd)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_rank(engine: str, words: list[str], every: int) -> None:
    """Run the example on this rank; rank 0 prints a row of the table every `every` steps."""
    ended: list[float] = []
    say = builtins.print

    def note(text: object, *rest: object, **options: object) -> None:
        if not re.match(r"step \d+ ", str(text)):
            return
        ended.append(time.perf_counter())
        if len(ended) % every == 0:
            times = [later - earlier for earlier, later in zip(ended[-every:], ended[-every + 1 :])]
            files = len(os.listdir("/proc/self/fd"))
            say(
                f"{len(ended):8d} {statistics.median(times) * 1e3:12.1f} {bytes_in_use():14,d} "
                f"{resident_bytes() / 1e6:12.1f} {files:7d} {threading.active_count():9d}",
                flush=True,
            )

    with mock.patch.object(builtins, "print", note), mock.patch.object(sys, "argv", ["pretrain.py", *words]):
        exec(compile(source("pretrain.py", engine), "pretrain.py", "exec"), {"__name__": "__main__"})  # noqa: S102


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--engine", choices=("lab", "torch"), default="lab")
    asked, words = parser.parse_known_args()
    every = max(2, asked.steps // TABLE_ROWS)
    if "RANK" in os.environ:
        run_rank(asked.engine, [*words, "--steps", str(asked.steps), "--save-every", str(asked.save_every)], every)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_llama(folder)
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
        print(f"{'step':>8} {'median ms':>12} {'bytes in use':>14} {'resident MB':>12} {'files':>7} {'threads':>9}")
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             "-m", "tests.long_run", "--steps", str(asked.steps), "--save-every", str(asked.save_every),
             "--engine", asked.engine, "--config", name, "--data", str(folder / "text.txt"),
             "--checkpoints", str(folder / "checkpoints"), "--sequence-length", "32",
             "--batch-size", "4", "--micro-batch-size", "2"],
            check=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()

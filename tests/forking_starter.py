"""Starts the ranks of a program and starts them again when one fails, as `torchrun --max-restarts` does, by forking:

    python -m tests.forking_starter RANKS PROGRAM [WORDS ...]

What the program needs is imported once, so that a restart takes a tenth of a second. SIGTERM goes on to the ranks.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import socket
import sys
import time
from typing import NoReturn

from fsdplab.sessions.launch.parent_death import end_with_parent

_IMPORTED = (
    "torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp", "torch.distributed.tensor", "safetensors.torch",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
    "fsdplab.engine.shard", "fsdplab.checkpoint.folder",
)  # fmt: skip
_OTHERS_FOLLOW_S = 30.0  # torchrun's own


def _rank(rank: int, ranks: int, port: int, mother: int, words: list[str]) -> NoReturn:
    end_with_parent(mother)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    there = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in there.items()}, MASTER_ADDR="127.0.0.1")
    sys.argv = words
    code = 1
    try:
        runpy.run_path(words[0], run_name="__main__")
        code = 0
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr, flush=True)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


def _attempt(ranks: int, words: list[str], asked: list[int]) -> bool:
    """Start the ranks and wait for them; whether all ended well."""
    mother, port = os.getpid(), _free_port()
    alive = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            _rank(rank, ranks, port, mother, words)
        alive.append(pid)
    deadline, fine, told = None, True, False
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            alive.remove(pid)
            fine = fine and os.waitstatus_to_exitcode(status) == 0
        if (asked or not fine) and not told:
            told, deadline = True, time.monotonic() + _OTHERS_FOLLOW_S
            _send(alive, signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            _send(alive, signal.SIGKILL)
        time.sleep(0.02)
    return fine


def _send(alive: list[int], sign: signal.Signals) -> None:
    for pid in alive:
        os.kill(pid, sign)


def main() -> None:
    ranks, words, asked = int(sys.argv[1]), sys.argv[2:], []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    for name in _IMPORTED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    while not _attempt(ranks, words, asked) and not asked:
        pass


if __name__ == "__main__":
    main()

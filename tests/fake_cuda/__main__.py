"""Runs a command under the stand-in: `python -m tests.fake_cuda --gpus 2 -- python -m fsdplab run ...`.

The words `python` or `python3` at the command's begin become the CUDA environment's own interpreter. Only the command
sees the stand-in's variables; the caller's environment stays as it is.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.fake_cuda.build import CannotBuild
from tests.fake_cuda.machine import Machine, run

_VARIABLE = "FSDPLAB_CUDA_PYTHON"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fake_cuda", description=__doc__)
    parser.add_argument("--python", type=Path, default=os.environ.get(_VARIABLE), help=f"or the variable {_VARIABLE}")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--capability", type=int, default=90, help="75: T4, 80: A100, 90: H100")
    parser.add_argument("--memory-gb", type=float, default=80.0)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="see README.md, e.g. IPC=refused"
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds, then the command is killed")
    parser.add_argument("command", nargs="+")
    said = parser.parse_args()
    if said.python is None:
        parser.error(f"say which Python has torch with CUDA: --python, or the variable {_VARIABLE}")
    machine = Machine(said.gpus, said.capability, said.memory_gb, dict(pair.split("=", 1) for pair in said.set))
    try:
        return run(machine, said.command, said.python, said.limit).returncode
    except CannotBuild as error:
        print(f"fake_cuda: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

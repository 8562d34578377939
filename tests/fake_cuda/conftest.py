"""Where the CUDA environment is; without one the tests of this folder are skipped with one reason."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fake_cuda.machine import Done, Machine, run

VARIABLE = "FSDPLAB_CUDA_PYTHON"
Run = Callable[..., Done]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs the CUDA environment where there is none; with it, tests start processes that import torch."""
    missing = pytest.mark.skip(reason=f"{VARIABLE} names no Python whose torch has CUDA; .ci/cuda makes one")
    for item in items:
        if "cuda_python" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(600))
            if VARIABLE not in os.environ:
                item.add_marker(missing)


@pytest.fixture(scope="session")
def cuda_python() -> Path:
    """The interpreter whose torch has CUDA."""
    return Path(os.environ[VARIABLE])


@pytest.fixture
def on_gpus(cuda_python: Path) -> Run:
    """Run a command on a machine: `on_gpus(Machine(gpus=2), "python", "-m", "fsdplab", ...)`."""

    def run_there(machine: Machine, *command: str, limit_s: float = 150.0, **variables: str) -> Done:
        return run(machine, command, cuda_python, limit_s, capture=True, variables=variables)

    return run_there


@pytest.fixture
def script(on_gpus: Run) -> Callable[..., Done]:
    """Run Python source on a machine, with arguments in `sys.argv`, in one process or as ranks with a group."""

    def run_script(machine: Machine, source: str, ranks: int = 0, limit_s: float = 150.0) -> Done:
        program = ("-c", textwrap.dedent(source))
        if not ranks:
            return on_gpus(machine, "python", *program, limit_s=limit_s)
        return on_gpus(machine, "python", "-c", _RANKS, str(ranks), textwrap.dedent(source), limit_s=limit_s)

    return run_script


# Starts the ranks of a script and prints what each of them prints, in order of rank; its status is the worst of theirs.
_RANKS = """
import os, subprocess, sys, tempfile
count, source = sys.argv[1:]
begin = '''
import os
import torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group("nccl", "file://" + os.environ["STORE"], rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
'''
with tempfile.TemporaryDirectory() as folder:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", begin + source], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": count, "STORE": folder + "/store"},
        )
        for rank in range(int(count))
    ]
    for process in ranks:
        print(process.communicate()[0], end="")
sys.exit(max(abs(process.returncode) for process in ranks))
"""

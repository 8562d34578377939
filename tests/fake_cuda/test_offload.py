"""Offload on the stand-in: slices and gradients on the host, units on the GPU, and copies that take 20 ms each.

The norm of gradients that are on the host is summed by NCCL, which moves nothing there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

machine = pytest.importorskip("tests.fake_cuda.machine", reason="the stand-in's sources are not in this checkout")
SLOW = {"COPY_US": 20_000}


def test_no_gradient_is_read_before_it_has_arrived(on_gpus: Callable[..., Any]) -> None:
    """Pinned, pageable and files; cut by rows, and by columns with two dtypes; with hooks that read at once."""
    command = ("python", "-m", "tests.fake_cuda.offload", "2")
    done = on_gpus(machine.Machine(gpus=2, settings=SLOW), *command, limit_s=600.0)
    assert done.returncode == 0, done.output[-3000:]
    *cases, without_waits = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    assert len(cases) == 12 and without_waits["case"] == "no waits"
    for case in cases:
        assert (case["devices"], case["stale"], case["norm"]) == (["cpu"], 0.0, "cpu"), case
        assert case["pinned"] is ("offload=pinned" in case["case"]), case
    assert without_waits["stale"] > 0.2, "the same steps, whose host does not wait"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_is_offloaded(on_gpus: Callable[..., Any], tmp_path: Path, ranks: int) -> None:
    options = ("--model", "gpt-tiny", "--device", "cuda", "--offload", "cpu", "--world-size", str(ranks))
    command = ("python", "-m", "fsdplab", "run", "full_shard", *options, "--out", str(tmp_path / "record"))
    done = on_gpus(machine.Machine(gpus=ranks), *command, limit_s=300.0)
    assert done.returncode == 0 and "needs" in done.output, done.output[-3000:]


TOUCHES = {
    "torch": "import sys\nif 'torch' not in sys.modules:\n    import torch\n    torch.cuda.is_available()\n",
    "the driver": "import ctypes\nctypes.CDLL('libcuda.so.1').cuInit(0)\n",
}


@pytest.mark.parametrize("touches", TOUCHES.values(), ids=TOUCHES)
def test_a_starter_that_touched_cuda_is_not_forked(on_gpus: Callable[..., Any], tmp_path: Path, touches: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(touches)
    options = ("--model", "gpt-tiny", "--device", "cuda", "--world-size", "2", "--out", str(tmp_path / "record"))
    path = f"{machine.ROOT}:{tmp_path}"
    command = ("python", "-m", "fsdplab", "run", "full_shard", *options)
    done = on_gpus(machine.Machine(gpus=2), *command, limit_s=300.0, PYTHONPATH=path)
    assert done.returncode == 0 and "CUDA was touched while the warm starter imported" in done.output

"""A rank that has one batch fewer has not died: its peers say that it ended normally, and what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdplab.engine import fully_shard
from fsdplab.engine.transport.selection import forget_destroyed
from tests.ranks import transports
from tests.surface import Net, loss_of

pytestmark = pytest.mark.skipif("shm" not in transports(), reason="ranks share no memory here")

_PROGRAM = """
import sys, torch, torch.distributed as dist
from torch import nn
from fsdplab.engine import fully_shard

dist.init_process_group("gloo")
model = fully_shard(nn.Linear(4, 4))
for step in range(2 if dist.get_rank() else 3):
    model(torch.ones(2, 4)).sum().backward()
if dist.get_rank() and sys.argv[1] == "raises":
    raise ValueError("on purpose")
"""


def told(folder: Path, how: str) -> str:
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run([*launch, str(program), how], capture_output=True, text=True, timeout=120)
    return ended.stderr


def test_a_process_that_ends_normally(tmp_path: Path) -> None:
    text = told(tmp_path, "ends")
    assert "rank 1 has ended normally: it ran fewer steps or batches" in text and "has died" not in text, text


def leaves_the_group() -> str:
    """The process goes on, to save or to evaluate; its peer does not wait for the time-out of the group."""
    model = fully_shard(Net(), transport="shm")
    loss_of(model).backward()
    if dist.get_rank() == 1:
        del model
        dist.destroy_process_group()
        forget_destroyed()
        return ""
    with pytest.raises(RuntimeError) as raised, torch.no_grad():
        loss_of(model)
    return str(raised.value)


def test_a_rank_that_destroys_its_group(ranks) -> None:
    text, _ = ranks(2, leaves_the_group)
    assert "rank 1 has ended normally" in text and "\n" not in text

"""Which device a rank computes on: the one it was started for, and no other process's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.fake_cuda.conftest import Run
from tests.fake_cuda.machine import Done, Machine

# a step of fused AdamW on the CPU makes torch initialise CUDA, on whatever device is current then
_LESSON = """
import tempfile
from pathlib import Path
from fsdplab.sessions import call_on_ranks

SOURCE = '''
import torch
from torch import nn
from fsdplab.engine import fully_shard

def shard(payload):
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()
    sharded = fully_shard(nn.Linear(4, 4))
    sharded(torch.ones(2, 4)).sum().backward()
    return [str(next(sharded.parameters()).to_local().device), torch.cuda.is_initialized()]
'''
with tempfile.TemporaryDirectory() as folder:
    source = Path(folder, "lesson.py")
    source.write_text(SOURCE)
    print(list(call_on_ranks(source, "shard", world_size=2)))
"""
_CELL = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "fsdplab.teaching")
shell.run_cell_magic("ranks", "2", '''
import torch
weight = torch.nn.Parameter(torch.ones(3))
weight.grad = torch.ones(3)
torch.optim.AdamW([weight], fused=True).step()
print("uses", torch.ones(1, device="cuda").device)
''')
"""


@pytest.mark.parametrize("mode", ["", "exclusive"])
def test_a_lessons_ranks_leave_the_gpus_alone(script: Callable[..., Done], mode: str) -> None:
    done = script(Machine(gpus=2, settings={"COMPUTE_MODE": mode}), _LESSON)
    assert "[['cpu', False], ['cpu', False]]" in done.output, done.output


@pytest.mark.parametrize(("gpus", "second"), [(2, 1), (1, 0)])
def test_a_cells_rank_uses_a_gpu_of_its_own_where_it_chooses_none(
    script: Callable[..., Done], gpus: int, second: int
) -> None:
    done = script(Machine(gpus=gpus), _CELL)
    assert "[rank 0] uses cuda:0" in done.output and f"[rank 1] uses cuda:{second}" in done.output, done.output


@pytest.mark.parametrize("flags", [("--device", "cpu"), ("-n", "3")], ids=["cpu", "auto"])
def test_a_run_on_the_cpu_needs_no_gpu(on_gpus: Run, flags: tuple[str, ...]) -> None:
    machine = Machine(gpus=2, settings={"COMPUTE_MODE": "exclusive"})
    done = on_gpus(
        machine, "python", "-m", "fsdplab", "run", "full_shard", "--model", "gpt-tiny", "--steps", "2", *flags
    )
    assert done.returncode == 0, done.output

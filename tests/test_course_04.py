"""Notebook 04: every right answer passes, every known wrong one is diagnosed, and what is trained equals the twin."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fsdplab.teaching import zero_by_hand
from fsdplab.teaching.core import display, registry
from fsdplab.teaching.core.exercise import Question
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.run_submission import behaviours
from tests.solutions import ended_of, in_all_cases, must_name_each_slip, solutions_of, try_ended

ITEMS = registry.items_of("04")
EXERCISES = [item for item in ITEMS if isinstance(item, Exercise)]
RIGHT = {  # other right answers than the references
    "04.rows_of": {
        "a tensor of two": (
            "import torch\n\n\ndef rows_of(rows, rank, n):\n    size = -(-rows // n)\n    return (torch.arange(n + 1) *"
            " size).clamp(max=rows)[rank : rank + 2]\n"
        ),
        "numpy's numbers": (
            "import numpy as np\n\n\ndef rows_of(rows, rank, n):\n    size = int(np.ceil(rows / n))\n    return"
            " np.minimum(rank * size, rows), np.minimum((rank + 1) * size, rows)\n"
        ),
        "as torch.chunk cuts": (
            "import torch\n\n\ndef rows_of(rows, rank, n):\n    blocks = list(torch.arange(rows).chunk(n))\n    if rank"
            " >= len(blocks):\n        return [rows, rows]\n    return [int(blocks[rank][0]), int(blocks[rank][-1]) +"
            " 1]\n"
        ),
        "with math.ceil": (
            "import math\n\n\ndef rows_of(rows, rank, n):\n    size = math.ceil(rows / n)\n    start = min(rows, size *"
            " rank)\n    return start, min(rows, start + size)\n"
        ),
    },
    "04.reduce_rows": {
        "a reduce to each owner": (
            "import torch.distributed as dist\n\n\ndef reduce_rows(parameter, mine):\n    blocks ="
            " list(parameter.grad.chunk(dist.get_world_size()))\n    for rank, block in enumerate(blocks):\n       "
            " dist.reduce(block, dst=rank)\n    mine.grad = blocks[dist.get_rank()] / len(blocks)\n    del"
            " parameter.grad\n"
        ),
        "torch's own average": (
            registry.find("04.reduce_rows")
            .reference.replace("blocks)\n    mine", "blocks, op=dist.ReduceOp.AVG)\n    mine")
            .replace("    mine.grad /= dist.get_world_size()\n", "")
        ),
        "one tensor": (
            "import torch\nimport torch.distributed as dist\n\n\ndef reduce_rows(parameter, mine):\n    own ="
            " torch.empty_like(mine)\n    dist.reduce_scatter_tensor(own, parameter.grad)\n    mine.grad,"
            " parameter.grad = own / dist.get_world_size(), None\n"
        ),
        "exchange, then add": (
            "import torch\nimport torch.distributed as dist\n\n\ndef reduce_rows(parameter, mine):\n    came ="
            " torch.empty_like(parameter.grad)\n    dist.all_to_all_single(came, parameter.grad)\n    mine.grad ="
            " sum(came.chunk(dist.get_world_size())) / dist.get_world_size()\n    parameter.grad = None\n"
        ),
    },
    "04.step_and_gather": {
        "all begun, then waited for": (
            "import torch.distributed as dist\n\n\ndef step_and_gather(pairs, optimizer):\n    optimizer.step()\n   "
            " begun = []\n    for parameter, mine in pairs:\n        blocks ="
            " list(parameter.data.chunk(dist.get_world_size()))\n        begun.append(dist.all_gather(blocks,"
            " blocks[dist.get_rank()], async_op=True))\n    for work in begun:\n        work.wait()\n"
        ),
        "one tensor, then a copy": (
            "import torch\nimport torch.distributed as dist\n\n\ndef step_and_gather(pairs, optimizer):\n   "
            " optimizer.step()\n    with torch.no_grad():\n        for parameter, mine in pairs:\n            whole ="
            " torch.empty_like(parameter)\n            dist.all_gather_into_tensor(whole, mine.data)\n           "
            " parameter.copy_(whole)\n"
        ),
        "a broadcast from each owner": (
            "import torch.distributed as dist\n\n\ndef step_and_gather(pairs, optimizer):\n    optimizer.step()\n   "
            " for parameter, mine in pairs:\n        for rank, block in"
            " enumerate(parameter.data.chunk(dist.get_world_size())):\n            dist.broadcast(block, src=rank)\n"
        ),
    },
}


SOLUTIONS = solutions_of(EXERCISES, RIGHT)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("solution", SOLUTIONS, ids=str)
def test_right_solutions_pass_and_wrong_ones_are_diagnosed(tried, solution):
    solution.must_report(tried[solution.key])


@pytest.mark.parametrize("exercise,known", ended_of(EXERCISES), ids=lambda value: getattr(value, "id", None) or "none")
def test_solutions_that_raise_are_diagnosed(workspace, exercise, known):
    feedback = try_ended(exercise, known, workspace)
    assert known.cause in feedback.cause and f"{exercise.id}.py" in feedback.got


def test_golden_values(workspace):
    saved = [(each, workspace.save(each.id, each.reference)) for each in EXERCISES if not each.pure]
    reduced, stepped = behaviours(saved, workspace)
    assert [trial.returned["mine.grad"].tolist() for trial in reduced.trials[1]] == [[111.0], [222.0], [333.0]]
    rows = stepped.trials[0][0].returned["step 1, parameter 1"]
    assert rows.tolist() == [98.0, 196.0, 294.0], "two steps of one, two and three"
    owned = in_all_cases(registry.find("04.rows_of"))[2]
    assert owned["(start, stop) of every rank"] == [(0, 4), (4, 8), (8, 10)]


@pytest.mark.parametrize("item", [item for item in ITEMS if isinstance(item, Question)], ids=lambda item: item.id)
def test_questions_accept_the_right_number_and_name_each_slip(course, item):
    must_name_each_slip(item, SimpleNamespace(moment_bytes=564_224))


@pytest.mark.timeout(600)
def test_sharded_optimizers_train_like_the_twin(course):
    runs = [zero_by_hand.zero(stage, steps=2) for stage in (1, 2)]
    for run in (run for pair in runs for run in pair):
        assert (
            run.verdict == "equal in every bit"
            and run.bytes_sent == run.payload
            and run.moments == (run.payload, run.payload)
        )
    held = [max(pair[0].held) for pair in runs]
    assert held[0] == 564_224 and held[1] == (564_224 + 65_536) // 2
    assert "Most gradients held: the reference ZeRO-1 564 kB, the reference ZeRO-2 315 kB" in display.alt_text(
        zero_by_hand.gradient_figure([pair[0] for pair in runs])
    )
    assert "2 P (n-1)/n = 564,224" in str(runs[0])

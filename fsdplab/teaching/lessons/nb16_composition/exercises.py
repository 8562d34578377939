"""Notebook 16: groups of a mesh, a model that is tensor-parallel and sharded,
and what expert gradients are divided by.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from fsdplab.teaching.core.exercise import Case, Choice, Exercise, Question, Slip, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference

ON_THE_RANKS = str(Path(__file__).with_name("on_ranks.py"))
_RANKS = 4

# ---- 16.groups_of

_GROUPS_STUB = '''\
from math import prod


def groups_of(rank, shape):
    """For each axis of a row-major mesh: the ranks that differ from `rank` on that axis only, in order."""
    groups = []
    for axis, size in enumerate(shape):
        ...  # how far apart are neighbours on this axis? where does the group begin?
    return groups
'''

_GROUPS = '''\
from math import prod


def groups_of(rank, shape):
    """For each axis of a row-major mesh: the ranks that differ from `rank` on that axis only, in order."""
    groups = []
    for axis, size in enumerate(shape):
        stride = prod(shape[axis + 1 :])
        first = rank - rank // stride % size * stride
        groups.append([first + step * stride for step in range(size)])
    return groups
'''

_STRIDE, _FIRST = "stride = prod(shape[axis + 1 :])", "first = rank - rank // stride % size * stride"
_APPEND = "groups.append([first + step * stride for step in range(size)])"
_MESHES = {"2 x 2": ((2, 2), range(4)), "4 in a row": ((1, 4), range(4)), "2 x 3 x 4": ((2, 3, 4), (0, 7, 13, 23))}


def _groups(rank: int, shape: tuple[int, ...]) -> list[list[int]]:
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    firsts = [rank - rank // stride % size * stride for stride, size in zip(strides, shape)]
    return [[first + step * stride for step in range(size)] for first, stride, size in zip(firsts, strides, shape)]


def _mesh_cases() -> list[Case]:
    return [
        Case(name, tuple((rank, list(shape)) for rank in ranks), tuple(_groups(rank, shape) for rank in ranks))
        for name, (shape, ranks) in _MESHES.items()
    ]


def _explain_groups(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    """Which axis is wrong, and which way of numbering would give what came."""
    rank, shape = case.arguments[trial.rank]
    got = trial.returned
    if not isinstance(got, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in got):
        return None, "return a list with one list of ranks for each axis"
    if len(got) != len(shape):
        return None, f"a mesh of {len(shape)} axes has {len(shape)} groups around each rank: append one an axis"
    right = _groups(rank, tuple(shape))
    axis = next(index for index, group in enumerate(got) if list(group) != right[index])
    where = f"axis {axis} of the mesh {' x '.join(map(str, shape))}, for rank {rank}"
    return where, _cause_of_group(list(got[axis]), right, axis, rank)


def _cause_of_group(group: list[int], right: list[list[int]], axis: int, rank: int) -> str:
    if rank not in group:
        return (
            f"rank {rank} is not in its own group: go back from it to the group's first rank, `rank // stride % size`"
            " strides"
        )
    if sorted(group) == right[axis]:
        return "the right ranks in another order: a group counts upwards along its axis"
    if len(group) != len(right[axis]):
        return f"the group has {len(group)} ranks, the axis {len(right[axis])} places"
    return (
        "the wrong stride: in a row-major mesh the last axis holds neighbours, so a step on an axis is as long as all"
        " later axes together"
    )


groups_of = Exercise(
    id="16.groups_of",
    title="The groups around a rank",
    statement=(
        "Write groups_of(rank, shape): for each axis of the mesh, the ranks that a collective over that axis joins with"
        " `rank`."
    ),
    stub=_GROUPS_STUB,
    reference=_GROUPS,
    hints=(
        "Draw 2 x 2: the ranks 0 1 above 2 3. Who differs from rank 3 in the row only? In the column only?",
        "A step along an axis moves on by the product of all later sizes; on the last axis that is 1.",
        (
            "`stride = prod(shape[axis + 1 :])`; the place on the axis is `rank // stride % size`; go back so many"
            " strides and list `size` ranks."
        ),
    ),
    cases=_mesh_cases,
    explain=_explain_groups,
    world_size=_RANKS,
    wrong=(
        Wrong("first axis fastest", edited(_GROUPS, (_STRIDE, "stride = prod(shape[:axis])")), "the wrong stride"),
        Wrong("neighbours on every axis", edited(_GROUPS, (_STRIDE, "stride = 1")), "the wrong stride"),
        Wrong(
            "from the rank on",
            edited(_GROUPS, (_APPEND, "groups.append([rank + step * stride for step in range(size)])")),
            "the wrong stride",
        ),
        Wrong("from rank 0", edited(_GROUPS, (_FIRST, "first = 0")), "not in its own group"),
        Wrong(
            "no place within the axis",
            edited(_GROUPS, (_FIRST, "first = rank - rank // stride * stride")),
            "not in its own group",
        ),
        Wrong("backwards", edited(_GROUPS, ("range(size)", "reversed(range(size))")), "counts upwards"),
        Wrong("one too many", edited(_GROUPS, ("range(size)", "range(size + 1)")), "the axis 2 places"),
        Wrong(
            "the last axis only", edited(_GROUPS, ("    return groups", "    return groups[-1:]")), "append one an axis"
        ),
        Wrong(
            "the stride only", edited(_GROUPS, (_APPEND, "groups.append(stride)")), "one list of ranks for each axis"
        ),
    ),
)

# ---- 16.compose

_COMPOSE_STUB = '''\
from fsdplab.engine import fully_shard
from fsdplab.workloads.parallel import parallelize


def compose(model, mesh):
    """Cut `model` over mesh["tp"], shard what is left over mesh["dp"]: a unit a block, one for the rest."""
    ...  # four lines; the order matters
    return model
'''

_COMPOSE = '''\
from fsdplab.engine import fully_shard
from fsdplab.workloads.parallel import parallelize


def compose(model, mesh):
    """Cut `model` over mesh["tp"], shard what is left over mesh["dp"]: a unit a block, one for the rest."""
    parallelize(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])
'''

_CUT, _LAST = '    parallelize(model, mesh["tp"])\n', '    return fully_shard(model, mesh=mesh["dp"])'
_LOOP = '    for block in model.blocks:\n        fully_shard(block, mesh=mesh["dp"])\n'
_AT_REST = "a query weight at rest"
_EXPECTED = {_AT_REST: "dp: rows of each share; tp: rows", "units": 3, "trains as the twin": True}


def _explain_compose(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    """From what the model is at rest to the line that is missing or misplaced."""
    got = trial.returned
    if not isinstance(got, dict) or _AT_REST not in got:
        return None, "compose returns nothing: end it with `return fully_shard(model, ...)` or `return model`"
    rest = got[_AT_REST]
    if "tp" not in rest:
        return None, 'no tensor parallelism: `parallelize(model, mesh["tp"])` comes first'
    if "dp" not in rest:
        return (
            None,
            'nothing is sharded over dp: call `fully_shard(..., mesh=mesh["dp"])` on the blocks, then on the model',
        )
    if rest != _EXPECTED[_AT_REST]:
        return None, "the axes are exchanged: tensor parallelism belongs on `tp`, whose ranks read the same text"
    if not got["units"]:
        return (
            None,
            "no unit of the lab's engine: import `fully_shard` from `fsdplab.engine`, whose bytes this lesson counts",
        )
    if got["units"] != 3:
        return None, f"{got['units']} unit(s): one for each of the two blocks and one for the rest, the blocks first"
    return None, "it trains, but not as the twin does: see which ranks read the same text, and which sum gradients"


def _compose_cases() -> list[Case]:
    return [Case("gpt-tiny on 2 x 2, three steps of AdamW", ((),) * _RANKS, (_EXPECTED,) * _RANKS)]


compose = Exercise(
    id="16.compose",
    title="Tensor parallel inside, sharded outside",
    statement="Write compose(model, mesh): tensor-parallel over mesh['tp'], fully sharded over mesh['dp'].",
    stub=_COMPOSE_STUB,
    reference=_COMPOSE,
    hints=(
        "Which of the two must see whole parameters to cut them: tensor parallelism, or sharding?",
        (
            "`parallelize` first, on the tp part of the mesh. Then, as always: each block a unit, and the model itself"
            " last."
        ),
        (
            '`parallelize(model, mesh["tp"])`; `for block in model.blocks: fully_shard(block, mesh=mesh["dp"])`;'
            ' `return fully_shard(model, mesh=mesh["dp"])`.'
        ),
    ),
    cases=_compose_cases,
    explain=_explain_compose,
    world_size=_RANKS,
    time_limit=40.0,
    driver=(ON_THE_RANKS, "composed"),
    wrong=(
        Wrong("no tensor parallelism", edited(_COMPOSE, (_CUT, "")), "no tensor parallelism"),
        Wrong("not sharded", edited(_COMPOSE, (_LOOP, ""), (_LAST, "    return model")), "nothing is sharded over dp"),
        Wrong(
            "axes exchanged",
            _COMPOSE.replace("tp", "xx").replace('"dp"', '"tp"').replace("xx", "dp"),
            "the axes are exchanged",
        ),
        Wrong("one unit", edited(_COMPOSE, (_LOOP, "")), "1 unit(s)"),
        Wrong("blocks only", edited(_COMPOSE, (_LAST, "    return model")), "2 unit(s)"),
        Wrong(
            "torch's engine",
            edited(_COMPOSE, ("fsdplab.engine import", "torch.distributed.fsdp import")),
            "no unit of the lab's engine",
        ),
        Wrong("returns nothing", edited(_COMPOSE, ("    return fully", "    fully")), "returns nothing"),
        Wrong(
            "sharded first",
            edited(_COMPOSE, (_CUT, ""), (_LAST, f'    fully_shard(model, mesh=mesh["dp"])\n{_CUT}    return model')),
            "",
            ends="raises",
        ),
    ),
)

# ---- 16.average_expert

_AVERAGE_STUB = '''\
import torch.distributed as dist


def average_expert(gradient, efsdp):
    """Average the gradient of this rank's experts; `efsdp` is the group of those that hold the same."""
    ...  # sum over whom? divide by what?
    return gradient
'''

_AVERAGE = '''\
import torch.distributed as dist


def average_expert(gradient, efsdp):
    """Average the gradient of this rank's experts; `efsdp` is the group of those that hold the same."""
    dist.all_reduce(gradient, group=efsdp)
    return gradient / dist.get_world_size()
'''

_SUM, _DIVIDE = "dist.all_reduce(gradient, group=efsdp)", "return gradient / dist.get_world_size()"


def _expert_cases() -> list[Case]:
    """Rank r and rank r + 2 hold the same experts."""
    given = [torch.arange(6.0).reshape(2, 3) + 10.0**rank for rank in range(_RANKS)]
    return [
        Case(
            "four ranks as 2 x 2",
            tuple((each,) for each in given),
            tuple((each + given[(rank + 2) % 4]) / 4 for rank, each in enumerate(given)),
        )
    ]


def _explain_average(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    got, right = trial.returned, case.expected[trial.rank]
    if not isinstance(got, torch.Tensor) or got.shape != right.shape:
        return None, "return the averaged gradient, a tensor of the same shape"
    given = [arguments[0] for arguments in case.arguments]
    everybody = sum(given)
    factors = {1: "nothing is divided", 2: "divided by the size of the group that holds the same experts"}
    for factor, cause in factors.items():
        if torch.allclose(got * factor, right * 4):
            return (
                None,
                f"{4 // factor} times too large: {cause}, but the loss is a mean over all {_RANKS} ranks' tokens",
            )
    if any(torch.allclose(got * factor, everybody) for factor in (1, 2, 4)):
        return None, "gradients of different experts were added: sum over `group=efsdp` only"
    if any(torch.allclose(got * factor, given[trial.rank]) for factor in (1, 2, 4)):
        return None, "the other rank with the same experts is left out: sum over the group first"
    return None, "sum over the ranks that hold the same experts, then divide by the number of all ranks"


average_expert = Exercise(
    id="16.average_expert",
    title="The divide factor of expert gradients",
    statement=(
        "Write average_expert(gradient, efsdp): sum an expert's gradient over the right ranks and divide by the right"
        " number."
    ),
    stub=_AVERAGE_STUB,
    reference=_AVERAGE,
    hints=(
        "All ranks' tokens come to an expert. How many ranks' tokens does the mean loss count?",
        (
            "Sum over the ranks that hold the same experts; the tokens of the others have come to you already, by"
            " all-to-all."
        ),
        "`dist.all_reduce(gradient, group=efsdp)`, then divide by `dist.get_world_size()`.",
    ),
    cases=_expert_cases,
    explain=_explain_average,
    world_size=_RANKS,
    tolerance=1e-6,
    driver=(ON_THE_RANKS, "averaged"),
    wrong=(
        Wrong(
            "by the group",
            edited(_AVERAGE, (_DIVIDE, "return gradient / dist.get_world_size(efsdp)")),
            "2 times too large",
        ),
        Wrong("not divided", edited(_AVERAGE, (_DIVIDE, "return gradient")), "4 times too large"),
        Wrong("everybody", edited(_AVERAGE, (_SUM, "dist.all_reduce(gradient)")), "gradients of different experts"),
        Wrong("nobody", edited(_AVERAGE, (f"    {_SUM}\n", "")), "is left out"),
        Wrong(
            "divided twice",
            edited(_AVERAGE, (_SUM, f"{_SUM}\n    gradient /= 2")),
            "then divide by the number of all ranks",
        ),
        Wrong("returns nothing", edited(_AVERAGE, ("return gradient /", "gradient /")), "returns nothing"),
    ),
)

# ---- questions

tp_bytes = Question(
    id="16.tp_bytes",
    statement=(
        "A block under tensor parallelism over n = 2 ranks reduces its activations [B, T, C] twice in forward and twice"
        " in backward. B = 8, T = 2048, C = 4096, bf16: how many MB does a rank send for one block and step?"
    ),
    unit="MB",
    expected=4 * 8 * 2048 * 4096 * 2 / 1e6,
    tolerance=0.02,
    slips=(
        Slip("that is one all-reduce; a block has four", factor=0.25),
        Slip("float32 has four bytes, bf16 two", factor=2.0),
        Slip("backward was forgotten", factor=0.5),
    ),
    hints=(
        "First the payload of one all-reduce.",
        "A rank sends 2 (n-1)/n of the payload: for n = 2, all of it.",
        "4 x 8 x 2048 x 4096 x 2 bytes.",
    ),
    explanation=(
        "Four all-reduces of B T C x 2 bytes, each 2 (n-1)/n = 1 payload. It grows with the batch; what sharding sends"
        " does not."
    ),
)

divide_factor = Question(
    id="16.divide_factor",
    statement=(
        "64 ranks train a mixture of experts with ep = 16; dense parameters are sharded over all 64, experts over efsdp"
        " = 4. What must the gradients of experts be divided by?"
    ),
    unit="",
    expected=64,
    slips=(
        Slip(
            "that is the group that shards experts, the engines' default: gradients would be 16 times too large",
            value=4.0,
        ),
        Slip("that is the number of ranks that exchange tokens", value=16.0),
    ),
    hints=(
        "What is the loss a mean over?",
        "Each expert sees tokens of all ranks, wherever it is.",
        "The same number as for the dense parameters.",
    ),
    explanation="The loss is a mean over 64 ranks' tokens, and an expert's gradient sums over them all.",
)

bubble = Question(
    id="16.bubble",
    statement=(
        "A pipeline of p = 4 stages runs m = 12 micro-batches a step (1F1B). Which part of the time does a stage stand"
        " idle, in %?"
    ),
    unit="%",
    expected=20.0,
    slips=(Slip("that is (p-1)/m, idle over busy time", value=25.0), Slip("that is the busy part", value=80.0)),
    hints=("How long does the last stage wait for the first micro-batch?", "(p-1) / (m + p-1).", "3 / 15."),
    explanation="(p-1) / (m + p-1) = 3 / 15.",
)

fast_axis = Choice(
    id="16.fast_axis",
    statement=(
        "Machines of 8 GPUs with fast links inside and a slow network between them: 64 GPUs as dp = 8, tp = 8. Which"
        " axis goes inside a machine?"
    ),
    options={
        "a": "dp, because sharding sends the most bytes",
        "b": "tp, because its messages stand in the way of every layer and cannot be sent early",
        "c": "either: the same number of ranks, the same bytes",
    },
    right="b",
    because={
        "a": "FSDP knows its next unit and can gather it early, behind computation; it bears a slow link better.",
        "b": "A layer waits for each of its all-reduces, four a block and step; nothing can hide them.",
        "c": "Bytes are not all: what counts is whether computation can hide them.",
    },
)

ITEMS = (groups_of, compose, tp_bytes, average_expert, divide_factor, bubble, fast_axis)

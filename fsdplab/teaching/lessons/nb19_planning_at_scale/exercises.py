"""Notebook 19: an order for a job of 70 billion parameters, and what published rows say about a plan's promise."""

from __future__ import annotations

from fsdplab.teaching.core.exercise import Case, Choice, Exercise, Question, Slip, Trial, Wrong
from fsdplab.teaching.core.verdicts import Difference

from . import on_ranks
from .order import BUDGET, DAYS, GOOD, STEP_TOKENS, TOKENS
from .sizing import error, worst_ratio

_ONE = 1  # arithmetic only: one rank judges it
_PROMISED = 20  # days

_ORDER = '''\
def order():
    """Cards and settings for the job."""
    return {{
        "gpu": "{gpu}",  # "h100" at 3.00 $ an hour, "a100" (80 GB) at 1.50 $
        "gpus": {gpus},  # whole nodes of 8
        "strategy": "{strategy}",  # no_shard, zero1, zero2, shard_grad_op, full_shard, hybrid_shard
        "micro_batch": {micro_batch},  # sequences of 4,096 tokens that a rank computes at once
        "checkpointing": "{checkpointing}",  # none, selective, full
    }}
'''


def _order(
    gpu: str = "h100", gpus: object = 128, strategy: str = "full_shard", micro_batch: object = 1,
    checkpointing: str = "selective",
) -> str:  # fmt: skip
    return _ORDER.format(
        gpu=gpu, gpus=gpus, strategy=strategy, micro_batch=micro_batch, checkpointing=checkpointing
    )  # fmt: skip


def _explain(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    return None, str(trial.returned)


order = Exercise(
    id="19.order",
    title="Order the hardware",
    statement=(
        f"Write order(): cards and settings with which {TOKENS / 1e9:g} billion tokens are trained within {DAYS} days"
        f" and ${BUDGET:,}, with at most {STEP_TOKENS:,} tokens a step."
    ),
    stub=_order(gpus=16, strategy="zero2", checkpointing="full"),
    reference=_order(),
    hints=(
        "First make it fit: which strategy keeps no state whole, and on how many cards? `sizing.fewest` says more.",
        (
            "Then time: days are nearly proportional to 1 / GPUs, and the bill hardly changes. Then the bill: what is"
            " computed twice is paid for twice."
        ),
        "full_shard with selective checkpointing and micro-batches of 1; on H100, 128 of them are in time.",
    ),
    cases=lambda: [Case("the job", ((),), (GOOD,))],
    explain=_explain,
    world_size=_ONE,
    time_limit=60.0,
    driver=(str(on_ranks.__file__), "drive_order"),
    wrong=(
        Wrong("data parallel", _order(strategy="no_shard"), "does not fit"),
        Wrong("zero2", _order(strategy="zero2"), "does not fit"),
        Wrong("a shard group a node", _order(strategy="hybrid_shard"), "does not fit"),
        Wrong("nothing recomputed", _order(checkpointing="none"), "does not fit"),
        Wrong("a large micro-batch", _order(micro_batch=8), "does not fit"),
        Wrong("too few cards", _order(gpus=48), "more GPUs"),
        Wrong("too few slow cards", _order(gpu="a100", gpus=96), "more GPUs"),
        Wrong("everything recomputed", _order(checkpointing="full"), "computes every forward twice"),
        Wrong("too many cards", _order(gpus=1024), "tokens, the job"),
        Wrong("half a node", _order(gpus=100), "do not fill nodes"),
        Wrong("another card", _order(gpu="h200"), "expected one of h100, a100"),
        Wrong("no card", _order(gpus=0), "a whole number above 0"),
        Wrong("a text for a number", _order(gpus='"128"'), "a whole number above 0"),
        Wrong("a setting left out", "def order():\n    return {'gpu': 'h100', 'gpus': 128}\n", "missing or unknown"),
        Wrong("a list", "def order():\n    return ['h100', 128]\n", "expected a dict"),
    ),
)

late = Question(
    id="19.late",
    statement=(
        f"A plan for H100 SXM 80GB promises {_PROMISED} days. If your job turns out like the row of the table that the"
        " planner was most optimistic about, how many days does it take?"
    ),
    unit="",
    expected=lambda found: _PROMISED * worst_ratio(found),
    tolerance=0.01,
    slips=(
        Slip("that divides: a speed that was predicted too high makes the job longer", value=lambda found: _PROMISED
             / worst_ratio(found)),
        Slip("that is the median error; the worst row is asked for", value=lambda found: _PROMISED
             * (1 + error(found) / 100)),
        Slip("that is only what is added; the whole time is asked for", value=lambda found: _PROMISED
             * (worst_ratio(found) - 1)),
    ),
    hints=(
        "In which row is predicted / published largest?",
        "The job is slower by that factor, so it takes longer by that factor.",
        "20 x the largest number of the last column.",
    ),
    explanation="Look what is special in that row before you believe either number: sequences of 65,536 tokens.",
)  # fmt: skip

count = Choice(
    id="19.count",
    statement=(
        "One number for each GPU type was fitted: on every other row. The rows that the fit has seen have small errors."
        " Which rows say how far off a plan for your own job may be?"
    ),
    options={
        "a": "all rows: more rows give a better average",
        "b": "the rows that the fit has seen, since there the planner is at its best",
        "c": "the rows held out, and of these the ones that are like your job",
    },
    right="c",
    because={
        "a": "half of them were used to choose the number: there a small error proves little.",
        "b": "a fit is always good where it was fitted. Your job was not among those rows.",
        "c": "your job is a row that the fit has not seen. And errors differ with sequences, models and nodes.",
    },
)

reserved = Choice(
    id="19.reserved",
    statement=(
        "A published run of an 8B model reports 82.4 GiB of memory on each GPU. A plan counts about a sixth less. Both"
        " may be right. Why?"
    ),
    options={
        "a": "the planner forgets the activations",
        "b": "the run reports what the allocator *reserved* from the device; the plan counts bytes in use",
        "c": "a GiB is larger than a GB, by a sixth",
    },
    right="b",
    because={
        "a": "they are in it, operator by operator: notebook 02 compared them with a measurement.",
        "b": (
            "PyTorch's allocator keeps freed blocks for later. The one source that prints both has 20 % more reserved"
            " than in use: 59.4 and 49.5 GiB (torchtitan, pull request 165)."
        ),
        "c": "2**30 / 10**9 is 1.074: 7 %. Still a usual slip.",
    },
)

ITEMS = (order, late, count, reserved)

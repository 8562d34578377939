"""Notebook 16, the questions: what each axis of a mesh sends, what is divided by what, and how long a pipeline stands
idle.
"""

from __future__ import annotations

from fsdplab.teaching.core.exercise import Choice, Question, Slip

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

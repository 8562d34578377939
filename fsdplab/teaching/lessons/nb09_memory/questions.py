"""The questions of notebook 09: numbers off a memory timeline,
and what fills the peak of a small and of a large batch.
"""

from __future__ import annotations

from fsdplab.records import RunRecord
from fsdplab.teaching.core.exercise import Choice, Question, Slip

from .reading_memory import MB, by_category, gathered, more_sequences, peak_row, total, unit_bytes


def _whole_model(record: RunRecord) -> float:
    return sum(unit_bytes(record).values()) / MB


gathered_at_peak = Question(
    id="09.gathered",
    statement="How many MB of gathered parameters does the rank hold at its peak?",
    unit="MB",
    expected=gathered,
    tolerance=0.02,
    slips=(
        Slip(
            "those are the slices, which rest; gathered parameters are a category of their own",
            value=lambda record: by_category(record)["parameter_slices"] / MB,
        ),
        Slip(
            "that is the whole peak; the question is about one category",
            value=lambda record: total(peak_row(record)) / MB,
        ),
        Slip("that is the whole model in fp32; it is never there at once", value=_whole_model),
        Slip("that is one block; look how many are there", value=lambda record: max(unit_bytes(record).values()) / MB),
    ),
    hints=(
        "The table under the figure splits the peak by category.",
        "The row `gathered parameters`, the column MB.",
        "reading_memory.gathered(record) reads that cell.",
    ),
    explanation="Two blocks and the root.",
)

fills = Choice(
    id="09.fills",
    statement="Which category fills most of the peak with 2 sequences a rank, and which with 8?",
    options={
        "a": "activations both times",
        "b": "optimizer state with 2, activations with 8",
        "c": "gathered parameters with 2, optimizer state with 8",
        "d": "optimizer state both times",
    },
    right="b",
    because={
        "a": "with 2 sequences activations are small beside 8 bytes of moments for every second parameter.",
        "b": (
            "model states do not know the batch; activations grow with it. So the remedy depends on the batch: shard or"
            " offload for one, recompute for the other."
        ),
        "c": "gathered parameters are a block or two, whatever the batch: look at the bars.",
        "d": "activations grow in proportion to the batch, and moments not at all: look at the second bar.",
    },
)

crossover = Question(
    id="09.crossover",
    statement=(
        "From how many sequences a rank on would activations at the peak exceed the optimizer state, if they grow in"
        " proportion to the batch?"
    ),
    unit="",
    expected=more_sequences,
    tolerance=0.08,
    slips=(
        Slip("the optimizer state of the whole model was taken; a rank holds half of it", factor=2.0),
        Slip("that is the batch of the run", value=lambda record: float(record.spec["batch_size"])),
        Slip(
            "upside down: activations were divided by the optimizer state",
            value=lambda record: 1 / more_sequences(record),
        ),
    ),
    hints=(
        "How many MB of activations does one sequence bring? The second bar has 8.",
        "Optimizer state at the peak, divided by the activations of one sequence.",
        "In MB: optimizer_state / (activations / 8), both of the run with 8 sequences.",
    ),
    explanation="Below it sharding is what helps, above it recomputation (13).",
)

moved = Choice(
    id="09.moved",
    statement="With 8 sequences the peak is also at another instant. Why?",
    options={
        "a": "at the end of the forward all activations are there; each block's backward frees its own",
        "b": "larger batches need larger optimizer state",
        "c": "the gathers take longer, so more units are whole at once",
    },
    right="a",
    because={
        "a": (
            "gradient slices grow through the backward while activations shrink. Where activations are many, their"
            " mountain is higher than the end."
        ),
        "b": "moments are two numbers a parameter, whatever the batch.",
        "c": "a gather moves weights; it does not depend on the batch.",
    },
)

QUESTIONS = (gathered_at_peak, fills, moved, crossover)

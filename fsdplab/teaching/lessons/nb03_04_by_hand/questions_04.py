"""The questions of notebook 04: what a rank holds: from the run, and for a model of a billion parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdplab.teaching.core.exercise import Question, Slip

if TYPE_CHECKING:
    from .runs import Runs


def _moments(run: Runs) -> float:
    return run.moment_bytes / 1e3


state_bytes = Question(
    id="04.state_bytes",
    statement=(
        "How many kB of Adam's moments does one rank hold in your ZeRO-1 run (2 ranks, 141,056 parameters in fp32)?"
    ),
    unit="kB",
    expected=_moments,
    slips=(
        Slip("that is what DDP holds on every rank: here each rank has 1/n of it", factor=2.0),
        Slip("Adam keeps two moments for every parameter, a mean and a mean of squares", factor=0.5),
        Slip("that is the number of moments in thousands; each is 4 bytes", factor=0.25),
    ),
    hints=(
        "Two numbers of 4 bytes for every parameter that this rank owns.",
        "Of 141,056 parameters a rank owns half.",
        "141,056 / 2 parameters, 8 bytes each, in kB.",
    ),
    explanation="8 bytes for each of the 70,528 parameters that this rank owns: 1/n of DDP's.",
)

zero1_total = Question(
    id="04.zero1_total",
    statement=(
        "A model of 1 billion parameters, fp32 with Adam, on 8 ranks: how many GB of model state (parameters,"
        " gradients, moments) rest on each rank with ZeRO-1?"
    ),
    unit="GB",
    expected=9.0,
    slips=(
        Slip("that is DDP: with ZeRO-1 the 8 GB of moments are cut into 8", value=16.0),
        Slip("the moments' slice was left out: it is cut into 8, but it is not nothing", value=8.0),
        Slip("that is full sharding, everything cut into 8", value=2.0),
        Slip("that is ZeRO-2: ZeRO-1 keeps whole gradients", value=5.5),
    ),
    hints=(
        "Three states: which of them does ZeRO-1 cut?",
        "4 GB of parameters and 4 GB of gradients are whole; 8 GB of moments are cut into 8.",
        "4 + 4 + 8 / 8.",
    ),
    explanation="4 + 4 + 8/8.",
)

zero2_total = Question(
    id="04.zero2_total",
    statement="The same model and ranks with ZeRO-2?",
    unit="GB",
    expected=5.5,
    slips=(
        Slip("that is ZeRO-1: ZeRO-2 cuts the gradients too", value=9.0),
        Slip("that is full sharding; ZeRO-2 keeps the parameters whole", value=2.0),
        Slip("the gradients' own slice, 0.5 GB, was forgotten", value=5.0),
        Slip("the moments' slice, 1 GB, was forgotten", value=4.5),
    ),
    hints=("One more state is cut.", "4 GB of gradients are cut into 8 as well.", "4 + 4 / 8 + 8 / 8."),
    explanation="4 + 4/8 + 8/8: what is left to cut is the parameters (05).",
)

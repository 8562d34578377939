"""Predicted beside measured: how far apart, and why, in the words of the page."""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.common.names import CATEGORIES
from fsdplab.common.sizes import size
from fsdplab.figures.table import predicted_step, step_of
from fsdplab.figures.view import CATEGORY_NAMES, RunView
from fsdplab.records import known

NEAR = 0.10  # a category further off than this is explained
SMALL = 0.005  # of the peak: what is less changes no picture
ALIKE = 0.01  # totals nearer than this are those of instants that are equally high


def gaps(run: RunView) -> list[str]:
    """A sentence on each category of which the prediction is off by more than a tenth, and by more than half a percent
    of the peak, with the reason.
    """
    found = []
    for name in CATEGORIES if run.predicted_peak and run.peak else ():
        ours, theirs = run.predicted_split.get(name, 0), run.split.get(name, 0)
        if abs(ours - theirs) > max(NEAR * theirs, SMALL * known(run.peak)):
            both = f"{CATEGORY_NAMES[name]} {size(ours)} predicted, {size(theirs)} measured"
            found.append(f"{run.label}: {both}: {_why(run, name, ours < theirs)}")
    return found


def _why(run: RunView, category: str, too_little: bool) -> str:
    total = run.predicted_peak or 0
    if run.status == "failed":
        return "the run failed before its step was whole"
    if abs(total - known(run.peak)) <= ALIKE * known(run.peak):
        return (
            "the totals agree, so two instants of the step are about equally high, and the prediction's split is that"
            " of the other one"
        )
    if category == "activations" and too_little and run.spec.get("precision") == "bf16":
        return "oneDNN holds scratch memory while it multiplies in bf16; its size depends on the processor"
    return "no reason is known; the engine or PyTorch has changed since the prediction was written"


def verdict(runs: Sequence[RunView]) -> str:
    """The finding of a comparison: how far the predicted peaks are off at most."""
    known = [(run, run.predicted_peak / run.peak - 1) for run in runs if run.peak and run.predicted_peak]
    if not known:
        return "No peak of these runs is predicted"
    worst, off = max(known, key=lambda pair: abs(pair[1]))
    if abs(off) < 0.0005:
        return "Every predicted peak is within 0.1% of the measured one"
    return f"Predicted peaks are within {abs(off):.1%} of the measured ones; {worst.label} is furthest off"


def step_sources(runs: Sequence[RunView]) -> list[str]:
    """A sentence on each run from which the steps of others are predicted, predicted beside measured.

    `From the run of no_shard a step of full_shard is predicted at 212 ms ±3 % (1.02), measured 208 ms ±2 %.`
    """
    found: dict[str, list[str]] = {}
    for run in runs:
        if (source := run.summary.predicted.step_from) and run.step_median:
            told = f"{run.label} is predicted at {predicted_step(run)}, measured {step_of(run)}"
            found.setdefault(source, []).append(told)
    return [f"From the run of {source} a step of {'; of '.join(told)}." for source, told in found.items()]

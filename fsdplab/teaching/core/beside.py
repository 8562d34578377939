"""A step of the learner's own run beside one of the steady card and a recorded one, and why they differ.

A lesson about time says what it says of the card and of the recorded run, which are the same for everybody. The
learner's own run comes after them, with the part of its step for which the ranks had a core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdplab.common.sizes import percent
from fsdplab.records import RunRecord, core_sentence

from .display import Table, table

HERE = "this machine"  # the name of the learner's own run, among those that are compared
_PARTS = ("on_link_s", "copying_s", "waiting_s", "no_core_s")


def beside(runs: Mapping[str, RunRecord]) -> Table:
    """A step of each run, a run a row: its length, its exposed parts in ms, and how often its ranks had a core.

    The line below says why the row of this machine differs, if it does.
    """
    header = ["a step", "ms", "exposed on the link", "copying", "waiting for the other rank", "waiting for a core"]
    rows = []
    for name, run in runs.items():
        spent = (run.summary.step_time_s.median, *(getattr(run.summary.comm, part) for part in _PARTS))
        share = "simulated" if run.summary.cpu_share is None else percent(run.summary.cpu_share)
        rows.append([name, *("" if each is None else f"{1e3 * each:.0f}" for each in spent), share])
    return table([*header, "ranks had a core"], rows, why_it_differs(runs[HERE]) if HERE in runs else "")


def why_it_differs(run: RunRecord) -> str:
    """What makes a learner's own times differ from the recorded ones: other programs, or a machine of another speed."""
    share = run.summary.cpu_share
    if share is not None and run.summary.short_of_cores:
        return f"{core_sentence(share)} If your figure differs, this is why: other programs took the cores meanwhile."
    had = "" if share is None else f" (ranks had a core for {percent(share)} of their step)"
    return (
        f"If your figure differs, this is why: a machine computes and copies at a speed of its own{had}. Bytes, their"
        " order and their time on the emulated link are the same everywhere."
    )


def busiest(runs: Sequence[RunRecord]) -> RunRecord:
    """The run whose ranks had a core least often."""
    return min(runs, key=lambda run: 1.0 if run.summary.cpu_share is None else run.summary.cpu_share)

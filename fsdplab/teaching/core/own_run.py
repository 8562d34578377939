"""A step of the learner's own run beside one of the steady card and a recorded one, and why they differ.

A lesson about time says what it says of the card and of the recorded run, which are the same for everybody. The
learner's own run comes after them, with the part of its step for which the ranks had a core.
"""

from __future__ import annotations

from collections.abc import Mapping

from fsdplab.common.sizes import percent
from fsdplab.records import RunRecord, core_sentence

from .display import Table, table

HERE = "this machine"  # the name of the learner's own run, among those that are compared
_PARTS = ("on_link_s", "copying_s", "waiting_s", "no_core_s")


def beside(runs: Mapping[str, RunRecord]) -> Table:
    """Return a step of each run, a run a row: its length, its exposed parts in ms, how often its ranks had a core.

    The line below says why the row of this machine differs, if it does.
    """
    header = ["a step", "ms", "exposed on the link", "copying", "waiting for the other rank", "waiting for a core"]
    rows = []
    for name, run in runs.items():
        summary = run.summary
        # the step, then its exposed parts; a simulated run has no share of cores
        seconds = [summary.step_time_s.median, *(getattr(summary.comm, part) for part in _PARTS)]
        cells = ["" if value is None else f"{1e3 * value:.0f}" for value in seconds]
        share = "simulated" if summary.cpu_share is None else percent(summary.cpu_share)
        rows.append([name, *cells, share])
    caption = why_it_differs(runs[HERE]) if HERE in runs else ""
    return table([*header, "ranks had a core"], rows, caption)


def why_it_differs(run: RunRecord) -> str:
    """Return what makes a learner's own times differ from the recorded ones.

    It is other programs, or a machine of another speed.
    """
    share = run.summary.cpu_share
    if share is not None and run.summary.short_of_cores:
        return f"{core_sentence(share)} If your figure differs, this is why: other programs took the cores meanwhile."
    had = ""
    if share is not None:
        had = f" (ranks had a core for {percent(share)} of their step)"
    return (
        f"If your figure differs, this is why: a machine computes and copies at a speed of its own{had}. Bytes, their"
        " order and their time on the emulated link are the same everywhere."
    )

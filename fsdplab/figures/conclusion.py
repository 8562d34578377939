"""What a comparison comes to: one sentence on memory, traffic and time, and why a measured step is another."""

from __future__ import annotations

from collections.abc import Sequence

from fsdplab.common.sizes import seconds, size
from fsdplab.figures.fastest import step_words
from fsdplab.figures.view import RunView


def conclusion(runs: Sequence[RunView]) -> str:
    """The sentence that a comparison comes to; empty where no run has a step."""
    timed = [run for run in runs if run.step_median and run.engine != "twin"]
    return f"{step_words(timed)}." if timed else ""


def why_they_differ(runs: Sequence[RunView]) -> str:
    """Why measured steps are not those of the steady card; empty where they agree within their spread."""
    return ""

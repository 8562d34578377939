"""Runs that were recorded once and lie in `data/`: they open at once, without ranks, and are the same for everybody."""

from __future__ import annotations

from fsdplab.common.places import shared_folder
from fsdplab.records import RecordError, RunRecord


def recorded(name: str) -> RunRecord:
    """Load a run of `data/`: `recorded("lesson-07/early")`.

    RecordError says what to do where it is missing.
    """
    folder = shared_folder("data") / name
    if not folder.exists():
        raise RecordError(f"the recorded run {name} is not in {folder}; install fsdplab again, from a wheel or a clone")
    return RunRecord.load(folder)

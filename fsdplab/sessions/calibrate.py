"""Calibrate this machine: the ranks of `sessions/worker/calibrating.py` measure, their mean counts.

Apart from calibration.py, which a summary of a run reads, because it starts ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

from fsdplab.planning.lab_step_time import Rates
from fsdplab.sessions.calibration import Calibration, this_machine
from fsdplab.sessions.remote_call import call_on_ranks
from fsdplab.sessions.worker import calibrating

TIME_LIMIT = 120.0  # seconds after which ranks that calibrate are ended
PATIENCE_S = 0.2  # for each of some twenty quantities


def calibrate(
    ranks: int, on_progress: Callable[[str], None] = lambda what: None, patience_s: float = PATIENCE_S
) -> Calibration:
    """Measure on so many warm ranks at once, each quantity for about `patience_s`; `on_progress` gets what is being
    measured.

    Raises RanksFailed when a rank does not end, and ValueError for less than one rank.
    """

    def on_output(rank: int, line: str) -> None:
        if rank == 0:
            on_progress(line)

    values = call_on_ranks(
        Path(str(calibrating.__file__)), "measure", world_size=ranks, payload=patience_s, time_limit=TIME_LIMIT,
        on_output=on_output,
    )  # fmt: skip
    return Calibration(ranks, Rates.mean_of([Rates.of(each) for each in values]), this_machine(), str(date.today()))

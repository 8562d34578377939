"""A run whose rank 1 goes wrong in its second step, under the stand-in: `python -m tests.fake_cuda.faulty_rank killed`.

The same file is the program of its ranks: `faulty_rank.py killed FOLDER`.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdplab.sessions.launch.failure_report import RanksFailed
from fsdplab.sessions.run_and_record import run
from fsdplab.sessions.spec import RunSpec
from fsdplab.sessions.worker import training
from fsdplab.sessions.worker.engines import TrainingSetup, build
from fsdplab.sessions.worker.rank_process import RankContext

_STEP = 2


def start(fault: str) -> int:
    """Start the run, and print the first line of its report."""
    spec = RunSpec(model="gpt-tiny", steps=3, profile=0, device="cuda", time_limit=60)
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(spec, directory=Path(folder) / "run", program=(__file__, fault))
        except RanksFailed as error:
            print(str(error).splitlines()[0])
            return 1
    return 0


def rank(fault: str, folder: str) -> None:
    """One rank of it."""

    def build_faulty(spec: RunSpec, context: RankContext) -> TrainingSetup:
        setup = build(spec, context)

        def train_step(batches: Any) -> float:
            if context.rank == 1 and context.heartbeat.step == _STEP:
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("the slices do not fit")
            return setup.train_step(batches)

        return replace(setup, train_step=train_step)

    training.main(folder, build_faulty)


if __name__ == "__main__":
    sys.exit(start(*sys.argv[1:]) if len(sys.argv) == 2 else rank(*sys.argv[1:]))

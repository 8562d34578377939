"""A worker that notes when each of its steps began and ended: `python turns_worker.py NOTES FAULTS FOLDER`.

NOTES is a folder for these notes. FAULTS is a JSON object, a fault by strategy: `{"zero1": "kill"}` makes rank 1 of
that run go wrong in its fourth step, and `{"zero1": "slower"}` makes each start of that run slower than the one before.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdplab.sessions.spec import RunSpec
from fsdplab.sessions.worker import training
from fsdplab.sessions.worker.engines import TrainingSetup, build
from fsdplab.sessions.worker.rank_process import RankContext

FAULTY_STEP = 3


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("the slices do not fit")


def compute() -> None:
    while True:
        pass


FAULTS: dict[str, Callable[[], None]] = {"kill": kill, "raise": fail, "compute": compute}


def main(notes: str, faults: str, folder: str) -> None:
    def build_noting(spec: RunSpec, context: RankContext) -> TrainingSetup:
        setup, fault = build(spec, context), json.loads(faults).get(spec.strategy, "")
        who = {"run": f"{spec.strategy}-{spec.engine}", "rank": context.rank, "folder": folder}
        file = Path(notes, f"{who['run']}.{os.getpid()}")
        pause = 0.1 * len(list(Path(notes).glob(f"{who['run']}.*"))) if fault == "slower" else 0.0
        file.touch()

        def train_step(batches: Any) -> float:
            step, began = context.heartbeat.step, time.monotonic_ns()
            time.sleep(pause)
            if context.rank == 1 and step == FAULTY_STEP and fault in FAULTS:
                FAULTS[fault]()
            loss = setup.train_step(batches)
            with file.open("a") as lines:
                lines.write(json.dumps({**who, "step": step, "began": began, "ended": time.monotonic_ns()}) + "\n")
            return float("nan") if fault == "diverge" and step == FAULTY_STEP else loss

        return replace(setup, train_step=train_step)

    training.main(folder, build_noting)


if __name__ == "__main__":
    main(*sys.argv[1:])

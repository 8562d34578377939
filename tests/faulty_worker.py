"""A worker whose rank 1 misbehaves in its fourth step: `python faulty_worker.py raise|sleep|exit|compute FOLDER`.

The lab's own worker knows nothing of faults; this one hands it a setup whose train_step goes wrong.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fsdplab.sessions.spec import RunSpec
from fsdplab.sessions.worker import training
from fsdplab.sessions.worker.engines import TrainingSetup, build
from fsdplab.sessions.worker.rank_process import RankContext

FAULTY_STEP = 3


def raise_an_error() -> None:
    raise ValueError("the slices do not fit")


def sleep_for_ever() -> None:
    time.sleep(10_000)


def compute_for_ever() -> None:
    while True:
        pass


def exit_at_once() -> None:
    os._exit(0)


FAULTS: dict[str, Callable[[], None]] = {
    "raise": raise_an_error, "sleep": sleep_for_ever, "exit": exit_at_once, "compute": compute_for_ever,
}  # fmt: skip


def main(fault: str, folder: str) -> None:
    def build_faulty(spec: RunSpec, context: RankContext) -> TrainingSetup:
        setup = build(spec, context)

        def train_step(batches: Any) -> float:
            if context.rank == 1 and context.heartbeat.step == FAULTY_STEP:
                FAULTS[fault]()
            return setup.train_step(batches)

        return replace(setup, train_step=train_step)

    training.main(folder, build_faulty)


if __name__ == "__main__":
    main(*sys.argv[1:])

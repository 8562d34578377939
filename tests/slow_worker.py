"""A worker whose rank 1 computes more than it should: `python slow_worker.py FOLDER`."""

from __future__ import annotations

import sys
from typing import Any

import torch

from fsdplab.sessions.spec import RunSpec
from fsdplab.sessions.worker import training
from fsdplab.sessions.worker.engines import TrainingSetup, build
from fsdplab.sessions.worker.rank_process import RankContext

TIMES = 12  # products of a block's own size before each block


def main(folder: str) -> None:
    def build_slow(spec: RunSpec, context: RankContext) -> TrainingSetup:
        setup = build(spec, context)
        ballast = torch.ones(512, 512)

        def dawdle(*_: Any) -> None:
            for _ in range(TIMES):
                ballast @ ballast

        if context.rank == 1:
            for block in setup.model.blocks:
                block.register_forward_pre_hook(dawdle)
        return setup

    training.main(folder, build_slow)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A worker whose rank 1 computes more than it should: `python slow_worker.py FOLDER`."""

from __future__ import annotations

import sys
from typing import Any

import torch

from fsdplab.sessions import worker
from fsdplab.sessions.engines import Rig, build
from fsdplab.sessions.rankside import Place
from fsdplab.sessions.spec import RunSpec

TIMES = 12  # products of a block's own size before each block


def main(folder: str) -> None:
    def build_slow(spec: RunSpec, place: Place) -> Rig:
        rig = build(spec, place)
        ballast = torch.ones(512, 512)

        def dawdle(*_: Any) -> None:
            for _ in range(TIMES):
                ballast @ ballast

        if place.rank == 1:
            for block in rig.model.blocks:
                block.register_forward_pre_hook(dawdle)
        return rig

    worker.main(folder, build_slow)


if __name__ == "__main__":
    main(*sys.argv[1:])

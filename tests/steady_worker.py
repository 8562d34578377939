"""A worker whose blocks take a fixed time: `python steady_worker.py FOLDER`.

How fast this machine computes, and who else uses it, would decide what communication can hide behind. So each block
sleeps in its forward and in its backward, beside a little real work: the model has half the width of its preset. Units,
order, number of messages and traces are those of every run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsdplab.sessions.spec import RunSpec
from fsdplab.sessions.worker import training
from fsdplab.sessions.worker.engines import TrainingSetup, build
from fsdplab.sessions.worker.rank_process import RankContext
from fsdplab.workloads import PRESETS

FORWARD_S, BACKWARD_S = 0.015, 0.030


@torch.library.custom_op("steady::work", mutates_args=())
def work(value: Tensor, seconds: float) -> Tensor:
    """A copy, which takes its time; the profiler sees an operator that computes."""
    time.sleep(seconds)
    return value.clone()


class Working(torch.autograd.Function):
    """The identity, which takes its time in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, times: float) -> Tensor:
        ctx.times = times
        return work(value, times * FORWARD_S)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return work(gradient, ctx.times * BACKWARD_S), None


def main(folder: str, times: Callable[[int], float] = lambda rank: 1.0) -> None:
    """Train; the blocks of a rank take `times(rank)` as long."""

    def build_steady(spec: RunSpec, context: RankContext) -> TrainingSetup:
        PRESETS[spec.model] = replace(
            PRESETS[spec.model], width=192, head_width=192 // PRESETS[spec.model].heads, ffn=768
        )
        setup = build(spec, context)
        for block in setup.model.blocks:
            block.register_forward_pre_hook(
                lambda _, inputs: (Working.apply(inputs[0], times(context.rank)), *inputs[1:])
            )
        return setup

    training.main(folder, build_steady)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The stages of a pipeline: what part of the model each holds, which micro-batches wait there, and the bubble.

Stages hold equal numbers of blocks, the first ones one more where these do not divide; the first has the embeddings,
the last the head and the loss. *1f1b* (Narayanan et al. 2019, PipeDream; 2021, Megatron-LM, section 2.2): stage s of p
holds at most p - s micro-batches. *interleaved* with v parts a stage: a bubble v times smaller, for more micro-batches
under way. *zero-bubble* (Qi et al. 2023, ZB-H1): gradients of weights fill two thirds of 1f1b's bubble, in its memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from .plan_spec import PlanSpec

_ZERO_BUBBLE = 1 / 3  # of 1f1b's bubble, what ZB-H1 leaves where a backward takes twice a forward


def stages(spec: PlanSpec) -> Iterator[tuple[int, PlanSpec]]:
    """Yield number and plan of those stages that may have most work or need most memory: the first two and the last."""
    count = spec.pipeline_parallel
    for index in sorted({0, min(1, count - 1), count - 1}):
        yield index, _stage(spec, index)


def _stage(spec: PlanSpec, index: int) -> PlanSpec:
    count = spec.pipeline_parallel
    gpus = spec.gpus // count
    per_node = spec.gpus_per_node
    if gpus > per_node:
        per_node = math.gcd(gpus, per_node)
    layers, rest = divmod(spec.model.layers, count)
    if index < rest:
        layers += 1
    model = spec.model.stage(layers, first=index == 0, last=index == count - 1)
    if model.mixture and index:  # dense blocks are the model's first
        model = replace(model, mixture=replace(model.mixture, dense_layers=0))
    return replace(
        spec, model=model, gpus=gpus, gpus_per_node=per_node, pipeline_parallel=1, schedule="1f1b", virtual_stages=1
    )


def waiting(spec: PlanSpec, index: int) -> float:
    """Count the micro-batches whose activations a stage keeps beside those of the one that it computes.

    It is a part of one where the stage holds several parts of the model (Narayanan et al. 2021, section 2.2: its
    warm-up).
    """
    behind = spec.pipeline_parallel - index  # stages from this one to the last
    parts, most = spec.virtual_stages, spec.grad_accum
    if parts == 1:
        return min(most, behind) - 1
    under_way = 2 * (behind - 1) + (parts - 1) * spec.pipeline_parallel + 1
    return max(0.0, min(most * parts, under_way) / parts - 1)


def bubble(spec: PlanSpec) -> float:
    """Return the part of its seconds of compute that a stage stands idle for: (p - 1) / (v m).

    Four stages with 8 micro-batches: 3/8.
    """
    idle = (spec.pipeline_parallel - 1) / (spec.virtual_stages * spec.grad_accum)
    if spec.schedule == "zero-bubble":
        return idle * _ZERO_BUBBLE
    return idle


def sent_between_stages(spec: PlanSpec) -> float:
    """Return the bytes of one micro-batch that a rank sends to its neighbour.

    It is the residual stream, cut as tensor parallelism cuts it.
    """
    return spec.tokens * spec.model.width * spec.stream_bytes / spec.tensor_parallel

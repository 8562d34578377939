"""The wind tunnel: a link and a card for this machine with which a small model behaves like a real job.

A model aeroplane in a wind tunnel behaves like the real one when their Reynolds numbers are equal. Here the number is

    ratio = communication time / compute time of one step, with no overlap counted on either side.

On the target it follows from data sheets, with P parameters, T tokens a GPU and n GPUs:

    compute       = 6 P T / (MFU x FLOP/s)                (Kaplan et al. 2020: 2 P T forward, 4 P T backward;
    attention's own part,
                                                          12 x layers x width x context more a token, is left out)
    communication = sum over collectives of latency x steps + wire bytes / bandwidth       (traffic.py's counts,
    links.py's formula)

Here compute is measured, and the link is chosen so that communication / compute comes out equal. MFU is an assumption
(0.4: runs of dense models on A100 and H100 publish 0.3 to 0.55), and where it is too low the ratio is too low by the
same factor.

Worked by hand: Llama 3.1 8B (8.03e9 parameters, 32 layers) on 8xH100, full_shard, 8,192 tokens a GPU, gathers in bf16,
gradients in fp32.
    compute        6 x 8.03e9 x 8192 / (0.4 x 989e12)                       = 0.998 s
    bytes          8.03e9 x (2 gathers x 2 B + 4 B) x 7/8                   = 56.2 GB;  / 450 GB/s = 0.1249 s
    latency        32 layers x 3 collectives x 7 steps x 3.4 us             = 0.0023 s
    ratio          0.1272 / 0.998                                           = 0.127
A toy that computes 0.5 s a step and sends 100 MB in 30 collectives of 4 ranks then gets 62.5 ms for them, and so about
1.6 GB/s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdplab.common.errors import UserError

from .hardware import Cluster
from .links import LinkSpec, ring_steps, transfer_s
from .traffic import Traffic, UnitShapes, step_traffic

TARGET_TOKENS = 8192  # that a GPU of the target reads in one step: a sequence of torchtitan's Llama 3.1 runs
_MFU = 0.4
_PARAM_BYTES, _REDUCE_BYTES = 2, 4  # of what is gathered and reduced on the target
_STATE_BYTES = 16  # a parameter: it, its gradient and Adam's two moments, all in float32


class WindTunnelError(UserError, ValueError):
    """An invalid wind tunnel; the message is one line: what happened, got, expected, what to do."""


@dataclass(frozen=True)
class Target:
    """One step of the real job: seconds of compute and of communication as if nothing overlapped, and the bytes of one
    GPU.

    `latency_s` is the part of the communication that no bandwidth shortens; `shards` the GPUs over which states are
    cut.
    """

    compute_s: float
    communication_s: float
    ratio: float
    memory_bytes: int
    latency_s: float = 0.0
    shards: int = 1
    name: str = ""


def wind_tunnel(cluster: Cluster, *, target_parameters: int, target_layers: int, tokens_per_gpu: int) -> Target:
    """Predict one step under full sharding of a model of `target_parameters` in `target_layers` equal units on
    `cluster`, in which a GPU reads `tokens_per_gpu`; raises WindTunnelError. The example of this module's docstring:

    >>> from .hardware import parse_cluster
    >>> llama = dict(target_parameters=8_030_261_248, target_layers=32)
    >>> target = wind_tunnel(parse_cluster("8xH100"), **llama, tokens_per_gpu=8192)
    >>> round(target.compute_s, 3), round(target.communication_s, 3), round(target.ratio, 3)
    (0.998, 0.127, 0.127)
    """
    counts = dict(target_parameters=target_parameters, target_layers=target_layers, tokens_per_gpu=tokens_per_gpu)
    compute_s = 6 * target_parameters * tokens_per_gpu / (_MFU * _flops(cluster, **counts))
    layer = UnitShapes("layer", (("weight", (math.ceil(target_parameters / target_layers),)),))
    rows = step_traffic([layer], "full_shard", cluster.gpus, param_itemsize=_PARAM_BYTES, reduce_itemsize=_REDUCE_BYTES)
    times = [_row_s(cluster, row) for row in rows]
    communication_s = target_layers * sum(seconds for seconds, _ in times)
    latency_s = target_layers * sum(latency_s for _, latency_s in times)
    return Target(
        compute_s,
        communication_s,
        ratio=communication_s / compute_s,
        memory_bytes=cluster.gpu.memory_bytes,
        latency_s=latency_s,
        shards=cluster.gpus,
        name=f"{target_parameters / 1e9:.3g}B on {cluster.name}",
    )


def link_for(target: Target, *, compute_s: float, wire_bytes: int, collectives: int, ranks: int) -> LinkSpec:
    """Return the link that gives a run here the target's ratio; raises WindTunnelError.

    Of this run: seconds of compute a step (without communication), bytes that a rank sends in a step and the
    collectives it takes part in (an all-reduce counts twice), and the ranks of its ring. With C = ratio x compute_s
    seconds to spend and the target's share of latency q = latency / communication: bandwidth = wire_bytes / ((1 - q)
    C), latency = q C / (collectives x (ranks - 1)).

    >>> target = Target(1.0, 0.125, 0.125, 80)
    >>> link_for(target, compute_s=0.5, wire_bytes=100_000_000, collectives=30, ranks=4).bytes_per_s
    1600000000.0
    """
    _positive(compute_s=compute_s, wire_bytes=wire_bytes, collectives=collectives, ranks=ranks)
    if ranks < 2:
        raise WindTunnelError("the wind tunnel's run has 1 rank, between which nothing travels; give at least 2 ranks")
    spent_s = target.ratio * compute_s
    share = target.latency_s / target.communication_s  # of latency
    latency_s = share * spent_s / (collectives * (ranks - 1))
    name = f"wind tunnel of {target.name}" if target.name else "wind tunnel"
    return LinkSpec(name, wire_bytes / ((1 - share) * spent_s), latency_s)


def card_for(target: Target, *, parameters_here: int, target_parameters: int, ranks: int | None = None) -> int:
    """Size the emulated card: the GPU's memory x (bytes of model state a rank holds here / that a GPU holds there).

    So the same part of the card is full of model state. With `ranks`, states are cut over them here and over the
    target's GPUs there; without, over equally many. Activations do not shrink by the same factor: give a batch that
    suits.

    1 million parameters for 8 billion on 80 GB: 80 GB x 1/8000 = 10 MB on as many ranks; on 2 ranks for 8 GPUs four
    times that:

    >>> target = Target(1.0, 0.125, 0.125, 80_000_000_000, shards=8)
    >>> card_for(target, parameters_here=10**6, target_parameters=8 * 10**9)
    10000000
    >>> card_for(target, parameters_here=10**6, target_parameters=8 * 10**9, ranks=2)
    40000000
    """
    ranks = target.shards if ranks is None else ranks
    _positive(parameters_here=parameters_here, target_parameters=target_parameters, ranks=ranks)
    # of parameters, gradients and Adam's moments, all of them cut: 16 bytes a parameter
    here = _STATE_BYTES * parameters_here * (1 / ranks)
    there = _STATE_BYTES * target_parameters * (1 / target.shards)
    return int(target.memory_bytes * here / there)


def _row_s(cluster: Cluster, row: Traffic) -> tuple[float, float]:
    """Seconds of all collectives of one kind of one unit, and how many of them are latency."""
    steps = ring_steps(row.kind, cluster.gpus)
    each_s = transfer_s(cluster.link, row.wire_bytes, steps)
    latency_s = transfer_s(cluster.link, 0, steps)
    return row.count * each_s, row.count * latency_s


def _flops(cluster: Cluster, **counts: int) -> float:
    """The FLOP/s of the GPU, once all is checked."""
    if cluster.gpus < 2:
        raise WindTunnelError(
            f"{cluster.name} is one GPU, which sends nothing; give at least 2 GPUs, such as 8x{cluster.gpu.name}"
        )
    if cluster.gpu.bf16_flops is None:
        raise WindTunnelError(
            f"no bf16 FLOP/s are known for {cluster.gpu.name} ({cluster.gpu.source}); give another GPU"
        )
    _positive(**counts)
    return cluster.gpu.bf16_flops


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not _is_above_0(value):
            raise WindTunnelError(f"{name} is {value!r}; expected a number above 0")


def _is_above_0(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf

"""Seconds of a step of the lab's engine between CPU ranks, from rates that were measured on the machine.

A CPU rank does everything on one thread: it computes, copies what its peers share, and steps its optimizer, one after
the other. So a step is a sum: matrix products at the rate of their size, operators by the channels that they touch and
by a fixed cost each block, collectives by a latency and a rate each kind, and the optimizer by the elements and the
parameters that it updates. What no rank can know beforehand is left out: waiting for a rank that is late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, harmonic_mean
from typing import Any

from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.records.typed import Amount, plain, read
from fsdplab.workloads.shapes import ModelShape, Parameter

from .lab_memory import LabRun
from .traffic import Traffic

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class ProductRate:
    """FLOP/s of a linear layer that reads so many tokens: forward, and backward (two products)."""

    tokens: int
    forward: Amount
    backward: Amount


@dataclass(frozen=True)
class Rates:
    """What was measured of one rank. Keys of `products`: bytes of an element; of `block_s`,
    `elementwise_s`: family and bytes ("gpt 4"); of the optimizer's: "whole" or "slices".

    `block_s`: seconds of a block's operators whatever their size, forward and backward; `elementwise_s`: seconds a
    token and channel that element-wise operators touch; `root_s`: of embedding and loss; `unit_s`: of the engine, a
    unit and micro-batch. `collectives`: kind -> (seconds each, seconds a byte that is gathered or reduced).
    """

    products: Mapping[str, tuple[ProductRate, ...]]
    block_s: Mapping[str, Amount]
    elementwise_s: Mapping[str, Amount]
    root_s: Amount
    unit_s: Amount
    collectives: Mapping[str, tuple[Amount, Amount]]
    optimizer_element_s: Amount
    optimizer_parameter_s: Mapping[str, Amount]

    @classmethod
    def of(cls, values: object) -> Rates:
        """From plain values, as a file or a rank has them; ValueError where they are wrong."""
        found = read(cls, plain(values), "rates")
        speeds = [rate for rows in found.products.values() for row in rows for rate in (row.forward, row.backward)]
        if not speeds or min(speeds) <= 0:
            raise ValueError("a rate of matrix products is no number above 0")
        if missing := set(KINDS) - set(found.collectives):
            raise ValueError(f"there is no rate of {missing.pop()}")
        return found

    @classmethod
    def mean_of(cls, ranks: Sequence[Rates]) -> Rates:
        """The ranks' mean, figure by figure: the rank that is slowest in one is not the slowest in all.

        FLOP/s by their seconds: 50 and 100 GFLOP/s are 66.7.
        """
        return cls.of(_mean([plain(each) for each in ranks]))


def _mean(values: Sequence[Any], name: str = "") -> Any:
    """Of alike tables and lists, entry by entry."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _mean([each[key] for each in values], key) for key in first}
    if isinstance(first, list):
        return [_mean(each) for each in zip(*values)]
    if name in ("forward", "backward"):
        return harmonic_mean(values)
    return first if name == "tokens" else fmean(values)


@dataclass(frozen=True)
class StepSeconds:
    """A step's seconds and their parts; the parts add up to the step."""

    compute_s: float
    communication_s: float
    optimizer_s: float
    engine_s: float

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.compute_s + self.communication_s + self.optimizer_s + self.engine_s


def step_seconds(
    run: LabRun, traffic: Iterable[Traffic], units: Sequence[Sequence[Parameter]], rates: Rates
) -> StepSeconds:
    """Seconds of a step of `run`, whose collectives are `traffic`, on ranks of these rates.

    Example: 1 GFLOP of forward products at 50 GFLOP/s, 2 of backward at 40, and nothing else: 0.07 s.
    """
    sent = 0.0
    for row in traffic:
        each_s, byte_s = rates.collectives[row.kind]
        sent += row.count * (each_s + row.logical_bytes * byte_s)
    cut = "optimizer" in STRATEGY_ROWS[run.strategy].cuts
    elements = sum(each.count for own in units for each in own) / (run.shards if cut else 1)
    calls = sum(len(own) for own in units) * rates.optimizer_parameter_s["slices" if cut else "whole"]
    return StepSeconds(
        compute_s=run.micro_batches * compute_seconds(run, rates),
        communication_s=sent,
        optimizer_s=elements * rates.optimizer_element_s + calls,  # a call a parameter
        engine_s=run.micro_batches * len(units) * rates.unit_s,
    )


# ---- compute


def compute_seconds(run: LabRun, rates: Rates) -> float:
    """Forward, loss and backward of one micro-batch."""
    shape, tokens = run.shape, run.batch * run.sequence
    size = f"{'llama' if shape.gated else 'gpt'} {run.itemsize}"
    forward, backward = product_rates(rates.products[str(run.itemsize)], tokens)
    block = _flops(shape, tokens, run.sequence)
    head = 2 * shape.vocabulary * shape.width * tokens
    again = recomputed_share(run)
    products = (shape.layers * block * (1 + again) + head) / forward + 2 * (shape.layers * block + head) / backward
    passes = 1 + (run.checkpoint != "none") / 3  # of forward and backward, of which the forward is a third
    touches = shape.layers * touched(shape) * passes + _OF_THE_LOSS * shape.vocabulary
    moved = touches * tokens * rates.elementwise_s[size]
    return products + moved + shape.layers * rates.block_s[size] * passes + rates.root_s


def product_rates(rows: Sequence[ProductRate], tokens: int) -> tuple[float, float]:
    """FLOP/s forward and backward at so many tokens, between the measured sizes in proportion to their logarithms."""
    rows = sorted(rows, key=lambda row: row.tokens)
    for low, high in zip(rows, rows[1:]):
        if low.tokens <= tokens <= high.tokens:
            part = math.log(tokens / low.tokens) / math.log(high.tokens / low.tokens)
            return (
                low.forward + part * (high.forward - low.forward),
                low.backward + part * (high.backward - low.backward),
            )
    end = rows[0] if tokens < rows[0].tokens else rows[-1]
    return end.forward, end.backward


def _flops(shape: ModelShape, tokens: int, sequence: int) -> float:
    """Of one block's forward: two an element of its matrices and token, and attention over half of the context."""
    matrices = sum(each.count for each in shape.block if each.is_matrix)
    return 2 * matrices * tokens + 4 * shape.query_width * tokens * sequence / 2


def recomputed_share(run: LabRun) -> float:
    """The part of a block's products that the backward computes again: all but the last, or every other one."""
    matrices = [each.count for each in run.shape.block if each.is_matrix]
    if run.checkpoint == "none" or run.units != "block":
        return 0.0
    computed = matrices[:-1] if run.checkpoint == "full" else matrices[1:-1:2]
    return sum(computed) / sum(matrices)


_OF_THE_LOSS = 2  # what a logit costs beside a channel of a block: a log-softmax, its gradient, and a cast


def touched(shape: ModelShape) -> int:
    """Channels a token that the element-wise operators of a block write in a forward.

    GPT: two norms, two sums, a GELU. Llama: the steps of two norms (4 each), two sums, rotary (4 of what it turns), a
    gate and its product.
    """
    if not shape.gated:
        return 4 * shape.width + shape.ffn
    return 10 * shape.width + 4 * (shape.query_width + shape.kv_width) + 2 * shape.ffn

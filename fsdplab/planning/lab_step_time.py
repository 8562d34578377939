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
        """Make rates from plain values, as a file or a rank has them; ValueError where they are wrong."""
        rates = read(cls, plain(values), "rates")
        speeds: list[float] = []
        for rows in rates.products.values():
            for row in rows:
                speeds += (row.forward, row.backward)
        if not speeds or min(speeds) <= 0:
            raise ValueError("a rate of matrix products is no number above 0")
        if missing := set(KINDS) - set(rates.collectives):
            raise ValueError(f"there is no rate of {missing.pop()}")
        return rates

    @classmethod
    def mean_of(cls, ranks: Sequence[Rates]) -> Rates:
        """Take the ranks' mean, figure by figure: the rank that is slowest in one is not the slowest in all.

        FLOP/s by their seconds: 50 and 100 GFLOP/s are 66.7.
        """
        return cls.of(_mean([plain(rates) for rates in ranks]))


def _mean(values: Sequence[Any], name: str = "") -> Any:
    """Of alike tables and lists, entry by entry."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _mean([table[key] for table in values], key) for key in first}
    if isinstance(first, list):
        return [_mean(entries) for entries in zip(*values)]
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
    """Predict the seconds of a step of `run`, whose collectives are `traffic`, on ranks of these rates.

    Example: 1 GFLOP of forward products at 50 GFLOP/s, 2 of backward at 40, and nothing else: 0.07 s.
    """
    sent_s = 0.0
    for row in traffic:
        each_s, byte_s = rates.collectives[row.kind]
        sent_s += row.count * (each_s + row.logical_bytes * byte_s)
    elements = sum(parameter.count for unit in units for parameter in unit)
    ranks, kind = 1, "whole"
    if "optimizer" in STRATEGY_ROWS[run.strategy].cuts:
        ranks, kind = run.shards, "slices"
    # a call a parameter
    calls_s = sum(len(unit) for unit in units) * rates.optimizer_parameter_s[kind]
    return StepSeconds(
        compute_s=run.micro_batches * compute_seconds(run, rates),
        communication_s=sent_s,
        optimizer_s=elements / ranks * rates.optimizer_element_s + calls_s,
        engine_s=run.micro_batches * len(units) * rates.unit_s,
    )


# ---- compute


def compute_seconds(run: LabRun, rates: Rates) -> float:
    """Predict the seconds of forward, loss and backward of one micro-batch."""
    shape, tokens = run.shape, run.batch * run.sequence
    family = "llama" if shape.gated else "gpt"
    size = f"{family} {run.itemsize}"
    forward, backward = product_rates(rates.products[str(run.itemsize)], tokens)
    block = _flops(shape, tokens, run.sequence)
    head = 2 * shape.vocabulary * shape.width * tokens
    forwards = shape.layers * block * (1 + recomputed_share(run)) + head
    backwards = 2 * (shape.layers * block + head)
    products_s = forwards / forward + backwards / backward
    passes = 1 + (run.checkpoint != "none") / 3  # of forward and backward, of which the forward is a third
    touches = shape.layers * touched(shape) * passes + _OF_THE_LOSS * shape.vocabulary
    moved_s = touches * tokens * rates.elementwise_s[size]
    operators_s = shape.layers * rates.block_s[size] * passes
    return products_s + moved_s + operators_s + rates.root_s


def product_rates(rows: Sequence[ProductRate], tokens: int) -> tuple[float, float]:
    """Return FLOP/s forward and backward at so many tokens.

    Between the measured sizes they are in proportion to the logarithms, beyond them those of the nearest.
    """
    rows = sorted(rows, key=lambda row: row.tokens)
    for low, high in zip(rows, rows[1:]):
        if low.tokens <= tokens <= high.tokens:
            part = math.log(tokens / low.tokens) / math.log(high.tokens / low.tokens)
            forward = low.forward + part * (high.forward - low.forward)
            backward = low.backward + part * (high.backward - low.backward)
            return forward, backward
    end = rows[0] if tokens < rows[0].tokens else rows[-1]
    return end.forward, end.backward


def _flops(shape: ModelShape, tokens: int, sequence: int) -> float:
    """Of one block's forward: two an element of its matrices and token, and attention over half of the context."""
    matrices = sum(parameter.count for parameter in shape.block if parameter.is_matrix)
    attention = 4 * shape.query_width * tokens * sequence / 2
    return 2 * matrices * tokens + attention


def recomputed_share(run: LabRun) -> float:
    """Return the part of a block's products that the backward computes again: all but the last, or every other one."""
    if run.checkpoint == "none" or run.units != "block":
        return 0.0
    matrices = [parameter.count for parameter in run.shape.block if parameter.is_matrix]
    computed = matrices[:-1] if run.checkpoint == "full" else matrices[1:-1:2]
    return sum(computed) / sum(matrices)


_OF_THE_LOSS = 2  # what a logit costs beside a channel of a block: a log-softmax, its gradient, and a cast


def touched(shape: ModelShape) -> int:
    """Count the channels a token that the element-wise operators of a block write in a forward.

    GPT: two norms, two sums, a GELU. Llama: the steps of two norms (4 each), two sums, rotary (4 of what it turns), a
    gate and its product.
    """
    if not shape.gated:
        return 4 * shape.width + shape.ffn
    return 10 * shape.width + 4 * (shape.query_width + shape.kv_width) + 2 * shape.ffn

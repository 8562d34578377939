"""Calibrates a machine: each rank measures, all ranks at once; `sessions/calibration.py` calls it on ranks.

Small pieces of what a run does, each by itself: a linear layer, a block, the engine's collectives, its hooks, the
optimizer. The median of some repetitions counts, after one that warms up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdplab.common.names import SAVES_MOST
from fsdplab.engine import shard_model
from fsdplab.engine.core.average import Average
from fsdplab.engine.core.buffers import UnshardedBuffer
from fsdplab.engine.core.layout import Layout
from fsdplab.engine.core.transport import CollectiveLabel, SendShard
from fsdplab.engine.transport.selection import transport_of
from fsdplab.planning.lab_step_time import ProductRate, product_rates, touched
from fsdplab.sessions.bf16_speed import timed
from fsdplab.workloads import build_model, loss_of, preset
from fsdplab.workloads.shapes import SHAPES

TOKENS = (64, 256, 1024)  # that a linear layer reads
_WIDTH, _INNER = 512, 1024
_SIZES = (1 << 16, 1 << 23)  # bytes of a collective
_DTYPES = {"4": torch.float32, "2": torch.bfloat16}
_FAMILIES = {"gpt": "gpt-25m", "llama": "llama-20m"}
_TINY = {"gpt": "gpt-tiny", "llama": "llama-tiny"}
_SEQUENCE = 128
_FEW = 16  # tokens of a block whose arithmetic takes no time
_ENOUGH = 30  # repetitions of what is quick


@dataclass(frozen=True)
class Clock:
    """Repeats work and takes the median; `patience_s` is how long for."""

    patience_s: float

    def median(self, work: Callable[[], float]) -> float:
        """Return the median of what `work` returns, which each rank does for itself; ranks begin together."""
        work()
        dist.barrier()
        # at least two repetitions, whatever the time
        times = [work(), work()]
        end = time.perf_counter() + self.patience_s
        while time.perf_counter() < end and len(times) < _ENOUGH:
            times.append(work())
        return statistics.median(times)

    def median_together(self, work: Callable[[], float]) -> float:
        """Return the same of what all ranks do together: as often on each, whatever the time."""
        work()
        dist.barrier()
        repetitions = 10 if self.patience_s else 3
        return statistics.median(work() for _ in range(repetitions))


def measure(payload: float) -> dict[str, Any]:
    """Measure the rates of this rank, in the form of `Rates.of`; each quantity for about `payload` seconds."""
    clock = Clock(payload)
    _say("matrix products")
    products = {}
    for size, dtype in _DTYPES.items():
        products[size] = [_linear(clock, tokens, dtype) for tokens in TOKENS]
    _say("operators")
    blocks, elements = {}, {}
    for family in _FAMILIES:
        for size in _DTYPES:
            name = f"{family} {size}"
            blocks[name] = _tiny_block(clock, name)
            elements[name] = _elementwise(clock, name, products[size], blocks[name])
    _say("collectives")
    collectives = _collectives(clock)
    _say("engine and optimizer")
    return {
        "products": {size: [asdict(row) for row in rows] for size, rows in products.items()},
        "block_s": blocks,
        "elementwise_s": elements,
        "collectives": collectives,
        **_engine(clock, blocks["gpt 4"], collectives),
    }


def _say(what: str) -> None:
    print(what, flush=True)


# ---- compute


def _linear(clock: Clock, tokens: int, dtype: torch.dtype) -> ProductRate:
    layer = nn.Linear(_WIDTH, _INNER, dtype=dtype)
    x = torch.randn(tokens, _WIDTH, dtype=dtype, requires_grad=True)
    given = torch.randn(tokens, _INNER, dtype=dtype)
    backwards: list[float] = []

    def both() -> float:
        layer.zero_grad()
        x.grad = None
        start = time.perf_counter()
        # [tokens, width] -> [tokens, inner]
        y = layer(x)
        between = time.perf_counter()
        y.backward(given)
        backwards.append(time.perf_counter() - between)
        return between - start

    # the first of `backwards` is the repetition that warms up
    forward = clock.median(both)
    # a multiplication and an addition for each element of the weight and token; the backward has two such products, of
    # the gradients of input and weight
    flops = 2 * tokens * _WIDTH * _INNER
    return ProductRate(tokens, flops / forward, 2 * flops / statistics.median(backwards[1:]))


def _block_s(clock: Clock, model: str, batch: int, sequence: int, dtype: torch.dtype) -> float:
    """Measure the seconds of one block's forward and backward."""
    config = replace(preset(model), layers=1)
    # one layer is enough: only its block is timed
    built = build_model(config)
    for parameter in built.parameters():  # not the rotary tables, which stay float32 in a run too
        parameter.data = parameter.data.to(dtype)
    x = torch.randn(batch, sequence, config.width, dtype=dtype, requires_grad=True)
    given = torch.randn_like(x)

    def once() -> float:
        built.zero_grad()
        x.grad = None
        return timed(lambda: built.blocks[0](x).backward(given))

    return clock.median(once)


def _tiny_block(clock: Clock, name: str) -> float:
    """Measure the seconds of a block so small that the cost of its operators' calls is all there is."""
    family, size = name.split()
    return _block_s(clock, _TINY[family], 1, _FEW, _DTYPES[size])


def _elementwise(clock: Clock, name: str, rows: list[ProductRate], tiny: float) -> float:
    """Measure the seconds a token and channel of what is neither a product nor the cost of calls."""
    family, size = name.split()
    model = _FAMILIES[family]
    shape = SHAPES[model]
    batch = 2
    # 2 x 128 = 256 tokens
    tokens = batch * _SEQUENCE
    whole_s = _block_s(clock, model, batch, _SEQUENCE, _DTYPES[size])
    forward, backward = product_rates(rows, tokens)
    elements = sum(parameter.count for parameter in shape.block if parameter.is_matrix)
    flops = 2 * tokens * elements  # of a forward; a backward has twice as many
    products_s = flops / forward + 2 * flops / backward
    # what products and calls leave of a block is spent on norms, activations and attention
    return max(0.0, (whole_s - products_s - tiny) / (tokens * touched(shape)))


# ---- collectives


def _collectives(clock: Clock) -> dict[str, tuple[float, float]]:
    """Measure by kind the seconds each, and the seconds a byte: a line through a small and a large one."""
    group = dist.group.WORLD
    assert group is not None, "no process group"
    works: dict[str, Callable[[dist.ProcessGroup, int], Callable[[], float]]] = {
        "all_gather": _gather,
        "reduce_scatter": _reduce,
        "all_reduce": partial(_reduce, all_reduces=True),
    }
    if group.size() == 1:
        # one rank sends nothing
        return dict.fromkeys(works, (0.0, 0.0))
    rates = {}
    few, many = _SIZES
    for kind, work in works.items():
        small_s = clock.median_together(work(group, few))
        large_s = clock.median_together(work(group, many))
        # 1 ms for 64 KiB and 9 ms for 8 MiB: 0.96 ns a byte, and 0.94 ms for a collective of none
        byte_s = max(0.0, (large_s - small_s) / (many - few))
        rates[kind] = (max(0.0, small_s - byte_s * few), byte_s)
    return rates


_LABEL = CollectiveLabel("calibration", "forward")
_CPU = torch.device("cpu")


def _layout(nbytes: int, ranks: int) -> Layout:
    # one float32 matrix of 256 columns: 64 KiB are 64 rows
    return Layout.of([("weight", (nbytes // 4 // 256, 256), 4)], ranks)


def _gather(group: dist.ProcessGroup, nbytes: int) -> Callable[[], float]:
    transport = transport_of(group, _CPU)
    layout = _layout(nbytes, group.size())
    resting = transport.storage(_CPU).make(layout.shard_bytes, "calibration")
    shard, whole = SendShard.of(resting.view(torch.float32)), UnshardedBuffer(layout, _CPU)

    def once() -> float:
        seconds = timed(lambda: transport.all_gather(shard, whole, _LABEL).wait())
        # outside the timing: the wait for peers that still read this shard is no part of the collective
        whole.free()
        transport.await_peers()
        return seconds

    return once


def _reduce(group: dist.ProcessGroup, nbytes: int, all_reduces: bool = False) -> Callable[[], float]:
    transport = transport_of(group, _CPU)
    if all_reduces:
        # an all-reduce cuts nothing: each rank has the whole gradient before and after
        layout = _layout(nbytes, 1)
        send = transport.all_reduce_packed
    else:
        layout = _layout(nbytes, group.size())
        send = transport.reduce_scatter
    gradient = torch.zeros(layout.slots[0].shape)

    def once() -> float:
        output = torch.empty(layout.shard_bytes // 4)
        return timed(lambda: send(layout, [gradient], output, _LABEL, Average(2.0)).wait())

    return once


# ---- the engine and the optimizer


def _engine(clock: Clock, block_s: float, collectives: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """Measure the cost of the root, of a unit, and of the optimizer's elements and calls."""
    # arithmetic takes no time in a model so small: what sharding adds is calls and collectives
    alone_s, whole = _tiny_steps(clock, sharded=False)
    sharded_s, slices = _tiny_steps(clock, sharded=True)
    layers = preset("gpt-tiny").layers
    gather_s, _ = collectives["all_gather"]
    reduce_s, _ = collectives["reduce_scatter"]
    # each block is gathered for forward and for backward, the root once
    sent_s = (2 * layers + 1) * gather_s + (layers + 1) * reduce_s
    return {
        "root_s": max(0.0, alone_s - layers * block_s),
        "unit_s": max(0.0, (sharded_s - alone_s - sent_s) / (layers + 1)),
        "optimizer_element_s": _optimizer_element_s(clock),
        "optimizer_parameter_s": {"whole": whole, "slices": slices},
    }


def _tiny_steps(clock: Clock, sharded: bool) -> tuple[float, float]:
    """Measure the seconds of forward and backward of gpt-tiny, and of its optimizer's step a parameter."""
    model: nn.Module = build_model("gpt-tiny")
    blocks = type(model.blocks[0])
    if sharded and dist.get_world_size() > 1:
        model = shard_model(model, SAVES_MOST[0], units=(blocks,))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(1, _FEW, dtype=torch.int64)
    steps: list[float] = []

    def once() -> float:
        seconds = timed(lambda: loss_of(model, tokens, tokens).backward())
        steps.append(timed(optimizer.step))
        optimizer.zero_grad()
        return seconds

    # the first step of the optimizer makes its state, and does not count
    trained = clock.median_together(once)
    return trained, statistics.median(steps[1:]) / len(list(model.parameters()))


def _optimizer_element_s(clock: Clock) -> float:
    weights = [nn.Parameter(torch.zeros(1 << 20)) for _ in range(4)]
    optimizer = torch.optim.AdamW(weights, fused=True)

    def once() -> float:
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        return timed(optimizer.step)

    # 4 parameters of 2**20 elements: so large that calls do not count
    return clock.median(once) / (len(weights) << 20)

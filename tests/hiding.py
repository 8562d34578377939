"""A group of one rank that gathers and reduces all the same, and a judge of what a step of it hides.

At world size 1 no engine communicates. To see streams, buffers and overlap on a single GPU, the lab's units get a
transport over the group of one rank: NCCL then copies where it would send, and all else is as with many ranks. Behind a
link it takes as long as eight ranks would. When each unit computed is read from CUDA events on the compute stream, when
it communicated from the engine's ledger.

Units 0, 1, ... run in this order forward and in reverse backward. Full sharding with one unit of prefetch lets
communication run behind exactly one piece of computing, its slot:

    forward of i     the all-gather of i + 1
    backward of i    the all-gather of i - 1 and the reduce-scatter of i + 1

In a slot min(communication, computing) can be hidden. The first gather of a forward and of a backward, and the last
reduction, have nothing to hide behind and do not count. Hidden is the communication during which something was
computed, at most what can be hidden, slot by slot.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdplab.engine import MixedPrecisionPolicy, events, shard_model
from fsdplab.engine.core.transport import Transport
from fsdplab.engine.emulation.link import Link, behind
from fsdplab.engine.shard import units_of
from fsdplab.engine.transport.gloo import GlooTransport
from fsdplab.engine.transport.staged import StagedTransport
from fsdplab.engine.transport.streams import device_clock
from fsdplab.profiling.intervals import Intervals, intersect, length, union

RANKS = 8  # that the group of one imitates
LEAST_SHARE = 0.9
_UNDER = 0.5  # of what fits, to count as lying under
_SYNCHRONISED = "synchronizing CUDA operation"  # torch's words, from 1.10 on
_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Size:
    """Blocks of two linear layers, `width` to four times that and back, on `tokens` rows."""

    blocks: int
    width: int
    tokens: int
    steps: int

    @property
    def unit_bytes(self) -> int:
        """Bytes of one gathered unit, in bf16."""
        return 2 * (8 * self.width * self.width + 5 * self.width)


SIZES = {
    "cuda": Size(blocks=8, width=3072, tokens=8192, steps=5),
    "cpu": Size(blocks=3, width=128, tokens=512, steps=2),
}


class Blocks(nn.Module):
    """Residual blocks and nothing else: the root has no parameters, so every collective belongs to a block."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        C = size.width
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C)) for _ in range(size.blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Marks:
    """Notes when each block begins and ends to compute, on the device's own clock; register it after the model was
    sharded.
    """

    def __init__(self, model: Blocks, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, str, str, Callable[[], int]]] = []  # unit, phase, start or end, when
        for index, block in enumerate(model.blocks):
            self._watch(f"blocks.{index}", block)

    def _watch(self, unit: str, block: nn.Module) -> None:
        def before(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            args[0].register_hook(lambda gradient: self._mark(unit, "backward", "end"))
            self._mark(unit, "forward", "start")

        def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            self._mark(unit, "forward", "end")
            output.register_hook(lambda gradient: self._mark(unit, "backward", "start"))

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)

    def _mark(self, unit: str, phase: str, edge: str) -> None:
        self._marks.append((unit, phase, edge, now_on(self._device)))

    def take(self) -> list[Span]:
        """The computing since the last `take`; the device must be idle."""
        found: dict[tuple[str, str], dict[str, int]] = {}
        for unit, phase, edge, when in self._marks:
            found.setdefault((unit, phase), {})[edge] = when()
        self._marks = []
        return [Span(unit, "compute", phase, each["start"], each["end"]) for (unit, phase), each in found.items()]


def now_on(device: torch.device) -> Callable[[], int]:
    """What tells, once the device is idle, when its current stream came to this point: `time.time_ns()`, as in the
    ledger.
    """
    if device.type != "cuda":
        now = time.time_ns()
        return lambda: now
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return device_clock(device).when(event)


@dataclass(frozen=True)
class Span:
    """Something that a unit did in [start_ns, end_ns): `what` is compute, all_gather or reduce_scatter, `phase` forward
    or backward.
    """

    unit: str
    what: str
    phase: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Slot:
    """A piece of computing, and the communication that may hide behind it; all in nanoseconds."""

    unit: str
    phase: str
    compute_ns: int
    communication_ns: int
    hideable_ns: int
    hidden_ns: int


@dataclass(frozen=True)
class Hiding:
    """One step, judged. `elsewhere` says which communication that did not run under the computing of its slot."""

    slots: tuple[Slot, ...]
    elsewhere: tuple[str, ...]

    @property
    def hideable_ns(self) -> int:
        """What could be hidden."""
        return sum(slot.hideable_ns for slot in self.slots)

    @property
    def hidden_ns(self) -> int:
        """What of it was hidden."""
        return sum(slot.hidden_ns for slot in self.slots)

    @property
    def share(self) -> float | None:
        """The hidden part of what could be hidden, 0 to 1; None where nothing could."""
        return self.hidden_ns / self.hideable_ns if self.hideable_ns else None


def judge(units: Sequence[str], spans: Sequence[Span]) -> Hiding:
    """Judge the spans of one step of `units`, given in forward order. A unit without a span of a kind has none there.

    Two units that compute 10 each forward, the gather of the second (4) from 2 to 6: 4 could be hidden and were. From 8
    to 12, with the second's forward from 12 on: 2 of 4.
    """
    busy = union([(span.start_ns, span.end_ns) for span in spans if span.what == "compute"])
    slots, elsewhere = [], []
    for index, unit in enumerate(units):
        for phase, hides in (("forward", _behind_forward(units, index)), ("backward", _behind_backward(units, index))):
            computing = _of(spans, unit, "compute", phase)
            travelling = {(other, what): _of(spans, other, what, phase) for other, what in hides}
            slots.append(_slot(unit, phase, computing, union(*travelling.values()), busy))
            elsewhere += [
                f"{what} of {other} not under {phase} of {unit}"
                for (other, what), it in travelling.items()
                if not _lies_under(it, computing)
            ]
    return Hiding(tuple(slots), tuple(elsewhere))


def _behind_forward(units: Sequence[str], index: int) -> list[tuple[str, str]]:
    return [(other, "all_gather") for other in units[index + 1 : index + 2]]


def _behind_backward(units: Sequence[str], index: int) -> list[tuple[str, str]]:
    before = [(units[index - 1], "all_gather")] if index else []
    return before + [(other, "reduce_scatter") for other in units[index + 1 : index + 2]]


def _of(spans: Sequence[Span], unit: str, what: str, phase: str) -> Intervals:
    return union(
        [(span.start_ns, span.end_ns) for span in spans if (span.unit, span.what, span.phase) == (unit, what, phase)]
    )


def _slot(unit: str, phase: str, computing: Intervals, travelling: Intervals, busy: Intervals) -> Slot:
    hideable = min(length(computing), length(travelling))
    hidden = min(length(intersect(travelling, busy)), hideable)
    return Slot(unit, phase, length(computing), length(travelling), hideable, hidden)


def _lies_under(travelling: Intervals, computing: Intervals) -> bool:
    fits = min(length(travelling), length(computing))
    return length(intersect(travelling, computing)) >= _UNDER * fits


@dataclass(frozen=True)
class Measured:
    """Steps of one model: seconds of each, and its spans."""

    units: tuple[str, ...]
    seconds: tuple[float, ...]
    spans: tuple[tuple[Span, ...], ...]

    def median_ns(self, what: str, phase: str) -> float:
        """Median length of such spans; 0 where there is none."""
        spans = [span for step in self.spans for span in step if (span.what, span.phase) == (what, phase)]
        return statistics.median([span.end_ns - span.start_ns for span in spans] or [0])

    def judged(self) -> list[Hiding]:
        """Every step, judged."""
        return [judge(self.units, step) for step in self.spans]


def measure(device: torch.device, size: Size, link: Link | None) -> Measured:
    """Train `size.steps` steps (after three that are thrown away) in the group of one, behind `link`;
    needs that group.
    """
    torch.manual_seed(0)
    with device:
        model = Blocks(size)
    sharded = made_to_gather(shard_model(model, "full_shard", mp_policy=_BF16), device, link, RANKS)
    marks, collectives = Marks(sharded, device), []
    unsubscribe = events.subscribe(lambda e: collectives.append(e) if isinstance(e, events.Collective) else None)
    x = torch.randn(size.tokens, size.width, device=device, requires_grad=True)
    seconds, spans = [], []
    for _step in range(3 + size.steps):
        synchronise(device)
        start = time.perf_counter()
        sharded(x).float().square().mean().backward()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
        events.flush()
        moved = [Span(each.unit, each.kind, each.phase, each.start_ns, each.end_ns) for each in collectives]
        spans.append((*marks.take(), *moved))
        collectives.clear()
        sharded.zero_grad()
    unsubscribe()
    return Measured(tuple(f"blocks.{index}" for index in range(size.blocks)), tuple(seconds[3:]), tuple(spans[3:]))


def link_for(size: Size, forward_ns: float, times: float) -> Link:
    """The link behind which a gather of one unit takes `times` as long as its forward: 100 MB of 8 ranks in 1 ms are
    87.5 GB/s.
    """
    return Link(size.unit_bytes * (RANKS - 1) / RANKS / (times * forward_ns * 1e-9))


@contextmanager
def group_of_one(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone, NCCL on CUDA and gloo on CPU, for the time of the block."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def made_to_gather(
    model: nn.Module, device: torch.device, link: Link | None = None, ranks: int | None = None
) -> nn.Module:
    """Have the units of `model`, sharded over the group of one, gather and reduce; with `link` as slowly as `ranks`
    ranks behind it.

    Call it before the first forward.
    """
    transport: Transport = (StagedTransport if device.type == "cuda" else GlooTransport)(dist.group.WORLD, device)
    if link is not None:
        transport = behind(transport, link, ranks)
    for unit in units_of(model):
        unit.memory.config = replace(unit.memory.config, shard=transport)
    return model


def synchronise(device: torch.device) -> None:
    """Wait for all work of the device; nothing on CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_syncs(call: Callable[[], Any], device: torch.device) -> list[str] | None:
    """Where the host waited for the device while `call` ran, one `file:line` each; None on CPU, which has no streams.

    Counted by torch's own sync debug mode: copies to the host, `.item()`, `nonzero`; what a library does past torch is
    not seen.
    """
    if device.type != "cuda":
        return None
    synchronise(device)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    synchronise(device)
    return synchronisations([(str(each.message), each.filename, each.lineno) for each in heard])


def synchronisations(heard: Sequence[tuple[str, str, int]]) -> list[str]:
    """Of warnings (message, file, line) those that tell of a synchronisation, as `file:line` below the last two
    folders.
    """
    return [f"{'/'.join(file.split('/')[-2:])}:{line}" for message, file, line in heard if _SYNCHRONISED in message]

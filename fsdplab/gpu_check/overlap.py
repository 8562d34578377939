"""Overlap on CUDA, proven: behind an emulated link the lab's full_shard hides at least 90 % of what can be hidden.

One process gathers and reduces over a group of one that takes as long as eight ranks behind a link. How fast the link
must be follows from a first measurement without it, so that the picture is the same on every device: a gather takes
half of a unit's forward in one row, one and a half times as long in the other. When each unit computed is read from
CUDA events on the compute stream, when it communicated from the engine's ledger.

What could be hidden, and what was, is judged from these intervals alone. Units 0, 1, ... run in this order forward and
in reverse backward. Full sharding with one unit of prefetch lets communication travel behind exactly one piece of
computing, its slot:

    forward of i     the all-gather of i + 1
    backward of i    the all-gather of i - 1 and the reduce-scatter of i + 1

In a slot min(communication, computing) can be hidden. The first gather of a forward and of a backward, and the last
reduction, have nothing to hide behind and do not count. Hidden is the communication during which something was
computed, at most what can be hidden, slot by slot.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdplab.engine import MixedPrecisionPolicy, events, shard_model
from fsdplab.engine.emulation.link import Link
from fsdplab.engine.transport.streams import device_clock
from fsdplab.profiling.intervals import Intervals, intersect, length, union

from .contestants import group_of_one, made_to_gather, synchronise
from .part import Sheet, part_main

RANKS = 8  # that the group of one imitates
LEAST_SHARE = 0.9
_UNDER = 0.5  # of what fits, to count as lying under
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
        for phase, behind in (("forward", _behind_forward(units, index)), ("backward", _behind_backward(units, index))):
            computing = _of(spans, unit, "compute", phase)
            travelling = {(other, what): _of(spans, other, what, phase) for other, what in behind}
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


def work(sheet: Sheet, device: torch.device) -> None:
    """The whole part: without a link, then behind two."""
    size = SIZES[device.type]
    sheet.note(
        f"A group of one rank takes as long as {RANKS} ranks behind an emulated link. Compute:"
        f" {'CUDA events' if device.type == 'cuda' else 'host clock'}."
    )
    with group_of_one(device):
        free = measure(device, size, None)
        sheet.row(**_row("none", None, free, free))
        for word, times in (("slow", 0.5), ("slower than compute", 1.5)):
            link = link_for(size, free.median_ns("compute", "forward"), times)
            linked = measure(device, size, link)
            sheet.row(**_row(word, link, linked, free))
            _check(sheet, word, linked.judged(), on_gpu=device.type == "cuda")


def _row(word: str, link: Link | None, measured: Measured, free: Measured) -> dict[str, object]:
    judged = measured.judged()
    shares = [each.share for each in judged if each.share is not None]
    computing = [
        sum(measured.median_ns("compute", phase) for phase in ("forward", "backward")) for measured in (measured, free)
    ]
    return {
        "link": word, "link_bytes_per_s": link and link.bytes_per_s, "as_ranks": RANKS,
        "step_s": statistics.median(measured.seconds),
        "forward_ms": measured.median_ns("compute", "forward") / 1e6,
        "backward_ms": measured.median_ns("compute", "backward") / 1e6,
        "gather_forward_ms": measured.median_ns("all_gather", "forward") / 1e6,
        "gather_backward_ms": measured.median_ns("all_gather", "backward") / 1e6,
        "reduce_ms": measured.median_ns("reduce_scatter", "backward") / 1e6,
        "hideable_ms": statistics.median(each.hideable_ns for each in judged) / 1e6,
        "hidden_ms": statistics.median(each.hidden_ns for each in judged) / 1e6,
        "hidden_share": statistics.median(shares) if shares else None,
        "compute_inflation": computing[0] / computing[1],
    }  # fmt: skip


def _check(sheet: Sheet, word: str, judged: Sequence[Hiding], on_gpu: bool) -> None:
    shares = [each.share or 0.0 for each in judged]
    if not on_gpu:  # two busy cores say nothing about streams: only that the arithmetic has something to judge
        some, got = all(each.hideable_ns > 0 for each in judged), f"{max(shares):.2f} hidden"
        sheet.check(f"link {word}: something could be hidden", some, got, "more than 0 hideable")
        return
    share = statistics.median(shares)
    name = f"link {word}: hidden of what can be hidden"
    sheet.check(name, share >= LEAST_SHARE, f"{share:.3f}", f"at least {LEAST_SHARE}")
    if word == "slow":
        elsewhere = sorted({place for each in judged for place in each.elsewhere})
        name = "gather of i+1 under forward of i, reduction of i under backward of i-1"
        sheet.check(name, not elsewhere, "; ".join(elsewhere[:3]) or "all there", "all there")


if __name__ == "__main__":
    sys.exit(part_main("overlap", work))

"""The part of lesson 07 that runs on the ranks: an emulated card, on which only the settings decide what is exposed.

On a real machine its speed and load would decide whether communication is hidden. So the exercise uses an emulated
card: a block's forward and backward take a fixed time (the rank sleeps), messages take the emulated link's. Engine,
units, order of messages and ranks are the real ones.

Why the reference passes and each single mistake fails, in ms a block with two sequences (all-gathers in bf16,
reductions in fp32):
    forward 80, backward 120; all-gather 60, reduction 100
    forward hides its all-gather (60 < 80); backward hides both of its messages side by side (100 < 120), not one after
    the other (160 > 120)
Tens of milliseconds, because a busy machine wakes a sleeper late; the card's own clock (`Card`) keeps such delays out
of the count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdplab.engine import MixedPrecisionPolicy, events, shard_model
from fsdplab.engine.emulation.link import Link, emulate
from fsdplab.profiling.intervals import length, subtract, union

BLOCKS, PARTS, WIDTH = 8, 8, 32
FORWARD_MS, BACKWARD_MS = 40.0, 60.0  # of one block, for one sequence
# a block's bytes in bf16 on the link, and the latency of each message, between two ranks
GATHER_MS, LATENCY_MS = 40.0, 20.0
# 8 x 32 x 32 elements of 2 bytes, of which each of 2 ranks sends half
BYTES_PER_S = PARTS * WIDTH * WIDTH * 2 / 2 / (GATHER_MS / 1e3)
TARGET_MS = 300
MOST_SEQUENCES = 2  # that the card's memory holds
STEPS = 6  # that are looked at, after one in which the engine learns the order of the units, until one is good enough
SETTINGS: dict[str, tuple[str, ...] | tuple[int, ...]] = {
    "units": ("linear", "block", "model"),
    "prefetch": (0, 1, 2),
    "link_queues": (1, 2),
    "batch_size": (1, 2),
}
PLACES = {
    ("all_gather", "forward"): "all-gathers in forward",
    ("all_gather", "backward"): "all-gathers in backward",
    ("reduce_scatter", "backward"): "reductions",
}


class Card:
    """The clock of an emulated card: computing takes a given time, and begins when its message has arrived.

    The host sleeps along, and catches up when it woke late, as a queue of kernels would. Intervals are in ns.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin a step: nothing is computed and nothing has moved yet."""
        self.free_ns = time.time_ns()
        self.computed: list[tuple[int, int]] = []
        self.moved: dict[str, list[tuple[int, int]]] = {place: [] for place in PLACES.values()}

    def compute(self, seconds: float) -> None:
        """Compute for so long, from when the card is free; the host waits for it."""
        # not the present time: a host that woke late must not make the step longer
        start = self.free_ns
        self.free_ns = start + round(1e9 * seconds)
        self.computed.append((start, self.free_ns))
        time.sleep(max(0, self.free_ns - time.time_ns()) / 1e9)

    def on_event(self, event: events.Event) -> None:
        """Note a message that the host has waited for: the card goes on when the link has delivered it."""
        if isinstance(event, events.Collective):
            # the link's own times, which no delay of the host is in
            self.moved[PLACES[event.kind, event.phase]].append((event.start_ns, event.end_ns))
            self.free_ns = max(self.free_ns, event.end_ns)

    def exposed(self) -> dict[str, float]:
        """Return |M without C| in ms by place; what two messages expose at once is the first place's."""
        covered = union(self.computed)
        exposed_ms = {}
        for place, transfers in self.moved.items():
            exposed_ms[place] = length(subtract(transfers, covered)) / 1e6
            # what is exposed in one place is not counted again in the next
            covered = union(covered, transfers)
        return exposed_ms

    def communication_ms(self) -> float:
        """Return the time of all messages, each for itself."""
        nanoseconds = 0
        for transfers in self.moved.values():
            nanoseconds += sum(end - start for start, end in transfers)
        return nanoseconds / 1e6


class Computing(torch.autograd.Function):
    """Takes the card's time and changes nothing: `takes` are seconds of forward and of backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, card: Card, takes: tuple[float, float]) -> Tensor:
        """Sleep for the forward's time: a sleeping rank takes no core from the other."""
        # (forward, backward) seconds
        ctx.card, ctx.seconds = card, takes[1]
        card.compute(takes[0])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Sleep before the gradients are there, as computing them would take time."""
        ctx.card.compute(ctx.seconds)
        return gradient, None, None


class Part(nn.Linear):
    """A linear layer whose computing takes `sequences` times its share of the block's time."""

    def __init__(self, card: Card, share: float, sequences: int) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.card = card
        blocks = share * sequences  # so many blocks' work on one sequence
        self.takes = (blocks * FORWARD_MS / 1e3, blocks * BACKWARD_MS / 1e3)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        # unless each part is a unit, seven of a block's eight parts take no time
        if not any(self.takes):
            return y
        return Computing.apply(y, self.card, self.takes)


class Block(nn.Sequential):
    """A unit's worth of linear layers.

    `evenly` gives each its own time, else the last has that of all, which wakes the rank less often.
    """

    def __init__(self, card: Card, evenly: bool, sequences: int) -> None:
        shares = [0.0] * (PARTS - 1) + [1.0]
        if evenly:
            shares = [1 / PARTS] * PARTS
        super().__init__(*(Part(card, share, sequences) for share in shares))


def complaint(settings: Any) -> str:
    """Return why these settings cannot be tried, or nothing."""
    if not isinstance(settings, Mapping):
        return f"expected a dict of settings, got {type(settings).__name__}"
    for name, value in settings.items():
        if name not in SETTINGS:
            return f"unknown setting {name!r}; you choose {', '.join(SETTINGS)}"
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if name == "batch_size" and is_number and value > MOST_SEQUENCES:
            return f"batch_size={value} does not fit: the memory of this card holds {MOST_SEQUENCES} sequences"
        if isinstance(value, bool) or value not in SETTINGS[name]:
            return f"{name}={value!r}; expected one of {', '.join(map(repr, SETTINGS[name]))}"
    missing = [name for name in SETTINGS if name not in settings]
    if missing:
        return f"{', '.join(missing)} missing; give a value for each"
    return ""


def on_this_rank(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the exposed ms of the best of the steps, by collective and phase, and all its communication.

    The best, because a busy machine can only add: a rank that wakes late makes the others wait. After a step with
    which all ranks are within the target no other is needed.
    """
    card, steps = Card(), []
    model = _sharded(payload, card)
    unsubscribe = events.subscribe(card.on_event)
    for number in range(1 + STEPS):
        card.begin()
        model(torch.ones(1, WIDTH)).sum().backward()
        model.zero_grad()
        step = {"exposed": card.exposed(), "communication_ms": card.communication_ms()}
        steps.append(step)
        most = torch.tensor(total(step))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        # all ranks have the same `most`, so they stop together; step 0 learns the order of the units
        if number > 0 and most <= TARGET_MS:
            break
    unsubscribe()
    return min(steps[1:], key=total)


def total(step: Mapping[str, Any]) -> float:
    """Return all ms of a step that are exposed."""
    return float(sum(step["exposed"].values()))


def _sharded(settings: Mapping[str, Any], card: Card) -> nn.Module:
    """Return blocks on the card, sharded as the settings say, behind the emulated link."""
    has_linear_units = settings["units"] == "linear"
    blocks = nn.Sequential(*(Block(card, has_linear_units, settings["batch_size"]) for _ in range(BLOCKS)))
    units_of: dict[str, Sequence[type[nn.Module]] | str] = {"linear": (Part,), "block": (Block,), "model": "root"}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard_model(
        blocks, "full_shard", units=units_of[settings["units"]], mp_policy=policy, prefetch=settings["prefetch"]
    )
    emulate(model, shard=Link(BYTES_PER_S, LATENCY_MS / 1e3, settings["link_queues"]))
    return model

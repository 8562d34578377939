"""Lesson 03, the part in the notebook's process: data parallelism with the learner's functions, beside the twin.

P is the bytes of all parameters and n the number of ranks. What buckets cost follows a simple model of a network: every
message costs a fixed start, then its bytes at full speed, and travels while backward computes, all but the last, which
leaves when backward is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fsdplab.common.sizes import seconds, size
from fsdplab.common.words import plural
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import ALARM, titled
from fsdplab.teaching.core.functions_in_use import owner
from fsdplab.teaching.lessons.by_hand.lesson import Faulty, Runs, trained, way
from fsdplab.teaching.lessons.by_hand.lesson import bucket_figure as bucket_figure
from fsdplab.workloads import build_model


def faulty(exercise: str = "03.small_together", steps: int = 12, world_size: int = 2) -> Faulty:
    """Train the exercise's faulty version as it was given, with AdamW and with SGD, beside the twin."""
    ways = [way("finish", name, name, exercise=exercise, stub=True, arguments=[]) for name in ("adamw", "sgd")]
    adamw, sgd = trained(ways, steps, world_size)
    return Faulty((adamw, sgd))


def data_parallel(steps: int = 6, bucket_bytes: int = 100_000, world_size: int = 2) -> Runs:
    """Train with the learner's hook and buckets (or the references), torch's DDP and the lab's no_shard.

    The twin trains beside each.
    """
    hook, buckets = "03.average_in_hook", "03.in_buckets"
    cut = f"{owner(buckets)} buckets of {size(bucket_bytes)}"
    ways = [
        way("hook", f"{owner(hook)} hook", exercise=hook),
        way("finish", cut, exercise=buckets, stub=False, arguments=[bucket_bytes]),
        way("ddp", "torch's DDP"),
        way("lab", "the lab's no_shard", strategy="no_shard"),
    ]
    return Runs(tuple(trained(ways, steps, world_size)))


# ---- what messages cost in buckets of a size

# Cost's parts, their names and colours
_PARTS = {
    "starts": ("starts of messages", "#f09a1a"),
    "transfer": ("their bytes", "#6cc4f0"),
    "last": ("the last message, after backward", ALARM),
}


@lru_cache(maxsize=8)
def gradient_sizes(model: str) -> tuple[int, ...]:
    """Return the bytes of every gradient (fp32) of a preset, head first: about the order in which they become ready."""
    parameters = list(build_model(model, device="meta").parameters())
    return tuple(4 * parameter.numel() for parameter in reversed(parameters))


def buckets(sizes: tuple[int, ...], bucket_bytes: float) -> list[int]:
    """Return the bytes of every bucket when each leaves as soon as it holds `bucket_bytes`.

    `buckets((3, 3, 3), 5) == [6, 3]`.
    """
    full: list[int] = []
    filled = 0
    for nbytes in sizes:
        # a bucket may be larger than its limit, by the gradient that fills it
        filled += nbytes
        if filled >= bucket_bytes:
            full.append(filled)
            filled = 0
    if filled:
        full.append(filled)
    return full


@dataclass(frozen=True)
class Cost:
    """One choice of buckets: how many messages, and seconds of the parts of their cost."""

    name: str
    messages: int
    starts: float
    transfer: float
    last: float

    @property
    def total(self) -> float:
        return self.starts + self.transfer + self.last


def costs(model: str, bucket_MB: float, start_us: float, GB_per_s: float, ranks: int = 8) -> list[Cost]:
    """Return the costs of one message a gradient, of buckets of `bucket_MB`, and of one message for all."""
    sizes, start = gradient_sizes(model), start_us * 1e-6
    # a bucket leaves once it holds so many bytes: with 0 each gradient leaves by itself
    limits = {"one a gradient": 0.0, f"buckets of {bucket_MB:g} MB": bucket_MB * 1e6, "one for all": sum(sizes)}
    choices = []
    for name, limit in limits.items():
        seconds_of_messages = []
        for nbytes in buckets(sizes, limit):
            # an all-reduce, by the textbook
            sent = 2 * nbytes * (ranks - 1) / ranks
            seconds_of_messages.append(sent / (GB_per_s * 1e9))
        # the last one leaves when backward is over: its start and its bytes are all exposed
        *before, last = seconds_of_messages
        choices.append(Cost(name, len(before) + 1, len(before) * start, sum(before), start + last))
    return choices


def bucket_costs(model: str, bucket_MB: float, start_us: float, GB_per_s: float, ranks: int = 8) -> go.Figure:
    """Draw the three choices as bars of milliseconds, with the last message, which nothing hides, in red."""
    choices = costs(model, bucket_MB, start_us, GB_per_s, ranks)
    parts = []
    for part, (name, colour) in _PARTS.items():
        milliseconds = [getattr(cost, part) * 1e3 for cost in choices]
        parts.append(Part(name, colour, milliseconds))
    ends, bars = {}, []
    for cost in choices:
        messages = plural(cost.messages, "message")
        starts, transfer, last = seconds(cost.starts), seconds(cost.transfer), seconds(cost.last)
        ends[cost.name] = f"<b>{messages}</b>, last {last}"
        bars.append(f"{cost.name}: {messages}, starts {starts}, bytes {transfer}, the last message {last}")
    figure = stacked_bars(ends, parts, "ms on the network in one step", "%{x:.3g} ms")

    in_buckets = choices[1]
    messages = plural(in_buckets.messages, "message")
    title = f"{in_buckets.name}: {messages}, {seconds(in_buckets.last)} after backward"
    gradients = size(sum(gradient_sizes(model)))
    subtitle = f"Computed for {model}, {gradients} of gradients on {ranks} ranks; nothing was run"
    alt = f"Bars of the time that one step's messages take. {'; '.join(bars)}."
    return titled(figure, title, subtitle, alt, 240)

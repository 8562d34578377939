"""What the messages of one step cost in buckets of a size: what the sliders of lesson 03 draw.

A simple model of a network: every message costs a fixed start, then its bytes at full speed. Messages travel while
backward computes, all but the last, which leaves when backward is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from fsdplab.common.sizes import seconds, size
from fsdplab.common.words import plural
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import ALARM, titled
from fsdplab.workloads import build_model

_STARTS, _BYTES = "starts of messages", "their bytes"
_LAST = "the last message, after backward"
_COLOURS = {_STARTS: "#f09a1a", _BYTES: "#6cc4f0", _LAST: ALARM}


@lru_cache(maxsize=8)
def gradient_sizes(model: str) -> tuple[int, ...]:
    """Bytes of every gradient (fp32) of a preset, head first: about the order in which they become ready."""
    return tuple(4 * parameter.numel() for parameter in reversed(list(build_model(model, device="meta").parameters())))


def buckets(sizes: tuple[int, ...], bucket_bytes: float) -> list[int]:
    """Bytes of every bucket when each leaves as soon as it holds `bucket_bytes`: `buckets((3, 3, 3), 5) == [6, 3]`."""
    full: list[int] = []
    filled = 0
    for nbytes in sizes:
        filled += nbytes
        if filled >= bucket_bytes:
            full, filled = [*full, filled], 0
    return [*full, filled] if filled else full


@dataclass(frozen=True)
class Cost:
    """One choice of buckets: how many messages, and seconds of the parts of their cost."""

    name: str
    messages: int
    starts: float
    transfer: float
    last: float

    @property
    def parts(self) -> dict[str, float]:
        return {_STARTS: self.starts, _BYTES: self.transfer, _LAST: self.last}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def costs(model: str, bucket_MB: float, start_us: float, GB_per_s: float, ranks: int = 8) -> list[Cost]:
    """One message a gradient, buckets of `bucket_MB`, and one message for all."""
    sizes, start = gradient_sizes(model), start_us * 1e-6
    found = []
    for name, limit in (
        ("one a gradient", 0.0),
        (f"buckets of {bucket_MB:g} MB", bucket_MB * 1e6),
        ("one for all", sum(sizes)),
    ):
        *before, last = [2 * nbytes * (ranks - 1) / ranks / (GB_per_s * 1e9) for nbytes in buckets(sizes, limit)]
        found.append(Cost(name, len(before) + 1, len(before) * start, sum(before), start + last))
    return found


def bucket_costs(model: str, bucket_MB: float, start_us: float, GB_per_s: float, ranks: int = 8) -> go.Figure:
    """The three choices as bars of milliseconds, with the last message, which nothing hides, in red."""
    found = costs(model, bucket_MB, start_us, GB_per_s, ranks)
    parts = [Part(part, colour, [cost.parts[part] * 1e3 for cost in found]) for part, colour in _COLOURS.items()]
    ends = {cost.name: f"<b>{plural(cost.messages, 'message')}</b>, last {seconds(cost.last)}" for cost in found}
    figure = stacked_bars(ends, parts, "ms on the network in one step", "%{x:.3g} ms")
    title = f"{found[1].name}: {plural(found[1].messages, 'message')}, {seconds(found[1].last)} after backward"
    subtitle = (
        f"Computed for {model}, {size(sum(gradient_sizes(model)))} of gradients on {ranks} ranks; nothing was run"
    )
    return titled(figure, title, subtitle, _alt(found), 240)


def _alt(found: Sequence[Cost]) -> str:
    each = "; ".join(
        f"{cost.name}: {plural(cost.messages, 'message')}, starts {seconds(cost.starts)}, bytes"
        f" {seconds(cost.transfer)}, the last message {seconds(cost.last)}"
        for cost in found
    )
    return f"Bars of the time that one step's messages take. {each}."

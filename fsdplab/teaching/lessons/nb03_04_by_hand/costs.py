"""What a bucket's size costs, computed: small messages pay for their starts, one large one waits for the end of
backward.
"""

from __future__ import annotations

from functools import lru_cache

from fsdplab.common.sizes import seconds, size
from fsdplab.teaching.core.display import Table, table
from fsdplab.workloads import build_model


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


def bucket_table(model: str, bucket_MB: float, start_us: float, GB_per_s: float, ranks: int = 8) -> Table:
    """One step's messages under a simple model of a network: every message costs its start, then its bytes at full
    speed.
    """
    sizes = gradient_sizes(model)
    rows = []
    for name, limit in (
        ("one a gradient", 0),
        (f"buckets of {bucket_MB:g} MB", bucket_MB * 1e6),
        ("one for all", sum(sizes)),
    ):
        sent = buckets(sizes, limit)
        moved = [2 * nbytes * (ranks - 1) / ranks / (GB_per_s * 1e9) for nbytes in sent]
        starts = len(sent) * start_us * 1e-6
        rows.append([name, len(sent), seconds(starts), seconds(sum(moved)), seconds(start_us * 1e-6 + moved[-1])])
    caption = f"Computed for {model} ({size(sum(sizes))} of gradients) on {ranks} ranks; nothing was run."
    return table(
        ["messages", "how many", "their starts", "their bytes", "the last message (nothing hides it)"], rows, caption
    )

"""The collectives that this package's engine issues on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fsdplab.engine import events


@contextmanager
def collectives() -> Iterator[list[events.Collective]]:
    """`with collectives() as seen: ...`; all of the body's are in `seen` when it has ended."""
    seen: list[events.Collective] = []
    stop = events.subscribe(lambda event: seen.append(event) if isinstance(event, events.Collective) else None)
    try:
        yield seen
        events.flush()
    finally:
        stop()


def payload_bytes(seen: Iterable[events.Collective], kind: str) -> int:
    """Bytes of the whole payloads of one kind: `payload_bytes(seen, "all_gather")`."""
    return sum(each.logical_bytes for each in seen if each.kind == kind)

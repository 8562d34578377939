"""The collectives that this package's engine issues on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fsdplab.engine import events


@contextmanager
def collectives() -> Iterator[list[events.Collective]]:
    """Collect the collectives of the body: `with collectives() as seen: ...`; `seen` is complete when it has ended."""
    seen: list[events.Collective] = []

    def note(event: object) -> None:
        if isinstance(event, events.Collective):
            seen.append(event)

    stop = events.subscribe(note)
    try:
        yield seen
        events.flush()
    finally:
        stop()


def payload_bytes(seen: Iterable[events.Collective], kind: str) -> int:
    """Return the bytes of the whole payloads of one kind: `payload_bytes(seen, "all_gather")`."""
    return sum(collective.logical_bytes for collective in seen if collective.kind == kind)

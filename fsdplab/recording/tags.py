"""What the lab's engine says of its long-lived buffers, which it says only when it makes them."""

from __future__ import annotations

from fsdplab.profiling import TagLog

heard: TagLog | None = None  # since the job imported the engine, where it does


def begin() -> None:
    """Listen from now on."""
    global heard
    heard = heard or TagLog()

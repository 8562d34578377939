"""A Watcher made of functions, by the names of its methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdplab.sessions import Watcher


def watching(**methods: Callable[..., Any]) -> Watcher:
    """Return a watcher that calls these functions in place of its methods."""
    watcher = Watcher()
    for name, function in methods.items():
        assert callable(getattr(Watcher, name)), name
        setattr(watcher, name, function)
    return watcher

"""fsdplab: a laboratory for Fully Sharded Data Parallel training, and the sharding engine it runs on.

`import fsdplab` costs nothing: the names below load their room (and torch) when they are first used, so that a
command line can print its help at once and a GPU machine needs no plotting library.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "shard_model": "fsdplab.engine",
    "fully_shard": "fsdplab.engine",
    "Strategy": "fsdplab.engine",
    "STRATEGIES": "fsdplab.engine",
    "MixedPrecisionPolicy": "fsdplab.engine",
    "FSDPModule": "fsdplab.engine",
    "RunSpec": "fsdplab.sessions",
    "run": "fsdplab.sessions",
    "compare": "fsdplab.sessions",
    "RunRecord": "fsdplab.records",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    """Load the room that a public name lives in, the first time the name is used."""
    if name not in _HOME:
        raise AttributeError(f"module 'fsdplab' has no attribute {name!r}; public names: {', '.join(_HOME)}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

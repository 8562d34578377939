"""From a RunSpec to a RunRecord: real ranks, one report when they fail, and no process left behind.

The names below load their chapter when they are first used, because every rank and every launcher passes through this
file: what it imports, each of them pays for before its work begins.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .benching import Bench as Bench
    from .benching import bench as bench
    from .call import IssuedCollective as IssuedCollective
    from .call import RankValues as RankValues
    from .call import call_on_ranks as call_on_ranks
    from .comparing import compare as compare
    from .faults import Failure as Failure
    from .faults import RanksFailed as RanksFailed
    from .recording import run as run
    from .spec import ENGINES as ENGINES
    from .spec import RunSpec as RunSpec
    from .spec import SpecError as SpecError

_HOME = {
    "ENGINES": "spec",
    "RunSpec": "spec",
    "SpecError": "spec",
    "run": "recording",
    "compare": "comparing",
    "bench": "benching",
    "Bench": "benching",
    "call_on_ranks": "call",
    "RankValues": "call",
    "IssuedCollective": "call",
    "Failure": "faults",
    "RanksFailed": "faults",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    """Load the chapter that a public name lives in, the first time the name is used."""
    if name not in _HOME:
        raise AttributeError(f"module 'fsdplab.sessions' has no attribute {name!r}; public names: {', '.join(_HOME)}")
    value = getattr(import_module(f"fsdplab.sessions.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

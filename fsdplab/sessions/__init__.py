"""From a RunSpec to a RunRecord: real ranks, one report when they fail, and no process left behind.

The names below load their chapter when they are first used, because every rank and every launcher passes through this
file: what it imports, each of them pays for before its work begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdplab.common.lazy import names_of

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

_MODULES = {
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

__all__ = [*_MODULES]

__getattr__, __dir__ = names_of(__name__, {name: f"fsdplab.sessions.{module}" for name, module in _MODULES.items()})

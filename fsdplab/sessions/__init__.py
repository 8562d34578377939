"""From a RunSpec to a RunRecord: real ranks, one report when they fail, and no process left behind.

The names below load when they are first used, because every rank and every launcher imports this file: each would wait
for what is imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdplab.common.lazy import names_of

if TYPE_CHECKING:
    from fsdplab.sessions.bench_engines import Bench as Bench
    from fsdplab.sessions.bench_engines import bench as bench
    from fsdplab.sessions.compare_runs import compare as compare
    from fsdplab.sessions.launch.failure_report import Failure as Failure
    from fsdplab.sessions.launch.failure_report import RanksFailed as RanksFailed
    from fsdplab.sessions.remote_call import IssuedCollective as IssuedCollective
    from fsdplab.sessions.remote_call import RankValues as RankValues
    from fsdplab.sessions.remote_call import call_on_ranks as call_on_ranks
    from fsdplab.sessions.run_and_record import run as run
    from fsdplab.sessions.spec import ENGINES as ENGINES
    from fsdplab.sessions.spec import RunSpec as RunSpec
    from fsdplab.sessions.spec import SpecError as SpecError

_MODULES = {
    "ENGINES": "spec",
    "RunSpec": "spec",
    "SpecError": "spec",
    "run": "run_and_record",
    "compare": "compare_runs",
    "bench": "bench_engines",
    "Bench": "bench_engines",
    "call_on_ranks": "remote_call",
    "RankValues": "remote_call",
    "IssuedCollective": "remote_call",
    "Failure": "launch.failure_report",
    "RanksFailed": "launch.failure_report",
}

__all__ = [*_MODULES]

__getattr__, __dir__ = names_of(__name__, {name: f"fsdplab.sessions.{module}" for name, module in _MODULES.items()})

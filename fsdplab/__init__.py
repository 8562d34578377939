"""fsdplab: a laboratory for Fully Sharded Data Parallel training, and the sharding engine it runs on.

`import fsdplab` is cheap: the names below import their package (and torch) when first used, so that the command line
prints its help at once and a GPU machine needs no plotting library.
"""

from __future__ import annotations

from fsdplab.common.lazy import names_of

__version__ = "0.2.0"

_MODULES = {
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
    "Workload": "fsdplab.workloads.own.value",
    "Recorder": "fsdplab.recording",
    "open_record": "fsdplab.recording",
    "trainer_callback": "fsdplab.recording",
    "lightning_callback": "fsdplab.recording",
}

__all__ = ["__version__", *_MODULES]

__getattr__, __dir__ = names_of(__name__, _MODULES)

"""The sharding engine: `fully_shard`, and `shard_model` for every row of the strategy table.

Begin with core/unit.py, which tells one unit's life in time order. `core/` is that life and imports nothing else of the
engine but events.py (what it tells listeners) and compat.py (what depends on torch's version); `transport/` moves bytes
between ranks, `emulation/` slows it down to a network that is not there, `features/` and `torch_api/` have one file for
each thing that a user may ask for besides. module.py and shard.py put them together; checkpoint.py stands beside them.
"""

from fsdplab.engine.compat import DataParallelMeshDims
from fsdplab.engine.core.policy import STRATEGIES, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, Strategy
from fsdplab.engine.features.clipping import clip_grad_norm_
from fsdplab.engine.features.offload import NVMeOffloadPolicy
from fsdplab.engine.features.offloaded_optimizer import offload_optimizer
from fsdplab.engine.module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from fsdplab.engine.shard import fully_shard, shard_model

__all__ = [
    "STRATEGIES",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "NVMeOffloadPolicy",
    "OffloadPolicy",
    "Strategy",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "offload_optimizer",
    "register_fsdp_forward_method",
    "shard_model",
    "share_comm_ctx",
]

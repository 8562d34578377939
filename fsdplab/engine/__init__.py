"""The sharding engine: `fully_shard`, and `shard_model` for every row of the strategy table.

Read `unit.py` first: it tells one unit's life in time order. A file imports only files above it in this list: policy,
layout, events, pending, compat, traps, home, lanes, packing, transport, placement, param, reduction, extension,
halfway, unit, schedule, runtime, hooks, facade, custom, module, recompute, shard. Built on these: gloo, slots, arenas
and shared (shared memory between the ranks of one machine), shm_group and shm_moves (the same for torch's own engines),
timelines, watchdog and shared_gpu* (ranks that share one GPU), choose (which transport a group gets), mapped, offload
and offloaded_optimizer (host memory and files), norms, checkpoint.
"""

from .compat import DataParallelMeshDims
from .module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from .norms import clip_grad_norm_
from .offload import NVMeOffloadPolicy
from .offloaded_optimizer import offload_optimizer
from .policy import STRATEGIES, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, Strategy
from .shard import fully_shard, shard_model

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

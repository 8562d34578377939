"""The sharding engine: `fully_shard`, and `shard_model` for every row of the strategy table.

Begin with core/unit.py and core/step.py: what one unit does, and when. `core/` imports nothing else of the engine but
events.py (what it tells listeners), compat.py (what depends on torch's version) and nested.py (tensors in containers).
`transport/` moves bytes between ranks, `emulation/` slows it down to a network that is not there, `features/` and
`torch_api/` have one file for each thing that a user may ask for besides. module.py and shard.py put them together;
checkpoint.py stands beside them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdplab.common.lazy import names_of

if TYPE_CHECKING:
    from fsdplab.engine.compat import DataParallelMeshDims as DataParallelMeshDims
    from fsdplab.engine.core.policy import STRATEGIES as STRATEGIES
    from fsdplab.engine.core.policy import CPUOffloadPolicy as CPUOffloadPolicy
    from fsdplab.engine.core.policy import MixedPrecisionPolicy as MixedPrecisionPolicy
    from fsdplab.engine.core.policy import OffloadPolicy as OffloadPolicy
    from fsdplab.engine.core.policy import Strategy as Strategy
    from fsdplab.engine.features.clipping import clip_grad_norm_ as clip_grad_norm_
    from fsdplab.engine.features.offload import NVMeOffloadPolicy as NVMeOffloadPolicy
    from fsdplab.engine.features.offloaded_optimizer import offload_optimizer as offload_optimizer
    from fsdplab.engine.module import FSDPModule as FSDPModule
    from fsdplab.engine.module import UnshardHandle as UnshardHandle
    from fsdplab.engine.module import register_fsdp_forward_method as register_fsdp_forward_method
    from fsdplab.engine.module import share_comm_ctx as share_comm_ctx
    from fsdplab.engine.shard import fully_shard as fully_shard
    from fsdplab.engine.shard import shard_model as shard_model

_MODULES = {
    "DataParallelMeshDims": "compat",
    "STRATEGIES": "core.policy",
    "CPUOffloadPolicy": "core.policy",
    "MixedPrecisionPolicy": "core.policy",
    "OffloadPolicy": "core.policy",
    "Strategy": "core.policy",
    "clip_grad_norm_": "features.clipping",
    "NVMeOffloadPolicy": "features.offload",
    "offload_optimizer": "features.offloaded_optimizer",
    "FSDPModule": "module",
    "UnshardHandle": "module",
    "register_fsdp_forward_method": "module",
    "share_comm_ctx": "module",
    "fully_shard": "shard",
    "shard_model": "shard",
}

__all__ = sorted(_MODULES)

__getattr__, __dir__ = names_of(__name__, {name: f"fsdplab.engine.{module}" for name, module in _MODULES.items()})

"""One choice, in the words of five programs.

A test looks up each name of FSDP1, FSDP2, accelerate and the lab in the library itself. DeepSpeed's are keys of its
configuration, and those with a dot are Python.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Term(NamedTuple):
    """A choice, and what to write for it; "" where a program has no word for it."""

    choice: str
    fsdp1: str
    fsdp2: str
    deepspeed: str
    accelerate: str
    lab: str


PROGRAMS = ("FSDP1", "FSDP2", "DeepSpeed", "accelerate", "the lab")
TERMS = (
    Term("a block is a unit", "`auto_wrap_policy=ModuleWrapPolicy({Block})`", "`fully_shard(block)`, the model last",
         "buckets in place of units: `reduce_bucket_size`", "`fsdp_transformer_layer_cls_to_wrap`",
         "`shard_model(model, units=[Block])`"),
    Term("shard everything, reshard after forward", "`ShardingStrategy.FULL_SHARD`", "`reshard_after_forward=True`",
         "`stage: 3`", "`fsdp_reshard_after_forward: true`", "`full_shard`"),
    Term("stay unsharded until the backward", "`ShardingStrategy.SHARD_GRAD_OP`", "`reshard_after_forward=False`",
         "`stage: 2`, nearly", "`fsdp_reshard_after_forward: false`", "`shard_grad_op`"),
    Term("shard nothing", "`ShardingStrategy.NO_SHARD`", "`DistributedDataParallel`", "`stage: 0`",
         "`distributed_type: MULTI_GPU`", "`no_shard`"),
    Term("shard inside a machine, replicate across", "`ShardingStrategy.HYBRID_SHARD`", "`mesh=` of two axes",
         "`zero_hpz_partition_size`, parameters alone", "`parallelism_config_dp_replicate_size`", "`hybrid_shard`"),
    Term("compute in bf16", "`MixedPrecision(param_dtype=)`", "`MixedPrecisionPolicy(param_dtype=)`",
         "`bf16: {enabled: true}`", "`mixed_precision: bf16`", "`precision=`"),
    Term("keep shards on the host", "`CPUOffload(offload_params=True)`", "`CPUOffloadPolicy()`",
         "`offload_param`, `offload_optimizer`", "`fsdp_offload_params`", "`offload=`"),
    Term("unshard ahead", "`forward_prefetch=True`", "`set_modules_to_forward_prefetch`",
         "`stage3_prefetch_bucket_size`", "`fsdp_forward_prefetch`", "`prefetch=`"),
    Term("accumulate without reducing", "`no_sync()`", "`set_requires_gradient_sync(False)`",
         "`gradient_accumulation_steps`", "`gradient_accumulation_steps`", "`micro_batches=`"),
    Term("clip by the norm of all", "`model.clip_grad_norm_`", "`torch.nn.utils.clip_grad_norm_`",
         "`gradient_clipping`", "`clip_grad_norm_`", "`clip_grad_norm_`"),
    Term("begin on the meta device", "`param_init_fn=`", "`to_empty` after `fully_shard`", "`zero.Init()`",
         "`fsdp_cpu_ram_efficient_loading`", "`to_empty` after `fully_shard`"),
    Term("what a parameter is at rest", "`FlatParameter`", "`DTensor`", "a flat partition", "", "`DTensor`"),
    Term("the whole parameters for a while", "`summon_full_params`", "`unshard()`", "`zero.GatheredParameters`", "",
         "`unshard()`"),
    Term("a checkpoint in shards", "`StateDictType.SHARDED_STATE_DICT`", "`get_model_state_dict`", "its own, always",
         "`fsdp_state_dict_type`", "`checkpoint.save`"),
)  # fmt: skip


def found(word: str) -> list[Term]:
    """The rows in which a word stands, in any program's column, in any case: `found("no_sync")`."""
    wanted = re.sub(r"[^a-z0-9]", "", word.lower())
    return [term for term in TERMS if any(wanted in re.sub(r"[^a-z0-9]", "", cell.lower()) for cell in term)]

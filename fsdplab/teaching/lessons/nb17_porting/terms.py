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
    lab: str
    deepspeed: str
    accelerate: str


PROGRAMS = ("FSDP1", "FSDP2", "the lab", "DeepSpeed", "accelerate")
TERMS = (
    Term("a block is a unit", "`auto_wrap_policy=`", "`fully_shard(block)`, the model last",
         "`shard_model(model, units=[Block])`",
         "buckets: `reduce_bucket_size`", "`fsdp_transformer_layer_cls_to_wrap`"),
    Term("shard everything, reshard after forward", "`FULL_SHARD`", "`reshard_after_forward=True`", "`full_shard`",
         "`stage: 3`", "`fsdp_reshard_after_forward: true`"),
    Term("stay unsharded until the backward", "`SHARD_GRAD_OP`", "`reshard_after_forward=False`", "`shard_grad_op`",
         "`stage: 2`, nearly", "`fsdp_reshard_after_forward: false`"),
    Term("shard nothing", "`NO_SHARD`", "`DistributedDataParallel`", "`no_shard`",
         "`stage: 0`", "`distributed_type: MULTI_GPU`"),
    Term("shard inside a machine, replicate across", "`HYBRID_SHARD`", "`mesh=` of two axes", "`hybrid_shard`",
         "`zero_hpz_partition_size`", "`dp_replicate_size`"),
    Term("compute in bf16", "`MixedPrecision`", "`MixedPrecisionPolicy`", "`precision=`",
         "`bf16: {enabled: true}`", "`mixed_precision: bf16`"),
    Term("keep shards on the host", "`CPUOffload`", "`CPUOffloadPolicy()`", "`offload=`",
         "`offload_param`, `offload_optimizer`", "`fsdp_offload_params`"),
    Term("unshard ahead", "`forward_prefetch=True`", "`set_modules_to_forward_prefetch`", "`prefetch=`",
         "`stage3_prefetch_bucket_size`", "`fsdp_forward_prefetch`"),
    Term("accumulate without reducing", "`no_sync()`", "`set_requires_gradient_sync`", "`micro_batches=`",
         "`gradient_accumulation_steps`", "`gradient_accumulation_steps`"),
    Term("clip by the norm of all", "`model.clip_grad_norm_`", "`torch.nn.utils.clip_grad_norm_`", "`clip_grad_norm_`",
         "`gradient_clipping`", "`clip_grad_norm_`"),
    Term("begin on the meta device", "`param_init_fn=`", "`to_empty` after `fully_shard`",
         "`to_empty` after `fully_shard`",
         "`zero.Init()`", "`fsdp_cpu_ram_efficient_loading`"),
    Term("what a parameter is at rest", "`FlatParameter`", "`DTensor`", "`DTensor`", "a flat partition", ""),
    Term("the whole parameters for a while", "`summon_full_params`", "`unshard()`", "`unshard()`",
         "`zero.GatheredParameters`", ""),
    Term("a checkpoint in shards", "`SHARDED_STATE_DICT`", "`get_model_state_dict`", "`checkpoint.save`",
         "its own, always", "`fsdp_state_dict_type`"),
)  # fmt: skip


def found(word: str) -> list[Term]:
    """The rows in which a word stands, in any program's column, in any case: `found("no_sync")`."""
    wanted = re.sub(r"[^a-z0-9]", "", word.lower())
    return [term for term in TERMS if any(wanted in re.sub(r"[^a-z0-9]", "", cell.lower()) for cell in term)]

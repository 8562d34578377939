"""Remedies in the words of what a job is written with: one row an engine or a trainer, one word a change.

A run of the lab is told the lab's own settings. A recorded job is told the line, the argument or the JSON key that its
own program has: first its trainer's, where it has one that sets this of its engine, else its engine's, else the general
one; "" where its engine cannot be told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LAB = {
    "recompute": 'recompute them (checkpoint="full" or "selective")',
    "smaller_batch": "take a smaller micro-batch",
    "shorter": "take shorter sequences",
    "low_precision": "bf16 (half the bytes)",
    "keep_gathered": "shard_grad_op instead of full_shard",
    "hybrid": "hybrid_shard with the shard group on a fast axis",
    "gather_ahead": (
        "Gather a unit ahead: prefetch=1 (or set_modules_to_forward_prefetch and set_modules_to_backward_prefetch)."
    ),
    "blocks_as_units": 'Make whole blocks units (units="auto"), or several blocks one unit: fewer, larger collectives.',
    "fewer_units": "Make several blocks one unit: fewer, larger collectives.",
    "cut_unit": (
        "Cut it: make parts of it units of their own, so that one unit is gathered while its neighbour computes."
    ),
    "cut_into_blocks": (
        'Cut it: make each block a unit (units="auto"), so that one unit is gathered while its neighbour computes.'
    ),
    "apart": "Give reductions a communicator of their own (set_separate_reduce_scatter_group, --link-queues 2)",
    "larger_batch": "a larger batch",
    "reshard": "reshard units after their forward (full_shard)",
    "smaller_units": "make units smaller",
    "shard_gradients": "shard them: zero2, shard_grad_op or full_shard",
    "shard_state": "shard it over more ranks",
    "shard_further": "shard it over more ranks",
    "shard": "shard them over more ranks",
    "shard_more": "shard them over more ranks (full_shard)",
    "fewer_in_flight": "allow fewer reductions in flight",
    "offload_state": "offload it",
    "offload": "offload them",
    "reduce_low": "reduce in bf16",
    "other": "look at the memory timeline: the optimizer's temporaries are the usual reason",
    "loader": (
        "More workers that stay and load ahead (DataLoader: num_workers, persistent_workers, prefetch_factor), pinned"
        " memory, samples that are decoded beforehand, a faster storage."
    ),
    "reduce_once": "Reduce once: model.set_requires_gradient_sync(False) for all micro-batches but the last.",
    "evaluate_less": "Evaluate every so many hundred steps: an evaluation of fewer batches tells nearly as much.",
    "save_less": (
        "Save every so many minutes (lost work costs less than that), the local shards and not the whole state, and"
        " while the next step computes (torch.distributed.checkpoint.async_save)."
    ),
    "recompute_less": (
        "Leave torch.utils.checkpoint.checkpoint out, or around some of the blocks only, as far as memory allows."
    ),
}

# what any job of PyTorch can do, where its engine has no word of its own
_TORCH = {
    "recompute": "recompute them (torch.utils.checkpoint.checkpoint around each block)",
    "low_precision": "torch.autocast in bf16",
    "offload_state": "keep it in host memory",
    "offload": "keep them in host memory",
    "fewer_in_flight": "",  # FSDP keeps one, and DDP its buckets
    "other": (
        "look at the memory timeline: data that the job holds and the optimizer's temporaries (with fused=True it has"
        " none) are the usual reasons"
    ),
    "reduce_once": "Add gradients up over the micro-batches, and all_reduce them after the last one.",
}
_FSDP2 = {
    **_TORCH,
    "low_precision": "fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)) (half the bytes)",
    "keep_gathered": "fully_shard(..., reshard_after_forward=False)",
    "hybrid": "fully_shard(..., mesh=) over a mesh of two dimensions, the shard group on a fast axis",
    "gather_ahead": (
        "Gather a unit ahead: blocks[i].set_modules_to_forward_prefetch([blocks[i + 1]]) and"
        " blocks[i].set_modules_to_backward_prefetch([blocks[i - 1]])."
    ),
    "blocks_as_units": "Call fully_shard on whole blocks, or on lists of several blocks: fewer, larger collectives.",
    "fewer_units": "Call fully_shard on a list of several blocks: fewer, larger collectives.",
    "cut_unit": "Cut it: call fully_shard on its parts too, so that one unit is gathered while its neighbour computes.",
    "apart": "Give reductions a communicator of their own (model.set_separate_reduce_scatter_group())",
    "reshard": "fully_shard(..., reshard_after_forward=True)",
    "smaller_units": "call fully_shard on smaller modules",
    "shard_more": "fully_shard(..., reshard_after_forward=True)",
    "offload_state": "fully_shard(..., offload_policy=CPUOffloadPolicy())",
    "offload": "fully_shard(..., offload_policy=CPUOffloadPolicy())",
    "reduce_low": "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)",
    "reduce_once": (
        "Reduce once: model.set_requires_gradient_sync(False) for all micro-batches but the last, and (True) for it."
    ),
}
_FSDP1 = {
    **_TORCH,
    "low_precision": "FullyShardedDataParallel(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))",
    "keep_gathered": "FullyShardedDataParallel(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)",
    "hybrid": "sharding_strategy=ShardingStrategy.HYBRID_SHARD",
    "gather_ahead": "Gather a unit ahead: FullyShardedDataParallel(forward_prefetch=True).",
    "blocks_as_units": "Give whole blocks to auto_wrap_policy (ModuleWrapPolicy({Block})): fewer, larger collectives.",
    "fewer_units": "Wrap several blocks as one (auto_wrap_policy): fewer, larger collectives.",
    "cut_unit": (
        "Cut it: give its parts' classes to auto_wrap_policy, so that one unit is gathered while its neighbour"
        " computes."
    ),
    "reshard": "sharding_strategy=ShardingStrategy.FULL_SHARD",
    "smaller_units": "give smaller modules to auto_wrap_policy",
    "shard_more": "sharding_strategy=ShardingStrategy.FULL_SHARD",
    "offload_state": "FullyShardedDataParallel(cpu_offload=CPUOffload(offload_params=True))",
    "offload": "FullyShardedDataParallel(cpu_offload=CPUOffload(offload_params=True))",
    "reduce_low": "MixedPrecision(reduce_dtype=torch.bfloat16)",
    "reduce_once": "Reduce once: `with model.no_sync():` around all micro-batches but the last.",
}
_DDP = {
    **_TORCH,
    "low_precision": "DistributedDataParallel's register_comm_hook with bf16_compress_hook (half the bytes)",
    "hybrid": "larger buckets (DistributedDataParallel(bucket_cap_mb=100))",
    "fewer_units": "Larger buckets: DistributedDataParallel(bucket_cap_mb=100).",
    "blocks_as_units": "Larger buckets: DistributedDataParallel(bucket_cap_mb=100).",
    "shard_gradients": (
        "shard them: fully_shard instead of DistributedDataParallel; DistributedDataParallel(gradient_as_bucket_view"
        "=True) keeps them once instead of twice"
    ),
    "shard_state": "shard it: ZeroRedundancyOptimizer, or fully_shard instead of DistributedDataParallel",
    "shard_more": "shard them: fully_shard instead of DistributedDataParallel",
    "smaller_units": "DistributedDataParallel(gradient_as_bucket_view=True), which keeps no second copy of gradients",
    "reduce_once": (
        "Reduce once: `with model.no_sync():` around the forward and the backward of all micro-batches but the last"
        " (around the backward alone it does nothing)."
    ),
}
_DEEPSPEED = {
    **_TORCH,
    "low_precision": '"bf16": {"enabled": true} (half the bytes)',
    "keep_gathered": '"zero_optimization": {"stage": 2}',
    "hybrid": '"zero_optimization": {"zero_hpz_partition_size": ranks of a node}',
    "gather_ahead": 'Gather more ahead: a larger "stage3_prefetch_bucket_size", and "overlap_comm": true.',
    "blocks_as_units": 'Larger buckets: "reduce_bucket_size" and "allgather_bucket_size" of "zero_optimization".',
    "fewer_units": 'Larger buckets: "reduce_bucket_size" and "allgather_bucket_size" of "zero_optimization".',
    "cut_unit": 'Smaller buckets ("reduce_bucket_size", "stage3_prefetch_bucket_size"), and "overlap_comm": true.',
    "apart": 'Reduce on a stream of its own: "zero_optimization": {"overlap_comm": true}',
    "larger_batch": 'a larger "train_micro_batch_size_per_gpu"',
    "smaller_batch": 'take a smaller "train_micro_batch_size_per_gpu"',
    "reshard": 'a smaller "stage3_max_live_parameters"',
    "smaller_units": 'smaller buckets ("reduce_bucket_size", "stage3_prefetch_bucket_size")',
    "shard_gradients": '"zero_optimization": {"stage": 2} or 3',
    "shard_state": 'shard it over more ranks, with "zero_optimization": {"stage": 1} or more',
    "shard_more": '"zero_optimization": {"stage": 3}',
    "offload_state": '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}',
    "offload": '"zero_optimization": {"offload_param": {"device": "cpu"}}',
    "reduce_low": '"communication_data_type": "bf16"',
    "fewer_in_flight": '"zero_optimization": {"overlap_comm": false}',
    "reduce_once": '"zero_optimization": {"stage": 1} reduces once a step; stages 2 and 3 reduce each micro-batch.',
}
_BY_ENGINE = {
    "plain": _TORCH,
    "torch-ddp": _DDP,
    "torch-fsdp1": _FSDP1,
    "torch-fsdp2": _FSDP2,
    **{f"deepspeed-{stage}": _DEEPSPEED for stage in (1, 2, 3)},
}
# what trainers set in their own words, whatever shards the model
_BY_TRAINER = {
    "Trainer": {
        "recompute": "recompute them: TrainingArguments(gradient_checkpointing=True)",
        "recompute_less": "Leave TrainingArguments(gradient_checkpointing=True) out, as far as memory allows.",
        "smaller_batch": "take a smaller micro-batch: TrainingArguments(per_device_train_batch_size=,"
        " gradient_accumulation_steps=)",
        "larger_batch": "a larger TrainingArguments(per_device_train_batch_size=)",
        "low_precision": "TrainingArguments(bf16=True)",
        "loader": "Load ahead: TrainingArguments(dataloader_num_workers=4, dataloader_persistent_workers=True).",
        "reduce_once": "Reduce once: TrainingArguments(gradient_accumulation_steps=) instead of a loop of your own.",
        "evaluate_less": 'Evaluate every so many steps: TrainingArguments(eval_strategy="steps", eval_steps=500).',
        "save_less": 'Save every so many steps: TrainingArguments(save_strategy="steps", save_steps=500).',
    },
    "Lightning": {
        "smaller_batch": "take a smaller micro-batch, with Trainer(accumulate_grad_batches=)",
        "reduce_once": "Reduce once: Trainer(accumulate_grad_batches=) instead of a loop of your own.",
        "evaluate_less": "Evaluate every so many steps: Trainer(val_check_interval=500, limit_val_batches=50).",
        "save_less": "Save every so many steps: ModelCheckpoint(every_n_train_steps=500).",
    },
    "torchtitan": {
        "recompute": "recompute them: activation_checkpoint=FullAC.Config() or SelectiveAC.Config()",
        "smaller_batch": "take a smaller training.local_batch_size",
        "larger_batch": "a larger training.local_batch_size",
        "keep_gathered": 'parallelism.fsdp_reshard_after_forward = "never"',
        "hybrid": "parallelism.data_parallel_replicate_degree, with the shard group on a fast axis",
        "low_precision": 'training.mixed_precision_param = "bfloat16"',
    },
    "accelerate": {"low_precision": "accelerate launch --mixed_precision bf16"},
}
# what they set of one engine: the words follow from how the model was sharded
_SHARDED_BY_TRAINER = {
    "shard_more": "shard them: TrainingArguments(fsdp=True)",
    "shard_gradients": "shard them: TrainingArguments(fsdp=True)",
    "shard_state": "shard it: TrainingArguments(fsdp=True)",
}
_SHARDED_BY_LIGHTNING = {
    "shard_more": 'shard them: Trainer(strategy="fsdp")',
    "shard_gradients": 'shard them: Trainer(strategy="fsdp")',
    "shard_state": 'shard it: Trainer(strategy="fsdp")',
}
_FSDP_BY_TRAINER = {
    "keep_gathered": 'TrainingArguments(fsdp_config={"reshard_after_forward": False})',
    "gather_ahead": 'Gather a unit ahead: TrainingArguments(fsdp_config={"forward_prefetch": True}).',
}
_OF_AN_ENGINE = {
    ("Trainer", "torch-ddp"): {
        **_SHARDED_BY_TRAINER,
        "fewer_units": "Larger buckets: TrainingArguments(ddp_bucket_cap_mb=100).",
    },
    ("Trainer", "plain"): _SHARDED_BY_TRAINER,
    ("Trainer", "torch-fsdp1"): _FSDP_BY_TRAINER,
    ("Trainer", "torch-fsdp2"): {"keep_gathered": _FSDP_BY_TRAINER["keep_gathered"]},
    ("Lightning", "torch-ddp"): {
        **_SHARDED_BY_LIGHTNING,
        "fewer_units": "Larger buckets: Trainer(strategy=DDPStrategy(bucket_cap_mb=100)).",
        # not precision="bf16-true", under which parameters are in bf16 and lose small updates
        "low_precision": "Trainer(strategy=DDPStrategy(ddp_comm_hook=bf16_compress_hook)) (half the bytes)",
    },
    ("Lightning", "plain"): _SHARDED_BY_LIGHTNING,
    ("Lightning", "torch-fsdp1"): {
        "low_precision": "FSDPStrategy(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)) (half the bytes)",
        "keep_gathered": 'Trainer(strategy=FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"))',
    },
}


def words_of(spec: Mapping[str, Any]) -> dict[str, str]:
    """What each change is called in the program of this run: a recorded job's own words, else the lab's.

    >>> words_of({"job": "train.py", "engine": "deepspeed-2"})["offload_state"]
    '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}'
    """
    if not spec.get("job"):
        return _LAB
    engine, trainer = str(spec.get("engine")), str(spec.get("trainer"))
    own = {**_BY_ENGINE.get(engine, {}), **_BY_TRAINER.get(trainer, {})}
    return {**_LAB, **own, **_OF_AN_ENGINE.get((trainer, engine), {})}

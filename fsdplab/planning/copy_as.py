"""A choice of strategy as code to copy: lines of PyTorch, and the configuration file of Accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdplab.common.names import STRATEGY_ROWS

from .plan_spec import PlanSpec

_RECOMPUTE = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


@dataclass(frozen=True)
class Sharded:
    """What is copied: `units` are the names of the classes whose instances are units; none: one unit of all."""

    strategy: str
    ranks: int
    units: tuple[str, ...] = ()
    shard_size: int | None = None
    precision: str = "fp32"
    checkpoint: str = "none"
    prefetch: int = 1
    optimizer: str = "adamw"
    device: str = "cuda"
    offload: bool = False  # shards rest in host memory

    @property
    def kind(self) -> str:
        """The classes as `isinstance` takes them."""
        if len(self.units) == 1:
            return self.units[0]
        return f"({', '.join(self.units)})"

    @property
    def replicas(self) -> int:
        """Groups that hold the same shards."""
        if not STRATEGY_ROWS[self.strategy].in_groups or not self.shard_size:
            return 1
        return self.ranks // self.shard_size


# the classes of blocks: those of this package's presets, and transformers' of published models
BLOCKS = {True: ("LlamaBlock", "LlamaDecoderLayer"), False: ("GPTBlock", "GPT2Block")}


def of_plan(spec: PlanSpec) -> Sharded:
    """Return what of a plan the code depends on."""
    _, published_class = BLOCKS[spec.model.gated]
    return Sharded(
        spec.strategy,
        ranks=spec.gpus,
        units=(published_class,),
        shard_size=spec.shard_size or spec.gpus_per_node,
        precision=spec.param_dtype,
        checkpoint=spec.checkpointing,
        prefetch=spec.prefetch,
        optimizer=spec.optimizer,
        offload=spec.offload,
    )


def pytorch(what: Sharded) -> str:
    """Write the lines that shard `model` and make its optimizer, for a program that has initialised its process group.

    >>> print(pytorch(Sharded("no_shard", 2)))
    import torch
    from torch.nn.parallel import DistributedDataParallel
    <BLANKLINE>
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    """
    lines = ["import torch", *_recompute(what)]
    if "gradients" in STRATEGY_ROWS[what.strategy].cuts:
        lines += _fully_sharded(what)
    else:
        lines += _replicated(what)
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    statements = [line for line in lines if line not in imports]
    return "\n".join([*imports, "", *statements])


def _replicated(what: Sharded) -> Iterator[str]:
    yield from ["from torch.nn.parallel import DistributedDataParallel", "model = DistributedDataParallel(model)"]
    if what.precision == "bf16":
        yield f'# around the forward and the loss: with torch.autocast("{what.device}", torch.bfloat16)'
    if STRATEGY_ROWS[what.strategy].cuts:  # the optimizer's state alone
        yield "from torch.distributed.optim import ZeroRedundancyOptimizer"
        yield "optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True)"
        return
    holders = "model"
    if what.units:
        holders = f"*(module for module in model.modules() if isinstance(module, {what.kind}))"
    yield from _optimizer(what, holders, ", replicas=torch.distributed.group.WORLD")


def _fully_sharded(what: Sharded) -> Iterator[str]:
    yield "from torch.distributed.device_mesh import init_device_mesh"
    if "parameters" not in STRATEGY_ROWS[what.strategy].cuts:
        yield "# FSDP2 has no ZeRO-2: this keeps the unsharded parameters until the backward, and shards gradients"
    shape, axes = f"({what.ranks},)", '("shard",)'
    if what.replicas > 1:
        shape, axes = f"({what.replicas}, {what.shard_size})", '("replicate", "shard")'
    yield f'mesh = init_device_mesh("{what.device}", {shape}, mesh_dim_names={axes})'
    settings = f"mesh=mesh, reshard_after_forward={STRATEGY_ROWS[what.strategy].reshards_after_forward}"
    imported = {"CPUOffloadPolicy": what.offload, "MixedPrecisionPolicy": what.precision == "bf16", "fully_shard": True}
    yield f"from torch.distributed.fsdp import {', '.join(name for name, is_used in imported.items() if is_used)}"
    if what.precision == "bf16":
        yield "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        settings += ", mp_policy=policy"
    if what.offload:
        pins = "pin_memory=False" if what.device == "cpu" else ""  # pinning asks for an accelerator
        settings += f", offload_policy=CPUOffloadPolicy({pins})"
    if what.units:
        kind = what.kind if what.checkpoint == "none" else "CheckpointWrapper"
        yield f"units = [module for module in model.modules() if isinstance(module, {kind})]"
        yield from ["for unit in units:", f"    fully_shard(unit, {settings})"]
    yield f"fully_shard(model, {settings})"
    if what.units and what.prefetch > 0:
        yield "for index, unit in enumerate(units):"
        yield f"    unit.set_modules_to_forward_prefetch(units[index + 1 : index + {1 + what.prefetch}])"
        yield f"    unit.set_modules_to_backward_prefetch(units[max(0, index - {what.prefetch}) : index][::-1])"
    yield from _optimizer(what, "*units" if what.units else "model")


def _recompute(what: Sharded) -> Iterator[str]:
    """Blocks are wrapped before they are sharded: a unit is a wrapped block."""
    if what.checkpoint == "none" or not what.units:
        return
    yield f"from {_RECOMPUTE} import CheckpointWrapper, apply_activation_checkpointing"
    if what.checkpoint == "selective":
        yield "# each unit is recomputed whole: the lab's selective keeps every second product"
    yield f"apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, {what.kind}))"


def _optimizer(what: Sharded, holders: str, replicas: str = "") -> list[str]:
    if what.optimizer != "muon":
        how = "foreach" if what.optimizer == "adamw-foreach" else "fused"
        return [f"optimizer = torch.optim.AdamW(model.parameters(), {how}=True)"]
    return [
        "from fsdplab.engine import whole_matrices",
        f"matrices = [each for module in ({holders},) for each in module.parameters() if each.ndim == 2]",
        "others = [each for each in model.parameters() if all(each is not one for one in matrices)]",
        "rest = torch.optim.AdamW(others, fused=True)",
        f"optimizer = whole_matrices(torch.optim.Muon(matrices), rest=rest{replicas})",
    ]


def accelerate_yaml(what: Sharded) -> str:
    """Write the file for `accelerate launch --config_file`: FSDP2 where it does the strategy, else DDP or DeepSpeed.

    >>> print(accelerate_yaml(Sharded("zero1", 2)).splitlines()[3])
      zero_stage: 1
    """
    mixed = "bf16" if what.precision == "bf16" else "'no'"
    lines = ["compute_environment: LOCAL_MACHINE"]
    row = STRATEGY_ROWS[what.strategy]
    if not row.cuts:
        kind = "MULTI_CPU" if what.device == "cpu" else "MULTI_GPU"
        lines.append(f"distributed_type: {kind}")
    elif "parameters" in row.cuts:
        lines += ["distributed_type: FSDP", *_fsdp_config(what)]
    else:  # less than FSDP2 shards
        lines += ["distributed_type: DEEPSPEED", "deepspeed_config:", f"  zero_stage: {row.deepspeed_stage}"]
    if what.device == "cpu":
        lines.append("use_cpu: true")
    lines += [f"mixed_precision: {mixed}", "num_machines: 1", f"num_processes: {what.ranks}"]
    return "\n".join(lines)


def _fsdp_config(what: Sharded) -> list[str]:
    reshards = str(STRATEGY_ROWS[what.strategy].reshards_after_forward).lower()
    lines = ["fsdp_config:", "  fsdp_version: 2", f"  fsdp_reshard_after_forward: {reshards}"]
    if what.units:
        lines += [
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_transformer_layer_cls_to_wrap: {','.join(what.units)}",
        ]
    else:
        lines.append("  fsdp_auto_wrap_policy: NO_WRAP")
    lines.append(f"  fsdp_activation_checkpointing: {str(what.checkpoint != 'none').lower()}")
    if what.offload:
        lines.append("  fsdp_offload_params: true")
    if what.replicas > 1:
        lines += [
            "parallelism_config:",
            f"  parallelism_config_dp_replicate_size: {what.replicas}",
            f"  parallelism_config_dp_shard_size: {what.shard_size}",
        ]
    return lines

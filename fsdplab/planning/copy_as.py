"""A choice of strategy as code to copy: lines of PyTorch, and the configuration file of Accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.workloads.shapes import ModelShape

from .plan_spec import PlanSpec

OF_A_NODE = 8  # ranks, in the line that starts them
_RECOMPUTE = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


@dataclass(frozen=True)
class Sharded:
    """What is copied: `units` are the names of the classes whose instances are units; none: one unit of all.

    `program` are lines that import these classes and make `model`; none: the reader's own program has both.
    """

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
    program: tuple[str, ...] = ()

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
        program=_of_transformers(spec.model),
    )


def of_the_lab(model: str, units: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines that make one of the lab's models, and import its blocks.

    >>> print(*of_the_lab("gpt-tiny", ("GPTBlock",)), sep="\\n")
    from fsdplab.workloads import build_model
    from fsdplab.workloads.transformer import GPTBlock
    model = build_model("gpt-tiny")
    """
    of_this_package = [name for name in units if name in {ours for ours, _ in BLOCKS.values()}]
    blocks = [f"from fsdplab.workloads.transformer import {name}" for name in of_this_package]
    return ("from fsdplab.workloads import build_model", *blocks, f'model = build_model("{model}")')


def _of_transformers(shape: ModelShape) -> tuple[str, ...]:
    """Return the lines that make a published model of this shape with transformers; none for shapes of other kinds."""
    if shape.why_not_built():
        return ()
    _, block = BLOCKS[shape.gated]
    if shape.gated:
        family, name, head = "llama", "Llama", "ForCausalLM"
        sizes = {
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.width,
            "intermediate_size": shape.ffn,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_width,
            "max_position_embeddings": shape.context,
            "tie_word_embeddings": shape.tied,
        }
    else:
        family, name, head = "gpt2", "GPT2", "LMHeadModel"
        sizes = {
            "vocab_size": shape.vocabulary,
            "n_embd": shape.width,
            "n_inner": shape.ffn,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_positions": shape.context,
            "tie_word_embeddings": shape.tied,
        }
    arguments = "".join(f"    {size}={value},\n" for size, value in sizes.items())
    return (
        f"from transformers import {name}Config, {name}{head}",
        f"from transformers.models.{family}.modeling_{family} import {block}",
        f"config = {name}Config(\n{arguments})",
        f"model = {name}{head}(config)  # with random weights, in the memory of each rank's host",
    )


def pytorch(what: Sharded) -> str:
    """Write a program for torchrun that makes `model`, shards it and makes its optimizer.

    >>> print(pytorch(Sharded("no_shard", 2, device="cpu")))
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    <BLANKLINE>
    # torchrun --nproc-per-node 2 this_file.py; `model` is yours
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    """
    lines = [*_started(what), *what.program, *_recompute(what)]
    if "gradients" in STRATEGY_ROWS[what.strategy].cuts:
        lines += _fully_sharded(what)
    else:
        lines += _replicated(what)
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    statements = [line for line in lines if line not in imports]
    return "\n".join([*imports, "", *statements])


def _started(what: Sharded) -> Iterator[str]:
    """Yield the lines that join the ranks into a group."""
    yield from ["import torch", "import torch.distributed as dist"]
    launch = f"--nproc-per-node {what.ranks}"
    if what.ranks > OF_A_NODE and what.ranks % OF_A_NODE == 0:
        launch = f"--nnodes {what.ranks // OF_A_NODE} --nproc-per-node {OF_A_NODE}"
    comment = f"# torchrun {launch} this_file.py"
    if not what.program:
        classes = [f"`{name}`" for name in what.units if "." not in name]  # others are imported by their module
        comment += f"; {', '.join(['`model`', *classes])} {'are' if classes else 'is'} yours"
    yield comment
    backend = "gloo" if what.device == "cpu" else "nccl"
    yield "if not dist.is_initialized():"
    yield f'    dist.init_process_group("{backend}")'
    if what.device != "cpu":
        yield "torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())"


def _replicated(what: Sharded) -> Iterator[str]:
    yield "from torch.nn.parallel import DistributedDataParallel"
    if what.device != "cpu":
        yield "model = model.cuda()"
    yield "model = DistributedDataParallel(model)"
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

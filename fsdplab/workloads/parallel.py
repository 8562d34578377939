"""Cuts a model before it is sharded: across a layer (tensor parallel) or between layers (pipeline stages).

Neither changes a parameter's name or its initial values, so a cut model still has an unsharded twin, and the whole
model's checkpoint fits it.

Tensor parallel: a block's first projections keep some output channels each (columns), the last one the matching input
channels (rows), so that a block needs one sum over the ranks per projection back into the residual stream.

Letters: B batch, T tokens, C width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .errors import ModelError
from .models import initialise
from .shapes import ModelShape, preset
from .transformer import GPT, GPTBlock, Llama

_COLUMNS = ("attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up")
_ROWS = ("attention.output", "feed_forward.down")
_NORMS = ("attention_norm", "feed_forward_norm")


def parallelize(model: GPT | Llama | GPTStage, mesh: DeviceMesh, sequence_parallel: bool = False) -> nn.Module:
    """Cut `model`, whole or one pipeline stage, over the 1-D `mesh`, in place; shard it over another mesh afterwards.

    With `sequence_parallel`, what flows between the projections (norms, residual stream) is cut along T as well, which
    T must allow. Raises `ModelError` where the ranks do not divide the key/value heads, or head and embedding are
    tied.
    """
    _check(model.config, mesh.size())
    for module in model.modules():
        if isinstance(module, model.block_type):
            parallelize_module(module, mesh, block_plan(module, sequence_parallel))
    plan = _root_plan(sequence_parallel)
    parts = dict(model.named_children())  # a stage lacks some
    parallelize_module(model, mesh, {name: plan[name] for name in plan if name in parts})
    return model


def block_plan(block: nn.Module, sequence_parallel: bool = False) -> dict[str, ParallelStyle]:
    """Return how each projection (and, with `sequence_parallel`, each norm) of a GPT or Llama block is cut."""
    # the residual stream [B, T, C] is cut along T, or whole on every rank
    stream = Shard(1) if sequence_parallel else Replicate()
    inside = {name for name, _ in block.named_modules()}
    plan: dict[str, ParallelStyle] = {}
    for name in _COLUMNS:
        if name in inside:  # a GPT has no gate
            # torch counts by outputs: "column-wise" keeps some rows of the stored weight (outputs, inputs)
            plan[name] = ColwiseParallel()
    for name in _ROWS:
        # each rank has a partial sum: all-reduced, or reduce-scattered along T
        plan[name] = RowwiseParallel(output_layouts=stream)
    # Stated once for all projections that read it: so its gradient is summed once, not once for each.
    for name in ("attention", "feed_forward"):
        plan[name] = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
    if sequence_parallel:
        plan |= {name: SequenceParallel() for name in _NORMS}
    return plan


def _root_plan(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Cut embeddings by rows, whose outputs are summed, and the head by vocabulary; logits come out whole."""
    # positions are embedded once, [T, C], without the dimension of the batch
    stream = Shard(1) if sequence_parallel else Replicate()
    positions = Shard(0) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "position_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=positions),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    if sequence_parallel:
        plan["final_norm"] = SequenceParallel()
    return plan


def _check(config: ModelShape, ranks: int) -> None:
    if config.kv_heads % ranks or config.ffn % ranks or config.vocabulary % ranks:
        raise ModelError(
            f"tensor parallelism over {ranks} ranks must divide kv_heads, ffn and vocabulary; "
            f"got {config.kv_heads}, {config.ffn} and {config.vocabulary}; use fewer ranks for it"
        )
    if config.tied:
        raise ModelError(
            "tied embeddings cannot be cut here: head and token embedding would be cut differently; use tied=False"
        )


# ---- pipeline stages


class GPTStage(nn.Module):
    """Blocks `first` to `last` (exclusive) of a GPT; the first stage has the embeddings too, the last one the head.

    tokens int64 [B, T] (first stage) or activations [B, T, C] -> activations, or logits [B, T, V] from the last stage.
    Every part has the name that it has in the whole model.
    """

    block_type = GPTBlock

    def __init__(self, config: ModelShape, first: int, last: int) -> None:
        super().__init__()
        self.config = config
        self.begins, self.ends = first == 0, last == config.layers
        if self.begins:
            self.token_embedding = nn.Embedding(config.vocabulary, config.width)
            self.position_embedding = nn.Embedding(config.positions, config.width)
        # by their numbers in the whole model, so that names agree
        self.blocks = nn.ModuleDict({str(index): GPTBlock(config) for index in range(first, last)})
        if self.ends:
            self.final_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.begins:
            self.config.require_length(x.shape[1])
            x = self.token_embedding(x) + self.position_embedding(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        if not self.ends:
            return x
        return self.head(self.final_norm(x))


def stage_span(layers: int, stage: int, stages: int) -> tuple[int, int]:
    """Return the first and last-plus-one block of a stage; earlier stages take the blocks that do not divide evenly.

    >>> [stage_span(5, stage, 3) for stage in range(3)]
    [(0, 2), (2, 4), (4, 5)]
    """
    if not 0 <= stage < stages:
        raise ModelError(f"stage must be from 0 to stages - 1 = {stages - 1}, got {stage}")
    if stages > layers:
        raise ModelError(f"{layers} blocks cannot fill {stages} pipeline stages; expected at most one stage a block")
    # 5 blocks on 3 stages: 1 each, and the first two take one more
    share, rest = divmod(layers, stages)
    first = stage * share + min(stage, rest)
    return first, first + share + (stage < rest)


def build_stage(
    model: str | ModelShape, stage: int, stages: int, device: torch.device | str = "cpu", seed: int = 0
) -> GPTStage:
    """Build a stage of a GPT with the values that `build_model(model, seed=seed)` has; on "meta", without values."""
    config = model if isinstance(model, ModelShape) else preset(model)
    if config.family != "gpt" or config.tied:
        raise ModelError("pipeline stages are cut from a gpt whose head is its own: gated=False, tied=False")
    with torch.device("meta"):
        built = GPTStage(config, *stage_span(config.layers, stage, stages))
    if torch.device(device).type == "meta":
        return built
    return initialise(built.to_empty(device=device), seed)

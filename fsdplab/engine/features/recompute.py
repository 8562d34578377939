"""Chooses what a unit keeps between its forward and its backward: activation checkpointing as one choice.

    none        every activation that autograd wants
    full        its inputs only; the backward runs the forward again (Chen et al. 2016, sublinear memory)
    selective   also the results of matrix products and attention, every other one (as torchtitan chooses): most of the
                arithmetic is kept, most of the memory is not

The second forward runs inside the unit's backward, where its parameters are gathered anyway: it costs no traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

CHECKPOINTS = ("none", "full", "selective")
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
_ATTENTIONS = {
    # `scaled_dot_product_attention`, one for each backend; its `math` is matrix products
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention.quantized",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",  # what torch prefers on H100
    "aten::_scaled_dot_product_fused_attention_overrideable",  # other accelerators
    "aten::_scaled_dot_product_attention_math_for_mps",
    # sequences of different lengths: nested tensors, and `torch.nn.attention.varlen`
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_cudnn_attention_forward",
    "torch_attn::_varlen_attn",
    "flex_attention",
}


@cache
def recompute_of(choice: str) -> Callable[..., Any] | None:
    """Return what runs a forward for `choice`: (forward, module, *args, **kwargs) -> output; None for "none"."""
    if choice not in CHECKPOINTS:
        raise ValueError(f"unknown checkpoint {choice!r}; expected one of {', '.join(CHECKPOINTS)}")
    if choice == "none":
        return None
    options = {}
    if choice == "selective":
        options["context_fn"] = _every_other_product
    return partial(checkpoint, use_reentrant=False, **options)


@cache
def recomputing(kind: type[nn.Module], recompute: Callable[..., Any]) -> type[nn.Module]:
    """Return a subclass of `kind`, under its name, whose forward is run by `recompute` where gradients are wanted."""

    @wraps(kind.forward, updated=())
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return recompute(kind.forward, self, *args, **kwargs)
        return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _every_other_product() -> Any:
    """Return the contexts of one checkpointed forward: attentions and every other matrix product are saved."""
    seen = {False: 0, True: 0}  # in the forward, in the recomputation: both must take the same decisions

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op.name() in _ATTENTIONS:
            return CheckpointPolicy.MUST_SAVE
        if op not in _PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        # Products 1, 3, 5 are saved; 2, 4, 6 are computed again.
        seen[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if seen[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)

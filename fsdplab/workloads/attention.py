"""Causal self-attention, shared by both families, and the rotary positions that Llama gives it.

Letters: B batch, T tokens, C width, H query heads, K key/value heads, D = C / H head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .shapes import ModelShape, RotaryScaling


class CausalAttention(nn.Module):
    """Each token looks at itself and at earlier ones. [B, T, C] -> [B, T, C]

    With K < H, H / K query heads share one key/value head (grouped-query attention).
    """

    def __init__(self, config: ModelShape, *, bias: bool, rotary: Rotary | None = None) -> None:
        super().__init__()
        C, self.D = config.width, config.head_width
        self.query = nn.Linear(C, config.heads * self.D, bias=bias)
        self.key = nn.Linear(C, config.kv_heads * self.D, bias=bias)
        self.value = nn.Linear(C, config.kv_heads * self.D, bias=bias)
        self.output = nn.Linear(config.heads * self.D, C, bias=bias)
        self.grouped = config.kv_heads != config.heads
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.query(x).view(B, T, -1, self.D).transpose(1, 2)  # (B, H, T, D)
        k = self.key(x).view(B, T, -1, self.D).transpose(1, 2)  # (B, K, T, D)
        v = self.value(x).view(B, T, -1, self.D).transpose(1, 2)  # (B, K, T, D)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        # (B, H, T, D) -> (B, T, H * D), which under tensor parallelism is a share of C
        y = y.transpose(1, 2).flatten(2)
        return self.output(y)


class Rotary(nn.Module):
    """Turns each pair of channels (i, i + D/2) of a query or key by an angle that grows with the token's position.

    The dot product of a turned query and a turned key then depends on the distance between them only. [B, *, T, D] ->
    same.

    One instance serves all blocks, so the tables exist once and a block stays a function of x alone. Were they passed
    to the blocks as arguments, a sharding engine that casts a unit's inputs to bfloat16 would round them.
    """

    cos: Tensor  # (context, D/2) float32
    sin: Tensor

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.config = config
        shape = (config.context, config.head_width // 2)
        # Not persistent: a checkpoint need not carry what a formula gives. So `to_empty` leaves garbage here until
        # `reset_buffers`.
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_buffers()

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Write the tables anew where they lie; on the meta device there is nothing to write."""
        if self.cos.is_meta:
            return
        base = self.config.rotary_base
        assert base is not None, "a shape without one is not built"
        frequencies = rotary_frequencies(self.config.head_width, base, self.config.rotary_scaling)
        positions = torch.arange(self.config.context, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, frequencies)  # (context, D/2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[-2]
        cos, sin = self.cos[:T], self.sin[:T]  # (T, D/2)
        first, second = x.chunk(2, dim=-1)  # (B, *, T, D/2) each
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.to(x.dtype)  # the tables are float32, so a bfloat16 x was turned in float32


def rotary_frequencies(head_width: int, base: float, scaling: RotaryScaling | None = None) -> Tensor:
    """Radians that each of the D/2 pairs turns a token, fastest first; float64 [D/2], on the CPU on every machine.

    >>> rotary_frequencies(4, 10_000.0).tolist()
    [1.0, 0.01]
    """
    exponents = torch.arange(0, head_width, 2, dtype=torch.float64, device="cpu") / head_width
    frequencies = base**-exponents
    if scaling is None:
        return frequencies
    turns = scaling.original_context * frequencies / (2 * math.pi)  # whole turns within the original context
    kept = ((turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor

"""Defines the models: a GPT as GPT-2 has it, and a Llama.

A GPT has LayerNorm, learned positions, GELU, and biases everywhere but in the head. A Llama has RMSNorm, rotary
positions, SwiGLU, grouped-query attention, and no biases.

Letters: B batch, T tokens, C width, V vocabulary, H query heads, K key/value heads, D = C / H head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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
        # (a, b) turned by t: (a cos t - b sin t, b cos t + a sin t)
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
    # 1: as it is; 0: `factor` times slower; between them blended
    kept = ((turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


class GPTFeedForward(nn.Module):
    """Linear, GELU, linear. [B, T, C] -> [B, T, C]"""

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.ffn)
        self.gelu = nn.GELU(approximate="tanh")
        self.down = nn.Linear(config.ffn, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gelu(self.up(x)))


class GPTBlock(nn.Module):
    """Attention, then feed-forward, each added to its input. [B, T, C] -> [B, T, C]"""

    feed_forward_type: Callable[..., nn.Module] = GPTFeedForward

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.attention = CausalAttention(config, bias=True)
        self.feed_forward_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.feed_forward = self.feed_forward_type(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class LlamaFeedForward(nn.Module):
    """SwiGLU: a second projection gates the first. [B, T, C] -> [B, T, C]"""

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.ffn, bias=False)
        self.up = nn.Linear(config.width, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """Attention, then feed-forward, each added to its input. [B, T, C] -> [B, T, C]"""

    def __init__(self, config: ModelShape, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.attention = CausalAttention(config, bias=False, rotary=rotary)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.feed_forward = LlamaFeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """tokens int64 [B, T] -> logits [B, T, V]; more than `config.context` tokens raise `ModelError`."""

    block_type: type[nn.Module]
    norm_type: type[nn.Module] = nn.LayerNorm

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        if config.positions:
            self.position_embedding = nn.Embedding(config.positions, config.width)
        self.blocks = self.make_blocks()
        self.final_norm = self.norm_type(config.width, eps=config.norm_epsilon)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def make_blocks(self) -> nn.ModuleList:
        """Return the blocks, first to last."""
        return nn.ModuleList(self.block_type(self.config) for _ in range(self.config.layers))

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens [B, T] -> the input of the first block [B, T, C]."""
        self.config.require_length(tokens.shape[1])
        x = self.token_embedding(tokens)
        if not self.config.positions:
            return x
        return x + self.position_embedding(torch.arange(tokens.shape[1], device=tokens.device))  # (B, T, C) + (T, C)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))  # (B, T, V)


class GPT(Decoder):
    """A decoder of `GPTBlock`."""

    block_type = GPTBlock


class Llama(Decoder):
    """A decoder of `LlamaBlock`; one table of rotary positions serves all blocks."""

    block_type = LlamaBlock
    norm_type = nn.RMSNorm

    def make_blocks(self) -> nn.ModuleList:
        rotary = Rotary(self.config)
        return nn.ModuleList(LlamaBlock(self.config, rotary) for _ in range(self.config.layers))

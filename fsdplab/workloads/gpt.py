"""What all models here are around their blocks, and a GPT as GPT-2 has it: LayerNorm, learned positions, GELU, biases
everywhere but in the head.

Letters: B batch, T tokens, C width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .attention import CausalAttention
from .shapes import ModelShape


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
        """The blocks, first to last."""
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

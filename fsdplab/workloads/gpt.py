"""A GPT as GPT-2 has it: LayerNorm, learned positions, GELU, biases everywhere but in the head.

Letters: B batch, T tokens, C width, V vocabulary.
"""

from __future__ import annotations

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

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.attention = CausalAttention(config, bias=True)
        self.feed_forward_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.feed_forward = GPTFeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """tokens int64 [B, T] -> logits [B, T, V]; more than `config.context` tokens raise `ModelError`."""

    block_type = GPTBlock

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width, eps=config.norm_epsilon)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        B, T = tokens.shape
        self.config.require_length(T)
        positions = torch.arange(T, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, C) + (T, C)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))  # (B, T, V)

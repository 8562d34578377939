"""A Llama-style model: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases.

Letters: B batch, T tokens, C width, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from .attention import CausalAttention, Rotary
from .shapes import ModelShape


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


class Llama(nn.Module):
    """tokens int64 [B, T] -> logits [B, T, V]; more than `config.context` tokens raise `ModelError`."""

    block_type = LlamaBlock

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        rotary = Rotary(config)
        self.blocks = nn.ModuleList(LlamaBlock(config, rotary) for _ in range(config.layers))
        self.final_norm = nn.RMSNorm(config.width, eps=config.norm_epsilon)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        B, T = tokens.shape
        self.config.require_length(T)
        x = self.token_embedding(tokens)  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))  # (B, T, V)

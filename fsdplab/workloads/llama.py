"""A Llama-style model: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases.

Letters: B batch, T tokens, C width.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from .attention import CausalAttention, Rotary
from .gpt import Decoder
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


class Llama(Decoder):
    """A decoder of `LlamaBlock`; one table of rotary positions serves all blocks."""

    block_type = LlamaBlock
    norm_type = nn.RMSNorm

    def make_blocks(self) -> nn.ModuleList:
        rotary = Rotary(self.config)
        return nn.ModuleList(LlamaBlock(self.config, rotary) for _ in range(self.config.layers))

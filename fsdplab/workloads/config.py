"""The shape of a model: everything that follows from it by arithmetic, without a tensor.

So planning works for 405 billion parameters on a laptop.

Letters used by the models:  B batch, T tokens, C width, H query heads, K key/value heads, D = C / H head width.
"""

from __future__ import annotations

from dataclasses import dataclass

FAMILIES = ("gpt", "llama")
SIZES = ("layers", "width", "heads", "kv_heads", "ffn", "vocabulary", "context")


class ConfigError(ValueError):
    """A model shape that cannot be built, or a preset that does not exist."""


class TextError(ValueError):
    """Text that cannot be trained on: missing, unreadable, empty, or too short. Here, so that a command that refuses it
    in one line knows it without importing torch.
    """


@dataclass(frozen=True)
class RotaryScaling:
    """How Llama 3.1 stretches rotary frequencies from `original_context` to a context `factor` times as long.

    Frequencies that turn more than `high_frequency` times within the original context stay as they are, those that turn
    less than `low_frequency` times become `factor` times slower, and those between are blended.
    """

    factor: float = 8.0
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and self.original_context >= 1):
            raise ConfigError(
                f"rotary scaling: got factor {self.factor!r} and original_context {self.original_context!r}; both must"
                " be at least 1"
            )
        if not 0 < self.low_frequency < self.high_frequency:
            raise ConfigError(
                f"rotary scaling: got low_frequency {self.low_frequency!r} and high_frequency {self.high_frequency!r}; "
                "expected 0 < low_frequency < high_frequency"
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a GPT or a Llama-style model, checked once, here; a wrong one raises `ConfigError`.

    >>> shape = dict(layers=2, width=64, heads=4, kv_heads=4, ffn=256, vocabulary=256, context=128)
    >>> ModelConfig(family="gpt", **shape).head_width
    16
    """

    family: str  # "gpt": LayerNorm, learned positions, GELU, biases.  "llama": RMSNorm, rotary, SwiGLU, no biases
    layers: int
    width: int
    heads: int
    kv_heads: int  # fewer than heads: grouped-query attention
    ffn: int  # inner width of the feed-forward part
    vocabulary: int
    context: int  # the longest sequence, in tokens
    tie_embeddings: bool = False  # the output head is the token embedding itself
    norm_epsilon: float = 1e-5
    rotary_base: float = 10_000.0  # llama only, as is the next
    rotary_scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(f"unknown model family: got {self.family!r}, expected one of {', '.join(FAMILIES)}")
        for name in SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {size!r}")
        self._check_heads()
        if not self.norm_epsilon > 0 or not self.rotary_base > 1:
            raise ConfigError(
                f"norm_epsilon must be above 0 and rotary_base above 1, got {self.norm_epsilon!r} and"
                f" {self.rotary_base!r}"
            )
        if self.family == "gpt" and self.rotary_scaling is not None:
            raise ConfigError(
                "a gpt has learned positions, so rotary_scaling must be None; use family='llama' for rotary positions"
            )

    def _check_heads(self) -> None:
        if self.width % self.heads:
            raise ConfigError(f"heads must divide width, got width {self.width} and {self.heads} heads; change either")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"kv_heads must divide heads, got {self.heads} heads and {self.kv_heads} kv_heads; "
                "each key/value head serves an equal group of query heads"
            )
        if self.family == "llama" and self.head_width % 2:
            raise ConfigError(
                "rotary positions turn pairs of channels, so width / heads must be even, "
                f"got {self.width} / {self.heads} = {self.head_width}"
            )

    def require_length(self, tokens: int) -> None:
        """Raise `ConfigError` for a sequence of more tokens than the model has positions for."""
        if tokens > self.context:
            raise ConfigError(
                f"a sequence of {tokens} tokens is longer than the model's context of {self.context}; give shorter"
                " sequences"
            )

    @property
    def head_width(self) -> int:
        """Channels of one attention head (D)."""
        return self.width // self.heads


def block_parameter_count(config: ModelConfig) -> int:
    """Parameters of one transformer block, in closed form: the usual unit of sharding.

    GPT-2 small (C = 768, ffn = 3072): attention 4 C^2 + 4 C, feed-forward 2 C ffn + ffn + C, two norms 4 C: 7,087,872.
    """
    C, F, kv_width = config.width, config.ffn, config.kv_heads * config.head_width
    attention = 2 * C * C + 2 * C * kv_width
    if config.family == "llama":
        return attention + 3 * C * F + 2 * C
    biases = (2 * C + 2 * kv_width) + (F + C)
    return attention + 2 * C * F + biases + 4 * C


def root_parameter_count(config: ModelConfig) -> int:
    """Parameters outside the blocks: embeddings, final norm and output head (counted once with the embedding when
    tied).
    """
    C = config.width
    tables = (1 if config.tie_embeddings else 2) * config.vocabulary * C
    if config.family == "llama":
        return tables + C
    return tables + config.context * C + 2 * C


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the whole model, in closed form; equal to what `build_model(config, device="meta")` holds.

    >>> from fsdplab.workloads import PRESETS
    >>> parameter_count(PRESETS["gpt2"])
    124439808
    """
    return config.layers * block_parameter_count(config) + root_parameter_count(config)

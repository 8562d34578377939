"""The shapes of models to plan for: every parameter of a block and of the root, without a tensor.

A model is named (`llama-3.1-70b`) or read from any Hugging Face `config.json` of a known type. From the shape follow
the exact number of parameters, the padding of their slices, the arithmetic of a token and what autograd saves.

Letters: C width, H query heads, K key/value heads, D head width, F width of the feed-forward part, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod

from fsdplab.common.words import near

ROWS, COLUMNS, WHOLE = "rows", "columns", "whole"  # what tensor parallelism cuts of a parameter


class ModelError(ValueError):
    """An invalid shape or an unknown model; the message is one line: what happened, got, expected, what to do."""


@dataclass(frozen=True)
class Parameter:
    """One parameter: its shape, and the dimension that tensor parallelism cuts (Shoeybi et al. 2019, section 3)."""

    name: str
    shape: tuple[int, ...]
    cut: str = WHOLE

    @property
    def count(self) -> int:
        """Its elements."""
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether tokens are multiplied by it."""
        return len(self.shape) == 2

    def on(self, ranks: int) -> Parameter:
        """What one of `ranks` tensor-parallel ranks holds: (8, 4) cut by rows over 2 ranks is (4, 4)."""
        if self.cut == WHOLE or ranks == 1:
            return self
        if self.cut == ROWS:
            return replace(self, shape=(-(-self.shape[0] // ranks), *self.shape[1:]))
        return replace(self, shape=(self.shape[0], -(-self.shape[1] // ranks)))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer: `layers` equal blocks, and a root with embeddings, last norm and head.

    >>> model("llama-3.1-8b").parameters
    8030261248
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    vocabulary: int
    context: int
    gated: bool = True  # a second product gates the first (SwiGLU): three matrices instead of two
    norm_bias: bool = False  # LayerNorm with a bias; else RMSNorm or LayerNorm without one
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    query_key_norm: bool = False
    fused: bool = False  # one matrix for query, key and value
    parallel: bool = False  # attention and feed-forward read the same input
    positions: int = 0  # rows of a learned table of positions
    tied: bool = False  # the head is the token embedding itself

    def __post_init__(self) -> None:
        for each in fields(self):
            size = getattr(self, each.name)
            if each.type == "int" and each.name != "positions":
                _check_size(self.name, each.name, size)
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.name}: {self.heads} heads and {self.kv_heads} key/value heads; expected that these divide"
                " those: each serves an equal group of query heads"
            )

    @property
    def query_width(self) -> int:
        """H x D."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """K x D."""
        return self.kv_heads * self.head_width

    @cached_property
    def block(self) -> tuple[Parameter, ...]:
        """The parameters of one block."""
        C, F = self.width, self.ffn
        ups = [("gate", F)] if self.gated else []
        return (
            *self._norm("attention_norm", C),
            *(each for name, out in self.qkv for each in _linear(name, out, C, ROWS, self.qkv_bias)),
            *_query_key_norms(self),
            *_linear("output", C, self.query_width, COLUMNS, self.output_bias),
            *self._norm("feed_forward_norm", C),
            *(each for name, out in [*ups, ("up", F)] for each in _linear(name, out, C, ROWS, self.ffn_bias)),
            *_linear("down", C, F, COLUMNS, self.ffn_bias),
        )

    @property
    def qkv(self) -> list[tuple[str, int]]:
        """The products that make query, key and value, and how wide each is."""
        if self.fused:
            return [("query_key_value", self.query_width + 2 * self.kv_width)]
        return [("query", self.query_width), ("key", self.kv_width), ("value", self.kv_width)]

    @cached_property
    def root(self) -> tuple[Parameter, ...]:
        """The parameters outside of the blocks; a tied head is counted once, with the embedding."""
        C, V = self.width, self.vocabulary
        positions = [Parameter("position_embedding", (self.positions, C))] if self.positions else []
        head = [] if self.tied else [Parameter("head", (V, C), ROWS)]
        embedding = Parameter("token_embedding", (V, C), ROWS)
        return (embedding, *positions, *self._norm("final_norm", C), *head)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, tied ones once."""
        return self.layers * self.block_parameters + self.root_parameters

    @property
    def block_parameters(self) -> int:
        """Parameters of one block."""
        return sum(each.count for each in self.block)

    @property
    def root_parameters(self) -> int:
        """Parameters outside of the blocks."""
        return sum(each.count for each in self.root)

    def _norm(self, name: str, width: int) -> list[Parameter]:
        weight = [Parameter(f"{name}.weight", (width,))]
        return [*weight, Parameter(f"{name}.bias", (width,))] if self.norm_bias else weight


def _check_size(model: str, name: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 10**9:
        raise ModelError(f"{model}: {name} is {size!r}; expected a whole number from 1 to 1,000,000,000")


def _linear(name: str, out: int, inner: int, cut: str, bias: bool) -> list[Parameter]:
    weight = Parameter(f"{name}.weight", (out, inner), cut)
    return [weight, Parameter(f"{name}.bias", (out,), cut if cut == ROWS else WHOLE)] if bias else [weight]


def _query_key_norms(shape: ModelShape) -> list[Parameter]:
    names = ("query_norm.weight", "key_norm.weight") if shape.query_key_norm else ()
    return [Parameter(name, (shape.head_width,)) for name in names]


# ---- models by name


def _llama(
    name: str, layers: int, width: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, context: int,
    *, qkv_bias: bool = False, tied: bool = False, head_width: int | None = None, query_key_norm: bool = False,
) -> ModelShape:  # fmt: skip
    return ModelShape(
        name=name, layers=layers, width=width, heads=heads, kv_heads=kv_heads, ffn=ffn, vocabulary=vocabulary,
        head_width=head_width or width // heads, context=context, qkv_bias=qkv_bias, tied=tied,
        query_key_norm=query_key_norm,
    )  # fmt: skip


def _gpt(
    name: str, layers: int, width: int, heads: int, vocabulary: int, context: int, positions: int, tied: bool = True
) -> ModelShape:
    """GPT-2's blocks: LayerNorm, GELU, biases everywhere but in the head."""
    return ModelShape(
        name=name, layers=layers, width=width, heads=heads, kv_heads=heads, head_width=width // heads, ffn=4 * width,
        vocabulary=vocabulary, context=context, gated=False, norm_bias=True, qkv_bias=True, output_bias=True,
        ffn_bias=True, fused=True, positions=positions, tied=tied,
    )  # fmt: skip


def _lab_gpt(name: str, layers: int, width: int, heads: int, context: int) -> ModelShape:
    """The models that the lab itself trains (workloads/presets.py): bytes, a product each for query, key and value."""
    return replace(_gpt(name, layers, width, heads, 256, context, context, tied=False), fused=False)


def _mpt(name: str, layers: int, width: int, heads: int) -> ModelShape:
    """MosaicML's benchmark models: L (12 d^2 + 13 d) + 2 d + 50368 d + context d parameters."""
    return _gpt(name, layers, width, heads, 50_368, 2048, 2048)


MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _lab_gpt("gpt-tiny", 2, 64, 4, 128),
        _lab_gpt("gpt-20m", 12, 384, 6, 256),
        _lab_gpt("gpt-25m", 8, 512, 8, 256),
        _llama("llama-tiny", 2, 64, 4, 2, 224, 256, 128),
        _llama("llama-20m", 6, 512, 8, 2, 1792, 256, 256),
        _llama("llama-0.3b", 20, 1024, 8, 4, 2816, 32_000, 4096),
        _llama("llama-1b", 20, 2048, 16, 8, 5632, 32_000, 4096),
        _llama("llama-3b", 28, 3072, 24, 8, 8192, 32_000, 4096),
        _gpt("gpt2", 12, 768, 12, 50_257, 1024, 1024),
        _gpt("gpt2-medium", 24, 1024, 16, 50_257, 1024, 1024),
        _gpt("gpt2-large", 36, 1280, 20, 50_257, 1024, 1024),
        _gpt("gpt2-xl", 48, 1600, 25, 50_257, 1024, 1024),
        _llama("llama-2-7b", 32, 4096, 32, 32, 11_008, 32_000, 4096),
        _llama("llama-2-13b", 40, 5120, 40, 40, 13_824, 32_000, 4096),
        _llama("llama-2-70b", 80, 8192, 64, 8, 28_672, 32_000, 4096),
        _llama("llama-3.1-8b", 32, 4096, 32, 8, 14_336, 128_256, 131_072),
        _llama("llama-3.1-70b", 80, 8192, 64, 8, 28_672, 128_256, 131_072),
        _llama("llama-3.1-405b", 126, 16_384, 128, 8, 53_248, 128_256, 131_072),
        _llama("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128_256, 131_072, tied=True),
        _llama("llama-3.2-3b", 28, 3072, 24, 8, 8192, 128_256, 131_072, tied=True),
        _llama("mistral-7b", 32, 4096, 32, 8, 14_336, 32_000, 32_768),
        _llama("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151_936, 32_768, qkv_bias=True, tied=True),
        _llama("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151_936, 32_768, qkv_bias=True, tied=True),
        _llama("qwen2.5-7b", 28, 3584, 28, 4, 18_944, 152_064, 131_072, qkv_bias=True),
        _llama("qwen2.5-72b", 80, 8192, 64, 8, 29_568, 152_064, 131_072, qkv_bias=True),
        _llama("qwen3-8b", 36, 4096, 32, 8, 12_288, 151_936, 40_960, head_width=128, query_key_norm=True),
        replace(_gpt("gpt-neox-20b", 44, 6144, 64, 50_432, 2048, 0, tied=False), parallel=True),
        _mpt("mpt-125m", 12, 768, 12),
        _mpt("mpt-350m", 24, 1024, 16),
        _mpt("mpt-760m", 24, 1536, 12),
        _mpt("mpt-1b", 24, 2048, 16),
        _mpt("mpt-3b", 32, 2560, 20),
        _mpt("mpt-7b", 32, 4096, 32),
        _mpt("mpt-13b", 40, 5120, 40),
        _mpt("mpt-30b", 48, 7168, 56),
        _mpt("mpt-70b", 80, 8192, 64),
    )
}


def model(name: str) -> ModelShape:
    """The named shape; an unknown name raises ModelError with the nearest known ones.

    >>> model("gpt2").parameters
    124439808
    """
    if name in MODELS:
        return MODELS[name]
    found = near(name, MODELS, 3)
    meant = f"did you mean {' or '.join(found)}? " if found else ""
    raise ModelError(
        f"unknown model {name!r}; {meant}expected the config.json of a dense Hugging Face model, or one of"
        f" {', '.join(MODELS)}"
    )

"""Describes models, for the planner and for the builder, by every parameter of a block and of the root, without a
tensor and without torch.

A model is named (`llama-3.1-70b`) or read from any Hugging Face `config.json` of a known type. From the shape follow
the exact number of parameters, the padding of their slices, the arithmetic of a token and what autograd saves. The
lab's own models read bytes (vocabulary 256), so model states dominate their memory as they do in large ones.

Letters: C width, H query heads, K key/value heads, D head width, F width of the feed-forward part, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import prod
from typing import Any

from fsdplab.common.words import near

from .errors import ModelError

BYTE_VOCABULARY = 256
ROWS, COLUMNS, WHOLE = "rows", "columns", "whole"  # what tensor parallelism cuts of a parameter


@dataclass(frozen=True)
class Parameter:
    """One parameter: its shape, and the dimension that tensor parallelism cuts (Shoeybi et al. 2019, section 3).

    `experts`: it is the matrices of so many experts, one below the other; 0: it is no expert's.
    """

    name: str
    shape: tuple[int, ...]
    cut: str = WHOLE
    experts: int = 0

    @property
    def count(self) -> int:
        """Its elements."""
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether tokens are multiplied by it."""
        return len(self.shape) == 2

    def on(self, ranks: int) -> Parameter:
        """Return what one of `ranks` tensor-parallel ranks holds: (8, 4) cut by rows over 2 ranks is (4, 4)."""
        if self.cut == WHOLE or ranks == 1:
            return self
        first, *rest = self.shape
        # a weight is (outputs, inputs): cut by rows each rank makes some outputs, by columns it reads some inputs
        if self.cut == ROWS:
            return replace(self, shape=(_share(first, ranks), *rest))
        return replace(self, shape=(first, _share(rest[0], ranks)))

    def of_experts(self, ranks: int) -> Parameter:
        """Return what one of `ranks` expert-parallel ranks holds: whole experts, where it is theirs."""
        if not self.experts or ranks == 1:
            return self
        rows, *rest = self.shape
        held = _share(self.experts, ranks)
        # 8 experts of 14,336 rows on 4 ranks: 2 experts, 28,672 rows
        rows_of_an_expert = rows // self.experts
        return replace(self, shape=(rows_of_an_expert * held, *rest), experts=held)


def _share(size: int, ranks: int) -> int:
    """Divide, rounded up: the share of the rank that has most."""
    return -(-size // ranks)


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
            raise ModelError(
                f"rotary scaling: got factor {self.factor!r} and original_context {self.original_context!r}; both must"
                " be at least 1"
            )
        if not 0 < self.low_frequency < self.high_frequency:
            raise ModelError(
                f"rotary scaling: got low_frequency {self.low_frequency!r} and high_frequency {self.high_frequency!r}; "
                "expected 0 < low_frequency < high_frequency"
            )


@dataclass(frozen=True)
class Experts:
    """A mixture in the place of a block's feed-forward part: `count` gated experts of which a token takes `per_token`,
    each `ffn` wide; beside them experts for all tokens, `shared_ffn` wide together. The first `dense_layers` blocks
    have a dense part instead.
    """

    count: int
    per_token: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    dense_layers: int = 0

    def __post_init__(self) -> None:
        if not (1 <= self.per_token <= self.count and self.ffn >= 1 and min(self.shared_ffn, self.dense_layers) >= 0):
            raise ModelError(f"a mixture of experts is {self}; expected 1 <= per_token <= count, and widths above 0")

    @property
    def ffn_per_token(self) -> int:
        """Channels that a token passes between the matrices of its experts."""
        return self.per_token * self.ffn + self.shared_ffn


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1): keys and values are made from
    `kv_rank` channels a token, queries from `query_rank` (0: from the token); a key has `rotary` more channels, which
    all heads share, and a value is `value` wide.
    """

    query_rank: int
    kv_rank: int
    rotary: int
    value: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer: `layers` equal blocks, and a root with embeddings, last norm and head.

    `ends`: whether it has the embeddings, and the last norm and head: a stage of a pipeline may lack either. `source`
    says where the shape is written down. Raises `ModelError` for sizes that contradict each other.

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
    wide_query_key_norm: bool = False  # these norms are over all heads' channels at once
    norms: int = 2  # of a block, each as wide as the model and with a weight
    fused: bool = False  # one matrix for query, key and value
    parallel: bool = False  # attention and feed-forward read the same input
    positions: int = 0  # rows of a learned table of positions
    tied: bool = False  # the head is the token embedding itself
    norm_epsilon: float = 1e-5
    rotary_base: float | None = None  # None: positions are learned, or the base is not known
    rotary_scaling: RotaryScaling | None = None
    mixture: Experts | None = None
    latent: Latent | None = None
    ends: tuple[bool, bool] = (True, True)
    source: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type != "int" or field.name in ("positions", "norms"):  # these two may be 0
                continue
            size = getattr(self, field.name)
            if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 10**9:
                raise ModelError(
                    f"{self.name}: {field.name} is {size!r}; expected a whole number from 1 to 1,000,000,000"
                )
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.name}: {self.heads} heads and {self.kv_heads} key/value heads; expected that these divide"
                " those: each serves an equal group of query heads"
            )
        if not self.norm_epsilon > 0 or self.rotary_base is not None and not self.rotary_base > 1:
            raise ModelError(
                f"{self.name}: norm_epsilon is {self.norm_epsilon!r} and rotary_base {self.rotary_base!r}; expected"
                " more than 0, and more than 1"
            )
        if self.positions and (self.rotary_base is not None or self.rotary_scaling is not None):
            raise ModelError(f"{self.name}: positions are learned; expected rotary_base and rotary_scaling to be None")

    def why_not_built(self) -> str:
        """Return why `build_model` cannot build this shape; empty where it can.

        >>> model("gpt2").why_not_built(), model("qwen3-8b").why_not_built()
        ('', 'it has norms of query and key')
        """
        if self.mixture:
            return "it has experts"
        if self.latent:
            return "it has latent attention"
        if self.norms != 2 or self.wide_query_key_norm:
            return "it has other norms"
        if self.query_key_norm:
            return "it has norms of query and key"
        if self.parallel:
            return "its two halves read the same input"
        # one value where all agree: {True} of a GPT, {False} of a Llama
        biases = {self.norm_bias, self.qkv_bias, self.output_bias, self.ffn_bias}
        if biases != {not self.gated}:
            return "a GPT here has all biases, and a Llama none"
        if self.gated == bool(self.positions) or self.positions not in (0, self.context):
            return "a GPT here has a learned position for each token of its context, and a Llama rotary ones"
        if self.gated and self.rotary_base is None:
            return "the base of its rotary positions is not known"
        if self.gated and self.head_width % 2:
            return f"rotary positions turn pairs of channels, and a head has {self.head_width}"
        return ""

    def require_length(self, tokens: int) -> None:
        """Raise `ModelError` for a sequence of more tokens than the model has positions for."""
        if tokens > self.context:
            raise ModelError(
                f"a sequence of {tokens} tokens is longer than the model's context of {self.context}; give shorter"
                " sequences"
            )

    @property
    def family(self) -> str:
        """`gpt` or `llama`: which of the two kinds of blocks it has."""
        return "llama" if self.gated else "gpt"

    @property
    def query_width(self) -> int:
        """H x D."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """K x D."""
        return self.kv_heads * self.head_width

    @property
    def value_width(self) -> int:
        """H x the width of a value: what attention's output product reads."""
        return self.heads * self.latent.value if self.latent else self.query_width

    @property
    def ffn_per_token(self) -> int:
        """Channels that a token passes between the products of a block's feed-forward part."""
        return self.mixture.ffn_per_token if self.mixture else self.ffn

    @property
    def logits_per_token(self) -> int:
        """The vocabulary; 0 for a stage without a head."""
        return self.vocabulary if self.ends[1] else 0

    @cached_property
    def block(self) -> tuple[Parameter, ...]:
        """The parameters of one block, with experts where the model has them."""
        names = ("attention_norm", "feed_forward_norm", "after_attention_norm", "after_feed_forward_norm")
        norms: list[Parameter] = []
        for name in names[: self.norms]:
            norms += self._norm(name, self.width)
        # a norm with a bias is two parameters, so the attention's part is half of the list
        half = len(norms) // 2
        output = _linear("output", self.width, self.value_width, COLUMNS, self.output_bias)
        feed_forward = _mixture(self) or self._feed_forward("", self.ffn)
        return (*norms[:half], *_qkv_of(self), *_query_key_norms(self), *output, *norms[half:], *feed_forward)

    @cached_property
    def dense_block(self) -> ModelShape:
        """The same model with a dense part in the place of experts."""
        return replace(self, mixture=None)

    def _feed_forward(self, prefix: str, inner: int) -> tuple[Parameter, ...]:
        """Return the products into `inner` channels, and the one back."""
        into = ("gate", "up") if self.gated else ("up",)
        parameters: list[Parameter] = []
        for name in into:
            parameters += _linear(f"{prefix}{name}", inner, self.width, ROWS, self.ffn_bias)
        parameters += _linear(f"{prefix}down", self.width, inner, COLUMNS, self.ffn_bias)
        return tuple(parameters)

    @property
    def qkv(self) -> list[tuple[str, int]]:
        """The products that make query, key and value, and how wide each is."""
        if self.fused:
            return [("query_key_value", self.query_width + 2 * self.kv_width)]
        return [("query", self.query_width), ("key", self.kv_width), ("value", self.kv_width)]

    @cached_property
    def root(self) -> tuple[Parameter, ...]:
        """The parameters outside of the blocks; a tied head is counted once, with the embedding."""
        has_embeddings, has_head = self.ends
        table = (self.vocabulary, self.width)
        parameters = []
        if has_embeddings:
            parameters.append(Parameter("token_embedding", table, ROWS))
            if self.positions:
                parameters.append(Parameter("position_embedding", (self.positions, self.width)))
        if has_head:
            if self.norms:
                parameters += self._norm("final_norm", self.width)
            # a last stage has its own copy of a tied head
            if not self.tied or not has_embeddings:
                parameters.append(Parameter("head", table, ROWS))
        return tuple(parameters)

    def stage(self, layers: int, first: bool, last: bool) -> ModelShape:
        """Return a stage of a pipeline with so many of its blocks."""
        return replace(self, layers=layers, ends=(first, last))

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, tied ones once."""
        blocks = self.layers * self.block_parameters
        if self.mixture and self.mixture.dense_layers:
            # counted as mixtures above: the difference to a dense block for each
            dense = self.mixture.dense_layers
            blocks += dense * (self.dense_block.block_parameters - self.block_parameters)
        return blocks + self.root_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that a token meets: all but those of the experts that it does not take."""
        experts = self.mixture
        if experts is None:
            return self.parameters
        routed = sum(parameter.count for parameter in self.block if parameter.experts)
        # Mixtral's tokens take 2 of 8 experts: three quarters of their parameters are unused
        unused = routed - routed * experts.per_token // experts.count
        return self.parameters - (self.layers - experts.dense_layers) * unused

    @property
    def block_parameters(self) -> int:
        """Parameters of one block."""
        return sum(parameter.count for parameter in self.block)

    @property
    def root_parameters(self) -> int:
        """Parameters outside of the blocks."""
        return sum(parameter.count for parameter in self.root)

    def _norm(self, name: str, width: int) -> list[Parameter]:
        parameters = [Parameter(f"{name}.weight", (width,))]
        if self.norm_bias:
            parameters.append(Parameter(f"{name}.bias", (width,)))
        return parameters


def _linear(name: str, out: int, inner: int, cut: str, bias: bool) -> list[Parameter]:
    parameters = [Parameter(f"{name}.weight", (out, inner), cut)]
    if bias:
        # a bias has the rows alone: where columns are cut, each rank has all of it
        parameters.append(Parameter(f"{name}.bias", (out,), ROWS if cut == ROWS else WHOLE))
    return parameters


def _query_key_norms(shape: ModelShape) -> list[Parameter]:
    if shape.wide_query_key_norm:
        query, key = shape.query_width, shape.kv_width
    elif shape.query_key_norm:
        # one weight for the D channels of a head, shared by all heads
        query = key = shape.head_width
    else:
        return []
    return [Parameter("query_norm.weight", (query,)), Parameter("key_norm.weight", (key,))]


def _qkv_of(shape: ModelShape) -> list[Parameter]:
    """Return what makes query, key and value; latent attention's narrow matrices are whole on every rank."""
    C, latent = shape.width, shape.latent
    parameters: list[Parameter] = []
    if latent is None:
        for name, out in shape.qkv:
            parameters += _linear(name, out, C, ROWS, shape.qkv_bias)
        return parameters
    if latent.query_rank:
        parameters += _linear("query_down", latent.query_rank, C, WHOLE, shape.qkv_bias)
        parameters.append(Parameter("query_down_norm.weight", (latent.query_rank,)))
    # H x D rows, from the narrow query or from the token
    parameters += _linear("query", shape.query_width, latent.query_rank or C, ROWS, False)
    # keys and values share one narrow input; the channels that are turned by position come beside it
    parameters += _linear("kv_down", latent.kv_rank + latent.rotary, C, WHOLE, shape.qkv_bias)
    parameters.append(Parameter("kv_down_norm.weight", (latent.kv_rank,)))
    # the rotary channels of a key are made by kv_down
    keys_and_values = shape.heads * (shape.head_width - latent.rotary + latent.value)
    parameters += _linear("kv_up", keys_and_values, latent.kv_rank, ROWS, False)
    return parameters


def _mixture(shape: ModelShape) -> tuple[Parameter, ...]:
    """Return the router, experts and shared experts; nothing for a dense model."""
    experts = shape.mixture
    if experts is None:
        return ()
    C, E, F = shape.width, experts.count, experts.ffn
    parameters = [
        Parameter("router.weight", (E, C)),
        # the matrices of all experts, one below the other
        Parameter("experts.gate.weight", (E * F, C), ROWS, E),
        Parameter("experts.up.weight", (E * F, C), ROWS, E),
        Parameter("experts.down.weight", (E * C, F), COLUMNS, E),
    ]
    if experts.shared_ffn:
        parameters += shape._feed_forward("shared.", experts.shared_ffn)
    if experts.shared_gate:
        parameters.append(Parameter("shared.router.weight", (1, C)))
    return tuple(parameters)


# ---- models by name


def llama(
    name: str,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocabulary: int,
    context: int,
    *,
    head_width: int | None = None,
    **more: Any,
) -> ModelShape:
    """Describe a Llama: RMSNorm, rotary positions, SwiGLU, no biases; `more` are other fields of the shape."""
    return ModelShape(
        name=name,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocabulary=vocabulary,
        head_width=head_width or width // heads,
        context=context,
        **{"rotary_base": 10_000.0, **more},
    )


def gpt(
    name: str, layers: int, width: int, heads: int, context: int, vocabulary: int = BYTE_VOCABULARY, **more: Any
) -> ModelShape:
    """GPT-2's blocks: LayerNorm, learned positions, GELU, biases everywhere but in the head.

    >>> gpt("small", layers=2, width=64, heads=4, context=128).head_width
    16
    """
    usual: dict[str, Any] = dict(
        kv_heads=heads,
        head_width=width // heads,
        ffn=4 * width,
        gated=False,
        norm_bias=True,
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        positions=context,
        source=_LAB,
    )
    return ModelShape(
        name=name, layers=layers, width=width, heads=heads, vocabulary=vocabulary, context=context, **{**usual, **more}
    )


def _gpt2(name: str, layers: int, width: int, heads: int, **more: Any) -> ModelShape:
    usual: dict[str, Any] = dict(context=1024, vocabulary=50_257, tied=True, fused=True)
    return gpt(name, layers, width, heads, **{**usual, "source": f"openai-community/{name}: config.json", **more})


def _mpt(name: str, layers: int, width: int, heads: int) -> ModelShape:
    """MosaicML's benchmark models: L (12 d^2 + 13 d) + 2 d + 50368 d + context d parameters."""
    return _gpt2(name, layers, width, heads, context=2048, vocabulary=50_368, source="mosaicml/llm-foundry: benchmarks")


_LAB = "this lab"
_LLAMA2: dict[str, Any] = dict(vocabulary=32_000, context=4096, source="meta-llama: config.json")
# For one GPU: 0.3 to 3 billion parameters, heads 128 wide. No published models, but with their proportions.
_ONE_GPU = {**_LLAMA2, "source": f"{_LAB}, in the proportions of Llama 2"}
_LLAMA3: dict[str, Any] = dict(
    vocabulary=128_256,
    context=131_072,
    rotary_base=500_000.0,
    rotary_scaling=RotaryScaling(),
    source="meta-llama: config.json",
)
_LLAMA3_SMALL = {**_LLAMA3, "rotary_scaling": RotaryScaling(32.0), "tied": True}
_QWEN: dict[str, Any] = dict(norm_epsilon=1e-6, rotary_base=1e6, source="Qwen: config.json")

SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        gpt("gpt-tiny", 2, 64, 4, 128),
        gpt("gpt-20m", 12, 384, 6, 256),
        gpt("gpt-25m", 8, 512, 8, 256),
        llama("llama-tiny", 2, 64, 4, 2, 224, BYTE_VOCABULARY, 128, source=_LAB),
        llama("llama-20m", 6, 512, 8, 2, 1792, BYTE_VOCABULARY, 256, source=_LAB),
        llama("llama-0.3b", 20, 1024, 8, 4, 2816, **_ONE_GPU),
        llama("llama-1b", 20, 2048, 16, 8, 5632, **_ONE_GPU),
        llama("llama-3b", 28, 3072, 24, 8, 8192, **_ONE_GPU),
        _gpt2("gpt2", 12, 768, 12),
        _gpt2("gpt2-medium", 24, 1024, 16),
        _gpt2("gpt2-large", 36, 1280, 20),
        _gpt2("gpt2-xl", 48, 1600, 25),
        llama("llama-2-7b", 32, 4096, 32, 32, 11_008, **_LLAMA2),
        llama("llama-2-13b", 40, 5120, 40, 40, 13_824, **_LLAMA2),
        llama("llama-2-70b", 80, 8192, 64, 8, 28_672, **_LLAMA2),
        llama("llama-3.1-8b", 32, 4096, 32, 8, 14_336, **_LLAMA3),
        llama("llama-3.1-70b", 80, 8192, 64, 8, 28_672, **_LLAMA3),
        llama("llama-3.1-405b", 126, 16_384, 128, 8, 53_248, **_LLAMA3),
        llama("llama-3.2-1b", 16, 2048, 32, 8, 8192, **_LLAMA3_SMALL),
        llama("llama-3.2-3b", 28, 3072, 24, 8, 8192, **_LLAMA3_SMALL),
        llama(
            "mistral-7b",
            layers=32,
            width=4096,
            heads=32,
            kv_heads=8,
            ffn=14_336,
            vocabulary=32_000,
            context=32_768,
            rotary_base=1e6,
            source="mistralai/Mistral-7B-Instruct-v0.2: config.json",
        ),
        llama(
            "mixtral-8x7b",
            layers=32,
            width=4096,
            heads=32,
            kv_heads=8,
            ffn=14_336,
            vocabulary=32_000,
            context=32_768,
            rotary_base=1e6,
            mixture=Experts(8, 2, 14_336),
            source="mistralai/Mixtral-8x7B-v0.1: config.json",
        ),
        llama("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151_936, 32_768, qkv_bias=True, tied=True, **_QWEN),
        llama("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151_936, 32_768, qkv_bias=True, tied=True, **_QWEN),
        llama("qwen2.5-7b", 28, 3584, 28, 4, 18_944, 152_064, 131_072, qkv_bias=True, **_QWEN),
        llama("qwen2.5-72b", 80, 8192, 64, 8, 29_568, 152_064, 131_072, qkv_bias=True, **_QWEN),
        llama("qwen3-8b", 36, 4096, 32, 8, 12_288, 151_936, 40_960, head_width=128, query_key_norm=True, **_QWEN),
        llama(
            "qwen3-30b-a3b",
            layers=48,
            width=2048,
            heads=32,
            kv_heads=4,
            ffn=6144,
            vocabulary=151_936,
            context=40_960,
            head_width=128,
            query_key_norm=True,
            mixture=Experts(128, 8, 768),
            **_QWEN,
        ),
        gpt(
            "gpt-neox-20b",
            layers=44,
            width=6144,
            heads=64,
            context=2048,
            vocabulary=50_432,
            positions=0,
            fused=True,
            parallel=True,
            source="EleutherAI/gpt-neox-20b: config.json",
        ),
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
# The shapes that can be built and trained here, as they are built: query, key and value are a product each.
PRESETS = {name: replace(shape, fused=False) for name, shape in SHAPES.items() if not shape.why_not_built()}


def preset(name: str) -> ModelShape:
    """Return the shape called `name` as it is built here; raises `ModelError` for an unknown name, with the nearest
    known ones, and for a shape that is only planned.

    >>> preset("gpt-20m").width
    384
    """
    if not isinstance(name, str):
        raise ModelError(f"unknown model {name!r}: expected one of {', '.join(PRESETS)}")
    if name in PRESETS:
        return PRESETS[name]
    if name in SHAPES:
        raise ModelError(f"{name} is planned, not built: {SHAPES[name].why_not_built()}; give another model")
    alike = near(name, PRESETS, 3)
    advice = f"did you mean {' or '.join(alike)}?" if alike else f"expected one of {', '.join(PRESETS)}"
    if name.endswith(".py"):
        advice = "start a program of your own with torchrun, and fsdplab report reads its traces (see the README)"
    raise ModelError(f"unknown model {name!r}: {advice}")


def model(name: str) -> ModelShape:
    """Return the named shape; an unknown name raises ModelError with the nearest known ones.

    >>> model("gpt2").parameters
    124439808
    """
    if name in SHAPES:
        return SHAPES[name]
    found = near(name, SHAPES, 3)
    meant = f"did you mean {' or '.join(found)}? " if found else ""
    raise ModelError(
        f"unknown model {name!r}; {meant}expected the config.json of a dense Hugging Face model, or one of"
        f" {', '.join(SHAPES)}"
    )

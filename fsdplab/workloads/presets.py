"""Named model shapes: small ones to train here, middling ones for one GPU, published ones to plan with.

The lab presets read bytes (vocabulary 256), so model state dominates their memory as it does in the large ones. Those
for one GPU (0.3 to 3 billion parameters, heads 128 wide, vocabulary of Llama 2) are no published models, but have their
proportions. The published presets have exactly the parameter counts of their papers and checkpoints; they are not
trained here, but built on the meta device, where a tensor has a shape and no memory.
"""

from __future__ import annotations

from fsdplab.common.words import near

from .config import ConfigError, ModelConfig, RotaryScaling

BYTE_VOCABULARY = 256


def _gpt_lab(layers: int, width: int, heads: int, context: int) -> ModelConfig:
    return ModelConfig(
        family="gpt",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        ffn=4 * width,
        vocabulary=BYTE_VOCABULARY,
        context=context,
    )


def _llama_lab(layers: int, width: int, heads: int, kv_heads: int, ffn: int, context: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocabulary=BYTE_VOCABULARY,
        context=context,
    )


def _gpt2(layers: int, width: int, heads: int) -> ModelConfig:
    return ModelConfig(
        family="gpt", layers=layers, width=width, heads=heads, kv_heads=heads, ffn=4 * width,
        vocabulary=50_257, context=1024, tie_embeddings=True,
    )  # fmt: skip


def _llama2(layers: int, width: int, heads: int, kv_heads: int, ffn: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocabulary=32_000,
        context=4096,
    )


def _llama31(layers: int, width: int, heads: int, ffn: int) -> ModelConfig:
    return ModelConfig(
        family="llama", layers=layers, width=width, heads=heads, kv_heads=8, ffn=ffn,
        vocabulary=128_256, context=131_072, rotary_base=500_000.0, rotary_scaling=RotaryScaling(),
    )  # fmt: skip


PRESETS: dict[str, ModelConfig] = {
    "gpt-tiny": _gpt_lab(layers=2, width=64, heads=4, context=128),
    "gpt-20m": _gpt_lab(layers=12, width=384, heads=6, context=256),
    "gpt-25m": _gpt_lab(layers=8, width=512, heads=8, context=256),
    "llama-tiny": _llama_lab(layers=2, width=64, heads=4, kv_heads=2, ffn=224, context=128),
    "llama-20m": _llama_lab(layers=6, width=512, heads=8, kv_heads=2, ffn=1792, context=256),
    "llama-0.3b": _llama2(layers=20, width=1024, heads=8, kv_heads=4, ffn=2816),
    "llama-1b": _llama2(layers=20, width=2048, heads=16, kv_heads=8, ffn=5632),
    "llama-3b": _llama2(layers=28, width=3072, heads=24, kv_heads=8, ffn=8192),
    "gpt2": _gpt2(layers=12, width=768, heads=12),
    "gpt2-medium": _gpt2(layers=24, width=1024, heads=16),
    "gpt2-large": _gpt2(layers=36, width=1280, heads=20),
    "gpt2-xl": _gpt2(layers=48, width=1600, heads=25),
    "llama-2-7b": _llama2(layers=32, width=4096, heads=32, kv_heads=32, ffn=11_008),
    "llama-2-13b": _llama2(layers=40, width=5120, heads=40, kv_heads=40, ffn=13_824),
    "llama-2-70b": _llama2(layers=80, width=8192, heads=64, kv_heads=8, ffn=28_672),
    "llama-3.1-8b": _llama31(layers=32, width=4096, heads=32, ffn=14_336),
    "llama-3.1-70b": _llama31(layers=80, width=8192, heads=64, ffn=28_672),
    "llama-3.1-405b": _llama31(layers=126, width=16_384, heads=128, ffn=53_248),
}


def preset(name: str) -> ModelConfig:
    """The shape called `name`; an unknown name raises `ConfigError` with the nearest known ones.

    >>> preset("gpt-20m").width
    384
    """
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    found = near(name, PRESETS, 3) if isinstance(name, str) else []
    advice = f"did you mean {' or '.join(found)}?" if found else f"expected one of {', '.join(PRESETS)}"
    if isinstance(name, str) and name.endswith(".py"):
        advice = "start a program of your own with torchrun, and fsdplab report reads its traces (see the README)"
    raise ConfigError(f"unknown model {name!r}: {advice}")

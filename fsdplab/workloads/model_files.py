"""Reads model shapes from Hugging Face's `config.json`. Each known `model_type` has a reader of its field names.

Defaults of absent fields are those of transformers' configuration classes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdplab.common.files import read_file
from fsdplab.common.words import did_you_mean

from .errors import ModelError
from .shapes import Experts, Latent, ModelShape, model

_MOST_LAYERS = 10_000
_LARGEST_FILE = 10**6  # bytes; a configuration has some thousand


def model_named(name: str) -> ModelShape:
    """Return the shape of a known name, of a `config.json`, or of a folder with one; raise ModelError."""
    if name.endswith(".py"):
        raise ModelError(
            f"{name} is a Python file, of which one step is planned (fsdplab plan step); expected a model's name, or"
            " the config.json of a Hugging Face model"
        )
    is_path = name.endswith(".json") or "/" in name
    if not is_path or "\0" in name:  # no path holds a zero byte
        return model(name)
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    return shape_of_config(_read(path), name)


def shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape that a parsed `config.json` describes; raise ModelError for a type that is not known here."""
    shape = _shape_of_kind(config, name)
    if shape.layers > _MOST_LAYERS:
        raise ModelError(f"{name}: the model has {shape.layers:,} layers; expected at most {_MOST_LAYERS:,}")
    return shape


def _shape_of_kind(config: Mapping[str, Any], name: str) -> ModelShape:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        meant = did_you_mean(kind, _READERS) if isinstance(kind, str) else ""
        raise ModelError(
            f"{name}: model_type is {kind!r}{meant}; expected one of {', '.join(_READERS)}: other models have other"
            " blocks, whose memory is not known here"
        )
    return _READERS[kind](_Config(config, name))


def _read(path: Path) -> dict[str, Any]:
    try:
        # utf-8-sig: some editors put a byte order mark before the text
        config = json.loads(read_file(path, _LARGEST_FILE).decode("utf-8-sig"))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}; give a known model, or a config.json") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is no JSON file; expected a Hugging Face config.json") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object; expected a Hugging Face config.json")
    return config


class _Config:
    """Reads the fields of a configuration and checks their types."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config, self.name = config, name

    def size(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 1; the default where the field is absent or null."""
        value = self.config.get(key)
        if value is None:
            value = default
        # in Python a bool is an int
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10**9:
            raise ModelError(f"{self.name}: {key} is {value!r}; expected a whole number from 1 to 1,000,000,000")
        return value

    def size_or_none_as_0(self, key: str) -> int:
        """Return a whole number of at least 1, or 0 where the field is absent, null or 0."""
        return self.size(key) if self.config.get(key) else 0

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false; the default where the field is absent."""
        value = self.config.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.name}: {key} is {value!r}; expected true or false")
        return value

    def inner(self, key: str) -> _Config:
        """Return the object inside of this one, an empty one where the field is absent."""
        value = self.config.get(key) or {}
        if not isinstance(value, dict):
            raise ModelError(f"{self.name}: {key} is {value!r}; expected a JSON object")
        return _Config(value, f"{self.name}, {key}")


def _head_width(config: _Config, width: int, heads: int) -> int:
    if config.config.get("head_dim") is None and width % heads:
        raise ModelError(f"{config.name}: {heads} heads do not divide the width {width}; expected that they do")
    # 4096 / 32 = 128; newer models say `head_dim`, whose heads together may be wider than the model
    usual = max(1, width // heads)
    return config.size("head_dim", usual)


def _like_llama(config: _Config, **changed: Any) -> ModelShape:
    width = config.size("hidden_size")
    heads = config.size("num_attention_heads")
    attention_bias = config.flag("attention_bias", False)
    read: dict[str, Any] = dict(
        name=config.name,
        layers=config.size("num_hidden_layers"),
        width=width,
        heads=heads,
        # absent: as many as heads, without grouped queries
        kv_heads=config.size("num_key_value_heads", heads),
        head_width=_head_width(config, width, heads),
        ffn=config.size("intermediate_size"),
        vocabulary=config.size("vocab_size"),
        context=config.size("max_position_embeddings", 2048),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        ffn_bias=config.flag("mlp_bias", False),
        tied=config.flag("tie_word_embeddings", False),
    )
    return ModelShape(**(read | changed))


def _gemma(config: _Config, **changed: Any) -> ModelShape:
    """Read Gemma. Gemma 2 and 3 also have a norm behind each half of a block (`norms=4`)."""
    if "text_config" in config.config:  # a model that also takes images: the part for text
        config = config.inner("text_config")
    tied = config.flag("tie_word_embeddings", True)
    head_width = config.size("head_dim", 256)
    return _like_llama(config, **{"tied": tied, "head_width": head_width, **changed})


def _mixtral(config: _Config) -> ModelShape:
    ffn = config.size("intermediate_size")
    count = config.size("num_local_experts", 8)
    per_token = config.size("num_experts_per_tok", 2)
    return _like_llama(config, mixture=Experts(count, per_token, ffn))


def _qwen_moe(config: _Config, **changed: Any) -> ModelShape:
    """Read a Qwen mixture of experts. A file in which only some blocks have experts is refused."""
    if config.size("decoder_sparse_step", 1) != 1 or config.config.get("mlp_only_layers"):
        raise ModelError(f"{config.name}: only some blocks have experts; such a model is not known here")
    ffn = config.size("moe_intermediate_size")
    shared_ffn = config.size_or_none_as_0("shared_expert_intermediate_size")
    count_key = "num_experts"
    if config.config.get(count_key) is None:
        count_key = "num_local_experts"
    count = config.size(count_key)
    per_token = config.size("num_experts_per_tok")
    experts = Experts(count, per_token, ffn, shared_ffn, shared_gate=bool(shared_ffn))
    return _like_llama(config, mixture=experts, **changed)


def _deepseek(config: _Config) -> ModelShape:
    """Read DeepSeek-V2 and V3, which have latent attention and, behind some dense blocks, experts."""
    if config.size("moe_layer_freq", 1) != 1:
        raise ModelError(f"{config.name}: only some blocks have experts; such a model is not known here")
    ffn = config.size("moe_intermediate_size")
    experts = Experts(
        count=config.size("n_routed_experts"),
        per_token=config.size("num_experts_per_tok"),
        ffn=ffn,
        # two shared experts of 1,536 channels work as one of 3,072
        shared_ffn=ffn * config.size_or_none_as_0("n_shared_experts"),
        dense_layers=config.config.get("first_k_dense_replace") or 0,
    )
    # queries are compressed in the large models only
    query_rank = config.size_or_none_as_0("q_lora_rank")
    rotary_width = config.size("qk_rope_head_dim")
    value_width = config.size("v_head_dim")
    return _like_llama(
        config,
        mixture=experts,
        # each head has a key and a value of its own, made from the narrow ones
        kv_heads=config.size("num_attention_heads"),
        latent=Latent(query_rank, config.size("kv_lora_rank"), rotary_width, value_width),
        # channels without and with a position
        head_width=config.size("qk_nope_head_dim") + rotary_width,
    )


def _gpt2(config: _Config) -> ModelShape:
    width = config.size("n_embd", 768)
    heads = config.size("n_head", 12)
    context = config.size("n_positions", 1024)
    return ModelShape(
        name=config.name,
        layers=config.size("n_layer", 12),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_width=_head_width(config, width, heads),
        ffn=config.size("n_inner", 4 * width),
        vocabulary=config.size("vocab_size", 50_257),
        context=context,
        positions=context,
        gated=False,
        norm_bias=True,
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        fused=True,
        tied=config.flag("tie_word_embeddings", True),
    )


def _gpt_neox(config: _Config) -> ModelShape:
    width = config.size("hidden_size")
    heads = config.size("num_attention_heads")
    bias = config.flag("attention_bias", True)
    return ModelShape(
        name=config.name,
        layers=config.size("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_width=_head_width(config, width, heads),
        ffn=config.size("intermediate_size"),
        vocabulary=config.size("vocab_size"),
        context=config.size("max_position_embeddings", 2048),
        gated=False,
        norm_bias=True,
        qkv_bias=bias,
        output_bias=bias,
        ffn_bias=True,
        fused=True,
        parallel=config.flag("use_parallel_residual", True),
        tied=config.flag("tie_word_embeddings", False),
    )


def _mpt(config: _Config) -> ModelShape:
    width = config.size("d_model", 2048)
    heads = config.size("n_heads", 16)
    bias = not config.flag("no_bias", True)
    context = config.size("max_seq_len", 2048)
    # ALiBi adds distances to the scores of attention, so that there is no table of positions
    alibi = config.inner("attn_config").flag("alibi", True)
    return ModelShape(
        name=config.name,
        layers=config.size("n_layers", 24),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_width=_head_width(config, width, heads),
        ffn=config.size("expansion_ratio", 4) * width,
        vocabulary=config.size("vocab_size", 50_368),
        context=context,
        gated=False,
        norm_bias=bias,
        qkv_bias=bias,
        output_bias=bias,
        ffn_bias=bias,
        fused=True,
        tied=config.flag("tie_word_embeddings", True),
        positions=0 if alibi else context,
    )


def _opt(config: _Config) -> ModelShape:
    width = config.size("hidden_size")
    heads = config.size("num_attention_heads")
    if config.size("word_embed_proj_dim", width) != width:
        raise ModelError(f"{config.name}: word_embed_proj_dim differs from hidden_size; such a model is not known here")
    context = config.size("max_position_embeddings", 2048)
    return ModelShape(
        name=config.name,
        layers=config.size("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=heads,
        head_width=_head_width(config, width, heads),
        ffn=config.size("ffn_dim"),
        vocabulary=config.size("vocab_size"),
        context=context,
        positions=context + 2,  # OPT numbers positions from 2 on
        gated=False,
        norm_bias=True,
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        tied=config.flag("tie_word_embeddings", True),
    )


_READERS = {
    "llama": _like_llama,
    "mistral": _like_llama,
    "qwen2": lambda config: _like_llama(config, qkv_bias=True, output_bias=False),
    "qwen3": lambda config: _like_llama(config, query_key_norm=True),
    "phi3": lambda config: _like_llama(config, fused=True),
    "gemma": _gemma,
    "gemma2": lambda config: _gemma(config, norms=4),
    "gemma3_text": lambda config: _gemma(config, norms=4, query_key_norm=True),
    "gemma3": lambda config: _gemma(config, norms=4, query_key_norm=True),
    "olmo": lambda config: _like_llama(config, norms=0),  # its norms have no weights
    "olmo2": lambda config: _like_llama(config, wide_query_key_norm=True),
    "olmo3": lambda config: _like_llama(config, wide_query_key_norm=True),
    "smollm3": lambda config: _like_llama(config, tied=config.flag("tie_word_embeddings", True)),
    "mixtral": _mixtral,
    "qwen2_moe": lambda config: _qwen_moe(config, qkv_bias=True, output_bias=False),
    "qwen3_moe": lambda config: _qwen_moe(config, query_key_norm=True),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "mpt": _mpt,
    "opt": _opt,
}

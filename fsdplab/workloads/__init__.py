"""Models, their published shapes, and text to train them on."""

from __future__ import annotations

from .config import (
    ConfigError,
    ModelConfig,
    RotaryScaling,
    block_parameter_count,
    parameter_count,
    root_parameter_count,
)
from .gpt import GPT, GPTBlock
from .llama import Llama, LlamaBlock
from .models import block_types, build_model, initialise, loss_of, reset_buffers, tie_embeddings
from .moe import MOE_PRESETS, MoE, MoEBlock, MoEConfig, build_moe, moe_loss_of, moe_parameter_count, spread_experts
from .parallel import GPTStage, build_stage, parallelize, stage_span
from .presets import BYTE_VOCABULARY, PRESETS, preset
from .text import ByteText, TextError

__all__ = [
    "BYTE_VOCABULARY", "GPT", "MOE_PRESETS", "PRESETS", "ByteText", "ConfigError", "GPTBlock", "GPTStage", "Llama",
    "LlamaBlock",
    "ModelConfig", "MoE", "MoEBlock", "MoEConfig", "RotaryScaling",
    "TextError", "block_parameter_count", "block_types", "build_model", "build_moe", "build_stage",
    "initialise", "loss_of", "moe_loss_of", "moe_parameter_count", "parallelize", "parameter_count", "preset",
    "reset_buffers", "root_parameter_count", "spread_experts", "stage_span", "tie_embeddings",
]  # fmt: skip

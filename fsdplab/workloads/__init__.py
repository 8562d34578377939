"""What is trained: models, their published shapes, and text to train them on."""

from __future__ import annotations

from .config import ConfigError, ModelConfig, RotaryScaling, block_parameter_count, parameter_count, root_parameter_count
from .gpt import GPT, GPTBlock
from .llama import Llama, LlamaBlock
from .models import block_types, build_model, initialise, loss_of, reset_buffers, tie_embeddings
from .presets import BYTE_VOCABULARY, PRESETS, preset
from .text import ByteText, TextError

__all__ = [
    "BYTE_VOCABULARY", "GPT", "PRESETS", "ByteText", "ConfigError", "GPTBlock", "Llama", "LlamaBlock", "ModelConfig", "RotaryScaling",
    "TextError", "block_parameter_count", "block_types", "build_model", "initialise", "loss_of", "parameter_count", "preset",
    "reset_buffers", "root_parameter_count", "tie_embeddings",
]  # fmt: skip

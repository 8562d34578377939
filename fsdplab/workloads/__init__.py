"""Models, their published shapes, and text to train them on.

The names below load when they are first used: shapes and counts need no torch, which takes two seconds to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdplab.common.lazy import names_of

if TYPE_CHECKING:
    from .config import ConfigError as ConfigError
    from .config import ModelConfig as ModelConfig
    from .config import RotaryScaling as RotaryScaling
    from .config import TextError as TextError
    from .config import block_parameter_count as block_parameter_count
    from .config import parameter_count as parameter_count
    from .config import root_parameter_count as root_parameter_count
    from .gpt import GPT as GPT
    from .gpt import GPTBlock as GPTBlock
    from .llama import Llama as Llama
    from .llama import LlamaBlock as LlamaBlock
    from .models import block_types as block_types
    from .models import build_model as build_model
    from .models import initialise as initialise
    from .models import loss_of as loss_of
    from .models import reset_buffers as reset_buffers
    from .models import tie_embeddings as tie_embeddings
    from .moe import MOE_PRESETS as MOE_PRESETS
    from .moe import MoE as MoE
    from .moe import MoEBlock as MoEBlock
    from .moe import MoEConfig as MoEConfig
    from .moe import build_moe as build_moe
    from .moe import moe_loss_of as moe_loss_of
    from .moe import moe_parameter_count as moe_parameter_count
    from .moe import spread_experts as spread_experts
    from .parallel import GPTStage as GPTStage
    from .parallel import build_stage as build_stage
    from .parallel import parallelize as parallelize
    from .parallel import stage_span as stage_span
    from .presets import BYTE_VOCABULARY as BYTE_VOCABULARY
    from .presets import PRESETS as PRESETS
    from .presets import preset as preset
    from .text import ByteText as ByteText

_MODULES = {
    "ConfigError": "config",
    "ModelConfig": "config",
    "RotaryScaling": "config",
    "TextError": "config",
    "block_parameter_count": "config",
    "parameter_count": "config",
    "root_parameter_count": "config",
    "GPT": "gpt",
    "GPTBlock": "gpt",
    "Llama": "llama",
    "LlamaBlock": "llama",
    "block_types": "models",
    "build_model": "models",
    "initialise": "models",
    "loss_of": "models",
    "reset_buffers": "models",
    "tie_embeddings": "models",
    "MOE_PRESETS": "moe",
    "MoE": "moe",
    "MoEBlock": "moe",
    "MoEConfig": "moe",
    "build_moe": "moe",
    "moe_loss_of": "moe",
    "moe_parameter_count": "moe",
    "spread_experts": "moe",
    "GPTStage": "parallel",
    "build_stage": "parallel",
    "parallelize": "parallel",
    "stage_span": "parallel",
    "BYTE_VOCABULARY": "presets",
    "PRESETS": "presets",
    "preset": "presets",
    "ByteText": "text",
}

__all__ = sorted(_MODULES)

__getattr__, __dir__ = names_of(__name__, {name: f"fsdplab.workloads.{module}" for name, module in _MODULES.items()})

"""Models, their published shapes, and text to train them on.

Names load when first used: shapes need no torch, and only experts and cut models need its DTensor, whose
import takes another second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdplab.common.lazy import names_of

if TYPE_CHECKING:
    from .errors import ModelError as ModelError
    from .errors import TextError as TextError
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
    from .shapes import BYTE_VOCABULARY as BYTE_VOCABULARY
    from .shapes import PRESETS as PRESETS
    from .shapes import SHAPES as SHAPES
    from .shapes import ModelShape as ModelShape
    from .shapes import RotaryScaling as RotaryScaling
    from .shapes import preset as preset
    from .text import ByteText as ByteText

_NAMES = {
    "errors": ("ModelError", "TextError"),
    "gpt": ("GPT", "GPTBlock"),
    "llama": ("Llama", "LlamaBlock"),
    "models": ("block_types", "build_model", "initialise", "loss_of", "reset_buffers", "tie_embeddings"),
    "moe": (
        "MOE_PRESETS", "MoE", "MoEBlock", "MoEConfig", "build_moe", "moe_loss_of", "moe_parameter_count",
        "spread_experts",
    ),
    "parallel": ("GPTStage", "build_stage", "parallelize", "stage_span"),
    "shapes": ("BYTE_VOCABULARY", "PRESETS", "SHAPES", "ModelShape", "RotaryScaling", "preset"),
    "text": ("ByteText",),
}  # fmt: skip

__all__ = sorted(name for names in _NAMES.values() for name in names)

__getattr__, __dir__ = names_of(
    __name__, {name: f"fsdplab.workloads.{module}" for module, names in _NAMES.items() for name in names}
)

"""Builds a model with values from a shape: on the meta device first, then it gets memory and is initialised.

Every parameter draws its values from a random stream of its own, seeded by (seed, name). So they do not depend on the
rank, the device, the order of construction or how the model was sharded: each rank can fill its slices of a model too
large to build whole, and still hold exactly the numbers of the unsharded twin.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional, init
from torch.overrides import TorchFunctionMode

from .errors import ModelError
from .shapes import ModelShape, preset
from .transformer import GPT, Llama

INITIAL_DEVIATION = 0.02
_FAMILIES: dict[str, type[GPT] | type[Llama]] = {"gpt": GPT, "llama": Llama}
# The two projections of a block that add to the residual stream.
_RESIDUAL = ("attention.output.weight", "feed_forward.down.weight")


def build_model(model: str | ModelShape, device: torch.device | str | None = None, seed: int = 0) -> GPT | Llama:
    """Build a model by preset name or shape, in torch's default dtype (float32), with values set by `seed` alone;
    torch's global generators stay as they were.

    On `device="meta"` it has shapes and no memory; `to_empty(device=...)` and `initialise(model, seed)` then give the
    same values. Query, key and value are a product each, also where the shape is fused. An unknown name raises
    `ModelError`, and so does a shape that cannot be built.

    >>> sum(p.numel() for p in build_model("gpt-20m", device="meta").parameters())
    21589248
    """
    config = model if isinstance(model, ModelShape) else preset(model)
    reason = config.why_not_built()
    if reason:
        raise ModelError(f"{config.name} cannot be built here: {reason}")
    target = torch.get_default_device() if device is None else torch.device(device)
    with torch.device("meta"), WithoutValues():
        built = _FAMILIES[config.family](config)
    tie_embeddings(built)
    if target.type == "meta":
        return built
    return initialise(built.to_empty(device=target), seed)


class WithoutValues(TorchFunctionMode):
    """Keeps modules that are built inside from drawing random values: on the meta device there is nothing to fill, and
    asking for it imports torch's compiler (0.7 s).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        # functions of torch.nn.init return the tensor that they were to fill
        if getattr(func, "__module__", None) == init.__name__:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def initialise(model: GPT | Llama, seed: int = 0) -> GPT | Llama:
    """Set every parameter and buffer in place, as a function of `seed` and the parameter's name, whole or sharded;
    returns `model`.

    Weights are normal with deviation 0.02, the projections into the residual stream 0.02 / sqrt(2 layers), as in GPT-2;
    biases 0, norms 1.
    """
    tie_embeddings(model)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ModelError(
                f"cannot initialise {name}: it is on the meta device and has no memory; call model.to_empty(device=...)"
                " first"
            )
        fill_parameter(parameter, _initial_value(name, parameter.shape, model.config.layers, seed))
    reset_buffers(model)
    return model


def reset_buffers(model: nn.Module) -> None:
    """Make anew what no checkpoint carries (the rotary tables): needed after `to_empty` when `initialise` is not
    called.
    """
    for module in model.modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers()


def tie_embeddings(model: GPT | Llama) -> None:
    """Make the head's weight the token embedding itself where the shape is tied: `to_empty` makes two of one."""
    if model.config.tied and model.head.weight is not model.token_embedding.weight:
        model.head.weight = model.token_embedding.weight


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the next token, in nats: a float32 scalar, whatever the model's dtype.

    tokens, targets: int64 [B, T]. The forward goes through `model(...)`, so hooks run. A fresh byte model gives about
    ln 256 = 5.55.
    """
    logits = model(tokens)  # (B, T, V)
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())  # (B*T, V), (B*T)


def block_types(model: GPT | Llama) -> tuple[type[nn.Module], ...]:
    """Return the classes to shard as units, one unit per instance: `(GPTBlock,)` or `(LlamaBlock,)`."""
    return (model.block_type,)


def _initial_value(name: str, shape: torch.Size, layers: int, seed: int) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, device="cpu")
    if name.endswith(".bias"):
        return torch.zeros(shape, device="cpu")
    deviation = INITIAL_DEVIATION
    if name.endswith(_RESIDUAL):
        deviation /= math.sqrt(2 * layers)
    # Drawn on the CPU: a GPU's generator would give other numbers.
    stream = torch.Generator(device="cpu").manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, deviation, generator=stream)


@torch.no_grad()
def fill_parameter(parameter: nn.Parameter, value: Tensor) -> None:
    """Copy a whole value into a parameter; of a sharded one, each rank takes its own slice."""
    tensors = sys.modules.get("torch.distributed.tensor")  # its import takes a second: who shares one has made it
    if tensors is None or not isinstance(parameter, tensors.DTensor):
        parameter.copy_(value)
        return
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: every rank has the whole value, so each takes its own slice and nothing is sent.
    local = parameter.to_local()
    sliced = distribute_tensor(value.to(local.device), parameter.device_mesh, parameter.placements, src_data_rank=None)
    local.copy_(sliced.to_local())

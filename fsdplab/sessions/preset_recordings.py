"""Records the two families of the lab's models for predictions without torch (planning/lab_memory/presets.py).

    python -m fsdplab.sessions.preset_recordings

writes `planning/lab_memory/presets.json` anew, as a change of the models, of the engine's hooks or of PyTorch's
operators needs. Each recording is of two blocks, whose events must be alike: then they are those of any layer. In a
recording without checkpointing linear layers are units beside the blocks, so that it has the calls of every choice of
units. With checkpointing units are computed again, blocks or linear layers, and each choice has a recording.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fsdplab.common.files import write_whole
from fsdplab.engine.features.recompute import CHECKPOINTS
from fsdplab.planning.lab_memory.presets import (
    BLOCK_BACKWARD,
    BLOCK_FORWARD,
    EMBEDDING,
    END,
    LOSS,
    RECORDED,
    attention_backward_scratch,
    attention_scratch,
)
from fsdplab.planning.lab_memory.step import Allocate, Call, Event, Free, Gradient
from fsdplab.sessions.micro_batch import RANDOM_STATE, SCRATCH, RecordChoices, record_micro_batch
from fsdplab.workloads.models import build_model, loss_of
from fsdplab.workloads.shapes import ModelShape
from fsdplab.workloads.workload import At

# Different primes, so that bytes show their factors; rotary positions need an even head width.
SIZES = {"B": 7, "T": 521, "C": 11, "K": 13, "G": 17, "D": 2 * 23, "F": 29, "V": 31, "P": 1031}
FAMILIES = ("gpt", "llama")
PRECISIONS = ("fp32", "bf16")
# What sizes are multiplied by: 2 or 4 bytes of an element, half of that (half of a head is turned), twice of that
# (int64, or two sums of a thread). The last one is alone: the generator's state, which checkpointing keeps.
_CONSTANTS = (1, 2, 4, 8, RANDOM_STATE)
_SCRATCH_OF_ATTENTION = {
    attention_scratch(SIZES["T"], SIZES["D"]): "attention_forward",
    attention_backward_scratch(SIZES["T"]): "attention_backward",
}


def _prime_shape(family: str) -> ModelShape:
    """Return two blocks of a family."""
    common: dict[str, Any] = dict(
        name=family,
        layers=2,
        width=SIZES["C"],
        kv_heads=SIZES["K"],
        head_width=SIZES["D"],
        ffn=SIZES["F"],
        vocabulary=SIZES["V"],
        context=SIZES["P"],
    )
    if family == "llama":
        return ModelShape(heads=SIZES["G"] * SIZES["K"], rotary_base=10_000.0, **common)
    biases: dict[str, Any] = dict(norm_bias=True, qkv_bias=True, output_bias=True, ffn_bias=True)
    return ModelShape(heads=SIZES["K"], gated=False, positions=SIZES["P"], **biases, **common)


@dataclass(frozen=True)
class PrimeTokens:
    """A model of prime sizes on tokens that are all 0: a recording asks for shapes only."""

    shape: ModelShape

    def build(self, device: torch.device | str, seed: int) -> nn.Module:
        """Build the model."""
        return build_model(self.shape, device=device, seed=seed)

    def batch(self, at: At) -> tuple[Tensor, Tensor]:
        """Return tokens and targets: int64 [B, T]."""
        tokens = torch.zeros(SIZES["B"], SIZES["T"], dtype=torch.int64)
        return tokens, tokens.clone()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the cross entropy, as a preset's."""
        return loss_of(model, *batch)


def record_presets() -> dict[str, dict[str, list[str]]]:
    """Record what `presets.json` holds: name of a recording -> part -> lines."""
    recordings = {}
    for family, precision, checkpoint in product(FAMILIES, PRECISIONS, CHECKPOINTS):
        recordings[f"{family} {precision} {checkpoint}"] = record_preset(family, precision, checkpoint)
        if checkpoint != "none":
            linear = record_preset(family, precision, checkpoint, "linear")
            recordings[f"{family} {precision} {checkpoint} linear"] = linear
    return recordings


def record_preset(family: str, precision: str, checkpoint: str, units: str = "block") -> dict[str, list[str]]:
    """Record one of them: part -> lines."""
    choices = RecordChoices(
        _units_under(checkpoint, units),
        low_precision=precision == "bf16",
        checkpoint=checkpoint,
        recomputes=nn.Linear if units == "linear" else nn.Module,
    )
    recording = record_micro_batch(PrimeTokens(_prime_shape(family)), choices)
    return parts_of(lines_of(recording.events))


def _units_under(checkpoint: str, units: str) -> Callable[[nn.Module], Any]:
    """Return what makes units: where a block is computed again, nothing inside of it may be a unit too."""

    def unit_classes(model: Any) -> tuple[type[nn.Module], ...]:
        if checkpoint == "none" or units == "linear":
            return model.block_type, nn.Linear
        return (model.block_type,)

    return unit_classes


# ---- lines


def lines_of(events: Sequence[Event]) -> list[str]:
    """Write each event as a line of the file."""
    lines = []
    alive: list[int] = []  # storages, the newest last

    def age(storage: int) -> int:
        # 1 for the newest: in any layer the same line names the same storage
        return len(alive) - alive.index(storage)

    for event in events:
        if isinstance(event, Allocate):
            lines.append(f"allocate {_factors(event)} {event.category}")
            alive.append(event.storage)
        elif isinstance(event, Free):
            lines.append(f"free {age(event.storage)}")
            alive.remove(event.storage)
        elif isinstance(event, Gradient):
            lines.append(f"gradient {_short(event.unit, event.parameter)} {age(event.storage)}")
        else:
            # the file has no column for options of a call, which are their defaults here
            if event != Call(event.method, event.unit):
                raise ValueError(f"{event} cannot be kept; expected a forward in training, which is not hidden")
            lines.append(f"call {event.method} {_short(event.unit)}".rstrip())
    return lines


def _factors(event: Allocate) -> str:
    """Write the bytes of a storage as a product of sizes: 4*B*T*C."""
    if event.storage == SCRATCH and event.nbytes in _SCRATCH_OF_ATTENTION:
        return _SCRATCH_OF_ATTENTION[event.nbytes]
    # 160468 bytes = 4 * 7 * 521 * 11: 4*B*T*C
    letters = [letter for letter, size in SIZES.items() if event.nbytes % size == 0]
    constant = event.nbytes // prod(SIZES[letter] for letter in letters)
    if constant not in _CONSTANTS:
        raise ValueError(
            f"{event} is {constant} times the sizes {letters}; expected one of {_CONSTANTS}: if it is a kernel's"
            " scratch memory, give it a name in planning/lab_memory/presets.py"
        )
    return "*".join([str(constant), *letters])


def _short(*names: str) -> str:
    """Join the names of a unit and a parameter as a shape has them: blocks.0.query.weight, without the root and without
    the module between a block and its linear layers.
    """
    name = ".".join(names).removeprefix("root.")
    return name.replace(".attention.", ".").replace(".feed_forward.", ".")


# ---- parts


def parts_of(lines: Sequence[str]) -> dict[str, list[str]]:
    """Cut a recording of two blocks where a block begins, forward and backward."""
    first_forward = lines.index("call before_forward blocks.0")
    second_forward = lines.index("call before_forward blocks.1")
    second_backward = lines.index("call before_backward blocks.1")
    first_backward = lines.index("call before_backward blocks.0")
    # both blocks have equally many lines, so the second ends as far behind its beginning as the first
    loss = second_forward + (second_forward - first_forward)
    end = first_backward + (first_backward - second_backward)
    return {
        EMBEDDING: [*lines[:first_forward]],
        BLOCK_FORWARD: _of_any_layer(lines[first_forward:second_forward], lines[second_forward:loss]),
        LOSS: [*lines[loss:second_backward]],
        BLOCK_BACKWARD: _of_any_layer(lines[first_backward:end], lines[second_backward:first_backward]),
        END: [*lines[end:]],
    }


def _of_any_layer(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Return the lines of the first block without its number; they must be those of the second."""
    any_layer = [line.replace("blocks.0", "blocks.{}") for line in first]
    of_second = [line.replace("blocks.1", "blocks.{}") for line in second]
    for line, other in zip_longest(any_layer, of_second):
        if line != other:
            raise ValueError(
                f"the second block has {other!r} where the first has {line!r}; expected equal blocks: only then one"
                " stands for every layer"
            )
    return any_layer


def main() -> None:
    """Write the file."""
    write_whole(RECORDED, json.dumps(record_presets(), indent=1) + "\n")


if __name__ == "__main__":
    main()

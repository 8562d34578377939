"""The micro-batch of a preset, without torch and in milliseconds, for any shape, batch and sequence.

What a block computes does not depend on its sizes. So each family is recorded once for each precision and kind of
checkpointing, with sizes that are prime numbers, which show the factors of every storage's bytes
(sessions/preset_recordings.py). `presets.json` keeps the recordings in these factors. Here the factors are multiplied,
and what a block does is repeated for every layer.

A line of the file is an event of a recording (step.py):

    allocate 4*B*T*C activations    a storage of 4 B T C bytes begins
    free 2                          of the storages that are alive, the second newest ends
    gradient blocks.{}.up.weight 1  autograd leaves the gradient of this layer's weight in the newest storage
    call before_forward blocks.{}   a hook calls a method of `StepOrder`

Letters: B batch, T tokens of a sequence, C width, K key/value heads, G query heads for each of these, D head width,
F width of the feed-forward part, V vocabulary, P positions that the model has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path

from fsdplab.workloads.shapes import ModelShape, Parameter

from .step import MASTER, Allocate, Bytes, Call, Event, Free, Gradient, MicroBatch, StepChoices, Stored, peak_of_step

ROOT = "root"
RECORDED = Path(__file__).with_name("presets.json")
# the parts of a recording, in the order in which a step passes them
EMBEDDING, BLOCK_FORWARD, LOSS, BLOCK_BACKWARD, END = "embedding", "block forward", "loss", "block backward", "end"

Line = tuple[str, ...]  # the words of a line


@dataclass(frozen=True, kw_only=True)
class LabRun(StepChoices):
    """What a run of a preset is made of, as far as its memory goes."""

    shape: ModelShape
    batch: int
    sequence: int
    checkpoint: str = "none"
    units: str = "block"  # or linear, or model


def memory_of_step(run: LabRun) -> Bytes:
    """Bytes by category at the peak of the second step, on rank 0, whose shards are largest."""
    return peak_of_step(run, micro_batch_of(run))


# ---- units


def unit_parameters(run: LabRun) -> dict[str, list[Parameter]]:
    """The units of a run, the root first, and their parameters."""
    by_unit: dict[str, list[Parameter]] = {}
    for parameter in _named_parameters(run.shape):
        by_unit.setdefault(unit_of(run, parameter.name), []).append(parameter)
    return {ROOT: by_unit.pop(ROOT), **by_unit}


def _named_parameters(shape: ModelShape) -> list[Parameter]:
    """All parameters, by names such as `head.weight` and `blocks.3.up.weight`."""
    parameters = []
    for parameter in shape.root:
        name = parameter.name if "." in parameter.name else f"{parameter.name}.weight"
        parameters.append(replace(parameter, name=name))
    for layer in range(shape.layers):
        for parameter in shape.block:
            parameters.append(replace(parameter, name=f"blocks.{layer}.{parameter.name}"))
    return parameters


def unit_of(run: LabRun, parameter: str) -> str:
    """The unit that owns a parameter (`blocks.3.up.weight`)."""
    module = parameter.removesuffix(".weight").removesuffix(".bias")
    in_block = module.startswith("blocks.")
    if run.units == "block" and in_block:
        block, layer, *_ = module.split(".")
        return f"{block}.{layer}"
    if run.units == "linear":
        linear_of_block = in_block and "norm" not in module
        head_of_its_own = module == "head" and not run.shape.tied
        if linear_of_block or head_of_its_own:
            return module
    return ROOT


# ---- the micro-batch


def micro_batch_of(run: LabRun) -> MicroBatch:
    """The micro-batch of a run, as a recording of it would be."""
    recorded = kept_recordings()[recording_name(run)]
    if run.shape.tied and run.units == "linear":
        # a tied head is of the root, which is not computed again
        in_blocks = replace(run, units="block")
        recorded = recorded | {LOSS: kept_recordings()[recording_name(in_blocks)][LOSS]}
    units = {}
    for name, parameters in unit_parameters(run).items():
        units[name] = tuple(Stored(parameter.name, parameter.shape, MASTER, run.itemsize) for parameter in parameters)
    sizes = Sizes.of(run.shape, run.batch, run.sequence)
    events = _Events(run, units, sizes)
    layers = range(run.shape.layers)
    events.add(recorded[EMBEDDING])
    for layer in layers:
        events.add(recorded[BLOCK_FORWARD], layer)
    events.add(recorded[LOSS])
    for layer in reversed(layers):
        events.add(recorded[BLOCK_BACKWARD], layer)
    events.add(recorded[END])
    tokens_and_targets = 2 * 8 * run.batch * run.sequence  # 64 bits each
    rotary_tables = 0
    if not run.shape.positions:
        rotary_tables = 2 * 4 * run.shape.context * (run.shape.head_width // 2)
    return MicroBatch(units, events.events, tokens_and_targets, rotary_tables)


def recording_name(run: LabRun) -> str:
    """Which recording of `presets.json` a run has: the units below the root are computed again.

    >>> from fsdplab.workloads.shapes import SHAPES
    >>> run = LabRun(shape=SHAPES["gpt-tiny"], batch=1, sequence=8, strategy="zero1", shards=2, replicas=1, itemsize=2)
    >>> recording_name(run)
    'gpt bf16 none'
    >>> recording_name(replace(run, checkpoint="full", units="linear"))
    'gpt bf16 full linear'
    """
    precision = "fp32" if run.itemsize == MASTER else "bf16"
    name = f"{run.shape.family} {precision}"
    if run.checkpoint == "none" or run.units == "model":
        return f"{name} none"
    if run.units == "linear":
        return f"{name} {run.checkpoint} linear"
    return f"{name} {run.checkpoint}"


@cache
def kept_recordings() -> dict[str, dict[str, list[Line]]]:
    """The recordings of `presets.json`: name -> part -> lines."""
    recordings: dict[str, dict[str, list[Line]]] = {}
    for name, parts in json.loads(RECORDED.read_text(encoding="utf-8")).items():
        recordings[name] = {part: [tuple(line.split()) for line in lines] for part, lines in parts.items()}
    return recordings


class Sizes:
    """Evaluates the products of the file for one shape, batch and sequence.

    >>> from fsdplab.workloads.shapes import SHAPES
    >>> Sizes.of(SHAPES["gpt-tiny"], batch=2, sequence=64).bytes_of("4*B*T*C")
    32768
    """

    def __init__(self, factors: Mapping[str, int]) -> None:
        self._factors = factors
        self._known: dict[str, int] = {}

    @classmethod
    def of(cls, shape: ModelShape, batch: int, sequence: int) -> Sizes:
        """The letters of a shape, and the scratch memory of attention's kernels."""
        return cls(
            {
                "B": batch,
                "T": sequence,
                "C": shape.width,
                "K": shape.kv_heads,
                "G": shape.heads // shape.kv_heads,
                "D": shape.head_width,
                "F": shape.ffn,
                "V": shape.vocabulary,
                "P": shape.context,
                "attention_forward": attention_scratch(sequence, shape.head_width),
                "attention_backward": attention_backward_scratch(sequence),
            }
        )

    def bytes_of(self, product: str) -> int:
        """The value of a product such as 4*B*T*C."""
        if product not in self._known:
            factors = product.split("*")
            self._known[product] = prod(
                int(factor) if factor.isdigit() else self._factors[factor] for factor in factors
            )
        return self._known[product]


_TABLE = "token_embedding.weight"


class _Events:
    """Writes the events of one micro-batch from the lines of a recording, whose head is a matrix of its own.

    A head that is tied to the embedding leaves no gradient of its own: autograd holds it until the embedding's is
    there, and adds both into a third storage, since the first is a view.
    """

    def __init__(self, run: LabRun, units: Mapping[str, Sequence[Stored]], sizes: Sizes) -> None:
        self.run, self.units, self.sizes = run, units, sizes
        self.events: list[Event] = []
        self._alive: list[int] = []  # numbers of storages, the newest last
        self._begun = 0
        self._of_table = ""  # the size of a gradient of the table that is also the head
        if run.shape.tied:
            self._of_table = f"{run.itemsize}*C*V"
        self._of_head = 0  # the storage of the head's part of that gradient

    def add(self, lines: Sequence[Line], layer: int | None = None) -> None:
        """Add the events of a part, in a block those of one layer."""
        for kind, *words in lines:
            if kind == "allocate":
                product, category = words
                # a part of a gradient is none yet
                self._alive.append(self._allocate(product, "activations" if product == self._of_table else category))
            elif kind == "free":
                (age,) = words
                storage = self._alive.pop(-int(age))
                if storage != self._of_head:
                    self.events.append(Free(storage))
            elif kind == "gradient":
                name, age = words
                storage = self._alive[-int(age)]
                if self._of_table and name == "head.weight":
                    self._of_head = storage
                elif self._of_table and name == _TABLE:
                    self._add_tied(int(age))
                else:
                    parameter = name.format(layer)
                    self.events.append(Gradient(unit_of(self.run, parameter), parameter, storage))
            else:
                method, *unit = words  # no unit is named where the call is for all
                self._call(method, "".join(unit).format(layer))

    def _call(self, method: str, unit: str) -> None:
        """Blocks and their linear layers were recorded as units; those that are none in this run call nothing."""
        if not unit or unit in self.units:
            self.events.append(Call(method, unit))

    def _allocate(self, product: str, category: str) -> int:
        """A storage begins; returns its number."""
        self._begun += 1
        self.events.append(Allocate(self._begun, self.sizes.bytes_of(product), category))
        return self._begun

    def _add_tied(self, age: int) -> None:
        """The sum of the head's part and the embedding's, which has that age, is the gradient of both."""
        total = self._allocate(self._of_table, "unsharded_gradients")
        self.events += [Free(self._of_head), Free(self._alive[-age])]
        self.events.append(Gradient(unit_of(self.run, _TABLE), _TABLE, total))
        self._alive[-age] = total  # what ends with the next line


# ---- scratch memory of attention


def attention_scratch(sequence: int, head_width: int) -> int:
    """Bytes that flash attention's forward takes on one thread."""
    rows, columns = _attention_tile(sequence)
    return rows * (columns + 2 + head_width) * 4


def attention_backward_scratch(sequence: int) -> int:
    """Bytes that its backward takes."""
    rows, columns = _attention_tile(sequence)
    return 2 * rows * columns * 4


def _attention_tile(sequence: int) -> tuple[int, int]:
    """Rows and columns of scores that a thread holds at once (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp)."""
    if sequence >= 768:
        rows = 256
    elif sequence >= 192:
        rows = 64
    else:
        rows = 32
    return min(rows, sequence), min(512, sequence)

"""Defines the parts of a run: a frozen dataclass each, with its fields, their help texts, and the rules inside it.

The fields are also flags of the command line, with these help texts; so this file imports torch only when needed.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from fsdplab.common.fields import option
from fsdplab.common.names import (
    IN_GROUPS,
    SAVES_MOST,
    STRATEGIES,
    STRATEGIES_IN_WORDS,
    STRATEGY_ROWS,
    StrategyRow,
    strategies_that,
)
from fsdplab.planning.hardware import HardwareError, parse_cluster
from fsdplab.planning.links import LinkError, parse_link
from fsdplab.planning.windtunnel import TARGET_TOKENS, Target, WindTunnelError, card_for, wind_tunnel
from fsdplab.workloads.errors import ModelError, TextError
from fsdplab.workloads.own.sources import check_model, is_own, reads_text
from fsdplab.workloads.shapes import preset

from . import choices, gpus
from .rules import Checked, Readable, Rule, Rules, SpecError

# Step whose memory is measured: the first has made the optimizer's state and recorded the order of the units, so the
# second is typical.
MEMORY_STEP = 1
_OFFLOADABLE = strategies_that(lambda row: row.can_offload)
NO_WIND_TUNNEL = (
    "emulate needs the model's size and traffic before it runs, which are not known of a model of one's own; give a"
    " link instead"
)
_MANY = 10**9  # beyond such numbers a run is a mistake, or would overflow a seed or an index


def _named(model: Any) -> Any:
    """Return a path, or a `Workload`, which is written to a file for the ranks, as a text."""
    if isinstance(model, os.PathLike):
        return os.fspath(model)
    if "torch" not in sys.modules:
        return model
    from fsdplab.workloads.own.carried import Workload, saved  # which import torch

    try:
        return saved(model) if isinstance(model, Workload) else model
    except ModelError as error:
        raise SpecError(str(error), "model") from error


@dataclass(frozen=True, kw_only=True)
class WorkloadPart(Checked):
    """What is trained: a model on a text. Runs that are compared have the same workload.

    Each rank reads `batch_size` sequences of `sequence_length` tokens in each of `micro_batches`.

    >>> WorkloadPart(batch_size=4, sequence_length=32).tokens_per_rank
    128
    """

    model: str = option(
        "gpt-20m",
        "Preset (gpt-tiny, gpt-20m, llama-20m, gpt2, ...), a Python file with model(), batch(at), loss(model, batch),"
        " or a Hugging Face folder or config.json.",
    )
    text: str | None = option(None, "Train on this file or folder; default: Python's own library sources.")
    seed: int = option(0, "Seed of weights and data.", least=0, most=2**63 - 1)
    batch_size: int = option(2, "Sequences that each rank reads in a micro-batch.", least=1, most=10**15)
    sequence_length: int = option(64, "Tokens in a sequence.", least=1, most=_MANY)
    micro_batches: int = option(1, "Micro-batches a step (gradient accumulation).", least=1, most=_MANY)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):  # the spec holds what JSON can hold
            # the one way to set a field of a frozen dataclass
            object.__setattr__(self, "model", _named(self.model))
        super().__post_init__()

    @property
    def own_model(self) -> bool:
        """Whether the model is none of the presets: its parts are known to ranks only, once they have built it."""
        return is_own(self.model)

    @property
    def tokens_per_rank(self) -> int | None:
        """Tokens that one rank reads in one step; None where batches are a model's own."""
        return self.batch_size * self.sequence_length * self.micro_batches if reads_text(self.model) else None

    def _read_text(self) -> None:
        if self.text is not None:
            from fsdplab.workloads import ByteText  # which imports torch

            ByteText.from_path(self.text).require(self.sequence_length)

    def _require_length(self) -> None:
        if not self.own_model:
            preset(self.model).require_length(self.sequence_length)

    RULES: ClassVar[Rules] = (
        Readable(("model",), lambda s: check_model(s.model), (ModelError,)),
        Readable(("sequence_length",), _require_length, (ModelError,)),
        Readable(("text", "sequence_length"), _read_text, (TextError,)),
    )


@dataclass(frozen=True, kw_only=True)
class Sharding(Checked):
    """How the model is sharded: the strategy, its units, and where shards are kept.

    `shard_size` ranks form a shard group of hybrid_shard.
    """

    strategy: str = option(SAVES_MOST[0], f"{STRATEGIES_IN_WORDS}.", one_of=STRATEGIES)
    shard_size: int | None = option(None, "Ranks of one shard group of hybrid_shard.", least=1)
    units: str = option(
        "auto",
        "FSDP units: auto (each block), linear (each linear layer), model (the whole model), or the name of a class of"
        " a model of your own.",
        known=choices.UNITS,
    )
    prefetch: int = option(1, "Units that the lab's engine gathers ahead; 0: none.", least=0, most=_MANY)
    offload: str = option(
        "none", "Where the lab keeps shards and optimizer state: none (the device) or cpu.", one_of=choices.OFFLOADS
    )

    @property
    def row(self) -> StrategyRow:
        """The strategy's row."""
        return STRATEGY_ROWS[self.strategy]

    RULES: ClassVar[Rules] = (
        Rule(
            ("shard_size", "strategy"),
            lambda s: s.shard_size is None or s.row.in_groups,
            f"shard_size is for {' or '.join(IN_GROUPS)}, not {{s.strategy}}",
            f"leave it out, or give strategy={IN_GROUPS[0]!r}",
        ),
        Rule(
            ("offload", "strategy"),
            lambda s: s.offload == "none" or s.row.can_offload,
            "offload moves shards, but {s.strategy} keeps parameters whole",
            f"give strategy={' or '.join(map(repr, _OFFLOADABLE))}",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class EngineChoice(Checked):
    """Who trains, and how: the engine, its precision and optimizer, what it recomputes and compiles, its transport.

    `compile="blocks"` makes one graph of each block's forward.
    """

    engine: str = option("lab", f"{choices.ENGINES_IN_WORDS}.", one_of=tuple(choices.ENGINES))
    precision: str = option("fp32", "fp32, or bf16 (compute in bf16, float32 masters).", one_of=choices.PRECISIONS)
    optimizer: str = option(
        "adamw",
        "adamw (fused), adamw-foreach, or muon (for the matrices of the units; adamw for the rest).",
        one_of=choices.OPTIMIZERS,
    )
    learning_rate: float = option(3e-4, "The optimizer's learning rate.", above=0)
    checkpoint: str = option(
        "none", "Activations that the lab recomputes: none, selective or full.", one_of=choices.CHECKPOINTS
    )
    compile: str = option(
        "none", "none, or blocks (torch.compile makes one graph of each block's forward).", one_of=choices.COMPILES
    )
    transport: str = option("auto", "How bytes move: auto, shm, gloo or nccl.", one_of=choices.TRANSPORTS)


@dataclass(frozen=True, kw_only=True)
class Network(Checked):
    """The emulated network between the ranks: a named link, or a wind tunnel, which chooses one.

    `link` is a preset ("eth10") or a bandwidth ("200mbit", "1GB/s,50us"), `link_across` that between the shard groups
    of hybrid_shard. `emulate` ("8xH100") with `as_model` ("llama-3.1-8b") chooses the link so that communication takes
    the same part of a step as on that machine; a link given as well is taken as that choice.
    """

    link: str | None = option(
        None, "Emulated network between ranks: eth10, nvlink4, ib400, ... or 200mbit, 1GB/s,50us."
    )
    link_across: str | None = option(None, "Emulated network between the shard groups of hybrid_shard.")
    link_queues: int = option(1, "1: gathers and reductions share a communicator; 2: each has its own.", one_of=(1, 2))
    emulate: str | None = option(
        None, "Wind tunnel: a machine such as 8xH100, whose network is slow or fast in proportion (with --as)."
    )
    as_model: str | None = option(None, "The model whose training on --emulate is imitated, such as llama-3.1-8b.")

    @property
    def linked(self) -> bool:
        """Whether the ranks are behind an emulated link."""
        return bool(self.link or self.link_across or self.emulate)

    @property
    def target(self) -> Target | None:
        """One step of `as_model` on `emulate` under full sharding, whatever the strategy, so that all runs of a
        comparison meet the same network; None without a wind tunnel.
        """
        if not (self.emulate and self.as_model):
            return None
        shape = preset(self.as_model)
        return wind_tunnel(
            parse_cluster(self.emulate),
            target_parameters=shape.parameters,
            target_layers=shape.layers,
            tokens_per_gpu=TARGET_TOKENS,
        )

    def scaled_card(self, workload: WorkloadPart, ranks: int) -> int:
        """Return bytes of the card of a wind tunnel: as full of this workload's states as the target's card is of the
        target's.
        """
        assert self.target is not None and self.as_model is not None, "the network has no wind tunnel"
        if workload.own_model:
            raise SpecError(NO_WIND_TUNNEL, "emulate")
        here, there = preset(workload.model).parameters, preset(self.as_model).parameters
        return card_for(self.target, parameters_here=here, target_parameters=there, ranks=ranks)

    RULES: ClassVar[Rules] = (
        Rule(
            ("as_model", "emulate"),
            lambda s: bool(s.emulate) == bool(s.as_model),
            "emulate={s.emulate!r}, as_model={s.as_model!r}",
            "give both, such as emulate='8xH100', as_model='llama-3.1-8b', or none of them",
        ),
        Readable(("link",), lambda s: s.link is not None and parse_link(s.link), (LinkError,)),
        Readable(("link_across",), lambda s: s.link_across is not None and parse_link(s.link_across), (LinkError,)),
        Readable(("as_model",), lambda s: s.as_model is not None and preset(s.as_model), (ModelError,)),
        Readable(("emulate",), lambda s: s.target, (HardwareError, WindTunnelError)),
    )


@dataclass(frozen=True, kw_only=True)
class Measuring(Checked):
    """What is measured: `steps` are timed, after `warmup` steps that are not; the second of these has its memory
    measured, and `profile` further steps run under PyTorch's profiler.

    `card` is the memory of an emulated accelerator, in bytes: a run that needs more goes on, and is marked as over the
    card.
    """

    steps: int = option(4, "Timed steps, after two that warm up.", least=1, most=10_000_000)
    warmup: int = option(
        2, "Steps before the timed ones; the memory of the second is measured.", least=0, most=10_000_000
    )
    profile: int = option(0, "Steps under PyTorch's profiler, after the timed ones; 0: no trace.", least=0, most=1_000)
    memory: bool = option(True, "Whether memory is measured.", one_of=(True, False))
    card: int | None = option(
        None,
        "Bytes of an emulated card: a run that needs more is marked as over the card.",
        least=1,
        most=2**63 - 1,  # as a record holds whole numbers
        remark=" (bytes of the emulated card, or None)",
    )

    RULES: ClassVar[Rules] = (
        Rule(
            ("warmup", "memory"),
            lambda s: not s.memory or s.warmup > MEMORY_STEP,
            "memory is measured in the second warm-up step, but warmup is {s.warmup}",
            "give warmup=2 or more, or memory=False",
        ),
        Rule(
            ("card", "memory"),
            lambda s: s.card is None or s.memory,
            "a card of {s.card} bytes needs the memory to be measured, but memory is False",
            "leave memory=True, or card=None",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Placement(Checked):
    """Where the ranks run, how they are started ("warm": forked; "torchrun"; "auto": warm where possible), and after
    how many seconds the run is ended with a report.
    """

    world_size: int = option(2, "Ranks: real processes on this machine.", least=1, most=100_000)
    device: str = option("auto", "auto, cpu or cuda.", one_of=choices.DEVICES)
    time_limit: float = option(120.0, "Seconds after which one run is ended with a report.", above=0)
    start: str = option(
        "auto",
        "How ranks are started: warm (forked), torchrun (new Pythons), or auto (warm if possible).",
        one_of=choices.STARTS,
    )

    @property
    def device_type(self) -> str:
        """`cuda` or `cpu`: where the ranks run once `auto` is decided (cuda needs one GPU a rank, unless
        FSDPLAB_SHARE_A_GPU=1 lets them share).
        """
        if self.device != "auto":
            return self.device
        # also for the twin, which is compared with ranks
        enough = 1 if os.environ.get("FSDPLAB_SHARE_A_GPU") == "1" else self.world_size
        return "cuda" if gpus.usable_gpus() >= enough else "cpu"

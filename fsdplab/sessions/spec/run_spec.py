"""What to run, described once and checked once.

Ranks take seconds to start, so an invalid request fails here, before any process exists, in one line: what happened,
what was got, what was expected, what to do. An existing `RunSpec` can be run. Its fields are also the command line's
flags, with the help texts below; so this file imports torch only when needed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdplab.common.fields import option
from fsdplab.common.names import (
    BEST_KNOWN_FIRST,
    IN_GROUPS,
    STATES,
    STRATEGIES,
    STRATEGIES_IN_WORDS,
    STRATEGY_ROWS,
    StrategyRow,
    strategies_that,
)
from fsdplab.common.places import how_to_install
from fsdplab.common.words import did_you_mean, plural, squeezed

from .gpus import MULTI_RANK_NCCL, compute_mode, mode_complaint, nccl_version, usable_gpus, why_no_gpu


def _best_known(fulfil: Callable[[StrategyRow], bool]) -> tuple[str, ...]:
    return tuple(name for name in BEST_KNOWN_FIRST if fulfil(STRATEGY_ROWS[name]))


# The strategies of each engine, the best known first.
ENGINES: dict[str, tuple[str, ...]] = {
    "lab": BEST_KNOWN_FIRST,
    "torch-ddp": _best_known(lambda row: not row.cuts),
    "torch-fsdp1": _best_known(lambda row: bool(row.torch_fsdp1)),
    "torch-fsdp2": _best_known(lambda row: row.cuts == STATES),
    **{f"deepspeed-{stage}": strategies_that(lambda row: row.deepspeed_stage == stage) for stage in (1, 2, 3)},
    "twin": STRATEGIES,
}
PEERS = tuple(name for name in ENGINES if name not in ("lab", "twin"))
OFFLOADABLE = _best_known(lambda row: row.cuts == STATES and not row.in_groups)  # states that rest as shards alone
_GROUPED = " or ".join(IN_GROUPS)
ENGINES_IN_WORDS = f"lab, {', '.join(PEERS)} or twin"
STARTS = ("auto", "warm", "torchrun")  # how ranks are started: warm ones are forked; auto is warm where possible
COMPILES = ("none", "blocks")
PRECISIONS = ("fp32", "bf16")
CHECKPOINTS = ("none", "selective", "full")  # which activations the lab recomputes in the backward
OFFLOADS = ("none", "cpu")  # where the lab keeps slices and optimizer state: the device, or host memory
DEVICES = ("auto", "cpu", "cuda")
# the FSDP units: each block (as auto), each linear layer, the whole model
UNITS = ("auto", "block", "linear", "model")
OPTIMIZERS = ("adamw", "adamw-foreach")  # fused, and the one that makes temporaries
TRANSPORTS = ("auto", "shm", "gloo", "nccl")
# besides lab; for them "auto" is the device's usual backend
ON_SHARED_MEMORY = ("torch-ddp", "torch-fsdp1", "torch-fsdp2")

# Step whose memory is measured: the first has made the optimizer's state and recorded the order of the units, so the
# second is typical.
MEMORY_STEP = 1
# beyond these a run is a mistake, or would overflow a seed or an index
_MOST = {
    "steps": 10_000_000, "warmup": 10_000_000, "profile": 1_000, "world_size": 100_000, "seed": 2**63 - 1,
    "batch_size": 10**15, "micro_batches": 10**9, "prefetch": 10**9,
}  # fmt: skip
CALIBRATION = 3  # steps without a link that a wind tunnel measures
_BYTES_OF_A_PROCESS = 250_000_000  # Python and torch before any model, measured


class SpecError(ValueError):
    """An invalid run; the message is one line: what happened, got, expected, what to do."""


@dataclass(frozen=True)
class RunSpec:
    """One run: model, data, strategy, engine, ranks. Sizes in bytes, times in seconds; raises SpecError when invalid.

    `steps` are timed, after `warmup` steps that are not; the second warm-up step's memory is measured. `batch_size`
    sequences of `sequence_length` tokens are read by each rank in each of `micro_batches`. `card` is the memory of an
    emulated accelerator: a run that needs more goes on, and is marked as over the card. `profile` steps come after the
    timed ones, under PyTorch's profiler. `link` is an emulated network: a preset ("eth10"), or a bandwidth ("200mbit",
    "1GB/s,50us"); `emulate` ("8xH100") with `as_model` ("llama-3.1-8b") choose it so that communication takes the same
    part of a step as on that machine (a link given as well is taken as that choice). `compile="blocks"` makes one graph
    of each block's forward. `start` is how ranks are started: "warm" (forked), "torchrun", or "auto" (warm where
    possible). `shard_size` ranks form a shard group of hybrid_shard, with the network `link_across` between the groups.

    >>> RunSpec(strategy="zero1", world_size=2).total_steps
    6
    """

    strategy: str = option("full_shard", f"{STRATEGIES_IN_WORDS}.")
    engine: str = option("lab", f"{ENGINES_IN_WORDS}.")
    world_size: int = option(2, "Ranks: real processes on this machine.")
    model: str = option("gpt-20m", "Preset: gpt-tiny, gpt-20m, gpt-25m, llama-tiny, llama-20m, gpt2, ...")
    text: str | None = option(None, "Train on this file or folder; default: Python's own library sources.")
    batch_size: int = option(2, "Sequences that each rank reads in a micro-batch.")
    sequence_length: int = option(64, "Tokens in a sequence.")
    steps: int = option(4, "Timed steps, after two that warm up.")
    warmup: int = option(2, "Steps before the timed ones; the memory of the second is measured.")
    micro_batches: int = option(1, "Micro-batches a step (gradient accumulation).")
    precision: str = option("fp32", "fp32, or bf16 (compute in bf16, float32 masters).")
    units: str = option("auto", "FSDP units: auto (each block), linear (each linear layer) or model (the whole model).")
    prefetch: int = option(1, "Units that the lab's engine gathers ahead; 0: none.")
    learning_rate: float = option(3e-4, "AdamW's learning rate.")
    optimizer: str = option("adamw", "adamw (fused) or adamw-foreach.")
    transport: str = option("auto", "How bytes move: auto, shm, gloo or nccl.")
    checkpoint: str = option("none", "Activations that the lab recomputes: none, selective or full.")
    offload: str = option("none", "Where the lab keeps slices and optimizer state: none (the device) or cpu.")
    compile: str = option("none", "none, or blocks (torch.compile makes one graph of each block's forward).")
    profile: int = option(0, "Steps under PyTorch's profiler, after the timed ones; 0: no trace.")
    link: str | None = option(
        None, "Emulated network between ranks: eth10, nvlink4, ib400, ... or 200mbit, 1GB/s,50us."
    )
    link_across: str | None = option(None, "Emulated network between the shard groups of hybrid_shard.")
    link_queues: int = option(1, "1: gathers and reductions share a communicator; 2: each has its own.")
    emulate: str | None = option(
        None, "Wind tunnel: a machine such as 8xH100, whose network is slow or fast in proportion (with --as)."
    )
    as_model: str | None = option(None, "The model whose training on --emulate is imitated, such as llama-3.1-8b.")
    shard_size: int | None = option(None, "Ranks of one shard group of hybrid_shard.")
    seed: int = option(0, "Seed of weights and data.")
    card: int | None = option(None, "Bytes of an emulated card: a run that needs more is marked as over the card.")
    device: str = option("auto", "auto, cpu or cuda.")
    memory: bool = option(True, "Whether memory is measured.")
    time_limit: float = option(120.0, "Seconds after which one run is ended with a report.")
    start: str = option(
        "auto", "How ranks are started: warm (forked), torchrun (new Pythons), or auto (warm if possible)."
    )

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_numbers(self)
        _check_pairs(self)
        _check_workload(self)
        _check_sharing(self)
        _check_network(self)
        _check_machine(self)

    @property
    def total_steps(self) -> int:
        """Steps of training in all: untimed, timed, under the profiler."""
        return self.untimed + self.steps + self.profiler_warmup + self.profile

    @property
    def untimed(self) -> int:
        """Steps before the timed ones: warm-up, and those in which a wind tunnel measures how fast this machine
        computes.
        """
        return self.warmup + (CALIBRATION if self.emulate and not self.link else 0)

    @property
    def profiler_warmup(self) -> int:
        """Steps that the profiler throws away before those it keeps: one on CUDA, where the first is slower, and none
        on the CPU, where it is not.
        """
        return 1 if self.profile and self.device_type == "cuda" else 0

    @property
    def row(self) -> StrategyRow:
        """The strategy's row."""
        return STRATEGY_ROWS[self.strategy]

    @property
    def replicas(self) -> int:
        """Shard groups that hold the same slices: 1 but under a strategy with groups of ranks."""
        return self.world_size // (self.shard_size or self.world_size)

    @property
    def linked(self) -> bool:
        """Whether the ranks are behind an emulated link."""
        return bool(self.link or self.link_across or self.emulate)

    @property
    def processes(self) -> int:
        """Rank processes to start: the twin replays all ranks in one."""
        return 1 if self.engine == "twin" else self.world_size

    @property
    def tokens_per_rank(self) -> int:
        """Tokens that one rank reads in one step."""
        return self.batch_size * self.sequence_length * self.micro_batches

    @property
    def device_type(self) -> str:
        """`cuda` or `cpu`: where the ranks run once `auto` is decided (cuda needs one GPU a rank, unless
        FSDPLAB_SHARE_A_GPU=1 lets them share).
        """
        if self.device != "auto":
            return self.device
        # also for the twin, which is compared with ranks
        enough = 1 if os.environ.get("FSDPLAB_SHARE_A_GPU") == "1" else self.world_size
        return "cuda" if usable_gpus() >= enough else "cpu"

    @property
    def why_this_device(self) -> str:
        """Why ranks share GPUs, or do not run on those that there are; "" where each rank has what a user expects."""
        found = usable_gpus()
        if self.shares_a_gpu:
            return f"{plural(found, 'GPU')} for {plural(self.processes, 'rank')}, which take turns"
        if self.device == "auto" and self.device_type == "cpu" and found:
            return f"this machine has {plural(found, 'GPU')}; --device cuda lets ranks share"
        return ""

    @property
    def shares_a_gpu(self) -> bool:
        """Whether there are more CUDA ranks than GPUs; such a run's times are emulated."""
        return self.device_type == "cuda" and 0 < usable_gpus() < self.processes

    @property
    def backend(self) -> str:
        """The process group's backend: `nccl` on cuda, else `gloo`, or `shm` for an engine of torch that asks for
        shared memory.

        The lab's engine chooses its transport on top of gloo. Torch's engines use shared memory behind an emulated link
        too. Ranks that share a GPU use NCCL where it can do that, else gloo through host memory.
        """
        if self.device_type == "cuda":
            by_host = self.transport == "auto" and self.shares_a_gpu and nccl_version() < MULTI_RANK_NCCL
            return "gloo" if by_host or self.transport == "gloo" else "nccl"
        return "shm" if (self.transport == "shm" or self.linked) and self.engine in ON_SHARED_MEMORY else "gloo"

    def as_dict(self) -> dict[str, Any]:
        """All fields, JSON-able; `RunSpec(**spec.as_dict()) == spec`."""
        return asdict(self)


def _check_choices(spec: RunSpec) -> None:
    for name, expected in (
        ("strategy", STRATEGIES),
        ("engine", tuple(ENGINES)),
        ("precision", PRECISIONS),
        ("device", DEVICES),
        ("optimizer", OPTIMIZERS),
        ("transport", TRANSPORTS),
        ("checkpoint", CHECKPOINTS),
        ("offload", OFFLOADS),
        ("compile", COMPILES),
        ("start", STARTS),
        ("units", UNITS),
        ("link_queues", (1, 2)),
        ("memory", (True, False)),
    ):
        got = getattr(spec, name)
        if got not in expected:
            words = [str(word) for word in expected]
            raise SpecError(f"unknown {name} {got!r}{near_matches(got, words)}; expected one of {', '.join(words)}")


def _check_numbers(spec: RunSpec) -> None:
    for name in ("world_size", "batch_size", "sequence_length", "steps", "micro_batches"):
        check_whole(name, getattr(spec, name), 1)
    for name in ("warmup", "prefetch", "seed", "profile"):
        check_whole(name, getattr(spec, name), 0)
    for name, most in _MOST.items():
        if getattr(spec, name) > most:
            raise SpecError(f"{name} is {str(getattr(spec, name))[:40]}; expected at most {most:,}")
    if spec.card is not None:
        check_whole("card", spec.card, 1, " (bytes of the emulated card, or None)")
    for name in ("learning_rate", "time_limit"):
        got = getattr(spec, name)
        if isinstance(got, bool) or not isinstance(got, (int, float)) or not 0 < got < float("inf"):
            raise SpecError(f"{name} is {got!r}; expected a number above 0")


def _check_pairs(spec: RunSpec) -> None:
    possible = ENGINES[spec.engine]
    if spec.strategy not in possible:
        able = " or ".join(possible)
        raise SpecError(
            f"engine {spec.engine} cannot do {spec.strategy}; expected {able}: give strategy={possible[0]!r}, or"
            " engine='lab'"
        )
    if spec.engine.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        raise SpecError(f"engine {spec.engine} needs DeepSpeed, which is not installed; run: {how_to_install('peers')}")
    for name in ("checkpoint", "offload"):
        if spec.engine != "lab" and getattr(spec, name) != "none":
            raise SpecError(
                f"{name} is {getattr(spec, name)!r}, which only the lab's engine does here; leave {name}='none', or"
                " give engine='lab'"
            )
    if spec.units != "auto" and spec.engine not in ("lab", "torch-fsdp2", "twin"):
        raise SpecError(
            f"units is {spec.units}, but engine {spec.engine} has its own; leave units='auto', or give engine='lab' or"
            " 'torch-fsdp2'"
        )
    if spec.offload != "none" and spec.strategy not in OFFLOADABLE:
        raise SpecError(
            f"offload moves sharded slices, but {spec.strategy} keeps parameters whole; give"
            f" strategy={' or '.join(map(repr, OFFLOADABLE))}"
        )
    if spec.engine != "lab" and spec.prefetch != 1:
        raise SpecError(
            f"prefetch is {spec.prefetch}, but engine {spec.engine} has its own rule; leave prefetch=1, or give"
            " engine='lab'"
        )
    if (
        spec.engine != "lab"
        and spec.transport != "auto"
        and not (spec.transport == "shm" and spec.engine in ON_SHARED_MEMORY)
    ):
        able = f"{' or '.join(ON_SHARED_MEMORY)} for shm, or engine='lab'"
        raise SpecError(
            f"transport is {spec.transport}, but engine {spec.engine} brings its own; leave transport='auto', or give"
            f" {able}"
        )
    if spec.transport == "nccl" and spec.device_type == "cpu" or spec.transport == "shm" and spec.device_type == "cuda":
        raise SpecError(
            f"transport {spec.transport} does not move tensors on {spec.device_type}; leave transport='auto'"
        )
    if spec.memory and spec.warmup <= MEMORY_STEP:
        raise SpecError(
            f"memory is measured in the second warm-up step, but warmup is {spec.warmup}; give warmup=2 or more, or"
            " memory=False"
        )
    if spec.card is not None and not spec.memory:
        raise SpecError(
            f"a card of {spec.card} bytes needs the memory to be measured, but memory is False; leave memory=True, or"
            " card=None"
        )


def _check_workload(spec: RunSpec) -> None:
    from fsdplab.workloads import ModelError, TextError, preset

    try:
        preset(spec.model).require_length(spec.sequence_length)
        if spec.text is not None:
            from fsdplab.workloads import ByteText  # which imports torch

            ByteText.from_path(spec.text).require(spec.sequence_length)
    except (ModelError, TextError) as error:
        raise SpecError(str(error)) from error


def _check_network(spec: RunSpec) -> None:
    """Links and their mesh: SpecError unless they fit together."""
    from fsdplab.planning.hardware import HardwareError, parse_cluster
    from fsdplab.planning.links import LinkError, parse_link
    from fsdplab.planning.windtunnel import WindTunnelError, wind_tunnel
    from fsdplab.workloads import ModelError, preset

    _check_shard_group(spec)
    if spec.engine == "twin":
        return  # the twin has no network; the fields describe the runs it is compared with
    if bool(spec.emulate) != bool(spec.as_model):
        raise SpecError(
            f"emulate={spec.emulate!r}, as_model={spec.as_model!r}: give both, such as emulate='8xH100',"
            " as_model='llama-3.1-8b', or none of them"
        )
    if spec.linked and spec.engine not in ("lab", *ON_SHARED_MEMORY):
        raise SpecError(
            f"engine {spec.engine} cannot be put behind an emulated link; leave link and emulate out, or give"
            f" engine='lab' or {ON_SHARED_MEMORY[0]!r}"
        )
    if spec.linked and spec.device_type == "cuda" and spec.engine != "lab":
        raise SpecError(
            f"between CUDA ranks only the lab's engine meets an emulated link, got {spec.engine}; give engine='lab' or"
            " device='cpu'"
        )
    if spec.linked and spec.device_type == "cuda" and spec.link_queues != 1:
        raise SpecError(
            f"an emulated link between CUDA ranks has one queue, got link_queues={spec.link_queues}; leave"
            " link_queues=1"
        )
    if spec.link_across and (not spec.row.in_groups or spec.engine != "lab"):
        raise SpecError(
            f"link_across is between the shard groups of the lab's {_GROUPED}, not of {spec.engine} {spec.strategy};"
            " leave it out"
        )
    try:
        for text in (spec.link, spec.link_across):
            if text is not None:
                parse_link(text)
        if spec.emulate and spec.as_model:
            shape = preset(spec.as_model)
            wind_tunnel(
                parse_cluster(spec.emulate),
                target_parameters=shape.parameters,
                target_layers=shape.layers,
                tokens_per_gpu=1,
            )
    except (LinkError, HardwareError, ModelError, WindTunnelError) as error:
        raise SpecError(str(error)) from error


def _check_shard_group(spec: RunSpec) -> None:
    if spec.row.in_groups and spec.shard_size is None:
        raise SpecError(
            f"{spec.strategy} needs shard_size, the ranks of one shard group: a divisor of world_size={spec.world_size}"
        )
    if spec.shard_size is None:
        return
    check_whole("shard_size", spec.shard_size, 1)
    if not spec.row.in_groups:
        raise SpecError(
            f"shard_size is for {_GROUPED}, not {spec.strategy}; leave it out, or give strategy={IN_GROUPS[0]!r}"
        )
    if spec.world_size % spec.shard_size:
        raise SpecError(f"shard_size is {spec.shard_size}, which does not divide world_size={spec.world_size}")


def _check_sharing(spec: RunSpec) -> None:
    """SpecError for a request of shared GPUs that is not supported."""
    if spec.transport == "nccl" and spec.shares_a_gpu and (found := nccl_version()) < MULTI_RANK_NCCL:
        raise SpecError(
            f"transport is nccl with {spec.processes} ranks on {usable_gpus()} GPU, which NCCL does from"
            f" 2.30 on, but torch brings {'.'.join(map(str, found))}; leave transport='auto', which then"
            " goes through host memory"
        )


def _check_machine(spec: RunSpec) -> None:
    from fsdplab.workloads import PRESETS

    if spec.compile != "none":
        _check_compiler(spec)
    if spec.device_type == "cuda":
        found = usable_gpus()
        if not found:
            raise SpecError(f"device is cuda, but no GPU can be used: {why_no_gpu()}; or give device='cpu'")
        if spec.shares_a_gpu and (mode := mode_complaint(compute_mode(0))):
            raise SpecError(f"device is cuda with {spec.processes} ranks on {plural(found, 'GPU')}, but {mode}")
        return
    needed, there = least_bytes(spec), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise SpecError(
            f"{spec.model} on {spec.world_size} ranks with batch_size={spec.batch_size} needs at least"
            f" {needed / 1e9:.1f} GB of memory, but this machine has {there / 1e9:.1f} GB; give a smaller model"
            f" ({', '.join(list(PRESETS)[:3])}), fewer ranks or a smaller batch"
        )


def _check_compiler(spec: RunSpec) -> None:
    from fsdplab.workloads.compiled import missing_compiler

    if missing := missing_compiler(spec.device_type):
        raise SpecError(
            f"compile is {spec.compile!r}, which needs {missing}, but this machine has none; install it, or leave"
            " compile='none'"
        )


def least_bytes(spec: RunSpec) -> int:
    """The least bytes that the ranks of one machine hold: processes, parameters, gradients, two moments, and the logits
    of a micro-batch, in fp32.

    Every rank builds the whole model before it shards it, and what a strategy shards is held once by all ranks
    together.
    """
    from fsdplab.workloads import preset

    shape = preset(spec.model)
    model, logits = 4 * shape.parameters, 4 * spec.batch_size * spec.sequence_length * shape.vocabulary
    copies = 1 if spec.row.cuts else spec.processes
    return spec.processes * (_BYTES_OF_A_PROCESS + model + logits) + 3 * model * copies


def check_whole(name: str, got: object, least: int, remark: str = "") -> None:
    """SpecError unless `got` is a whole number of at least `least`."""
    if isinstance(got, bool) or not isinstance(got, int) or got < least:
        raise SpecError(f"{name} is {got!r}; expected a whole number of at least {least}{remark}")


def near_matches(got: object, expected: Sequence[str]) -> str:
    """What was probably meant, in brackets; empty where nothing is near. Who writes zero3 means full_shard."""
    for row in STRATEGY_ROWS.values():
        if row.name in expected and row.known_as and squeezed(str(got)) == squeezed(row.known_as):
            return f" ({row.known_as} is {row.name} here)"
    return did_you_mean(got, expected)

"""What to run, said once and checked once.

Ranks cost seconds to start, so a request that cannot work is refused here, before any process exists, in one line that
says what was wrong, what was got, what is possible and what to do. A `RunSpec` that exists can be run.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fsdplab.workloads import PRESETS, ByteText, ConfigError, TextError, parameter_count, preset
from fsdplab.workloads.compiled import COMPILES, missing_compiler

from .launch import STARTS
from .refusing import SpecError, check_whole, near_matches
from .spec_network import check_network
from .spec_sharing import check_sharing, shares_a_gpu

STRATEGIES = ("no_shard", "zero1", "zero2", "shard_grad_op", "full_shard", "hybrid_shard")

# What each engine can do; the first is what it is best known for.
ENGINES: dict[str, tuple[str, ...]] = {
    "lab": ("full_shard", "shard_grad_op", "zero2", "zero1", "no_shard", "hybrid_shard"),
    "torch-ddp": ("no_shard",),
    "torch-fsdp1": ("full_shard", "shard_grad_op", "no_shard"),
    "torch-fsdp2": ("full_shard", "shard_grad_op", "hybrid_shard"),
    "deepspeed-1": ("zero1",),
    "deepspeed-2": ("zero2",),
    "deepspeed-3": ("full_shard",),
    "twin": STRATEGIES,
}
PRECISIONS = ("fp32", "bf16")
CHECKPOINTS = ("none", "selective", "full")  # which activations the lab computes again in the backward
OFFLOADS = ("none", "cpu")  # where the lab's slices and optimizer state rest: the device, or host memory
DEVICES = ("auto", "cpu", "cuda")
# what travels together: a block (auto is the same), each linear layer, everything
UNITS = ("auto", "block", "linear", "model")
OPTIMIZERS = ("adamw", "adamw-foreach")  # fused, and the one that makes temporaries
TRANSPORTS = ("auto", "shm", "gloo", "nccl", "shared_gpu")
ON_SHARED_GPU = ("lab", "torch-fsdp2")  # torch's takes collectives of the user's own
# besides lab; for them "auto" is the device's usual backend
ON_SHARED_MEMORY = ("torch-ddp", "torch-fsdp1", "torch-fsdp2")

# Step whose memory is measured: the first has made the optimizer's state and recorded the order of the units, so the
# second is typical.
MEMORY_STEP = 1
CALIBRATION = 3  # steps without a link that a wind tunnel measures
_BYTES_OF_A_PROCESS = 250_000_000  # Python and torch before any model, measured


@dataclass(frozen=True)
class RunSpec:
    """One run: model, data, strategy, engine, ranks. Sizes in bytes, times in seconds; raises SpecError when it cannot
    be run.

    `steps` are timed, after `warmup` steps that are not; the second warm-up step's memory is measured. `batch_size`
    sequences of `sequence_length` tokens are read by each rank in each of `micro_batches`. `card` is the memory of an
    emulated accelerator: a run that needs more ends as out of memory. `profile` steps come after the timed ones, under
    PyTorch's profiler. `link` is an emulated network: a preset ("eth10"), or a bandwidth ("200mbit", "1GB/s,50us");
    `emulate` ("8xH100") with `as_model` ("llama-3.1-8b") has it chosen so that communication takes the same part of a
    step as on that machine (with a link as well, that link is taken to be the one so chosen). `compile="blocks"` makes
    one graph of each block's forward. `start` is how ranks are started: "warm" (forked), "torchrun", or "auto" (warm
    where that can be). `shard_size` ranks form a shard group of hybrid_shard, and `link_across` is the network between
    the groups.

    >>> RunSpec(strategy="zero1", world_size=2).total_steps
    10
    """

    strategy: str = "full_shard"
    engine: str = "lab"
    world_size: int = 2
    model: str = "gpt-20m"
    text: str | None = None
    batch_size: int = 2
    sequence_length: int = 64
    steps: int = 8
    warmup: int = 2
    micro_batches: int = 1
    precision: str = "fp32"
    units: str = "auto"
    prefetch: int = 1
    learning_rate: float = 3e-4
    optimizer: str = "adamw"
    transport: str = "auto"
    checkpoint: str = "none"
    offload: str = "none"
    compile: str = "none"
    profile: int = 0
    link: str | None = None
    link_across: str | None = None
    link_queues: int = 1
    emulate: str | None = None
    as_model: str | None = None
    shard_size: int | None = None
    seed: int = 0
    card: int | None = None
    device: str = "auto"
    memory: bool = True
    time_limit: float = 120.0
    start: str = "auto"

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_numbers(self)
        _check_pairs(self)
        _check_workload(self)
        check_sharing(self, ON_SHARED_GPU)
        check_network(self, ON_SHARED_MEMORY)
        _check_machine(self)

    @property
    def total_steps(self) -> int:
        """Steps of training in all: untimed, timed, profiled (of which the profiler throws the first away)."""
        return self.untimed + self.steps + (self.profile and self.profile + 1)

    @property
    def untimed(self) -> int:
        """Steps before the timed ones: warm-up, and those in which a wind tunnel measures how fast this machine
        computes.
        """
        return self.warmup + (CALIBRATION if self.emulate and not self.link else 0)

    @property
    def replicas(self) -> int:
        """Shard groups that hold the same slices: 1 but under hybrid_shard."""
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
    def place(self) -> str:
        """`cuda` or `cpu`: where the ranks run once `auto` is decided (cuda needs one GPU a rank, unless
        FSDPLAB_SHARE_A_GPU lets them share).
        """
        if self.device != "auto":
            return self.device
        may_share = (
            self.transport == "auto" and self.engine in ON_SHARED_GPU and os.environ.get("FSDPLAB_SHARE_A_GPU") == "1"
        )
        # of the twin too: it is compared with ranks
        enough = 1 if self.transport == "shared_gpu" or may_share else self.world_size
        return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= enough else "cpu"

    @property
    def shares_a_gpu(self) -> bool:
        """Whether ranks share a GPU, or rehearse it on the CPU: what such a run's times say of several GPUs is
        emulated.
        """
        return shares_a_gpu(self, ON_SHARED_GPU)

    @property
    def backend(self) -> str:
        """The process group's backend: `nccl` on cuda, else `gloo`, or `shm` for an engine of torch that asks for
        shared memory.

        The lab's engine makes its own choice on top of gloo. Torch's engines meet an emulated link in shared memory
        too.
        """
        if self.transport == "shared_gpu" or self.transport == "auto" and self.shares_a_gpu:
            return "gloo"
        if self.place == "cuda":
            return "nccl"
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
        raise SpecError(
            f'engine {spec.engine} needs DeepSpeed, which is not installed; run: pip install "fsdplab[peers]"'
        )
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
    if spec.offload != "none" and spec.strategy not in ("full_shard", "shard_grad_op"):
        raise SpecError(
            f"offload moves slices that rest, but {spec.strategy} keeps parameters whole; give strategy='full_shard' or"
            " 'shard_grad_op'"
        )
    if spec.engine != "lab" and spec.prefetch != 1:
        raise SpecError(
            f"prefetch is {spec.prefetch}, but engine {spec.engine} has its own rule; leave prefetch=1, or give"
            " engine='lab'"
        )
    if (
        spec.engine != "lab"
        and spec.transport not in ("auto", "shared_gpu")
        and not (spec.transport == "shm" and spec.engine in ON_SHARED_MEMORY)
    ):
        able = f"{' or '.join(ON_SHARED_MEMORY)} for shm, or engine='lab'"
        raise SpecError(
            f"transport is {spec.transport}, but engine {spec.engine} brings its own; leave transport='auto', or give"
            f" {able}"
        )
    if spec.transport == "nccl" and spec.place == "cpu" or spec.transport in ("shm", "gloo") and spec.place == "cuda":
        raise SpecError(f"transport {spec.transport} does not move tensors on {spec.place}; leave transport='auto'")
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
    try:
        preset(spec.model).require_length(spec.sequence_length)
        if spec.text is not None:
            ByteText.from_path(spec.text).require(spec.sequence_length)
    except (ConfigError, TextError) as error:
        raise SpecError(str(error)) from error


def _check_machine(spec: RunSpec) -> None:
    if spec.compile != "none" and (missing := missing_compiler(spec.place)):
        raise SpecError(
            f"compile is {spec.compile!r}, which needs {missing}, but this machine has none; install it, or leave"
            " compile='none'"
        )
    if spec.place == "cuda":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found < spec.processes and not (found and spec.shares_a_gpu):  # these share one
            raise SpecError(
                f"device is cuda with {spec.processes} ranks, but {found} GPUs were found; give"
                f" world_size={max(found, 1)} or device='cpu'"
                + (", or an engine whose ranks can share one: lab or torch-fsdp2" if found else "")
            )
        return
    needed, there = least_bytes(spec), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise SpecError(
            f"{spec.model} on {spec.world_size} ranks needs at least {needed / 1e9:.1f} GB of memory, but this machine"
            f" has {there / 1e9:.1f} GB; give a smaller model ({', '.join(list(PRESETS)[:3])}) or fewer ranks"
        )


def least_bytes(spec: RunSpec) -> int:
    """Bytes that the ranks of one machine hold between two steps at the very least: processes, parameters, gradients,
    two moments in fp32.

    Every rank builds the whole model before it shards it, and what a strategy shards is held once by all ranks
    together.
    """
    model = 4 * parameter_count(preset(spec.model))
    copies = spec.processes if spec.strategy == "no_shard" else 1
    return spec.processes * (_BYTES_OF_A_PROCESS + model) + 3 * model * copies

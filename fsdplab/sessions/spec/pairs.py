"""Lists the rules between the parts of a run: what an engine, a device or a machine cannot do.

The order counts: the first rule that is broken is the error, so what is asked of every run stands before what only
one device or machine lacks.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

from fsdplab.common.machine import memory_bytes
from fsdplab.common.names import IN_GROUPS
from fsdplab.common.places import how_to_install
from fsdplab.common.words import plural
from fsdplab.workloads.shapes import PRESETS, preset

from . import gpus
from .choices import ENGINES, ON_SHARED_MEMORY, UNITS, WITH_MUON
from .parts import NO_WIND_TUNNEL
from .rules import Rule, near_matches

_BYTES_OF_A_PROCESS = 250_000_000  # Python and torch before any model, measured


def _behind_a_link(spec: Any) -> bool:
    """Return whether an engine is behind a link: the twin is not, its fields describe the runs it is compared with."""
    return bool(spec.linked and spec.engine != "twin")


def _mode_complaint(spec: Any) -> str:
    return gpus.mode_complaint(gpus.compute_mode(0)) if spec.shares_a_gpu else ""


def _missing_compiler(spec: Any) -> str | None:
    if spec.compile == "none":
        return None
    from fsdplab.workloads.compiled import missing_compiler  # which imports torch

    return missing_compiler(spec.device_type)


def _of_the_lab(name: str) -> Rule:
    return Rule(
        (name, "engine"),
        lambda s: s.engine == "lab" or getattr(s, name) == "none",
        f"{name} is {{s.{name}!r}}, which only the lab's engine does here",
        f"leave {name}='none', or give engine='lab'",
    )


def least_bytes(spec: Any) -> int:
    """Return the least bytes that the ranks of one machine hold: processes, parameters, gradients, two moments, and the
    logits of a micro-batch, in fp32.

    Every rank builds the whole model before it shards it, and what a strategy shards is held once by all ranks
    together.
    """
    if spec.own_model:  # its size is not known before it is built
        return int(spec.processes * _BYTES_OF_A_PROCESS)
    shape = preset(spec.model)
    # bytes in float32: of one copy of the model, and of B x T x V logits
    model, logits = 4 * shape.parameters, 4 * spec.batch_size * spec.sequence_length * shape.vocabulary
    copies = 1 if spec.row.cuts else spec.processes
    # gradients and two moments are 3 more copies: one of all ranks together where they are sharded, else one a rank
    return int(spec.processes * (_BYTES_OF_A_PROCESS + model + logits) + 3 * model * copies)


def _unknown_units(spec: Any) -> str:
    more = ", or the name of a class of its modules" if spec.own_model else ""
    return f"unknown units {spec.units!r}{near_matches(spec.units, UNITS)}; expected one of {', '.join(UNITS)}{more}"


PAIRS = (
    # ---- what a model can do
    Rule(("units",), lambda s: s.units in UNITS or (s.own_model and str(s.units).isidentifier()), _unknown_units, ""),
    Rule(("emulate", "model"), lambda s: not (s.emulate and s.own_model), NO_WIND_TUNNEL, ""),
    # ---- what an engine can do
    Rule(
        ("strategy", "engine"),
        lambda s: s.strategy in ENGINES[s.engine],
        lambda s: f"engine {s.engine} cannot do {s.strategy}; expected {' or '.join(ENGINES[s.engine])}",
        lambda s: f"give strategy={ENGINES[s.engine][0]!r}, or engine='lab'",
    ),
    Rule(
        ("engine",),
        lambda s: not s.engine.startswith("deepspeed") or importlib.util.find_spec("deepspeed") is not None,
        "engine {s.engine} needs DeepSpeed, which is not installed",
        f"run: {how_to_install('peers')}",
    ),
    Rule(
        ("optimizer", "engine"),
        lambda s: s.optimizer != "muon" or s.engine in WITH_MUON,
        "optimizer muon needs whole matrices, which engine {s.engine} does not show its optimizer",
        f"give engine={' or '.join(map(repr, WITH_MUON[:-1]))}, or optimizer='adamw'",
    ),
    _of_the_lab("checkpoint"),
    _of_the_lab("offload"),
    Rule(
        ("units", "engine"),
        lambda s: s.units == "auto" or s.engine in ("lab", "torch-fsdp2", "twin"),
        "units is {s.units}, but engine {s.engine} has its own",
        "leave units='auto', or give engine='lab' or 'torch-fsdp2'",
    ),
    Rule(
        ("prefetch", "engine"),
        lambda s: s.engine == "lab" or s.prefetch == 1,
        "prefetch is {s.prefetch}, but engine {s.engine} has its own rule",
        "leave prefetch=1, or give engine='lab'",
    ),
    Rule(
        ("transport", "engine"),
        lambda s: s.engine == "lab" or s.transport == "auto" or s.transport == "shm" and s.engine in ON_SHARED_MEMORY,
        "transport is {s.transport}, but engine {s.engine} brings its own",
        f"leave transport='auto', or give {' or '.join(ON_SHARED_MEMORY)} for shm, or engine='lab'",
    ),
    Rule(
        ("transport", "device"),
        lambda s: (s.transport, s.device_type) not in (("nccl", "cpu"), ("shm", "cuda")),
        "transport {s.transport} does not move tensors on {s.device_type}",
        "leave transport='auto'",
    ),
    Rule(
        ("transport",),
        lambda s: s.transport != "nccl" or not s.shares_a_gpu or gpus.nccl_version() >= gpus.MULTI_RANK_NCCL,
        lambda s: (
            f"transport is nccl with {s.processes} ranks on {gpus.usable_gpus()} GPU, which NCCL does from 2.30"
            f" on, but torch brings {'.'.join(map(str, gpus.nccl_version()))}"
        ),
        "leave transport='auto', which then goes through host memory",
    ),
    # ---- groups of ranks, and links
    Rule(
        ("shard_size", "strategy"),
        lambda s: not s.row.in_groups or s.shard_size is not None,
        "{s.strategy} needs shard_size, the ranks of one shard group",
        "give a divisor of world_size={s.world_size}",
    ),
    Rule(
        ("shard_size", "world_size"),
        lambda s: s.shard_size is None or s.world_size % s.shard_size == 0,
        "shard_size is {s.shard_size}, which does not divide world_size={s.world_size}",
        "give a divisor of it",
    ),
    Rule(
        ("link", "emulate", "engine"),
        lambda s: not _behind_a_link(s) or s.engine in ("lab", *ON_SHARED_MEMORY),
        "engine {s.engine} cannot be put behind an emulated link",
        f"leave link and emulate out, or give engine='lab' or {ON_SHARED_MEMORY[0]!r}",
    ),
    Rule(
        ("link", "emulate", "engine"),
        lambda s: not _behind_a_link(s) or s.device_type == "cpu" or s.engine == "lab",
        "between CUDA ranks only the lab's engine meets an emulated link, got {s.engine}",
        "give engine='lab' or device='cpu'",
    ),
    Rule(
        ("link_queues",),
        lambda s: not _behind_a_link(s) or s.device_type == "cpu" or s.link_queues == 1,
        "an emulated link between CUDA ranks has one queue, got link_queues={s.link_queues}",
        "leave link_queues=1",
    ),
    Rule(
        ("link_across", "strategy"),
        lambda s: not s.link_across or s.engine == "twin" or (s.row.in_groups and s.engine == "lab"),
        f"link_across is between the shard groups of the lab's {' or '.join(IN_GROUPS)}, not of {{s.engine}}"
        " {s.strategy}",
        "leave it out",
    ),
    # ---- what this machine can do
    Rule(
        ("compile",),
        lambda s: not _missing_compiler(s),
        lambda s: f"compile is {s.compile!r}, which needs {_missing_compiler(s)}, but this machine has none",
        "install it, or leave compile='none'",
    ),
    Rule(
        ("device",),
        lambda s: s.device_type == "cpu" or gpus.usable_gpus() > 0,
        lambda s: f"device is cuda, but no GPU can be used: {gpus.why_no_gpu()}",
        "or give device='cpu'",
    ),
    Rule(
        ("device", "world_size"),
        lambda s: not _mode_complaint(s),
        lambda s: (
            f"device is cuda with {s.processes} ranks on {plural(gpus.usable_gpus(), 'GPU')}, but {_mode_complaint(s)}"
        ),
        "or give device='cpu'",
    ),
    Rule(
        ("model", "world_size", "batch_size"),
        lambda s: s.device_type == "cuda" or least_bytes(s) <= (memory_bytes() or math.inf),
        lambda s: (
            f"{s.model} on {s.world_size} ranks with batch_size={s.batch_size} needs at least"
            f" {least_bytes(s) / 1e9:.1f} GB of memory, but this machine has {memory_bytes() / 1e9:.1f} GB"
        ),
        f"give a smaller model ({', '.join(list(PRESETS)[:3])}), fewer ranks or a smaller batch",
    ),
)

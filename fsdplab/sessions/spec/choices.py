"""Lists the known values of a spec's fields: engines with their strategies, precisions, devices and so on."""

from __future__ import annotations

from collections.abc import Callable

from fsdplab.common.names import BEST_KNOWN_FIRST, STATES, STRATEGIES, STRATEGY_ROWS, StrategyRow, strategies_that


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
ENGINES_IN_WORDS = f"lab, {', '.join(PEERS)} or twin"
# the engines of torch that take shared memory instead of the device's usual backend
ON_SHARED_MEMORY = ("torch-ddp", "torch-fsdp1", "torch-fsdp2")

STARTS = ("auto", "warm", "torchrun")  # how ranks are started: warm ones are forked; auto is warm where possible
COMPILES = ("none", "blocks")
PRECISIONS = ("fp32", "bf16")
CHECKPOINTS = ("none", "selective", "full")  # which activations the lab recomputes in the backward
OFFLOADS = ("none", "cpu")  # where the lab keeps shards and optimizer state: the device, or host memory
DEVICES = ("auto", "cpu", "cuda")
UNITS = ("auto", "block", "linear", "model")  # the FSDP units: each block (as auto), each linear layer, the whole model
# AdamW, fused or with temporaries; Muon for the matrices of the units, with AdamW for the rest
OPTIMIZERS = ("adamw", "adamw-foreach", "muon")
WITH_MUON = ("lab", "torch-ddp", "torch-fsdp2", "twin")  # others flatten parameters, or bring optimizers of their own
TRANSPORTS = ("auto", "shm", "gloo", "nccl")

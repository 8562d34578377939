"""What a run must send in one step, by the formula of its strategy: the number that the ledger is held to."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

from torch import nn

from fsdplab.common.names import IN_GROUPS
from fsdplab.planning import Traffic, UnitShapes, step_traffic
from fsdplab.sessions.spec import RunSpec
from fsdplab.workloads import build_model


def formula_bytes(spec: RunSpec) -> int | None:
    """Bytes that one rank should send in one step, by the textbook's formula for the strategy; None for the twin, which
    sends nothing.
    """
    if spec.engine == "twin":
        return None
    return sum(entry.step_bytes for entry in traffic_of(spec, spec.strategy))


def traffic_of(spec: RunSpec, strategy: str) -> list[Traffic]:
    """The collectives of one step of this run under `strategy`, by the formula."""
    itemsize = 2 if spec.precision == "bf16" else 4
    return step_traffic(
        unit_shapes(spec.model, spec.units), strategy, spec.world_size, param_itemsize=itemsize, reduce_itemsize=4,
        micro_batches=spec.micro_batches, replicas=spec.replicas if strategy in IN_GROUPS else 1,
    )  # fmt: skip


@lru_cache
def unit_shapes(model_name: str, kind: str = "auto") -> tuple[UnitShapes, ...]:
    """The units of a model (its blocks, its linear layers, or none), and as "root" what is left."""
    model = build_model(model_name, device="meta")
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    units: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        owner = name.rpartition(".")[0]
        if kind in ("auto", "block"):
            unit = ".".join(parts[:2]) if parts[0] == "blocks" else "root"
        else:
            unit = owner if kind == "linear" and owner in linears else "root"
        units[unit].append((name, tuple(parameter.shape)))
    return tuple(UnitShapes(unit, tuple(parameters)) for unit, parameters in units.items())

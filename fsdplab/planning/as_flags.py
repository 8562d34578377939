"""A plan in words and as flags: what a search varies, and what is not as it is by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeAlias

from .plan_spec import PlanSpec, flag_of

Changes: TypeAlias = Mapping[str, Any]  # fields of a PlanSpec and their values

_ALWAYS = ("gpus", "strategy", "micro_batch", "grad_accum", "checkpointing", "loss")
_OF_THE_HOST = ("host_memory", "storage")  # they describe machines, and are no choice
_BOOLEANS = {"compile": "--compile blocks", "offload": "--offload cpu", "flash": "--no-flash"}


def in_short(spec: PlanSpec) -> str:
    """Return `full_shard, checkpoint full, fused loss, 2 x 4 sequences, tp 2`."""
    groups = f" in groups of {spec.shards}" if spec.row.in_groups else ""
    words = [
        f"{spec.strategy}{groups}",
        f"checkpoint {spec.checkpointing}",
        f"{spec.loss} loss",
        f"{spec.micro_batch} x {spec.grad_accum} sequences",
    ]
    degrees = {"tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}
    for name, axis in degrees.items():
        count = getattr(spec, f"{axis}_parallel")
        if count > 1:
            words.append(f"{name} {count}")
    return ", ".join(words)


def flags(spec: PlanSpec) -> str:
    """Return a plan as flags of `fsdplab plan`: what a search varies, and what is not as it is by default."""
    shown = []
    for field in fields(spec):
        value = getattr(spec, field.name)
        is_flag = "help" in field.metadata and field.name not in ("seq", *_OF_THE_HOST)
        if is_flag and (field.name in _ALWAYS or value != field.default):
            shown.append(flag(field.name, value))
    return " ".join(shown)


def flag(name: str, value: Any) -> str:
    """Return one choice as a flag: `--batch-size 2`."""
    if isinstance(value, bool):
        return _BOOLEANS.get(name, flag_of(name))
    return f"{flag_of(name)} {value}"


def changes_in_words(changes: Changes) -> str:
    """Return a single change as flags."""
    return " ".join(flag(name, value) for name, value in changes.items() if value is not None)

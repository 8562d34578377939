"""How far one choice can go: the largest micro-batch, the fewest GPUs, and a choice swept over values.

The largest micro-batch is found by doubling and halving, since memory grows with it. What to choose together is
searched in `planning/search`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdplab.common.words import did_you_mean

from .memory import fits_card
from .plan_spec import CHECKPOINTINGS, PlanError, PlanSpec, flag_of, under_each_strategy
from .planner import Plan, least_gpus, plan_of

_MOST_SEQUENCES = 2**12
SWEPT = ("gpus", "seq", "micro_batch", "grad_accum", "tensor_parallel", "prefetch", "lora_rank")
_FIELDS = {flag_of(name)[2:].replace("-", "_"): name for name in SWEPT}  # by what the flag is called
_MOST_VALUES = 64


def _variants(spec: PlanSpec) -> list[PlanSpec]:
    """Every strategy with every checkpointing."""
    return [
        replace(each, checkpointing=checkpointing)
        for each in under_each_strategy(spec)
        for checkpointing in CHECKPOINTINGS
    ]


def largest_micro_batch(spec: PlanSpec) -> PlanSpec | None:
    """`spec` with the largest micro-batch that fits; None where not even one sequence does."""
    most = largest_that_fits(lambda count: fits_card(replace(spec, micro_batch=count)), _MOST_SEQUENCES)
    return replace(spec, micro_batch=most) if most else None


def largest_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """The largest count up to `most` that fits, where smaller ones do too: by doubling and halving; 0 for none.

    >>> largest_that_fits(lambda count: count < 14, 100), largest_that_fits(lambda count: True, 100)
    (13, 100)
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fewest_gpus(spec: PlanSpec) -> Plan | None:
    """The plan on the fewest GPUs on which some strategy and recomputation fits with one sequence a rank; None where no
    number of them does. Of several the one with most tokens/s.
    """
    found = []
    for each in _variants(replace(spec, micro_batch=1)):
        if not each.row.in_groups and (gpus := least_gpus(each)) is not None:
            found.append(plan_of(replace(each, gpus=gpus)))
    return min(found, key=lambda each: (each.spec.gpus, -(each.tokens_per_s_per_gpu or 0)), default=None)


# ---- sweeps


def parse_sweep(text: str) -> tuple[str, list[int]]:
    """`world-size=8..1024` (doubling) or `seq=1024,4096,8192` -> the field and its values; raises PlanError.

    >>> parse_sweep("world-size=8..64")
    ('gpus', [8, 16, 32, 64])
    """
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_")
    name = _FIELDS.get(name, name)
    if not equals or name not in SWEPT:
        known = [flag_of(each)[2:] for each in SWEPT]
        meant = did_you_mean(name, known)
        raise PlanError(
            f"sweep is {text[:60]!r}{meant}; expected one of {', '.join(known)} and its values, such as"
            " world-size=8..1024 or sequence-length=1024,4096"
        )
    if span := re.fullmatch(r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*", values, re.ASCII):
        low, high = int(span[1]), int(span[2])
        found = [low * 2**power for power in range(_MOST_VALUES) if 0 < low * 2**power <= high]
    else:
        parts = [part.strip() for part in values.split(",")]
        found = [int(part) for part in parts if re.fullmatch(r"\d{1,9}", part, re.ASCII)]
        found = found if len(found) == len(parts) else []
    if not found or len(found) > _MOST_VALUES:
        raise PlanError(
            f"sweep has values {values[:60]!r}; expected 1 to {_MOST_VALUES} whole numbers: 8..1024 (doubling) or"
            " 8,16,64"
        )
    return name, found


def sweep(spec: PlanSpec, name: str, values: Sequence[int]) -> list[Plan]:
    """The plan for each value of one choice; raises PlanError for a value that contradicts the others."""
    return [plan_of(replace(spec, **{name: value})) for value in values]  # type: ignore[arg-type]

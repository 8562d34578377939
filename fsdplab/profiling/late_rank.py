"""placeholder until merged"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Key = tuple[int, str, str, str, int]
Arrivals = Mapping[Key, Mapping[int, int]]


@dataclass(frozen=True)
class LateRank:
    rank: int
    a_step_ns: float
    last: int
    of: int
    by_ns: float
    p_value: float
    phase: str


def late_rank(arrivals: Arrivals, step_ns: float) -> LateRank | None:
    return None

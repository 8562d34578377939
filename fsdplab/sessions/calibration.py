"""How fast this machine computes, moves memory and sends: measured once, kept, read by predictions of step times."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Calibration:
    """Rates of one rank while `ranks` ranks work at once, each on one thread. FLOP/s, bytes/s, seconds."""

    ranks: int
    matmul_flops: dict[str, float]
    memory_bytes_per_s: float

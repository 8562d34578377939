"""Cards without peer access, whose collectives go through host memory: how sure their exposed time is.

GeForce cards do not read each other's memory under NVIDIA's driver (general knowledge, as data/hardware.csv notes), so
NCCL copies through the host. Its rate is what the CPU and its memory deliver (a maintainer in NVIDIA/nccl #1639), which
no data sheet of a GPU says: a plan assumes that of PCIe, as between GPUs that have peer access. The other end of the
band is what NCCL's own search takes between two sockets, 10 GB/s, where it takes 24 inside one (the log in
NVIDIA/nccl-tests #307, eight RTX 4090).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fsdplab.common.sizes import seconds, size, three_digits

from .plan_spec import PlanSpec
from .plan_traffic import LINK_EFFICIENCY
from .step_time import StepTime, has_known_flops, step_time

BETWEEN_SOCKETS = 10e9  # bytes per second


@dataclass(frozen=True)
class PeerlessBand:
    """A step at the assumed rate of collectives and at the least one, in bytes per second."""

    name: str
    assumed: float
    least: float
    times: tuple[StepTime, StepTime]
    tokens_a_gpu: float

    @property
    def exposed_s(self) -> tuple[float, float]:
        """Exposed seconds at both rates."""
        return self.times[0].exposed_s, self.times[1].exposed_s

    @property
    def tokens_per_s(self) -> tuple[float, float]:
        """Tokens a second on each GPU at both rates, the lower one first."""
        fast, slow = (self.tokens_a_gpu / time.step_s for time in self.times)
        return slow, fast

    @property
    def words(self) -> str:
        """Both ends, and what is assumed."""
        low, high = map(seconds, self.exposed_s)
        slow, fast = map(three_digits, self.tokens_per_s)
        assumed, least = f"{size(self.assumed)}/s", f"{size(self.least)}/s"
        return (
            f"assumed: {self.name} has no peer access, so collectives go through host memory; {low} exposed at"
            f" {assumed}, {high} at {least}, which NCCL takes between sockets: {slow} to {fast} tokens/s a GPU"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all figures for `--json`."""
        return {
            "assumed_bytes_per_s": self.assumed,
            "least_bytes_per_s": self.least,
            "exposed_s": list(self.exposed_s),
            "tokens_per_s_per_gpu": list(self.tokens_per_s),
        }


def peerless_band(spec: PlanSpec) -> PeerlessBand | None:
    """Return the band of a plan on cards without peer access; None for others, and where nothing is sent or known."""
    gpu = spec.gpu
    if gpu.peer_access or spec.gpus == 1 or not has_known_flops(gpu):
        return None
    assumed = gpu.link.bytes_per_s * LINK_EFFICIENCY
    least = min(assumed, BETWEEN_SOCKETS)
    slow = replace(gpu, link=replace(gpu.link, bytes_per_s=least / LINK_EFFICIENCY))
    times = step_time(spec), step_time(replace(spec, gpu=slow))
    return PeerlessBand(gpu.name, assumed, least, times, spec.step_tokens / spec.gpus)

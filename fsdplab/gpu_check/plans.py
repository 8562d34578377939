"""Which parts the check has, in their order, and how many seconds each may take.

On CUDA the limits add up to the eight minutes that a borrowed machine grants; what a part leaves over, the last one may
use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdplab.common.words import did_you_mean

LIMIT_S = 480.0
CLOSING_S = 8.0  # kept of the whole limit, to pack records and write the table
LEAST_S = 3.0  # a part is not started with less than this


@dataclass(frozen=True)
class PartPlan:
    """One part: its name (and module), its limits in seconds, and what it does, in words. `arguments` are flags of its
    own.
    """

    name: str
    cuda_s: float
    cpu_s: float
    says: str
    module: str = ""
    arguments: tuple[str, ...] = ()
    takes_the_rest: bool = False

    def seconds(self, device: str, left: float) -> float:
        """The limit on `device` where `left` seconds remain of the whole: `PartPlan("a", 40, 20, "").seconds("cuda",
        25) == 25`.
        """
        wanted = self.cuda_s if device == "cuda" else self.cpu_s
        return left if self.takes_the_rest else min(wanted, left)

    @property
    def program(self) -> str:
        """The module that Python runs."""
        return self.module or f"fsdplab.gpu_check.{self.name}"


ENVIRONMENT = PartPlan("environment", 40, 60, "what this machine is")
PARTS = (
    PartPlan("tests", 110, 90, "the GPU tests"),
    PartPlan("one_rank", 150, 120, "one rank: engines side by side"),
    PartPlan("several_ranks", 70, 120, "several ranks on one GPU"),
    PartPlan("overlap", 30, 90, "communication hidden behind compute"),
    PartPlan("memory", 40, 90, "bytes by arithmetic and by the allocator"),
    PartPlan("traces", 40, 90, "recorded runs with traces and memory timelines"),
    PartPlan("course", 40, 180, "code cells of the notebooks as scripts", takes_the_rest=True),
)


def chosen(names: Sequence[str]) -> tuple[PartPlan, ...]:
    """The parts of these names in the check's order; all where none is named. ValueError with the nearest name for an
    unknown one.
    """
    known = [part.name for part in PARTS]
    for name in names:
        if name not in known:
            raise ValueError(f"--parts has {name!r}{did_you_mean(name, known)}; expected some of {', '.join(known)}")
    return tuple(part for part in PARTS if not names or part.name in names)

"""The faults of lesson 14: each is one line of `job.py`, or a part of one, and what stands there in its place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

JOB = Path(__file__).with_name("job.py")


@dataclass(frozen=True)
class Fault:
    """In the job, `injected` stands for `line`; both are empty for the job as it is."""

    name: str
    line: str = ""
    injected: str = ""

    def source(self) -> str:
        """The job with the fault in it. ValueError where `line` does not stand in the job exactly once."""
        text = JOB.read_text(encoding="utf-8")
        if not self.line:
            return text
        if text.count(self.line) != 1:
            raise ValueError(f"{self.name}: {self.line!r} stands {text.count(self.line)} times in {JOB.name}, not once")
        return text.replace(self.line, self.injected)


_FORWARD = "x = unit.forward(x, unit.whole).detach()\n"
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("none"),
        Fault("missing wait", "        self.work.wait()\n", ""),
        Fault("wrong divisor", "(self.sum / self.ranks)", "self.sum"),
        Fault("no reshard", f"{_FORWARD}        unit.reshard()\n", _FORWARD),
        Fault(
            "one slow rank", "    inputs = []\n", "    inputs = []\n    __import__('time').sleep(0.06 * (rank == 1))\n"
        ),
        Fault(
            "mismatched order",
            "for unit in reversed(units):\n        unit.reduce()",
            "for unit in units if rank else reversed(units):\n        unit.reduce()",
        ),
        Fault(
            "diverging branch",
            "    optimizer.step()\n",
            "    if loss.item() > 1.01:\n        dist.all_reduce(loss.detach())\n    optimizer.step()\n",
        ),
        Fault("bf16 masters", ".clone().to(torch.float32)", ".clone().to(torch.bfloat16)"),
        Fault(
            "NaN on one rank",
            "    inputs = []\n",
            "    inputs = []\n    x[0] /= 0.0 if (step, rank) == (3, 1) else 1.0\n",
        ),
        Fault("unsynchronised seeds", "torch.manual_seed(0)", "torch.manual_seed(rank)"),
    )
}

"""What a recorded job pays outside the steps that are measured: python -m tests.recording_cost [ROUNDS]

A loop with a tiny model runs in turns alone, while its steps are only noted, and after the recording has ended. It is
CPU time of a step, so that other work on the machine counts little; the fastest of several stretches of each run.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fsdplab.recording.launch import prepare
from fsdplab.recording.settings import Settings, environment

JOB = """
import time, torch
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
x = torch.randn(4, 8)

def steps(count):
    for _ in range(count):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

steps(60)
spent = []
for _ in range(10):
    before = time.thread_time()
    steps(300)
    spent.append((time.thread_time() - before) / 300 * 1e6)
print(min(spent))
"""
# all steps noted, and the recording over after step 16
KINDS = {"alone": None, "noted": (1_000_000, 1_000_001), "after": (5, 6)}


def microseconds(steps: tuple[int, int] | None) -> float:
    """CPU time of one step of the job."""
    base = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with tempfile.TemporaryDirectory() as folder:
        if steps is not None:
            settings = Settings(str(Path(folder, "out")), *steps)
            prepare(settings)
            base = environment(settings, base.items())
        done = subprocess.run([sys.executable, "-c", JOB], env=base, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main(rounds: int) -> None:
    """Print the medians of the rounds, and what recording adds."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, steps in KINDS.items():
            found[kind].append(microseconds(steps))
    medians = {kind: statistics.median(each) for kind, each in found.items()}
    for kind, each in medians.items():
        print(f"{kind}: {each:.1f} us a step, {each - medians['alone']:+.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)

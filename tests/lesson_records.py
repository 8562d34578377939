"""The recorded runs of lessons 07, 10, 11 and 13 in `data/`, recorded anew: `python -m tests.lesson_records`.

`python -m tests.lesson_records lesson-01` times the collectives of lesson 01.

On an otherwise idle machine of two cores; a line says for what part of its steps the ranks of each group had a core. A
group replaces what is there only where its ranks had a core more often: `--anyway` replaces it in any case.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec, compare, run
from fsdplab.teaching import collectives, reading_choices
from fsdplab.teaching.core.course_state import open_course
from fsdplab.teaching.lessons.nb13_trading.on_ranks import CARD, JOB

REPEATS = 300
DATA = Path(__file__).parents[1] / "data"
BASE = dict(model="gpt-20m", world_size=2, batch_size=2, sequence_length=64, link="400MB/s", device="cpu")
TUNNEL = RunSpec(  # lesson 10: behind the link that imitates Llama 3.1 8B on 8 H100
    model="gpt-20m", strategy="full_shard", world_size=2, batch_size=2, sequence_length=64, steps=1, warmup=1,
    memory=False, profile=1, device="cpu", time_limit=300.0, emulate="8xH100", as_model="llama-3.1-8b",
)  # fmt: skip


def overlap() -> dict[str, RunRecord]:
    """Lesson 07: the job without and with prefetch."""
    job = RunSpec(strategy="full_shard", warmup=2, steps=4, profile=1, memory=False, **BASE)
    return dict(zip(("late", "early"), compare([replace(job, prefetch=depth) for depth in (0, 1)]), strict=True))


def strategies() -> dict[str, RunRecord]:
    """Lesson 11: its job under every strategy."""
    names = reading_choices.STRATEGIES
    return dict(zip(names, compare([RunSpec(strategy=name, warmup=2, steps=4, **BASE) for name in names]), strict=True))


def in_bf16() -> dict[str, RunRecord]:
    """Lesson 13: its job in bf16 with every other choice; without tables, as its memory alone is read."""
    job = RunSpec(**JOB, card=CARD, device="cpu", precision="bf16")
    every = product(("none", "selective", "full"), ("none", "cpu"))
    runs = {f"bf16-{kind}-{place}": run(replace(job, checkpoint=kind, offload=place)) for kind, place in every}
    for each in runs.values():
        each.tables.clear()
    return runs


GROUPS: dict[str, Callable[[], dict[str, RunRecord]]] = {
    "lesson-07": overlap,
    "lesson-10": lambda: {"tunnel": run(replace(TUNNEL, steps=2))},
    "lesson-11": strategies,
    "lesson-13": in_bf16,
}


def bandwidth() -> None:
    """Lesson 01: collectives on the loopback, the shortest of many repeats, which other programs disturb least."""
    with TemporaryDirectory() as folder:
        open_course("teacher", Path(folder) / "my_fsdp")
        measured = collectives.measure_bandwidth(repeats=REPEATS, chosen=min)
    made_by = f"the shortest of {REPEATS} repeats, 2 CPU ranks over gloo, torch {torch.__version__}"
    content = {"made_by": made_by, "timings": [asdict(timing) for timing in measured.timings]}
    path = DATA / collectives.RECORDED
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def share(runs: list[RunRecord]) -> float:
    """The least part of their steps for which ranks had a core."""
    return min((each.summary.cpu_share or 0.0 for each in runs), default=0.0)


def record(group: str, anyway: bool) -> None:
    """Record one group, and keep it where it is the better one."""
    kept = [RunRecord.load(path) for path in sorted((DATA / group).glob("*"))]
    runs = GROUPS[group]()
    before, now = share(kept), share(list(runs.values()))
    if not anyway and now <= before:
        print(f"{group}: ranks had a core for {now:.0%}, not more than the {before:.0%} before: left as it was")
        return
    shutil.rmtree(DATA / group, ignore_errors=True)
    for name, each in runs.items():
        replace(each, path=DATA / group / name).save()
    print(f"{group}: recorded, ranks had a core for {now:.0%}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["lesson-01"]:
        sys.exit(bandwidth())
    asked = [name for name in sys.argv[1:] if name != "--anyway"] or list(GROUPS)
    for each in asked:
        record(each, "--anyway" in sys.argv)

"""Where the CPU time of a `full_shard` step goes that no communication at all would not take, by part of the engine.

    python -m tests.step_account data/step_account.json [--world-size 2] [--precision fp32] [--batch-size 4]
        [--sequence-length 256] [--rounds 12] [--floor-ms MS]

CPU time of ranks, page faults and instructions (of user code, where the kernel counts them), not wall time: other work
on the machine delays a step and costs it little CPU time and no instruction. Ranks
train alone (`Alone`, the floor of `fsdplab bench`) and with the engine in turn; each part is a function of the engine
that is timed around its calls, without what other parts took inside of it. It is measured twice: with the C library's
heap as it is, and told to keep what is freed (as `MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_THRESHOLD_` do). What the
parts take hardly depends on the batch, so a small one measures them; the per mille are of `--floor-ms`, a larger one's.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import resource
import statistics
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from fsdplab.common.files import write_output
from fsdplab.common.temporary import temporary_folder
from fsdplab.engine.core import buffers, hooks, memory
from fsdplab.engine.transport.shared_memory import transport
from fsdplab.sessions import bench_engines
from fsdplab.sessions.launch.launcher import run_ranks
from fsdplab.sessions.launch.mailbox import Mailbox
from fsdplab.sessions.run_and_record import reachable
from fsdplab.sessions.spec import RunSpec
from fsdplab.sessions.worker.engines import build, micro_batches, workload_of
from fsdplab.sessions.worker.rank_process import rank_process

HEAPS = ("as it is", "kept")
_TRIM, _MMAP = -1, -3  # of mallopt
WARMUP = 3
PYTHON = "the engine's Python: hooks, order, slots"
_PARTS: dict[str, tuple[tuple[Any, str], ...]] = {  # what is timed: functions by part
    "all-gather: copy the shards of all ranks": ((transport, "unpack_from"), (memory.UnitMemory, "_fill")),
    "reduce-scatter: pack gradients": ((transport, "pack_part"),),
    "reduce-scatter: sum, scaled": ((transport.SharedTransport, "_sum"),),
    "free unsharded parameters": ((buffers.UnshardedBuffer, "free"),),
    "show collectives to who watches them": ((transport, "announce"),),
    PYTHON: (
        *(
            (hooks.UnitHooks, name)
            for name in ("before_forward", "after_forward", "_before_backward", "after_backward")
        ),
        (hooks.Runtime, "end_backward"),
    ),
}
OPTIMIZER, REST = "optimizer: DTensors to their shards", "what no part holds: other faults, colder caches"


@dataclass
class Clock:
    """Milliseconds, page faults and millions of instructions by part, each without the parts inside of it."""

    parts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0] * 3))
    _open: list[list[float]] = field(default_factory=list)

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, whose calls are of `part`."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            inside = [0.0] * 3
            self._open.append(inside)
            before = _used()
            try:
                return function(*args, **kwargs)
            finally:
                self._open.pop()
                for index, (now, then) in enumerate(zip(_used(), before)):
                    self.parts[part][index] += now - then - inside[index]
                    if self._open:
                        self._open[-1][index] += now - then

        return timed


def _used() -> tuple[float, float, float]:
    """Milliseconds of CPU time, page faults and millions of instructions of this thread."""
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    counted = struct.unpack("<Q", os.read(_counter(), 8))[0] if _counter() >= 0 else 0
    return 1e3 * time.thread_time(), faults, counted / 1e6


@functools.cache
def _counter() -> int:
    """A descriptor that counts this thread's instructions outside of the kernel, below 0 where the kernel offers none
    (`perf_event_open`, x86-64).
    """
    attributes = bytearray(128)
    struct.pack_into(
        "<IIQQQQQ", attributes, 0, 0, len(attributes), 1, 0, 0, 0, 1 << 5 | 1 << 6
    )  # no kernel, no hypervisor
    return ctypes.CDLL(None).syscall(298, (ctypes.c_char * 128).from_buffer(attributes), 0, -1, -1, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output")
    for name, kind, default in (
        ("world-size", int, 2), ("precision", str, "fp32"), ("batch-size", int, 4), ("sequence-length", int, 256),
        ("rounds", int, 12),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--floor-ms", type=float)
    asked = vars(parser.parse_args())
    output, rounds, floor = (asked.pop(name) for name in ("output", "rounds", "floor_ms"))
    spec = RunSpec(model="gpt-25m", **asked)
    found = {heap: _measured(spec, rounds, heap) for heap in HEAPS}
    record = {"spec": {"model": "gpt-25m", **asked}, "of_ms": floor or found["kept"]["floor_ms"], "heaps": found}
    write_output(Path(output), json.dumps(record, indent=1) + "\n")
    print("\n".join(rows(record)))


def _measured(spec: RunSpec, rounds: int, heap: str) -> dict[str, Any]:
    folder = temporary_folder("account")
    (folder / "asked.json").write_text(json.dumps({"spec": reachable(spec), "rounds": rounds, "heap": heap}))
    mailbox = Mailbox(folder)
    run_ranks([str(Path(__file__).resolve()), str(folder)], mailbox, world_size=spec.world_size, time_limit=3600)
    return mailbox.reports("result")[0]


def rank(folder: str) -> None:
    """As one rank; figures are means over all rounds, so that the parts add up."""
    asked = json.loads(Path(folder, "asked.json").read_text())
    spec, rounds = RunSpec(**asked["spec"]), asked["rounds"]
    if asked["heap"] == "kept":
        libc = ctypes.CDLL(None)
        assert libc.mallopt(_TRIM, 10**9) == libc.mallopt(_MMAP, 32 << 20) == 1
    clock = Clock()
    patches = [
        mock.patch.object(owner, name, clock.around(part, getattr(owner, name)))
        for part, functions in _PARTS.items()
        for owner, name in functions
    ]
    with rank_process(folder, spec.backend, spec.device_type) as context:
        with mock.patch.object(bench_engines.time, "perf_counter", time.process_time):
            alone = bench_engines.Alone(spec, context)
            for patch in patches:
                patch.start()
            ours, workload = build(spec, context), workload_of(spec)
            watch = bench_engines._OptimizerWatch(ours.optimizer)
            taken: dict[str, list[tuple[float, ...]]] = {"floor": [], "step": []}
            for step in range(WARMUP + rounds):
                if step == WARMUP:
                    clock.parts.clear()
                batches = [micro_batches(spec, workload, step, context.rank, context.device)]
                turns: list[tuple[str, Any]] = [("floor", alone), ("step", ours)]
                for name, setup in turns[:: -1 if step % 2 else 1]:
                    context.heartbeat.enter("account", step)
                    dist.barrier()
                    before = _used()
                    setup.train_step(batches)
                    taken[name].append(tuple(now - then for now, then in zip(_used(), before)))
        optimizing = [1e3 * seconds for seconds in watch.seconds[WARMUP:]]
        alone_optimizing = [1e3 * seconds for seconds in alone.parts["optimizer"][WARMUP:]]
        floors = [
            ms - own * (1 - 1 / spec.world_size) for (ms, *_), own in zip(taken["floor"][WARMUP:], alone_optimizing)
        ]
        parts = {part: [each / rounds for each in used] for part, used in clock.parts.items()}
        parts[OPTIMIZER] = [statistics.mean(optimizing) - statistics.mean(alone_optimizing) / spec.world_size, 0.0, 0.0]
        steps = [ms for ms, *_ in taken["step"][WARMUP:]]
        over = statistics.mean(steps) - statistics.mean(floors)
        parts[REST] = [over - sum(ms for ms, *_ in parts.values()), 0.0, 0.0]
        context.write("result", {
            "floor_ms": statistics.mean(floors), "step_ms": statistics.mean(steps),
            "over_floor": sorted(mine / floor for mine, floor in zip(steps, floors)),
            "floor_faults": statistics.mean(faults for _, faults, _ in taken["floor"][WARMUP:]),
            "step_faults": statistics.mean(faults for _, faults, _ in taken["step"][WARMUP:]),
            "parts": parts,
        })  # fmt: skip


def rows(record: dict[str, Any]) -> list[str]:
    """The table in docs/speed.md: milliseconds of a step above the floor by part and heap, instructions, page faults.
    The optimizer's and the rest's instructions are not told apart from the model's.
    """
    heaps, of = [record["heaps"][heap] for heap in HEAPS], record["of_ms"]
    over = [heap["step_ms"] - heap["floor_ms"] for heap in heaps]
    parts = {part: [heap["parts"][part][0] for heap in heaps] for part in (*_PARTS, OPTIMIZER, REST)}
    counted = {part: f"{heaps[-1]['parts'][part][2]:.1f}" for part in _PARTS}
    faults = " | ".join(f"{heap['step_faults']:,.0f} ({heap['floor_faults']:,.0f}) |" for heap in heaps)
    return [
        "| part | heap as it is, ms | per mille | heap kept, ms | per mille | million instructions |",
        "|---|---|---|---|---|---|",
        *(
            f"| {part} | "
            + " | ".join(f"{ms:.1f} | {1e3 * ms / of:.1f}" for ms in found)
            + f" | {counted.get(part, '')} |"
            for part, found in (parts | {"all of it": over}).items()
        ),
        f"| page faults of a step (of the floor's) | {faults} |",
    ]


if __name__ == "__main__":
    rank(sys.argv[1]) if len(sys.argv) == 2 and Path(sys.argv[1], "asked.json").exists() else main()

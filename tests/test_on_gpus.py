"""What must hold of runs on a GPU, and can hold nowhere else: their losses, their traces, and who has a context.

`fsdplab gpu-check` runs these, with all other tests that are marked gpu. Where kernels give wrong values, nothing that
rests on values is judged.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdplab.common.names import IN_GROUPS, OVER_ALL_RANKS
from fsdplab.engine import fully_shard
from fsdplab.profiling.exports import traces_of
from fsdplab.profiling.intervals import length, union
from fsdplab.profiling.traces.overlap import analyse_trace
from fsdplab.records import CATEGORIES, RunRecord, Summary
from fsdplab.records.summary import known
from fsdplab.sessions import RunSpec, gpu_probes, run
from fsdplab.sessions.run_and_record import WORKER
from fsdplab.sessions.worker import training
from fsdplab.sessions.worker.engines import Held, TrainingSetup, one_step, optimizer_of, workload_of
from fsdplab.sessions.worker.rank_process import RankContext

needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
RANKS = max(2, torch.cuda.device_count())
TINY: dict[str, Any] = dict(model="gpt-tiny", batch_size=2, sequence_length=32, world_size=RANKS, memory=False, steps=4)
TOLERANCE = 1e-3  # relative: a GPU's sums have another order than the CPU's, a wrong gradient shows by far more
LEDGER_TOLERANCE = 0.2  # the part by which ledger and trace may differ, beside the launches:
LAUNCH_S = 50e-6  # of each collective, which the one counts and the other does not
OTHER = 0.05  # of the peak may have no category


# ---- losses


CASES: dict[str, dict[str, Any]] = {
    **{name: dict(strategy=name) for name in OVER_ALL_RANKS},
    **{name: dict(strategy=name, shard_size=RANKS // 2) for name in IN_GROUPS if RANKS % 2 == 0},
    "offload": dict(offload="cpu"),
    "Shard(1)": {},
}


@pytest.fixture(scope="module")
def twin() -> Sequence[float | None]:
    if gpu_probes.ask("machine")["gpus"][0]["sum"] != 8.0:
        pytest.skip("kernels give wrong values here, so losses are not judged")
    return run(RunSpec(engine="twin", device="cpu", **TINY)).summary.losses


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_the_twin_on_the_cpu(twin: Sequence[float | None], case: str, tmp_path: Path) -> None:
    program = ("-m", "tests.test_on_gpus") if case == "Shard(1)" else WORKER
    found = run(RunSpec(device="cuda", **TINY | CASES[case]), directory=tmp_path / "run", program=program)
    torch.testing.assert_close(torch.tensor(found.summary.losses), torch.tensor(twin), rtol=TOLERANCE, atol=0.0)


def cut_along_dimension_1(spec: RunSpec, context: RankContext) -> TrainingSetup:
    """The setup of a rank whose matrices are sharded along dimension 1."""
    workload = workload_of(spec)
    model = workload.build(context.device, spec.seed)
    mesh = init_device_mesh(context.device.type, (spec.world_size,))
    for module in [*(each for each in model.modules() if isinstance(each, workload.units(model))), model]:
        fully_shard(module, mesh=mesh, shard_placement_fn=along_1)
    optimizer, mine = optimizer_of(spec, model, workload), Held(model)

    def step(batches: Sequence[Sequence[Any]]) -> float:
        return one_step(mine, optimizer, batches[0], workload.loss, context.heartbeat.enter).item()

    return TrainingSetup(model, optimizer, step)


def along_1(parameter: nn.Parameter) -> Shard:
    return Shard(min(1, parameter.ndim - 1))


# ---- processes


@pytest.mark.gpu
@needs_a_gpu
def test_the_process_that_starts_ranks_has_no_context() -> None:
    """A context in it would keep the rank out of a GPU in compute mode EXCLUSIVE_PROCESS."""
    code = (
        "from fsdplab.sessions import RunSpec, run\n"
        "from fsdplab.sessions.spec.gpus import has_context\n"
        f"run(RunSpec(device='cuda', **{TINY}))\n"
        f"raise SystemExit(any(has_context(index) for index in range({torch.cuda.device_count()})))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- traces and ledgers


class Communication(NamedTuple):
    """Seconds of communication in a profiled step, by the ledger and by the trace, and its number of collectives."""

    ledger: float
    trace: float
    collectives: float
    linked: bool

    @property
    def wrong(self) -> str:
        """Where the two differ by more than launching explains; "" where they agree. Without a link the ledger also
        counts how long a kernel takes to begin, so only a trace with more is wrong.
        """
        apart = self.trace - self.ledger
        allowed = LEDGER_TOLERANCE * self.ledger + LAUNCH_S * self.collectives
        if self.trace and (abs(apart) if self.linked else apart) <= allowed:
            return ""
        said = f"{1e3 * self.ledger:.3g} ms by the ledger, {1e3 * self.trace:.3g} ms by the trace"
        return f"a step communicates for {said}"


def communication(record: RunRecord) -> Communication:
    """What both say of the profiled steps; the mean over ranks and steps."""
    breakdown = record.table("breakdown")
    rows = {(row["rank"], row["step"]): list[tuple[int, int]]() for row in breakdown}
    for row in record.table("ledger"):
        rows.get((row["rank"], row["step"]), []).append((row["start_ns"], row["end_ns"]))
    ledger = sum(length(union(spans)) for spans in rows.values())
    trace = sum(int(row["exposed_ns"] + row["overlapped_ns"]) for row in breakdown)
    steps, count = len(rows), sum(map(len, rows.values()))
    return Communication(ledger / steps / 1e9, trace / steps / 1e9, count / steps, bool(record.spec.get("link")))


def comparable(record: RunRecord) -> bool:
    """Whether the times of a run's trace and of its ledger must agree.

    Not where a wait is in one of them only: ranks that share a GPU wait for their turn, and on a busy machine the
    threads that serve a GPU wait for a core.
    """
    return record.provenance["step_time_s"] == "measured" and not record.summary.short_of_cores


@pytest.mark.gpu
@needs_a_gpu
@pytest.mark.parametrize(
    ("strategy", "link"), [("full_shard", None), ("full_shard", "500MB/s"), ("shard_grad_op", None), ("no_shard", None)]
)
def test_a_trace_has_kernels_adds_up_and_agrees_with_the_ledger(
    strategy: str, link: str | None, tmp_path: Path
) -> None:
    spec = RunSpec(
        model="gpt-20m", batch_size=16, sequence_length=256, precision="bf16", steps=4, profile=2, device="cuda",
        world_size=RANKS, strategy=strategy, link=link,
    )  # fmt: skip
    record = run(spec, directory=tmp_path / "run")
    own = [row for row in record.table("ledger") if row["rank"] == 0]
    assert analyse_trace(traces_of(record)[0], ledger=own).device == "cuda"
    parts = ("compute_only_ns", "overlapped_ns", "exposed_ns", "other_ns")
    assert all(row["step_ns"] == sum(row[part] for part in parts) for row in record.table("breakdown"))
    found = communication(record)
    assert found.trace and (not comparable(record) or found.wrong == "")
    peak = record.summary.peak_memory_bytes
    assert len(record.table("memory")) > 1 and peak.split[CATEGORIES[-1]] <= OTHER * known(peak.total)


def test_a_ledger_and_a_trace_that_differ_are_found(tmp_path: Path) -> None:
    assert Communication(0.010, 0.009, 8, linked=True).wrong == Communication(0.010, 0.002, 8, linked=False).wrong == ""
    assert "78.7 ms by the ledger, 3.6 ms by the trace" in Communication(0.0787, 0.0036, 8, linked=True).wrong
    assert Communication(0.010, 0.020, 8, linked=False).wrong and Communication(0.010, 0.0, 8, linked=False).wrong
    where = {"rank": 0, "step": 6}
    tables = {
        "breakdown": [{**where, "exposed_ns": 30, "overlapped_ns": 10}],
        "ledger": [
            {**where, "start_ns": 0, "end_ns": 20},
            {**where, "start_ns": 10, "end_ns": 40},
            {"rank": 0, "step": 1, "start_ns": 0, "end_ns": 9},
        ],
    }
    found = communication(RunRecord(tmp_path, spec={}, tables=tables))
    assert tuple(found) == (40e-9, 40e-9, 2, False)


@pytest.mark.parametrize(
    ("time", "share", "exact"),
    [("measured", 0.97, True), ("measured", None, True), ("measured", 0.6, False), ("emulated", 0.97, False)],
)
def test_a_ledger_and_a_trace_are_compared_where_no_wait_is_in_one_alone(
    tmp_path: Path, time: str, share: float | None, exact: bool
) -> None:
    record = RunRecord(tmp_path, spec={}, provenance={"step_time_s": time}, summary=Summary(cpu_share=share))
    assert comparable(record) is exact


if __name__ == "__main__":
    training.main(sys.argv[1], cut_along_dimension_1)

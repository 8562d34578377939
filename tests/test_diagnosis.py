"""Findings: each cause is injected into a real run, and must be the first one found; rules on hand-written tables are
exact.

The blocks of these runs take a fixed time (steady_worker.py), and links are set from what the same work computes
without one, so that the cause depends neither on how fast this machine is nor on what else it does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplab.profiling.diagnosis import MOST, Finding, findings
from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec, run

pytestmark = pytest.mark.timeout(600)  # an injection is repeated where the machine's speed changes meanwhile
PLAIN = RunSpec(
    model="gpt-20m", steps=1, warmup=1, memory=False, profile=2, device="cpu", batch_size=1, sequence_length=16
)
SLOW_WORKER = (str(Path(__file__).with_name("slow_worker.py")),)
STEADY_WORKER = (str(Path(__file__).with_name("steady_worker.py")),)


def kinds(record: RunRecord) -> list[str]:
    return [finding.kind for finding in findings(record)]


def first(record: RunRecord) -> Finding:
    """The first finding but for what other work on this machine causes: that ranks come late now and then is no part of
    an injection.
    """
    return next(finding for finding in findings(record) if finding.kind not in ("skew", "slow_rank"))


def compute_s(record: RunRecord) -> float:
    return statistics.median(row["compute_ns"] for row in record.table("breakdown")) / 1e9


@pytest.fixture(scope="module")
def plain() -> RunRecord:
    return run(PLAIN, program=STEADY_WORKER)


def link_for(record: RunRecord, ratio: float) -> str:
    """A link on which the record's traffic takes `ratio` of its computing time."""
    return f"{record.summary['comm']['bytes_per_step'] / (ratio * compute_s(record)) / 1e6:.3f}MB/s"


def behind(spec: RunSpec, plain: RunRecord, ratio: float, **more: object) -> RunRecord:
    """The run on a link set by `ratio`; once more where the machine's speed changed between the run that was measured
    and this one.
    """
    for _ in range(3):
        record = run(replace(spec, link=link_for(plain, ratio), **more), program=STEADY_WORKER)
        if 0.8 < compute_s(record) / compute_s(plain) < 1.25:
            break
        plain = record
    return record


def told(record: RunRecord) -> str:
    return "\n".join(f"{finding.kind} {finding.seconds:.3f}: {finding.title}" for finding in findings(record))


def injected(kind: str, make: Callable[[], RunRecord]) -> RunRecord:
    """The record in which the injected cause is the first finding; made at most three times, since other work on the
    machine may cost a run more than the cause that was injected.
    """
    for _ in range(3):
        record = make()
        if first(record).kind == kind:
            return record
    raise AssertionError(f"{kind} was injected three times, and the last run's findings are\n{told(record)}")


def test_a_cause_that_was_not_injected_is_not_found(plain: RunRecord) -> None:
    with pytest.raises(AssertionError, match="one_big_unit was injected three times"):
        injected("one_big_unit", lambda: plain)


def test_no_prefetch(plain: RunRecord) -> None:
    found = first(injected("no_prefetch", lambda: behind(PLAIN, plain, 0.6, prefetch=0)))
    assert "prefetch=1" in found.remedy and "all_gather of" in found.title


def test_a_slow_link(plain: RunRecord) -> None:
    record = injected("slow_link", lambda: behind(PLAIN, plain, 5.0))
    assert "emulated" in first(record).text


def test_tiny_units(plain: RunRecord) -> None:
    latency = f"100GB/s,{1.5 * compute_s(plain) / 147 * 1e6:.0f}us"
    record = injected("tiny_units", lambda: run(replace(PLAIN, units="linear", link=latency), program=STEADY_WORKER))
    assert "collectives a step" in first(record).title


def test_one_big_unit(plain: RunRecord) -> None:
    record = injected("one_big_unit", lambda: behind(PLAIN, plain, 0.5, units="model"))
    assert "the root" in first(record).title


def test_one_communicator(plain: RunRecord) -> None:
    spec = replace(PLAIN, precision="bf16")
    low = run(spec, program=STEADY_WORKER)
    injected("one_communicator", lambda: behind(spec, low, 1.6))
    apart = behind(spec, low, 1.6, link_queues=2)
    assert "one_communicator" not in kinds(apart), told(apart)


def test_a_slow_rank() -> None:
    record = run(replace(PLAIN, batch_size=2, sequence_length=128), program=SLOW_WORKER)
    found = findings(record)[0]
    assert found.kind == "slow_rank" and "rank 1" in found.title, told(record)


# ---- rules, on tables written by hand: one rank, one step of 100 ms

MS = 1_000_000


def by_hand(
    tmp_path: Path, *, compute: int = 60, exposed: list[tuple], other_rank: int = 60, **summary: object
) -> RunRecord:
    """`exposed`: rows of (unit, phase, kind, communication ms, exposed ms, cause)."""
    rows = [
        {
            "rank": 0,
            "step": 7,
            "unit": unit,
            "phase": phase,
            "kind": kind,
            "communication_ns": all_ * MS,
            "exposed_ns": part * MS,
            "cause": cause,
        }
        for unit, phase, kind, all_, part, cause in exposed
    ]
    hidden, shown = (
        sum(row["communication_ns"] - row["exposed_ns"] for row in rows),
        sum(row["exposed_ns"] for row in rows),
    )
    step = {"step": 7, "step_ns": 100 * MS, "overlapped_ns": hidden, "exposed_ns": shown}
    breakdown = [
        {
            **step,
            "rank": rank,
            "compute_ns": busy * MS,
            "compute_only_ns": busy * MS - hidden,
            "other_ns": (100 - busy) * MS - shown,
        }
        for rank, busy in ((0, compute), (1, other_rank))
    ]
    return RunRecord(
        tmp_path, spec={"strategy": "full_shard", "engine": "lab", "world_size": 2, "prefetch": 1}, summary=summary,
        tables={"breakdown": breakdown, "exposed": rows},
    )  # fmt: skip


def test_late_gathers_count_up_to_what_a_schedule_could_hide(tmp_path: Path) -> None:
    record = by_hand(
        tmp_path,
        exposed=[
            ("a", "forward", "all_gather", 20, 15, "late_start"),
            ("b", "backward", "all_gather", 10, 5, "late_start"),
        ],
    )
    found = findings(record)[0]
    assert (found.kind, found.seconds) == ("no_prefetch", pytest.approx(0.020))
    assert "all_gather of a in forward alone 15 ms" in found.title


def test_what_cannot_be_hidden_is_the_links(tmp_path: Path) -> None:
    record = by_hand(
        tmp_path, compute=20, other_rank=20, exposed=[("a", "forward", "all_gather", 70, 60, "late_start")]
    )
    by_kind = {finding.kind: finding.seconds for finding in findings(record)}
    assert by_kind == {"slow_link": pytest.approx(0.050), "no_prefetch": pytest.approx(0.010)}


def test_a_queue_costs_no_more_than_two_queues_would_save(tmp_path: Path) -> None:
    exposed = [
        ("a", "backward", "all_gather", 60, 50, "link_busy"),
        ("b", "backward", "reduce_scatter", 30, 30, "link_busy"),
    ]
    record = by_hand(
        tmp_path, compute=10, other_rank=10, exposed=exposed, link={"queues": 1, "name": "eth1", "bytes_per_s": 125e6}
    )
    by_kind = {finding.kind: finding.seconds for finding in findings(record)}
    assert by_kind == {"slow_link": pytest.approx(0.050), "one_communicator": pytest.approx(0.030)}


def test_waiting_for_a_peer_is_not_the_links(tmp_path: Path) -> None:
    assert "slow_link" not in kinds(
        by_hand(
            tmp_path, compute=20, other_rank=20, exposed=[("a", "forward", "all_gather", 70, 60, "waiting_for_peer")]
        )
    )


def test_small_change_is_not_mentioned(tmp_path: Path) -> None:
    assert findings(by_hand(tmp_path, exposed=[("a", "forward", "all_gather", 20, 1, "late_start")])) == []


def test_the_peak_comes_last_and_there_are_at_most_five(tmp_path: Path) -> None:
    causes = [
        ("a", "backward", "all_gather", 9, 8, cause) for cause in ("late_start", "link_busy", "nothing_to_hide_behind")
    ]
    peak = {"total": 100, "by_category": {"activations": 80, "optimizer_state": 20}}
    record = by_hand(tmp_path, compute=10, other_rank=30, exposed=causes, peak_memory_bytes=peak)
    found = findings(record)
    assert len(found) <= MOST and found[-1].kind == "peak" and "80% of it activations" in found[-1].title
    assert [finding.seconds for finding in found[:-1]] == sorted(
        (finding.seconds for finding in found[:-1]), reverse=True
    )


def test_a_run_that_was_not_profiled_has_no_findings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run it again with --profile"):
        findings(RunRecord(tmp_path))

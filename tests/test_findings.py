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

from fsdplab.profiling.findings import MOST, Finding, findings, profiling_cost
from fsdplab.profiling.step_facts import step_facts
from fsdplab.profiling.traces.import_traces import record_of_traces
from fsdplab.records import RunRecord
from fsdplab.records.summary import Summary
from fsdplab.sessions import RunSpec, run
from tests.gpu_traces import GpuRank

pytestmark = pytest.mark.timeout(600)  # an injection is repeated where the machine's speed changes meanwhile
PLAIN = RunSpec(
    model="gpt-20m", steps=1, warmup=1, memory=False, profile=2, device="cpu", batch_size=1, sequence_length=16
)
SLOW_WORKER = (str(Path(__file__).with_name("slow_worker.py")),)
STEADY_WORKER = (str(Path(__file__).with_name("steady_worker.py")),)


def kinds(record: RunRecord) -> list[str]:
    return [finding.kind for finding in findings(record)]


def with_cores(record: RunRecord) -> RunRecord:
    """The record as if its ranks had had their cores: other tests may run beside these, and then most findings are
    withheld.
    """
    return replace(record, summary=replace(record.summary, cpu_share=None))


def first(record: RunRecord) -> Finding:
    """The first finding but for what other work on this machine causes: that ranks come late now and then, and that
    copies take longer, is no part of an injection.
    """
    of_the_machine = ("skew", "slow_rank", "late_rank", "copies", "no_core", "idle")
    return next(finding for finding in findings(with_cores(record)) if finding.kind not in of_the_machine)


def exposed_first(record: RunRecord) -> Finding:
    """The costliest finding on exposed time."""
    return next(finding for finding in findings(record) if finding.of == "exposed")


def compute_s(record: RunRecord) -> float:
    return statistics.median(row["compute_ns"] for row in record.table("breakdown")) / 1e9


@pytest.fixture(scope="module")
def plain() -> RunRecord:
    return run(PLAIN, program=STEADY_WORKER)


def link_for(record: RunRecord, ratio: float) -> str:
    """A link on which the record's traffic takes `ratio` of its computing time."""
    return f"{record.summary.comm.bytes_per_step / (ratio * compute_s(record)) / 1e6:.3f}MB/s"


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
        if any(found.kind == kind for found in findings(with_cores(record))) and first(record).kind == kind:
            return record
    raise AssertionError(f"{kind} was injected three times, and the last run's findings are\n{told(record)}")


def test_no_prefetch(plain: RunRecord) -> None:
    found = first(injected("no_prefetch", lambda: behind(PLAIN, plain, 0.6, prefetch=0)))
    assert "prefetch=1" in found.remedy and "all_gather of" in found.title


def test_a_slow_link(plain: RunRecord) -> None:
    record = injected("slow_link", lambda: behind(PLAIN, plain, 5.0))
    assert "emulated" in first(record).text


@pytest.mark.full("the default tier injects two causes into real runs")
def test_tiny_units(plain: RunRecord) -> None:
    latency = f"100GB/s,{1.5 * compute_s(plain) / 147 * 1e6:.0f}us"
    record = injected("tiny_units", lambda: run(replace(PLAIN, units="linear", link=latency), program=STEADY_WORKER))
    assert "collectives a step" in first(record).title


@pytest.mark.full("the default tier injects two causes into real runs")
def test_one_big_unit(plain: RunRecord) -> None:
    record = injected("one_big_unit", lambda: behind(PLAIN, plain, 0.5, units="model"))
    assert "the root" in first(record).title


@pytest.mark.full("the default tier injects two causes into real runs")
def test_one_communicator(plain: RunRecord) -> None:
    spec = replace(PLAIN, precision="bf16")
    low = run(spec, program=STEADY_WORKER)
    injected("one_communicator", lambda: behind(spec, low, 1.6))
    apart = behind(spec, low, 1.6, link_queues=2)
    assert "one_communicator" not in kinds(apart), told(apart)


@pytest.mark.full("the default tier injects two causes into real runs")
def test_a_slow_rank() -> None:
    record = run(replace(PLAIN, steps=7), program=SLOW_WORKER)  # with the profiled ones enough to name one of two ranks
    found = findings(with_cores(record))[0]
    assert found.kind == "slow_rank" and "Rank 1" in found.title, told(record)


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
        tmp_path, spec={"strategy": "full_shard", "engine": "lab", "world_size": 2, "prefetch": 1},
        summary=Summary.from_dict(summary), tables={"breakdown": breakdown, "exposed": rows},
    )  # fmt: skip


@pytest.mark.quick
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
    assert "all_gather of a in forward alone 15.0 ms" in found.title and "(20 %)" in found.title


@pytest.mark.quick
def test_what_cannot_be_hidden_is_the_links(tmp_path: Path) -> None:
    record = by_hand(
        tmp_path, compute=20, other_rank=20, exposed=[("a", "forward", "all_gather", 70, 60, "late_start")]
    )
    assert seconds_by_kind(record) == {"slow_link": 0.050, "no_prefetch": 0.010, "idle": 0.020}


@pytest.mark.quick
def test_a_queue_costs_no_more_than_two_queues_would_save(tmp_path: Path) -> None:
    exposed = [
        ("a", "backward", "all_gather", 60, 50, "link_busy"),
        ("b", "backward", "reduce_scatter", 30, 30, "link_busy"),
    ]
    record = by_hand(
        tmp_path, compute=10, other_rank=10, exposed=exposed, link={"queues": 1, "name": "eth1", "bytes_per_s": 125e6}
    )
    assert seconds_by_kind(record) == {"slow_link": 0.050, "one_communicator": 0.030}


@pytest.mark.quick
def test_time_on_a_slow_link_between_groups_is_no_latency(tmp_path: Path) -> None:
    """2 MB among the shards take 2 ms and a latency of 1 ms; 2 MB between the groups take 20 ms and 1 ms."""
    link = {"name": "fast", "bytes_per_s": 1e9, "across": {"name": "slow", "bytes_per_s": 1e8}}
    record = by_hand(tmp_path, exposed=[("a", "backward", "all_reduce", 21, 21, "late_start")], link=link)
    record.spec |= {"strategy": "hybrid_shard", "world_size": 4, "shard_size": 2}
    record.tables["ledger"] = [
        {"rank": 0, "step": 7, "unit": "a", "kind": kind, "wire_bytes": 2_000_000, "logical_bytes": 4_000_000,
         "emulated": True, "start_ns": 0, "end_ns": length * MS}
        for kind, length in (("all_gather", 3), ("all_reduce", 21))
    ]  # fmt: skip
    assert step_facts(record).latency_s == pytest.approx(0.002)


@pytest.mark.quick
def test_waiting_for_a_peer_is_not_the_links(tmp_path: Path) -> None:
    assert "slow_link" not in kinds(
        by_hand(
            tmp_path, compute=20, other_rank=20, exposed=[("a", "forward", "all_gather", 70, 60, "waiting_for_peer")]
        )
    )


@pytest.mark.quick
def test_small_change_is_not_mentioned(tmp_path: Path) -> None:
    record = by_hand(tmp_path, compute=95, other_rank=95, exposed=[("a", "forward", "all_gather", 20, 1, "late_start")])
    assert findings(record) == []


@pytest.mark.quick
def test_a_slow_link_comes_before_what_a_schedule_could_hide_on_it_and_the_peak_last(tmp_path: Path) -> None:
    causes = [("a", "late_start"), ("b", "link_busy"), ("c", "nothing_to_hide_behind")]
    exposed = [(unit, "backward", "all_gather", 12, part, cause) for part, (unit, cause) in zip((12, 9, 11), causes)]
    peak = {"total": 100, "by_category": {"activations": 80, "optimizer_state": 20}}
    record = by_hand(tmp_path, compute=30, other_rank=30, exposed=exposed, peak_memory_bytes=peak)
    found = findings(record)
    assert len(found) <= MOST + 1 and found[-1].kind == "peak"
    assert found[-1].title == "Peak memory is 100 B, of which 80 B (80 %) is activations"
    assert [finding.kind for finding in found[:-1]] == [
        "idle", "slow_link", "no_prefetch", "nothing_to_hide_behind", "busy_link",
    ]  # fmt: skip
    assert found[1].seconds < found[2].seconds > found[3].seconds, "costliest first but for the link"
    assert "36.0 ms of communication beside 30.0 ms of computing" in found[1].title


@pytest.mark.quick
def test_a_run_that_was_not_profiled_has_no_findings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run it again with --profile"):
        findings(RunRecord(tmp_path))


# ---- findings are a partition


def seconds_by_kind(record: RunRecord) -> dict[str, float]:
    return {finding.kind: pytest.approx(finding.seconds) for finding in findings(record)}


def of_exposed(record: RunRecord) -> dict[str, float]:
    return {each.kind: pytest.approx(each.seconds) for each in findings(record) if each.of == "exposed"}


@pytest.mark.quick
def test_findings_add_up_to_no_more_than_what_is_exposed(tmp_path: Path) -> None:
    """150 MB/s, 880 ms beside 469: the link was third, behind units that should be alike and were."""
    exposed = [
        ("a", "forward", "all_gather", 20, 20, "late_start"),
        ("b", "backward", "all_gather", 30, 10, "link_busy"),
        ("c", "backward", "reduce_scatter", 30, 25, "nothing_to_hide_behind"),
    ]
    record = by_hand(tmp_path, compute=40, other_rank=40, exposed=exposed)
    found = findings(record)
    assert found[0].kind == "slow_link" and found[0].seconds == pytest.approx(0.040)
    exposed_s = sum(finding.seconds for finding in found if finding.of == "exposed")
    assert exposed_s == pytest.approx(0.055), "all of it, each nanosecond once"


@pytest.mark.quick
def test_the_three_parts_of_a_row_are_claimed_by_three_findings(tmp_path: Path) -> None:
    """10 ms on the link, 6 copying, 30 waiting: the row has one cause, and no second is counted twice."""
    record = by_hand(tmp_path, exposed=[("a", "forward", "all_gather", 50, 46, "waiting_for_peer")])
    for row in record.table("exposed"):
        row |= {"on_link_ns": 10 * MS, "copying_ns": 6 * MS, "waiting_ns": 30 * MS}
    assert of_exposed(record) == {"skew": 0.030, "nothing_to_hide_behind": 0.010, "copies": 0.006}
    for row in record.table("exposed"):
        row["cause"] = "late_start"
    assert of_exposed(record) == {"skew": 0.030, "no_prefetch": 0.010, "copies": 0.006}
    for row in record.table("exposed"):
        row["kind"] = "reduce_scatter"
    assert of_exposed(record) == {"skew": 0.030, "blocking": 0.010, "copies": 0.006}
    assert "async_op=True" in next(each.remedy for each in findings(record) if each.kind == "blocking")
    for row in record.table("exposed"):
        row["cause"] = "unknown"
    assert of_exposed(record) == {"skew": 0.030, "unknown": 0.010, "copies": 0.006}


@pytest.mark.quick
def test_one_big_unit_claims_its_copies_too(tmp_path: Path) -> None:
    record = by_hand(tmp_path, exposed=[("root", "forward", "all_gather", 30, 24, "nothing_to_hide_behind")])
    record.table("exposed")[0] |= {"on_link_ns": 10 * MS, "copying_ns": 14 * MS, "waiting_ns": 0}
    assert of_exposed(record) == {"nothing_to_hide_behind": 0.010, "copies": 0.014}
    record.tables["ledger"] = ledger(root=100_000_000, a=10_000_000)
    assert of_exposed(record) == {"one_big_unit": 0.024}


@pytest.mark.quick
def test_messages_without_a_units_name_are_no_big_unit(tmp_path: Path) -> None:
    """DDP's buckets, and what a trainer gathers besides: there is no unit to cut."""
    record = by_hand(tmp_path, exposed=[("", "backward", "all_reduce", 30, 24, "nothing_to_hide_behind")])
    record.tables["ledger"] = ledger(**{"": 100_000_000})
    assert of_exposed(record) == {"nothing_to_hide_behind": 0.024}


@pytest.mark.quick
def test_a_mean_is_set_beside_means_only(tmp_path: Path) -> None:
    """A row that one of two profiled steps has counts half, in the finding and in the heat map."""
    record = by_hand(tmp_path, exposed=[("a", "forward", "all_gather", 20, 20, "late_start")])
    empty = [row | {"step": 8, "exposed_ns": 0, "other_ns": row["other_ns"] + row["exposed_ns"]}
             for row in record.table("breakdown")]  # fmt: skip
    record.tables["breakdown"] += empty
    (found,) = [each for each in findings(record) if each.of == "exposed"]
    assert found.seconds == pytest.approx(0.010) and found.title.count("10.0 ms") == 2


@pytest.mark.quick
def test_a_unit_is_named_where_units_have_names(tmp_path: Path) -> None:
    """DDP's buckets have none: its all-reduce is not the root's."""
    ddp = by_hand(tmp_path, exposed=[("", "backward", "all_reduce", 20, 15, "nothing_to_hide_behind")])
    assert "all_reduce in backward alone 15.0 ms" in exposed_first(ddp).title
    fsdp = by_hand(
        tmp_path,
        exposed=[
            ("a", "forward", "all_gather", 9, 0, "hidden"),
            ("root", "forward", "all_gather", 20, 15, "late_start"),
        ],
    )
    assert "all_gather of the root in forward alone 15.0 ms" in exposed_first(fsdp).title


# ---- no remedy that the run already follows


def ledger(**sizes: int) -> list[dict]:
    return [
        {
            "rank": 0, "step": 7, "unit": unit, "phase": "forward", "kind": "all_gather", "logical_bytes": nbytes,
            "wire_bytes": nbytes // 2, "padding_bytes": 0, "dtype": "float32", "start_ns": 0, "end_ns": MS,
            "emulated": False, "waited_ns": 0,
        }
        for unit, nbytes in sizes.items()
    ]  # fmt: skip


@pytest.mark.quick
def test_units_that_are_alike_are_not_to_be_made_alike(tmp_path: Path) -> None:
    record = by_hand(tmp_path, exposed=[("a", "forward", "all_gather", 20, 15, "nothing_to_hide_behind")])
    record.tables["ledger"] = ledger(root=4_000_000, a=5_000_000, b=5_000_000)
    alike = exposed_first(record)
    assert alike.kind == "nothing_to_hide_behind" and "alike" not in alike.remedy and "root" not in alike.remedy
    record.tables["ledger"] = []
    unknown = exposed_first(record)
    assert "if units or buckets differ" in unknown.remedy and "root" not in unknown.remedy
    record.tables["ledger"] = ledger(root=40_000_000, a=5_000_000, b=15_000_000, c=9_000_000)
    unlike = exposed_first(record)
    assert "alike" in unlike.remedy and "keep the root small" in unlike.remedy


@pytest.mark.quick
@pytest.mark.parametrize("prefetch, said, unsaid", [(0, "prefetch=1", "prefetch=2"), (1, "prefetch=2", "prefetch=1 ")])
def test_who_gathers_ahead_is_not_told_to(tmp_path: Path, prefetch: int, said: str, unsaid: str) -> None:
    record = by_hand(tmp_path, exposed=[("a", "forward", "all_gather", 20, 15, "late_start")])
    record.spec["prefetch"] = prefetch
    found = exposed_first(record)
    assert said in found.remedy and unsaid not in found.remedy


@pytest.mark.quick
def test_who_has_two_communicators_is_not_told_to_have_them(tmp_path: Path) -> None:
    exposed = [
        ("a", "backward", "all_gather", 30, 20, "link_busy"),
        ("b", "backward", "reduce_scatter", 30, 5, "hidden"),
    ]
    one = by_hand(tmp_path, exposed=exposed, link={"queues": 1, "name": "eth1", "bytes_per_s": 125e6})
    two = by_hand(tmp_path, exposed=exposed, link={"queues": 2, "name": "eth1", "bytes_per_s": 125e6})
    assert "communicator of their own" in exposed_first(one).remedy
    assert list(of_exposed(one)) == ["one_communicator", "unknown"], "a collective that is called hidden and was not"
    alike = by_hand(tmp_path, exposed=exposed[:1])
    assert exposed_first(alike).kind == "busy_link", "gathers alone queue behind gathers"
    assert exposed_first(two).kind == "busy_link" and "communicator" not in exposed_first(two).remedy


@pytest.mark.quick
def test_who_sends_bf16_under_shard_grad_op_is_not_told_to(tmp_path: Path) -> None:
    exposed = [("a", "forward", "all_gather", 70, 60, "late_start")]
    full = by_hand(tmp_path, compute=20, other_rank=20, exposed=exposed)
    assert "bf16" in findings(full)[0].remedy and "instead of full_shard" in findings(full)[0].remedy
    full.spec |= {"precision": "bf16", "strategy": "shard_grad_op"}
    assert "bf16" not in findings(full)[0].remedy and "instead of full_shard" not in findings(full)[0].remedy


@pytest.mark.quick
def test_the_peaks_remedies_leave_out_what_is_done(tmp_path: Path) -> None:
    peak = {"total": 100, "by_category": {"activations": 80}}
    record = by_hand(tmp_path, exposed=[], peak_memory_bytes=peak)
    assert "recompute" in findings(record)[-1].remedy
    record.spec["checkpoint"] = "full"
    assert "recompute" not in findings(record)[-1].remedy and "micro-batch" in findings(record)[-1].remedy


# ---- who was late, on rows: steps of 100 ms, five collectives each


def steps_of(
    tmp_path: Path,
    late_ms: Callable[[int, int, int], float],
    *,
    ranks: int = 2,
    steps: int = 8,
    compute_ms: Callable[[int, int], float] = lambda rank, step: 60.0,
    longer_ms: Callable[[int, int], float] = lambda rank, step: 0.0,
    **more: object,
) -> RunRecord:
    """`late_ms(rank, step, number)`: how late a rank comes to a collective; 30 ms of each step of rank 0 are exposed,
    waiting.
    """
    collectives, breakdown, exposed = [], [], []
    for step in range(steps):
        for rank in range(ranks):
            whole = round((100 + longer_ms(rank, step)) * MS)
            begin = step * 1000 * MS
            for number in range(5):
                start = begin + round((20 * number + late_ms(rank, step, number)) * MS)
                collectives.append(
                    {"rank": rank, "step": step, "unit": "", "phase": "", "kind": "all_to_all", "issue_ns": start,
                     "start_ns": start, "end_ns": begin + (20 * number + 19) * MS, "packing_ns": 0}
                )  # fmt: skip
            shown = 30 * MS if rank == 0 else 0
            busy = round(compute_ms(rank, step) * MS)
            breakdown.append(
                {"rank": rank, "step": step, "step_ns": whole, "compute_ns": busy, "compute_only_ns": busy,
                 "overlapped_ns": 0, "exposed_ns": shown, "other_ns": whole - busy - shown}
            )  # fmt: skip
        exposed.append(
            {"rank": 0, "step": step, "unit": "", "phase": "", "kind": "all_to_all", "communication_ns": 30 * MS,
             "exposed_ns": 30 * MS, "cause": "waiting_for_peer"}
        )  # fmt: skip
    return RunRecord(
        tmp_path, spec={"strategy": "trace", "engine": "trace", "world_size": ranks},
        tables={"collectives": collectives, "breakdown": breakdown, "exposed": exposed},
    )  # fmt: skip


def blamed(record: RunRecord) -> list[str]:
    waits = ("slow_rank", "late_rank", "long_step", "slow_loading", "skew", "more_waiting")
    return [f"{each.kind}: {each.title}" for each in findings(record) if each.kind in waits]


def with_loading(record: RunRecord, loading: dict[tuple[int, int], float]) -> RunRecord:
    """The record with the seconds, by rank and step, that it took to get each step's data."""
    rows = [
        {"rank": rank, "step": step, "loss": None, "step_time_s": None, "tokens": None, "loading_s": seconds}
        for (rank, step), seconds in loading.items()
    ]
    return replace(record, tables={**record.tables, "steps": rows})


@pytest.mark.quick
def test_the_last_to_come_is_named_and_not_who_computes_longest(tmp_path: Path) -> None:
    """Rank 7 of 8 is 6.1 ms late to three of five collectives; rank 5 idles longest and was blamed."""
    record = steps_of(
        tmp_path,
        lambda rank, step, number: 6.1 if rank == 7 and number < 3 else 0.0,
        ranks=8,
        longer_ms=lambda rank, step: 40.0 if rank == 5 else 0.0,
    )
    first, rest = blamed(record)
    assert first == "late_rank: Rank 7 comes last to 24 of 40 collectives, 6.10 ms after the others (median)"
    assert rest.startswith("more_waiting: Ranks wait for each other for another")
    (found,) = [each for each in findings(record) if each.kind == "late_rank"]
    assert found.rank == 7 and "its device is not slow" in found.text


@pytest.mark.quick
def test_a_late_rank_that_computes_longer_is_slow(tmp_path: Path) -> None:
    late = lambda rank, step, number: 5.0 if rank == 1 else 0.0  # noqa: E731
    slow = steps_of(tmp_path, late, compute_ms=lambda rank, step: 69.5 if rank == 1 else 60.0)
    assert blamed(slow)[0] == "slow_rank: Rank 1 is slow: it computes for 69.5 ms a step, the others for 60.0 ms"
    near = steps_of(tmp_path, late, compute_ms=lambda rank, step: 66.0 if rank == 1 else 60.0)
    assert blamed(near)[0].startswith("late_rank: Rank 1 comes last to 40 of 40"), "10 % are no slow device"


@pytest.mark.quick
def test_kinds_that_exclude_each_other_never_stand_together(tmp_path: Path) -> None:
    for late_ms in (0.0, 5.0):
        record = steps_of(tmp_path, lambda rank, step, number: late_ms if rank == 1 else 0.0)
        found = {each.kind: each for each in findings(record)}
        assert ("late_rank" in found) == bool(late_ms) != ("skew" in found)
        assert not late_ms or all("No rank is late" not in each.text for each in found.values())


@pytest.mark.quick
def test_few_steps_cannot_tell_and_say_so(tmp_path: Path) -> None:
    record = steps_of(tmp_path, lambda rank, step, number: 5.0 if rank == 1 else 0.0, steps=2)
    (found,) = [each for each in findings(record) if each.kind == "skew"]
    assert "No rank is late" not in found.text
    assert found.text.endswith("whether it is always the same rank, 2 steps cannot tell (8 can: --steps 8).")


@pytest.mark.quick
def test_noise_between_two_ranks_names_nobody(tmp_path: Path) -> None:
    """Ranks take turns in being 4 ms late, and their computing differs by a fifth, now this way and now that."""
    turns = steps_of(
        tmp_path,
        lambda rank, step, number: 4.0 if rank == (step + number) % 2 else 0.0,
        compute_ms=lambda rank, step: 55.0 if rank == step % 2 else 65.0,
    )
    assert [each.partition(":")[0] for each in blamed(turns)] == ["skew"]
    assert "No rank is late beyond chance" in next(each for each in findings(turns) if each.kind == "skew").text


@pytest.mark.quick
def test_one_long_step_is_no_slow_rank(tmp_path: Path) -> None:
    late = lambda rank, step, number: 15.0 if (rank, step) == (1, 2) else 0.0  # noqa: E731
    one = steps_of(tmp_path, late, steps=3, longer_ms=lambda rank, step: 75.0 if (rank, step) == (1, 2) else 0.0)
    assert blamed(one)[0] == "long_step: Step 2 was a long one on rank 1: 175 ms without communication, usually 100 ms"
    assert findings(one)[0].seconds == pytest.approx(0.025) and findings(one)[0].rank == 1
    near = steps_of(tmp_path, late, steps=3, longer_ms=lambda rank, step: 30.0 if (rank, step) == (1, 2) else 0.0)
    assert not any("long_step" in each or "slow" in each for each in blamed(near))
    everywhere = steps_of(
        tmp_path, lambda rank, step, number: 0.0, steps=3, longer_ms=lambda rank, step: 90.0 if step == 2 else 0.0
    )
    (found,) = [each for each in findings(everywhere) if each.kind == "long_step"]
    assert found.of == "step" and "on every rank" in found.title and found.rank is None


@pytest.mark.quick
def test_a_slow_loader_is_named_with_its_remedy(tmp_path: Path) -> None:
    record = steps_of(tmp_path, lambda rank, step, number: 12.0 if rank == 1 and number == 0 else 0.0, steps=3)
    slow = {(rank, step): 0.040 if rank == 1 else 0.002 for rank in (0, 1) for step in range(3)}
    found = findings(with_loading(record, slow))[0]
    assert (found.kind, found.rank) == ("slow_loading", 1)
    assert found.title == "Rank 1 waits 40.0 ms a step for its data, the others 2.00 ms"
    assert "rank 1's loader" in found.remedy and "num_workers" in found.remedy
    assert found.seconds == pytest.approx(0.030), "no more than is waited for"
    once = {key: seconds if key[1] == 0 else 0.002 for key, seconds in slow.items()}
    assert not any(each.startswith("slow_loading") for each in blamed(with_loading(record, once))), (
        "one slow batch does not repeat"
    )


@pytest.mark.quick
def test_a_loader_that_is_slow_on_all_ranks_is_no_exposed_time(tmp_path: Path) -> None:
    record = steps_of(tmp_path, lambda rank, step, number: 0.0, steps=3)
    all_slow = {(rank, step): 0.030 for rank in (0, 1) for step in range(3)}
    (found,) = [each for each in findings(with_loading(record, all_slow)) if each.kind == "slow_loading"]
    assert (found.seconds, found.of) == (pytest.approx(0.030), "step") and "num_workers" in found.remedy
    quick = dict.fromkeys(all_slow, 0.004)
    assert not any(each.startswith("slow_loading") for each in blamed(with_loading(record, quick)))


@pytest.mark.quick
def test_loading_is_read_from_the_record(tmp_path: Path) -> None:
    record = steps_of(tmp_path, lambda rank, step, number: 0.0, steps=3)
    record.tables["steps"] = [
        {"rank": rank, "step": step, "loss": 1.0, "step_time_s": None, "tokens": 1, "loading_s": 0.030}
        for rank in (0, 1)
        for step in (1, 2)
    ]
    assert any(each.startswith("slow_loading: Loading data takes 30.0 ms") for each in blamed(record))


# ---- what timed steps allow, and a machine that is busy


def timed(record: RunRecord, step_s: float, **summary: object) -> RunRecord:
    """The record with timed steps of so many seconds."""
    record.summary = Summary.from_dict({"step_time_s": {"median": step_s, "min": step_s}, **summary})
    return record


@pytest.mark.quick
def test_a_finding_claims_no_more_than_timed_steps_allow(tmp_path: Path) -> None:
    """60 ms exposed in profiled steps of 100; timed steps of 80 were blocked for 12 ms, and packed for 8."""
    exposed = [("a", "forward", "all_gather", 70, 60, "late_start")]
    record = timed(by_hand(tmp_path, compute=40, other_rank=40, exposed=exposed), 0.080, comm={"blocked_s": 0.012})
    record.tables["collectives"] = [
        {"rank": 0, "step": 7, "unit": "a", "phase": "forward", "kind": "all_gather", "start_ns": 0, "end_ns": MS,
         "packing_ns": 8 * MS}
    ]  # fmt: skip
    assert sum(each.seconds for each in findings(record) if each.of == "exposed") == pytest.approx(0.020)
    assert "(25 %)" in exposed_first(record).title, "of a timed step"
    without = timed(by_hand(tmp_path, compute=40, other_rank=40, exposed=exposed), 0.080)
    claimed = sum(each.seconds for each in findings(without) if each.of == "exposed")
    assert claimed == pytest.approx(0.048), "without a ledger in proportion to the step"


@pytest.mark.quick
def test_profiled_steps_that_were_longer_are_told(tmp_path: Path) -> None:
    record = timed(by_hand(tmp_path, exposed=[]), 0.080, profile={"steps": 1, "overhead": 0.25})
    assert profiling_cost(record).startswith("Profiled steps took 25 % longer than timed ones.")
    assert profiling_cost(timed(record, 0.080, profile={"steps": 1, "overhead": 0.05})) == ""


@pytest.mark.quick
def test_on_a_busy_machine_there_is_one_finding_on_time(tmp_path: Path) -> None:
    peak = {"total": 100, "by_category": {"activations": 80, "optimizer_state": 20}}
    record = by_hand(tmp_path, exposed=[("a", "forward", "all_gather", 70, 60, "late_start")])
    record = timed(record, 0.080, cpu_share=0.31, peak_memory_bytes=peak)
    first, memory = findings(record)
    assert first.title == (
        "Ranks had a core for 31 % of their step: the measured times are the machine's, not the strategy's"
    )
    assert (first.kind, first.of, first.seconds, memory.kind) == ("short_of_cores", "machine", 0.0, "peak")
    quiet = timed(record, 0.080, cpu_share=0.93, peak_memory_bytes=peak)
    assert "short_of_cores" not in kinds(quiet) and "no_prefetch" in kinds(quiet)


@pytest.mark.quick
def test_nearly_all_exposed_time_has_a_cause_or_is_called_unknown(tmp_path: Path) -> None:
    """Many small causes, and one that the trace does not show: 95 % of what is exposed are told."""
    causes = ("late_start", "link_busy", "nothing_to_hide_behind", "waiting_for_peer", "unknown", "late_start")
    exposed = [
        (unit, "backward", kind, 12, 5, cause)
        for unit, cause, kind in zip("abcdef", causes, ["all_gather"] * 5 + ["reduce_scatter"])
    ]
    record = by_hand(tmp_path, exposed=exposed)
    told_s = sum(each.seconds for each in findings(record) if each.of == "exposed")
    assert told_s >= 0.95 * 0.030
    assert {"unknown", "smaller_causes"} & set(kinds(record))


@pytest.mark.quick
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_large_idle_share_is_told_even_where_nobody_knows_why(tmp_path: Path, device: str) -> None:
    record = by_hand(tmp_path, exposed=[])
    record.environment["device"] = device
    (found,) = findings(record)
    assert (found.kind, found.of, found.seconds) == ("idle", "step", pytest.approx(0.040))
    assert found.title == "Nothing ran for 40.0 ms of each step (40 %): the reason is unknown"
    assert ("py-spy" in found.remedy) == (device == "cpu")


# ---- idle time


def record_of(tmp_path: Path, rank: GpuRank) -> RunRecord:
    return record_of_traces([rank.write(tmp_path / "rank0.json")])


def busy(idle_us: float) -> GpuRank:
    """Two kernels of 200 us, the first right at the step's begin, and as long between them as is asked for."""
    rank = GpuRank(world_size=1).step(1, 99, 500 + idle_us).kernel(99, 100, 300)
    return rank.kernel(300 + idle_us - 1, 300 + idle_us, 500 + idle_us)


@pytest.mark.quick
def test_a_loader_that_leaves_the_device_idle(tmp_path: Path) -> None:
    (found,) = findings(record_of(tmp_path, busy(400).loader(310, 690)))
    assert (found.kind, found.of, found.seconds) == ("slow_loading", "step", pytest.approx(380e-6))
    assert found.title == "Loading data takes 380 µs of a step of 801 µs (47 %)" and "num_workers" in found.remedy


@pytest.mark.quick
def test_synchronising_and_late_launches(tmp_path: Path) -> None:
    (late,) = findings(record_of(tmp_path, busy(400)))
    assert late.kind == "host_bound" and late.title == (
        "Nothing ran for 401 µs of each step (50 %): the host launched its next work too late"
    )
    assert kinds(record_of(tmp_path, busy(400).synchronise(120, 303))) == ["synchronisation"]


@pytest.mark.quick
def test_little_idle_time_is_no_finding(tmp_path: Path) -> None:
    assert findings(record_of(tmp_path, busy(30))) == []


@pytest.mark.quick
def test_long_idle_time_that_the_trace_does_not_explain_is_told(tmp_path: Path) -> None:
    """The second kernel was launched at once and began 900 us later."""
    trace = GpuRank(world_size=1).step(1, 99, 150).kernel(99, 100, 200).kernel(120, 1100, 1200)
    (found,) = findings(record_of(tmp_path, trace))
    assert (found.kind, found.of) == ("idle", "step") and ": the reason is unknown" in found.title
    assert "Perfetto" in found.remedy


@pytest.mark.quick
def test_a_device_that_works_through_its_loading_has_no_finding(tmp_path: Path) -> None:
    """The host takes 600 us for a batch; the device is busy with the step before for all but 30 us of 1000."""
    trace = GpuRank(world_size=1)
    for step in range(3):
        at = 1000 * step
        trace.step(step, at, at + 999).loader(at + 1, at + 601).kernel(at + 610, at + 630, at + 1600)
    assert all(each.kind != "slow_loading" for each in findings(record_of(tmp_path, trace)))


@pytest.mark.quick
def test_one_rank_s_loader_is_told_by_the_traces_of_two(tmp_path: Path) -> None:
    files = []
    for rank in (0, 1):
        trace, late = GpuRank(rank), 300 * rank
        for step in range(3):
            at = 1000 * step
            trace.step(step, at, at + 999).loader(at + 1, at + 5 + late)
            trace.kernel(at + 6 + late, at + 7 + late, at + 207 + late)
            trace.nccl("all_reduce", at + 8 + late, at + 207 + late, at + 520)
        files.append(trace.write(tmp_path / f"rank{rank}.json"))
    found = {each.kind: each for each in findings(record_of_traces(files))}
    assert found["slow_loading"].title.startswith("Rank 1 waits 304 µs a step")


@pytest.mark.quick
def test_one_rank_of_several_tells_no_waiting_from_sending(tmp_path: Path) -> None:
    """The all_reduce of 900 us may be rank 1's lateness, and rank 1's trace is not there."""
    trace = GpuRank(0, world_size=2).step(1, 99, 150).kernel(99, 100, 200).nccl("all_reduce", 105, 200, 1100)
    first = findings(record_of(tmp_path, trace))[0]
    assert first.kind == "slow_link" and first.title.startswith("Communication takes longer than the work: 900 µs of")
    assert "Waiting for 1 of the 2 ranks, whose traces were not given, is in it" in first.text
    assert first.remedy.startswith("Give the other ranks' traces too")


def test_a_job_that_shards_a_state_is_not_advised_to_shard_it():
    """At its peak memory any category may be the largest; what is sharded already can be sharded further only."""
    from fsdplab.common.names import STRATEGY_ROWS
    from fsdplab.profiling.causes.memory import ways_to_lower

    states = {"optimizer": "optimizer_state", "gradients": "unsharded_gradients", "parameters": "sharded_parameters"}
    begins = (
        "shard it:",
        "shard them:",
        "shard them over more ranks (",
        "fully_shard(..., reshard",
        "sharding_strategy",
    )
    for trainer in ("", "Trainer", "Lightning", "torchtitan"):
        for engine in ("lab", "torch-fsdp1", "torch-fsdp2", "deepspeed-3"):
            for row in STRATEGY_ROWS.values():
                job = {"job": "train.py", "engine": engine, "trainer": trainer, "strategy": row.name}
                for state in row.cuts:
                    assert not ways_to_lower(job, states[state]).startswith(begins), (job, state)
    assert ways_to_lower({"job": "train.py", "engine": "torch-ddp"}, "unsharded_gradients").startswith("shard them:")

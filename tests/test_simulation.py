"""The simulation of a step: cases small enough to check by hand, what the closed form says too, and the record."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplab import figures
from fsdplab.common.thinning import MAX_POINTS
from fsdplab.engine.core.step import Schedule
from fsdplab.figures.report.page import tabbed
from fsdplab.figures.style import alt_text
from fsdplab.figures.view import provenance, views
from fsdplab.planning import PlanError
from fsdplab.planning import program as work_module
from fsdplab.planning.efficiency import HBM_EFFICIENCY
from fsdplab.planning.memory import memory_of
from fsdplab.planning.planner import plan_spec
from fsdplab.planning.simulation import (
    StepWork,
    Transfer,
    UnitWork,
    simulate,
    simulate_work,
    simulated_step,
)  # fmt: skip
from fsdplab.planning.simulation.simulated_step import account
from fsdplab.planning.step_time import step_time, work_of
from fsdplab.profiling.findings import findings
from fsdplab.profiling.late_rank import late_rank_of
from fsdplab.records import CATEGORIES, CAUSES, LANES, RunRecord, comparison_json
from fsdplab.sessions import RunSpec, run
from fsdplab.sessions.steady_card import steady
from fsdplab.workloads.shapes import SHAPES
from tests.test_plan import ended

pytestmark = pytest.mark.quick
DATA = Path(__file__).parent.parent / "data"


def transfer(kind: str, seconds: float, axis: str = "shard") -> Transfer:
    """So many bytes at one byte a second."""
    return Transfer(kind, seconds, 1.0, 0.0, axis)


def work(gather: float = 1, reduce: float = 1, forward: float = 2, backward: float = 3, blocks: int = 2, **choices):
    """Blocks b0, b1, ... inside a root without parameters; seconds of everything."""
    sent = {"all_gather": transfer("all_gather", gather), "reduce_scatter": transfer("reduce_scatter", reduce)}
    block = UnitWork("", forward, backward, sent)
    named = tuple(replace(block, name=f"b{index}") for index in range(blocks))
    return StepWork(UnitWork("root", 0.0, 0.0), named, **choices)


def reduced_across(seconds: float) -> UnitWork:
    """Such a block, whose reduced shard is all-reduced over the replicas."""
    (block,) = work(blocks=1).blocks
    return replace(block, sent={**block.sent, "all_reduce": transfer("all_reduce", seconds, "replicate")})


def passages(found, rank: int = 0) -> list[tuple[str, str, float, float]]:
    """(unit, first letter of the kind, begin, end) of every collective, in the order of issue."""
    return [(each.unit, each.transfer.kind[4], each.begun, each.ended) for each in found.logs[rank].collectives]


def computed(found, rank: int = 0) -> list[tuple[float, float]]:
    return [(span.start, span.end) for span in found.logs[rank].computed]


# ---- by hand


def test_without_prefetch_each_gather_is_waited_for():
    found = simulate_work(work(prefetch=0))
    assert computed(found) == [(1, 3), (4, 6), (7, 10), (12, 15)]
    # the reduction of b1 is issued before the gather of b0, and one communicator keeps that order
    assert passages(found) == [
        ("b0", "g", 0, 1), ("b1", "g", 3, 4), ("b1", "g", 6, 7), ("b1", "c", 10, 11), ("b0", "g", 11, 12),
        ("b0", "c", 15, 16),
    ]  # fmt: skip
    assert found.step_s == 16


def test_prefetch_hides_all_but_the_first_of_each_phase_and_the_last_reduction():
    found = simulate_work(work(prefetch=1))
    assert computed(found) == [(1, 3), (3, 5), (6, 9), (9, 12)]
    assert passages(found) == [
        ("b0", "g", 0, 1), ("b1", "g", 1, 2), ("b1", "g", 5, 6), ("b0", "g", 6, 7), ("b1", "c", 9, 10),
        ("b0", "c", 12, 13),
    ]  # fmt: skip
    split = account(found.logs[0], 0)
    second = 10**9
    assert (split.compute_only_ns, split.overlapped_ns, split.exposed_ns) == (7 * second, 3 * second, 3 * second)


def test_on_a_slow_link_collectives_stand_in_a_queue():
    found = simulate_work(work(gather=4, reduce=4))
    assert computed(found) == [(4, 6), (8, 10), (14, 17), (18, 21)]
    assert passages(found)[-3:] == [("b0", "g", 14, 18), ("b1", "c", 18, 22), ("b0", "c", 22, 26)]


def test_two_communicators_share_the_link():
    one = simulate_work(work(reduce=2, prefetch=0))
    two = simulate_work(work(reduce=2, prefetch=0), communicators=2)
    assert passages(one)[3:] == [("b1", "c", 10, 12), ("b0", "g", 12, 13), ("b0", "c", 16, 18)]
    # from 10 both have half of the link: the gather of 1 byte ends at 12, then the reduction has its other byte alone
    assert passages(two)[3:] == [("b1", "c", 10, 13), ("b0", "g", 10, 12), ("b0", "c", 15, 17)]


def test_latency_passes_before_the_bytes():
    gather = Transfer("all_gather", 10.0, 5.0, latency_s=0.5)
    block = UnitWork("b0", 1.0, 1.0, {"all_gather": gather})
    step = StepWork(UnitWork("root", 0.0, 0.0), (block,)).shared(reshards_after_forward=False)
    found = simulate_work(step)
    assert gather.seconds == 2.5 and computed(found) == [(2.5, 3.5), (3.5, 4.5)]


def test_more_reductions_in_flight_let_the_backward_go_on():
    slow = work(gather=0, reduce=10, forward=0, backward=1, blocks=3).shared(reshards_after_forward=False)
    slow = replace(slow, blocks=(replace(slow.blocks[0], backward_s=20.0), *slow.blocks[1:]))
    assert computed(simulate_work(slow)) == [(0, 1), (1, 2), (11, 31)]
    assert simulate_work(slow).step_s == 41
    more = simulate_work(replace(slow, in_flight=2))
    assert computed(more) == [(0, 1), (1, 2), (2, 22)] and more.step_s == 32


def test_a_slow_rank_is_waited_for():
    found = simulate_work(work(forward=2, backward=2, blocks=1, prefetch=0, shards=2), paces={1: 2.0})
    assert [each.rank.first for each in found.logs] == [0, 1]
    assert computed(found, 0) == [(1, 3), (6, 8)] and computed(found, 1) == [(1, 5), (6, 10)]
    assert passages(found) == [("b0", "g", 0, 1), ("b0", "g", 5, 6), ("b0", "c", 10, 11)]
    quick, slow = (account(log, index) for index, log in enumerate(found.logs))
    assert [each.waiting_ns for each in quick.passages] == [0, 2 * 10**9, 2 * 10**9]
    assert (quick.exposed_ns, slow.exposed_ns) == (7 * 10**9, 3 * 10**9)
    assert not any(each.waiting_ns for each in slow.passages)


def test_slices_are_all_reduced_on_the_link_across_behind_their_reduction():
    each = reduced_across(5)
    found = simulate_work(StepWork(UnitWork("root", 0.0, 0.0), (each,), shards=2, replicas=3))
    assert passages(found)[-2:] == [("b0", "c", 7, 8), ("b0", "r", 8, 13)] and found.step_s == 13


def test_what_stands_between_products_is_exposed():
    block = UnitWork("b0", 2.0, 3.0, inline_forward=(transfer("all_gather", 1, "tensor"),) * 2)
    found = simulate_work(StepWork(UnitWork("root", 0.0, 0.0), (block,)))
    assert computed(found) == [(1, 2), (3, 4), (4, 7)]
    assert account(found.logs[0], 0).exposed_ns == 2 * 10**9


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_gathered_units_are_at_most_the_prefetched_ones_and_one(depth):
    (log,) = simulate_work(work(blocks=7, prefetch=depth)).logs
    held, most = set(), 0
    for unit, state, _, _ in log.life:
        held = held - {unit} if state == "sharded" else held | {unit}
        most = max(most, len(held))
    assert most == depth + 1 and not held


# ---- the engine's own schedule


def test_the_schedule_is_the_engines():
    assert work_module.Schedule is Schedule


def issued(record: RunRecord) -> list[tuple[str, str, str]]:
    """(unit, phase, kind) of rank 0's collectives in its last step, in the order in which the link carried them."""
    last = max(row["step"] for row in record.table("ledger"))
    rows = [row for row in record.table("ledger") if (row["rank"], row["step"]) == (0, last)]
    return [(row["unit"], row["phase"], row["kind"]) for row in sorted(rows, key=lambda row: row["start_ns"])]


def test_collectives_are_issued_in_the_order_of_a_recorded_run():
    recorded = RunRecord.load(DATA / "traces-08")
    assert recorded.spec["prefetch"] == 0
    spec = plan_spec(SHAPES[recorded.spec["model"]], "h100", gpus=2, seq=64, prefetch=0)
    assert len(issued(recorded)) == 8 and issued(simulate(spec)) == issued(recorded)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_collectives_are_issued_in_the_order_of_a_run(strategy, tmp_path):
    ran = run(
        RunSpec(
            model="gpt-tiny", strategy=strategy, steps=2, prefetch=1, link="400MB/s", micro_batches=2, memory=False
        ),
        directory=tmp_path / "run",
    )
    spec = plan_spec(SHAPES["gpt-tiny"], "h100", gpus=2, seq=64, strategy=strategy, grad_accum=2)
    assert len(issued(ran)) >= 12 and issued(simulate(spec)) == issued(ran)


# ---- the closed form says the same where both speak

AGREED = {
    "prefetch": {}, "no prefetch": dict(prefetch=0), "exposed": dict(gpus=64, seq=256),
    "exposed, no prefetch": dict(gpus=64, seq=256, prefetch=0), "accumulated": dict(grad_accum=3),
    "no_shard": dict(strategy="no_shard", grad_accum=2), "zero1": dict(strategy="zero1", grad_accum=3),
    "zero2": dict(strategy="zero2", grad_accum=4), "shard_grad_op": dict(strategy="shard_grad_op", grad_accum=2),
    "context": dict(gpus=64, context_parallel=2), "recomputed": dict(checkpointing="full", micro_batch=2),
    "lora": dict(lora_rank=16, base_dtype="nf4"), "one": dict(gpus=1),
    "hybrid": dict(gpus=64, strategy="hybrid_shard"),
    "hybrid, exposed": dict(gpus=512, strategy="hybrid_shard", seq=512, grad_accum=2),
    "hybrid, groups of one": dict(gpus=16, strategy="hybrid_shard", shard_size=1, seq=512),
    "tensor": dict(gpus=64, tensor_parallel=8), "tensor, recomputed": dict(gpus=64, tensor_parallel=4, grad_accum=3,
    checkpointing="full"), "context, exposed": dict(gpus=64, context_parallel=2, tensor_parallel=2, seq=512),
    "tensor, hybrid": dict(gpus=64, strategy="hybrid_shard", tensor_parallel=2, seq=512, prefetch=2),
    "two ahead": dict(gpus=16, seq=512, prefetch=2, grad_accum=2, micro_batch=3),
}  # fmt: skip


@pytest.mark.parametrize("name", AGREED)
def test_the_closed_form_agrees(name):
    spec = plan_spec("llama-3.1-8b", "h100", **AGREED[name])
    closed, record = step_time(spec), simulate(spec)
    shared = spec.tensor_parallel * spec.context_parallel > 1  # one link: the closed form knows how much, not when
    assert record.summary.step_time_s.median == pytest.approx(closed.step_s, rel=0.01 if shared else 1e-9)
    assert record.summary.comm.exposed_s == pytest.approx(closed.exposed_s, rel=0.03 if shared else 0, abs=1e-6)
    (split,) = record.table("breakdown")
    assert split["compute_ns"] / 1e9 == pytest.approx(closed.compute_s, rel=2e-6)  # rounded to ns, event by event
    assert sum(row["wire_bytes"] for row in record.table("ledger")) == pytest.approx(
        record.summary.comm.bytes_per_step, abs=500
    )


def test_tensor_parallelism_leaves_the_other_link_free():
    """Gathers go on beside its collectives, in both forms: one of them said 10.2 s, the other 9.85 s."""
    spec = plan_spec("llama-3.1-405b", "h100", gpus=512, tensor_parallel=8)
    found, closed = simulate(spec).summary.step_time_s.median, step_time(spec)
    assert found == pytest.approx(closed.step_s, rel=1e-9)
    assert max(closed.compute_s, closed.communication_s / 2) < found < closed.compute_s + closed.communication_s


def test_trees_are_taken_where_they_are_faster():
    ring = Transfer("all_reduce", 14.0, 1.0, latency_s=14.0)  # 8 ranks, 8 bytes: 14 steps of 1 s, 14 bytes each
    tree = simulated_step.faster_all_reduce(ring, 8)
    assert tree.seconds == pytest.approx(2 * 3 * 1 + 2 * 8) and tree.wire_bytes == ring.wire_bytes
    large = replace(ring, wire_bytes=14_000.0)
    assert simulated_step.faster_all_reduce(large, 8) is large and simulated_step.faster_all_reduce(ring, 1) is ring


def test_trees_shorten_a_step_with_many_replicas():
    spec = plan_spec("llama-3.1-8b", "h100", gpus=4096, strategy="hybrid_shard", seq=1024)
    rings, faster = simulate(spec), simulate(spec, trees=True)
    assert faster.summary.step_time_s.median < 0.9 * rings.summary.step_time_s.median
    assert faster.summary.comm.bytes_per_step == rings.summary.comm.bytes_per_step
    sharded = plan_spec("llama-3.1-8b", "h100", gpus=64)
    assert simulate(sharded, trees=True).table("ledger") == simulate(sharded).table("ledger")


# ---- many ranks


def test_ten_thousand_ranks_cost_what_eight_do():
    small, large = (
        simulate(plan_spec("llama-3.1-405b", "h100", gpus=gpus, gpus_per_node=8)).summary.simulated
        for gpus in (8, 10_000)
    )
    layers = SHAPES["llama-3.1-405b"].layers
    assert layers == 126 and large.ranks == {0: 10_000}
    assert large.operations <= 1.01 * small.operations and small.operations <= 10 * layers


def test_a_slow_rank_among_ten_thousand_makes_few_classes():
    spec = plan_spec("llama-3.1-8b", "h100", gpus=10_000, strategy="hybrid_shard")
    even, late = simulate(spec), simulate(spec, paces={77: 1.5})
    ranks = late.summary.simulated.ranks
    assert sum(ranks.values()) == 10_000 and ranks[77] == 1 and len(ranks) <= 8
    assert late.summary.step_time_s.median > 1.5 * step_time(spec).compute_s
    assert late.summary.simulated.operations <= len(ranks) * even.summary.simulated.operations


@pytest.mark.parametrize("paces", [{}, {5: 1.5}, {0: 1.5, 5: 1.5}, {1: 0.5}, {0: 2.0, 1: 2.0, 2: 2.0, 3: 2.0}])
def test_classes_end_when_every_rank_simulated_for_itself_does(paces):
    block = reduced_across(2)
    blocks = tuple(replace(block, name=f"b{index}") for index in range(3))
    step = StepWork(UnitWork("root", 0.5, 0.5), blocks, shards=4, replicas=2)
    apart = {rank: paces.get(rank, 1.0) + 1e-11 * rank for rank in range(8)}
    each = simulate_work(step, paces=apart)
    assert len(each.logs) == 8
    ends = {log.rank.first: log.end for log in each.logs}
    for log in simulate_work(step, paces=paces).logs:
        assert log.end == pytest.approx(ends[log.rank.first], rel=1e-9)


# ---- the record

KINDS = {
    "symmetric": ({}, {}),
    "slow rank": (dict(gpus=16, seq=1024), dict(paces={3: 1.3})),
    "two communicators": (dict(gpus=64, seq=512), dict(communicators=2, in_flight=3)),
    "hybrid": (dict(gpus=32, strategy="hybrid_shard", grad_accum=2), dict(paces={9: 1.2}, communicators=2)),
    "tensor": (dict(gpus=64, tensor_parallel=4, context_parallel=2, prefetch=3), dict(paces={60: 2.0})),
    "one": (dict(gpus=1), {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_instant_of_a_step_is_in_one_part(kind):
    choices, how = KINDS[kind]
    record = simulate(plan_spec("llama-3.1-8b", "h100", **choices), **how)
    parts = ("compute_only_ns", "overlapped_ns", "exposed_ns", "other_ns")
    for row in record.table("breakdown"):
        assert sum(row[name] for name in parts) == row["step_ns"] and row["other_ns"] == 0
        assert row["on_link_ns"] + row["copying_ns"] + row["waiting_ns"] == row["exposed_ns"]
        for table, length in (
            ("exposed", lambda each: each["exposed_ns"]),
            ("timeline", lambda each: (each["end_ns"] - each["start_ns"]) * (each["lane"] == "exposed")),
        ):
            mine = [each for each in record.table(table) if each["rank"] == row["rank"]]
            assert sum(map(length, mine)) == row["exposed_ns"]
    assert {row["lane"] for row in record.table("timeline")} <= set(LANES)
    assert {row["cause"] for row in record.table("exposed")} <= set(CAUSES)


def test_causes_are_those_of_measured_steps():
    def causes(**choices):
        spec = plan_spec("llama-3.1-8b", "h100", **{"gpus": 16, "seq": 1024} | choices)
        return {row["cause"] for row in simulate(spec).table("exposed")}

    assert "late_start" in causes(prefetch=0) and "late_start" not in causes()
    assert "link_busy" in causes(seq=256) and causes(seq=8192) == {"hidden", "nothing_to_hide_behind"}
    late = simulate(plan_spec("llama-3.1-8b", "h100", gpus=8, seq=8192), paces={3: 1.5}).table("exposed")
    assert {row["cause"] for row in late if row["rank"] == 0 and row["phase"] == "forward"} > {"waiting_for_peer"}
    assert not any(row["cause"] == "waiting_for_peer" for row in late if row["rank"] == 3)


def test_a_block_that_ends_at_the_instant_of_a_gathers_issue_was_there_to_hide_it():
    job = RunSpec(model="gpt-20m", batch_size=2, sequence_length=64, link="400MB/s", prefetch=0, device="cpu")
    rows = [row for row in steady(job).table("exposed") if row["rank"] == 0 and row["phase"] == "forward"]
    late = [row["unit"] for row in rows if row["cause"] == "late_start"]
    assert late == [f"blocks.{place}" for place in range(1, 12)], "before root and block 0 nothing was computed"


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_row_of_memory_is_the_plans_peak(kind):
    choices, how = KINDS[kind]
    spec = plan_spec("llama-3.1-8b", "h100", **choices)
    record, memory = simulate(spec, **how), memory_of(spec)
    if "in_flight" in how:
        more = record.summary.peak_memory_bytes.split["communication_buffers"]
        assert more == how["in_flight"] * memory.peak.by_category["communication_buffers"] > 0
        return
    lengths = {row["rank"]: row["step_ns"] for row in record.table("breakdown")}
    for rank, length in lengths.items():
        rows = [row for row in record.table("memory") if row["rank"] == rank]
        (peak,) = [row for row in rows if row["is_peak"]]
        assert {name: peak[name] for name in CATEGORIES} == pytest.approx(memory.peak.by_category, abs=1)
        assert all(sum(row[name] for name in CATEGORIES) <= memory.peak.total + 8 for row in rows)
        times = [row["time_ns"] for row in rows]
        assert times == sorted(times) and (times[0], times[-1]) == (0, length)
        resting = {name: rows[-1][name] for name in CATEGORIES}
        assert resting == pytest.approx(memory.resting.by_category, abs=1)


def test_a_rank_has_as_many_rows_of_memory_as_a_measured_one_at_most():
    """126 blocks have 512 moments."""
    spec = plan_spec("llama-3.1-405b", "h100", gpus=512, checkpointing="full")
    record, memory = simulate(spec, paces={3: 1.5}), memory_of(spec)
    assert len(memory.moments) > MAX_POINTS
    for rank in {row["rank"] for row in record.table("memory")}:
        rows = [row for row in record.table("memory") if row["rank"] == rank]
        assert MAX_POINTS - 4 <= len(rows) <= MAX_POINTS
        (peak,) = [row for row in rows if row["is_peak"]]
        assert {name: peak[name] for name in CATEGORIES} == pytest.approx(memory.peak.by_category, abs=1)
        times = [row["time_ns"] for row in rows]
        assert times == sorted(times) and times[0] == 0 < times[-1]


def test_a_saved_record_is_read_back(tmp_path):
    record = simulate(plan_spec("llama-3.1-8b", "h100", gpus=16), paces={3: 1.5}, folder=tmp_path / "run").save()
    again = RunRecord.load(tmp_path / "run")
    assert again.tables == record.tables and again.summary == record.summary
    assert set(again.provenance.values()) == {"simulated"}


def test_a_page_of_alike_ranks_does_not_ask_for_a_profile_of_two():
    page = str(tabbed("", [simulate(plan_spec("gpt2", "h100", gpus=8, seq=128))], []))
    assert "All simulated ranks are alike" in page and "no collective of two ranks" not in page


def test_a_step_of_too_many_events_is_refused_before_it_fills_the_memory():
    """A million micro-batches took over 12 GB before somebody ended it."""
    with pytest.raises(PlanError, match="32 blocks x 1,000,000 micro-batches = 32,000,000 passes; expected at most"):
        simulate(plan_spec("llama-3.1-8b", "h100", grad_accum=10**6))


@pytest.mark.parametrize(
    "how,words",
    [
        (dict(communicators=3), "communicators is 3; expected 1, or 2"),
        (dict(in_flight=0), "in_flight is 0; expected a whole number from 1"),
        (dict(paces={8: 1.5}), "a pace is given for rank 8; expected one from 0 to 7"),
        (dict(paces={1: 0.0}), "the pace of rank 1 is 0.0; expected a number above 0"),
        (dict(paces={1: float("nan")}), "the pace of rank 1 is nan"),
    ],
)
def test_bad_choices_are_refused(how, words):
    with pytest.raises(PlanError, match="expected") as refused:
        simulate(plan_spec("llama-3.1-8b", "h100", gpus=8), **how)
    assert words in str(refused.value)


# ---- figures


@pytest.fixture(scope="module")
def late() -> RunRecord:
    """A late rank among 16, on a network that does not hide everything."""
    return simulate(plan_spec("llama-3.1-8b", "h100", gpus=16, seq=1024), paces={3: 1.5})


FIGURES = (
    "rank_timeline", "step_bar", "exposed_bar", "exposed_heatmap", "straggler_map", "step_time", "memory_by_category",
    "ledger_against_formula", "pareto", "memory_timeline", "linked_view",
)  # fmt: skip


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_draws_it_and_says_simulated(name, late):
    drawn = getattr(figures, name)(late)
    said = drawn.layout.title.subtitle.text
    assert said.startswith("Simulated for 16 GPU ranks") and "easured" not in said
    assert drawn.data and alt_text(drawn)


def test_memory_of_a_large_model_is_drawn_in_gigabytes(late):
    """An axis of 40k MB is read by nobody; the unit is that of the figure's own largest bytes, also in its hovers."""
    beside = figures.memory_by_category([RunRecord.load(DATA / "traces-08"), late])
    drawn = [getattr(figures, name)(late) for name in FIGURES]
    with_bytes = 0
    for figure in [*drawn, beside]:
        words = json.dumps(figure.to_plotly_json(), default=str)
        assert not re.search(r"\(MB\)|} MB", words), words[:200]
        with_bytes += "(GB)" in words
    assert with_bytes == 6  # five of the figures have bytes, of which the bars of memory are drawn twice
    longest = max(max(trace.x) for trace in figures.memory_by_category(late).data)
    assert 0.5 < longest < 50


def test_a_figure_of_both_says_which_is_simulated(late):
    measured = RunRecord.load(DATA / "traces-08")
    for draw in (figures.step_time, figures.memory_by_category, figures.step_bar):
        said = draw([measured, late]).layout.title.subtitle.text.replace("<br>", " ")
        assert said.startswith("Measured on 2 CPU ranks and simulated for 16 GPU ranks (full_shard, llama"), said


def test_the_difference_of_two_simulations_says_so(late):
    eager = simulate(plan_spec("llama-3.1-8b", "h100", gpus=16, seq=1024, prefetch=0))
    assert figures.difference(late, eager).layout.title.subtitle.text.startswith("Simulated for 16 GPU ranks")


def test_a_page_claims_nothing_measured(late):
    said = dict(provenance(views([late])))
    assert "measured" not in said and "full_shard, for 16 GPU ranks" in said["simulated"]
    page = figures.comparison_page(comparison_json([late]), [late])
    text = re.sub(r"<script.*?</script>", "", page[page.index("<body>") :], flags=re.DOTALL)
    assert "Simulated for 16 GPU ranks" in text and "Measured on" not in text and "real processes" not in text


def test_findings_and_tables_of_a_simulation_say_simulated():
    record = simulate(plan_spec("llama-3.1-8b", "h100", gpus=512, seq=512))
    found = findings(record)
    assert any("the data sheet's link, simulated" in each.text for each in found)
    assert not any("measured" in f"{each.title} {each.text} {each.remedy}" for each in found)
    page = figures.comparison_page(comparison_json([record]), [record])
    text = re.sub(r"<script.*?</script>", "", page[page.index("<body>") :], flags=re.DOTALL)
    assert "would cost, simulated" in text and "What was simulated" in text and "Simulated for" in text
    assert "A simulated step has no traces" in text and "Where it ran" not in text


# ---- the command


def test_a_pipeline_is_refused_instead_of_simulated_without_its_stages():
    """The whole model was once simulated on every stage, four times as long as the closed form."""
    with pytest.raises(PlanError, match="in 4 stages is not simulated event by event; leave --pp out"):
        simulate(plan_spec("llama-3.1-70b", "h100", gpus=64, pipeline_parallel=4, grad_accum=8))


def test_what_collectives_take_from_the_compute_is_no_part_of_the_optimizers_step():
    """All ranks' passes are longer by it; it once lay in the optimizer's step, a quarter of this one, and then as a
    backward of no unit behind the last reduction.
    """
    spec = plan_spec("llama-3.1-8b", "h100", gpus=8)
    record = simulate(spec)
    moved_s = (2 * 8 + 3 * 4) * spec.model.parameters / 8 / (HBM_EFFICIENCY * spec.gpu.hbm_bytes_per_s)
    assert record.summary.profile.optimizer_s == pytest.approx(moved_s, rel=1e-3)
    rows = record.table("timeline")
    assert not [row for row in rows if row["name"] == "slowed by collectives"]
    last = max(row["end_ns"] for row in rows if row["lane"] == "reduce_scatter")
    assert not [row for row in rows if row["lane"] == "compute" and row["start_ns"] >= last and row["unit"]]


SPREAD = (
    dict(gpus=8),
    dict(gpus=16, strategy="hybrid_shard", grad_accum=3),
    dict(gpus=8, tensor_parallel=2, checkpointing="full"),
    dict(gpus=8, strategy="no_shard"),
    dict(gpus=4, gpu="4090", checkpointing="full", offload=True),
    dict(gpus=1),
)


@pytest.mark.parametrize("choices", SPREAD, ids=str)
def test_slowed_compute_is_spread_and_nothing_else_is_longer(choices):
    """The step and its compute are longer by these seconds, which lie beside collectives; exposed time is as before."""
    spec = plan_spec("llama-3.1-8b", **({"gpu": "h100"} | choices))
    work = work_of(spec)
    found = simulate_work(work)
    (log,) = found.logs
    alone = simulate_work(replace(work, slowed_s=0.0)).logs[0]
    assert found.step_s == pytest.approx(alone.end + work.slowed_s, rel=1e-9)
    assert found.step_s == pytest.approx(step_time(spec).step_s, rel=1e-3)
    assert sum(span.end - span.start for span in log.computed) == pytest.approx(work.compute_s, rel=1e-9)
    ours, before = account(log, 0), account(alone, 0)
    computed = before.compute_only_ns + before.overlapped_ns + 1e9 * work.slowed_s
    assert ours.compute_only_ns + ours.overlapped_ns == pytest.approx(computed, abs=2e4)
    assert ours.exposed_ns == pytest.approx(before.exposed_ns, abs=2e4)
    took = [each.ended - each.begun for each in log.collectives]
    alone_took = [each.ended - each.begun for each in alone.collectives]
    if work.slowed_s and "tensor_parallel" not in choices:  # whose collectives part the compute
        assert took == pytest.approx(alone_took, rel=1e-6), "collectives take as long as before"
    spans = [*log.computed, *log.waited]
    assert all(span.end >= span.start for span in spans) and log.passed == sorted(log.passed)
    ordered = sorted(log.computed, key=lambda span: span.start)
    assert all(one.end <= other.start + 1e-9 for one, other in zip(ordered, ordered[1:])), "one kernel at a time"


def test_ranks_with_paces_of_their_own_keep_slowed_compute_behind_their_passes():
    found = simulate_work(work_of(plan_spec("llama-3.1-8b", "h100", gpus=8)), paces={3: 1.5})
    assert all([span for span in log.computed if span.kind == "slowed by collectives"] for log in found.logs)


def test_the_command_prints_the_simulated_step_beside_the_closed_form(capsys, tmp_path):
    page, path = tmp_path / "step.html", tmp_path / "step.json"
    given = ["simulate", "--model", "llama-3.1-405b", "--world-size", "10000", "--html", str(page), "--json", str(path)]
    code, out, _ = ended(["plan", *given], capsys)
    found = json.loads(path.read_text())
    simulated, closed = found["simulated"], found["closed_form"]
    assert code == 0 and re.search(r"step +45\.1 s +45\.1 s +\+0\.0%", out), out
    assert simulated["step_time_s"]["median"] == pytest.approx(closed["step_time_s"], rel=1e-9)
    # what a simulation costs is its events, and their number does not grow with the ranks
    assert "10,000 ranks of 1 kind, 1,016 events" in out and simulated["simulated"]["operations"] == 1016
    assert set(found["provenance"].values()) == {"simulated"}
    assert "Simulated for 10000 GPU ranks" in page.read_text(encoding="utf-8")


def test_the_command_shows_that_the_two_agree_with_tensor_parallelism(capsys):
    code, out, _ = ended(["plan", "simulate", "--world-size", "64", "--tp", "8"], capsys)
    (step,) = [line for line in out.splitlines() if line.strip().startswith("step ")]
    assert code == 0 and step.split()[-1] == "+0.0%" and "64 ranks of 1 kind" in out


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["simulate", "--gpu", "a10g"], "no bf16 FLOP/s are known for A10G"),
        (["simulate", "--world-size", "12"], "12 GPUs do not fill nodes of 8"),
        (["simulate", "--html", "/no/such/folder/a.html"], "--html /no/such/folder/a.html cannot be written"),
    ],
    ids=str,
)
def test_a_wrong_simulation_is_one_clear_line(arguments, words, capsys):
    code, _, said = ended(["plan", *arguments], capsys)
    assert code == 2 and words in said and said.count("\n") == 1


def test_the_late_rank_is_found(late):
    found = late_rank_of(simulate(plan_spec("llama-3.1-8b", "h100", gpus=8, seq=8192), paces={3: 1.5}))
    assert found is not None and found.rank == 3

"""Every number that a remedy, an advice or a plan's sentence shows is computed once more here.

A sentence is asked for its numbers, in their order, and not for its words. A number is right where the one that is
expected lies within half of its last digit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from fsdplab.common.sizes import size
from fsdplab.figures.conclusion import change_words, gaps, verdict
from fsdplab.figures.fastest import step_words
from fsdplab.figures.outlook import Outlook
from fsdplab.figures.view import RunView
from fsdplab.planning import search
from fsdplab.planning.advice import hiding_sentence, hybrid_sentence
from fsdplab.planning.as_flags import in_short
from fsdplab.planning.memory import memory_of
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.plan_traffic import LINK_EFFICIENCY
from fsdplab.planning.planner import plan_of, plan_spec
from fsdplab.planning.remedies import cards_for_states, in_words, lacking, more_cards, remedies
from fsdplab.planning.search import Fit, candidate_of
from fsdplab.planning.step_time import Compute
from fsdplab.profiling.findings import Finding, findings
from fsdplab.profiling.late_rank import CHANCE, fewest_steps, late_rank_of, too_few_steps
from fsdplab.records import RunRecord, Spread, Summary
from fsdplab.records.comparison import drift_sentence
from fsdplab.records.summary import Peak, Predicted
from fsdplab.sessions import RunSpec
from fsdplab.sessions.changes import best_change
from fsdplab.sessions.prediction import Prediction, predict
from fsdplab.sessions.steady_card import steady_step
from tests.test_findings import MS, by_hand, ledger, steps_of, timed

pytestmark = pytest.mark.quick
UNITS = {
    "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "ns": 1e-9, "µs": 1e-6,
    "ms": 1e-3, "s": 1.0, "%": 0.01, "": 1.0,
}  # fmt: skip
NUMBER = re.compile(r"(?<![\w.])(\d+(?:,\d{3})*(?:\.\d+)?)(?: ?([kMG]?B(?:/s)?|[nµm]?s|%)(?!\w))?(?!\w)")


class Shown(NamedTuple):
    """A number of a sentence in bytes, seconds or parts of one, and half of its last digit."""

    value: float
    half: float


def shown_in(sentence: str) -> list[Shown]:
    """The numbers of a sentence in their order; those of names, such as zero1 and bf16, are none."""
    found = []
    for digits, unit in NUMBER.findall(sentence):
        decimals = len(digits.partition(".")[2])
        found.append(Shown(UNITS[unit] * float(digits.replace(",", "")), UNITS[unit] * 0.5 * 10**-decimals))
    return found


def assert_shows(sentence: str, expected: Sequence[float]) -> None:
    """The sentence shows these numbers, in this order, and no others."""
    shown = shown_in(sentence)
    right = [abs(each.value - number) <= 1.001 * each.half for each, number in zip(shown, expected)]
    assert len(shown) == len(expected) and all(right), f"{sentence}\nshows {shown}\nexpected {list(expected)}"


# ---- remedies and findings, from rows written by hand


def finding_of(record: RunRecord, kind: str) -> Finding:
    return next(each for each in findings(record) if each.kind == kind)


def test_a_slow_link(tmp_path: Path) -> None:
    """70 ms of communication, of which 60 are exposed, beside 20 of computing: 3.5 times the tokens, 50 ms too much."""
    exposed = [("a", "forward", "all_gather", 70, 60, "late_start")]
    link = {"queues": 2, "name": "eth", "bytes_per_s": 125e6}
    found = finding_of(by_hand(tmp_path, compute=20, other_rank=20, exposed=exposed, link=link), "slow_link")
    assert_shows(found.remedy, [70 / 20])
    assert_shows(found.title, [0.070, 0.020])
    assert_shows(found.text, [0.050, 125e6])


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_one_unit_further_ahead(tmp_path: Path, prefetch: int) -> None:
    record = by_hand(tmp_path, exposed=[("a", "forward", "all_gather", 20, 15, "late_start")])
    record.spec["prefetch"] = prefetch
    found = finding_of(record, "no_prefetch")
    assert_shows(found.remedy, [prefetch + 1])
    assert_shows(found.title, [0.015, 15 / 100, 0.015])
    assert_shows(found.text, [prefetch])


def test_two_units_ahead_where_one_is_gathered(tmp_path: Path) -> None:
    exposed = [("a", "backward", "all_gather", 30, 20, "link_busy")]
    record = by_hand(tmp_path, exposed=exposed, link={"queues": 2, "name": "eth", "bytes_per_s": 125e6})
    found = finding_of(record, "busy_link")
    assert_shows(found.remedy, [record.spec["prefetch"] + 1])
    assert_shows(found.title, [0.020, 0.020])


def test_units_that_are_too_small(tmp_path: Path) -> None:
    """Three gathers of 10 ms each, of 500 kB sent at 100 MB/s: 15 of 30 ms are latency, and 24 of 30 exposed."""
    exposed = [(unit, "forward", "all_gather", 10, 8, "nothing_to_hide_behind") for unit in "abc"]
    record = by_hand(tmp_path, exposed=exposed, link={"queues": 2, "name": "slow", "bytes_per_s": 100e6})
    rows = ledger(a=1_000_000, b=1_000_000, c=1_000_000)
    record.tables["ledger"] = [row | {"emulated": True, "end_ns": 10 * MS} for row in rows]
    found = finding_of(record, "tiny_units")
    assert_shows(found.title, [3, 1e6, 0.015])
    assert_shows(found.text, [15 / 30, 0.015 * 24 / 30])


def test_one_unit_with_most_parameters(tmp_path: Path) -> None:
    record = by_hand(tmp_path, exposed=[("root", "forward", "all_gather", 30, 24, "nothing_to_hide_behind")])
    record.tables["ledger"] = ledger(root=90_000_000, a=20_000_000, b=10_000_000)
    assert_shows(finding_of(record, "one_big_unit").title, [90 / 120, 0.024])


def test_parts_of_exposed_time(tmp_path: Path) -> None:
    """46 of 100 ms: 10 on the link, 6 copying, 25 waiting for a peer and 5 for a core."""
    record = by_hand(tmp_path, exposed=[("a", "forward", "all_gather", 50, 46, "unknown")])
    parts = {"on_link_ns": 10 * MS, "copying_ns": 6 * MS, "waiting_ns": 25 * MS, "no_core_ns": 5 * MS}
    record.table("exposed")[0] |= parts
    for kind, spent_s in {"unknown": 0.010, "skew": 0.025, "copies": 0.006, "no_core": 0.005}.items():
        first, second, *_ = shown_in(finding_of(record, kind).title)
        assert (first.value, second.value) == pytest.approx((spent_s, spent_s / 0.100)), kind


def test_many_small_causes_are_added_up(tmp_path: Path) -> None:
    causes = ("late_start", "link_busy", "nothing_to_hide_behind", "waiting_for_peer", "unknown", "late_start")
    kinds = ["all_gather"] * 5 + ["reduce_scatter"]
    exposed = [(unit, "backward", kind, 12, 5, cause) for unit, cause, kind in zip("abcdef", causes, kinds)]
    found = finding_of(by_hand(tmp_path, exposed=exposed), "smaller_causes")
    listed = [each.value for each in shown_in(found.text)]
    assert len(listed) > 1
    assert_shows(found.title, [sum(listed), sum(listed) / 0.100])


def test_idle_time_by_cause(tmp_path: Path) -> None:
    """40 of 100 ms: 24 since the host was late, 10 of copies, 6 unknown."""
    record = by_hand(tmp_path, exposed=[])
    columns = ("host_bound_ns", "data_loading_ns", "synchronisation_ns", "copies_ns", "kernel_gap_ns", "rest_ns")
    record.tables["idle"] = [
        {"rank": rank, "step": 7, **dict.fromkeys(columns, 0)}
        | {"host_bound_ns": 24 * MS, "copies_ns": 10 * MS, "rest_ns": 6 * MS}
        for rank in (0, 1)
    ]
    found = finding_of(record, "host_bound")
    assert_shows(found.title, [0.040, 40 / 100, 0.024])
    assert_shows(found.text, [0.010, 0.006])


def test_the_optimizers_step(tmp_path: Path) -> None:
    """30 of 100 ms: 18 of computing and 12 of exposed exchange."""
    record = by_hand(tmp_path, exposed=[("a", "optimizer", "all_gather", 12, 12, "unknown")])
    record.tables["timeline"] = [
        {"rank": 0, "step": 7, "lane": "compute", "unit": "", "phase": "optimizer", "start_ns": 0, "end_ns": 18 * MS}
    ]
    assert_shows(finding_of(record, "optimizer_step").title, [30 / 100, 0.030, 12 / 30])


def test_one_long_step(tmp_path: Path) -> None:
    """100 ms, and once 175 on rank 1: 75 ms of three steps are 25 a step."""
    record = steps_of(
        tmp_path, lambda rank, step, number: 15.0 if (rank, step) == (1, 2) else 0.0, steps=3,
        longer_ms=lambda rank, step: 75.0 if (rank, step) == (1, 2) else 0.0,
    )  # fmt: skip
    found = finding_of(record, "long_step")
    assert_shows(found.title, [2, 1, 0.175, 0.100])
    assert_shows(found.text, [3, 0.025])


def test_a_rank_that_comes_late(tmp_path: Path) -> None:
    """Rank 1 of 2 comes 5 ms late to each of 40 collectives; it computes as long as the other, then a sixth longer."""
    late = steps_of(tmp_path, lambda rank, step, number: 5.0 if rank == 1 else 0.0)
    found = finding_of(late, "late_rank")
    assert_shows(found.title, [1, 40, 40, 0.005])
    assert_shows(found.text, [0.060, 0.060, 5 * 0.005])
    assert_shows(found.remedy, [1])
    slow = steps_of(
        tmp_path, lambda rank, step, number: 5.0 if rank == 1 else 0.0,
        compute_ms=lambda rank, step: 70.0 if rank == 1 else 60.0,
    )  # fmt: skip
    found = finding_of(slow, "slow_rank")
    assert_shows(found.title, [1, 0.070, 0.060])
    assert_shows(found.text, [40, 40, 0.005, 5 * 0.005])
    assert_shows(found.remedy, [1])


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_the_steps_that_it_takes_to_name_a_rank(tmp_path: Path, ranks: int) -> None:
    """The least number by which one of so many ranks is last in all of them by chance in one case of a hundred."""
    steps = next(count for count in range(6, 99) if ranks * ranks**-count <= CHANCE)
    assert fewest_steps(ranks) == steps
    record = steps_of(tmp_path, lambda rank, step, number: 5.0 if rank == 1 else 0.0, ranks=ranks, steps=4)
    assert_shows(finding_of(record, "skew").text, [4, steps, steps])


def test_one_rank_is_late_to_nobody(tmp_path: Path) -> None:
    """No number of steps names a rank that is alone."""
    with pytest.raises(ValueError, match="ranks is 1; expected 2 or more"):
        fewest_steps(1)
    record = steps_of(tmp_path, lambda rank, step, number: 0.0, ranks=1, steps=4)
    assert late_rank_of(record) is None and too_few_steps(record).startswith("one rank alone cannot tell")
    record = steps_of(tmp_path, lambda rank, step, number: 0.0, ranks=2, steps=1)
    assert late_rank_of(record) is None and too_few_steps(record).startswith("1 step cannot tell (8 can")


def test_the_peak(tmp_path: Path) -> None:
    peak = {"total": 300_000_000, "by_category": {"activations": 210_000_000, "optimizer_state": 90_000_000}}
    record = by_hand(tmp_path, exposed=[], peak_memory_bytes=peak, workspace_bytes=8_500_000)
    found = finding_of(record, "peak")
    assert_shows(found.title, [300e6, 210e6, 210 / 300])
    assert_shows(found.text, [8.5e6])


def test_loading_everywhere(tmp_path: Path) -> None:
    record = timed(steps_of(tmp_path, lambda rank, step, number: 0.0, steps=3), 0.080)
    record.tables["steps"] = [
        {"rank": rank, "step": step, "loss": None, "step_time_s": None, "tokens": None, "loading_s": 0.030}
        for rank in (0, 1)
        for step in range(3)
    ]
    assert_shows(finding_of(record, "slow_loading").title, [0.030, 0.080, 0.375])


# ---- advice on runs


def test_the_change_that_gains_most() -> None:
    """Tokens a second from steps on the steady card: the same tokens in a shorter step, then twice the tokens."""
    spec = RunSpec(model="gpt-20m", world_size=2, batch_size=2, sequence_length=128, link="150MB/s", device="cpu")
    for before, after, tokens in (
        (spec, replace(spec, precision="bf16"), 1),
        (replace(spec, precision="bf16"), replace(spec, precision="bf16", batch_size=4), 2),
    ):
        steps = [steady_step(each).step_time_s for each in (before, after)]
        change, peak = best_change(before), predict(after).peak_bytes
        run = RunView("full_shard", "lab", 2, Summary(peak_memory_bytes=Peak(232_000_000), change=change))
        said = change_words([run])
        gain, *memory = [each for each in shown_in(said) if each.value not in (16, 32)]
        assert gain.value == pytest.approx(tokens * steps[0] / steps[1] - 1, abs=gain.half)
        assert [each.value for each in memory] == [pytest.approx(peak, abs=0.5e6), 232e6]


def test_what_an_emulated_card_lacks() -> None:
    predicted = Prediction({"activations": 250_000_000, "optimizer_state": 100_000_000}, None, None, None, fits=False)
    assert_shows(Outlook(RunSpec(card=300_000_000), predicted).misfit, [350e6, 300e6, 50e6])


def compared(label: str, measured: int, predicted: int, activations: tuple[int, int]) -> RunView:
    """A run with a peak and activations, measured and predicted."""
    splits = [{"activations": part, "other": whole - part} for part, whole in zip(activations, (measured, predicted))]
    summary = Summary(
        peak_memory_bytes=Peak(measured, splits[0]), predicted=Predicted(Peak(predicted, splits[1]), None, None)
    )
    return RunView(label, "lab", 2, summary)


def test_predicted_beside_measured() -> None:
    """220 of 200 MB are 10 % too much, 285 of 300 MB 5 % too little."""
    runs = [
        compared("zero1", 200_000_000, 220_000_000, (100_000_000, 130_000_000)),
        compared("zero2", 300_000_000, 285_000_000, (90_000_000, 60_000_000)),
    ]
    assert_shows(verdict(runs), [0.10])
    assert "zero1" in verdict(runs)
    (activations,) = gaps(runs[0])
    assert_shows(activations, [130e6, 100e6])


def test_a_machine_whose_speed_drifted() -> None:
    drift = {"strategy": "zero1", "engine": "lab", "first_s": 0.400, "again_s": 0.500, "relative": 0.25}
    assert_shows(drift_sentence({"drift": drift}), [0.25, 0.500, 0.400])


def test_steps_of_two_runs() -> None:
    fast, slow = (
        RunView(name, "lab", 2, Summary(Spread.of(steps)))
        for name, steps in (("zero1", (0.40, 0.40, 0.40, 0.40)), ("zero2", (0.70, 0.70, 0.70, 0.70)))
    )
    assert_shows(step_words([fast, slow]), [0.400, 0.70])


# ---- plans


EIGHT = plan_spec("llama-3.1-8b", "h100", gpus=8)
SEVENTY = plan_spec("llama-3.1-70b", "h100", gpus=64, checkpointing="full")
TOO_LARGE = plan_spec("llama-3.1-70b", "h100", gpus=8, micro_batch=2, checkpointing="selective")
P, ROOT, BLOCK = EIGHT.model.parameters, EIGHT.model.root_parameters, EIGHT.model.block_parameters
OTHERS = 7 / 8  # of all bytes of a collective over 8 ranks, what a rank sends
GATHERED = 2 * (2 * P - ROOT) * OTHERS  # bytes of full_shard's gathers in bf16: blocks twice, the root once


def peak(spec: PlanSpec) -> float:
    return memory_of(spec).peak.total


def held(spec: PlanSpec, *categories: str) -> float:
    by_category = memory_of(spec).peak.by_category
    return sum(by_category[name] for name in categories)


def most(spec: PlanSpec, category: str) -> float:
    return max(moment.by_category[category] for moment in memory_of(spec).moments)


def states(spec: PlanSpec) -> float:
    return held(spec, "sharded_parameters", "sharded_gradients", "optimizer_state")


def step_s(spec: PlanSpec) -> float:
    time = plan_of(spec).time
    assert time is not None
    return time.step_s


def speed(spec: PlanSpec) -> float:
    """Tokens a second and GPU."""
    ranks = spec.gpus // spec.tensor_parallel
    return spec.micro_batch * spec.grad_accum * spec.seq * ranks / step_s(spec) / spec.gpus


def exposed(spec: PlanSpec) -> float:
    time = plan_of(spec).time
    assert time is not None
    return (time.step_s - time.compute_s) / time.step_s


def both(number: Callable[[PlanSpec], float], *specs: PlanSpec) -> list[float]:
    return [number(spec) for spec in specs]


def link_s(nbytes: float, ranks: int) -> float:
    """Seconds of a gather or a reduction of so many bytes in all over the NVLink of a node."""
    sent = nbytes * (ranks - 1) / ranks
    return sent / (LINK_EFFICIENCY * 450e9) + (ranks - 1) * 3.4e-6


def test_where_communication_hides() -> None:
    """A forward hides a gather, a backward a gather and a reduction; communication stays as the tokens grow."""
    compute, gather, reduction = Compute(EIGHT, None), link_s(2 * BLOCK, 8), link_s(4 * BLOCK, 8)
    ratios = gather / compute.forward_s, (gather + reduction) / compute.backward_s
    assert_shows(hiding_sentence(EIGHT), [4096 * max(ratios), 4096])
    assert hiding_sentence(replace(EIGHT, gpus=1)) == ""


def test_whether_hybrid_sharding_pays() -> None:
    for slower, pays in ((1.0, False), (32.0, True)):
        nodes = replace(EIGHT, gpus=16, oversubscription=slower)
        hybrid = replace(nodes, strategy="hybrid_shard", shard_size=8)
        said = hybrid_sentence(nodes)
        assert_shows(said, [8, step_s(hybrid), step_s(nodes)])
        assert ("pays" in said and "does not" not in said) == (step_s(hybrid) < 0.99 * step_s(nodes)) == pays, said
    too_large = replace(TOO_LARGE, gpus=16, oversubscription=32.0, checkpointing="none")
    assert "would pay, but does not fit a card" in hybrid_sentence(too_large)


def test_what_a_plan_lacks_and_how_many_cards_hold_its_states() -> None:
    """4 bytes a parameter of masters, 16 of all states: over so many cards."""
    card, parameters = TOO_LARGE.gpu.memory_bytes, TOO_LARGE.model.parameters
    cards = [math.ceil(bytes_each * parameters / card) for bytes_each in (4, 16)]
    alone = held(TOO_LARGE, "activations")
    assert_shows(lacking(plan_of(TOO_LARGE)) or "", [alone, card, peak(TOO_LARGE) - card])
    assert_shows(cards_for_states(TOO_LARGE) or "", cards)
    fewer = replace(SEVENTY, gpus=8)
    fitting_on = next(gpus for gpus in range(8, 99, 8) if peak(replace(fewer, gpus=gpus)) <= card)
    assert_shows(lacking(plan_of(fewer)) or "", [peak(fewer), card, peak(fewer) - card])
    assert more_cards(fewer) == [{"gpus": fitting_on}]


def test_what_makes_a_plan_fit_has_its_peak_and_its_speed() -> None:
    """A remedy's figures are those of the plan with its changes."""
    for spec in (TOO_LARGE, replace(SEVENTY, gpus=8)):
        for remedy in remedies(spec):
            other = replace(spec, **dict(remedy.changes))
            tokens_per_s = other.step_tokens / step_s(other) / other.gpus
            host = [16 * other.model.parameters / other.gpus * other.gpus_per_node] if other.offload else []
            said = in_words(remedy)
            assert peak(other) <= other.gpu.memory_bytes and f"{tokens_per_s:,.0f} tokens/s" in said, said
            assert size(peak(other)) in said and (not host or size(host[0]) in said), said


# ---- the answers of a search


FAST = plan_spec("llama-3.1-8b", "h100", gpus=16, checkpointing="full", grad_accum=4)
CHEAP, SAFE = replace(FAST, gpus=8, grad_accum=8), replace(FAST, tensor_parallel=2, grad_accum=8)
BOLD = replace(FAST, micro_batch=4, seq=8192)
SLOW_NETWORK = dict(oversubscription=4.0)
# of the bands of tokens/s of plans without tensor parallelism, and with it
MIDDLE, MIDDLE_CUT = math.sqrt(0.93 * 1.16), math.sqrt(0.74 * 1.25)


def answered(fast: PlanSpec, cheap: PlanSpec, safe: PlanSpec) -> Fit:
    """A search that answered with these plans."""
    own, fastest, cheapest, safest = (candidate_of(spec) for spec in (fast, fast, cheap, safe))
    return Fit(own, 64, fastest, cheapest, safest, None, 0, 0)


def certainly(spec: PlanSpec) -> float:
    """Bytes that a card needs for certain: what the allocator reserved of torchtitan's run beside a GiB of the
    framework, or the upper end of the band.
    """
    upper_end = 1.08 if spec.tensor_parallel > 1 else 1.22
    return max((peak(spec) - 2**30) * 59.41 / 49.54 + 2**30, upper_end * peak(spec))


def test_why_the_fastest_is_not_faster() -> None:
    found = answered(BOLD, CHEAP, SAFE)
    assert found.fastest is not None
    assert_shows(search.why_fastest(found, found.fastest), [search.EQUAL, exposed(BOLD)])


def test_what_the_cheapest_saves_and_how_much_longer_it_trains() -> None:
    fast = replace(FAST, **SLOW_NETWORK)
    found = answered(fast, CHEAP, SAFE)
    assert found.cheapest is not None
    hours = [step_s(spec) * spec.gpus for spec in (fast, CHEAP)]
    longer = step_s(CHEAP) / step_s(fast)
    expected = [1 - hours[1] / hours[0], exposed(CHEAP), exposed(fast), longer, 8, 16]
    assert_shows(search.why_cheapest(found, found.cheapest), expected)


def test_what_the_safest_leaves_free_and_how_fast_it_is() -> None:
    for safe, middle in ((replace(FAST, micro_batch=2, grad_accum=2), 1.0), (SAFE, MIDDLE_CUT / MIDDLE)):
        found, needed = answered(FAST, CHEAP, safe), certainly(safe)
        assert found.safest is not None
        expected = [needed, safe.gpu.memory_bytes - needed, step_s(FAST) / step_s(safe) * middle]
        assert_shows(search.why_safest(found, found.safest), expected)


def test_a_plan_in_short() -> None:
    spec = plan_spec("llama-3.1-70b", "h100", gpus=64, micro_batch=3, grad_accum=5, tensor_parallel=4)
    assert_shows(in_short(spec), [3, 5, 4])
    assert_shows(in_short(replace(spec, strategy="hybrid_shard", shard_size=8)), [8, 3, 5, 4])

"""The advice below a comparison: ordered by what a change gains on the steady card, and only what the run can take."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fsdplab import RunSpec
from fsdplab.figures.conclusion import costliest
from fsdplab.profiling.findings import findings
from fsdplab.records import RunRecord
from fsdplab.records.summary import Change
from fsdplab.sessions.changes import COSTS, LEAST_GAIN, best_change, edits, gains, in_order

pytestmark = pytest.mark.quick
DATA = Path(__file__).parents[1] / "data"


def change(words: str, gain: float, costs: str) -> Change:
    return Change(words, gain, None, costs)


SHORT, AHEAD = change("bf16", 0.65, "precision"), change("prefetch", 0.61, "memory")


@pytest.fixture(scope="module")
def late() -> RunRecord:
    """full_shard that gathers nothing ahead, on two ranks of one machine, over an emulated link."""
    return RunRecord.load(DATA / "lesson-07" / "late")


def test_what_gains_most_comes_first(late: RunRecord) -> None:
    early = RunRecord.load(DATA / "lesson-07" / "early")
    first, second = costliest([early, late], most=9)
    assert findings(late)[0].kind == "slow_link", "by its cost alone another finding would be first"
    assert (first.finding.kind, second.finding.kind) == ("no_prefetch", "copies")
    assert (first.gain or 0) > (second.gain or 0) > 0
    for advice in (first, second):
        (said,) = re.findall(r"(\d+) % more tokens/s on the steady card", advice.remedy)
        assert int(said) == round(100 * (advice.gain or 0))


def test_only_what_a_run_can_take_is_offered(late: RunRecord) -> None:
    assert not [finding for finding in findings(late) if "hybrid_shard" in finding.remedy], "two ranks have no replicas"
    unsharded = RunSpec(strategy="no_shard", link="400MB/s", device="cpu")
    sharded = RunSpec(strategy="full_shard", prefetch=0, link="400MB/s", device="cpu")
    gain_of_prefetch = [gains(spec)["prefetch"].gain or 0 for spec in (sharded, unsharded)]
    assert gain_of_prefetch[0] > LEAST_GAIN > gain_of_prefetch[1], "nothing is gathered that could be gathered ahead"


def test_of_gains_that_are_close_the_change_that_costs_least_comes_first() -> None:
    assert in_order([SHORT, AHEAD]) == [AHEAD, SHORT]
    queues = change("queues", 0.6, "nothing")
    assert in_order([AHEAD, SHORT, queues]) == [queues, AHEAD, SHORT]
    dear = replace(SHORT, gain=0.7)
    assert in_order([AHEAD, dear]) == [dear, AHEAD], "0.61 is less than nine tenths of 0.7"
    small = change("other", 0.01, "nothing")
    assert in_order([small, SHORT]) == [SHORT, small]
    assert in_order([]) == []


def test_every_advised_change_says_what_it_costs() -> None:
    settings = dict(prefetch=0, precision="fp32", checkpoint="full", link_queues=1, tokens=256)
    remedies = {edit.setting: edit.remedy for edit in edits(settings) if edit.remedy.words}
    assert set(remedies) == set(settings)
    assert {remedy.costs for remedy in remedies.values()} <= set(COSTS)
    assert remedies["precision"].costs == "precision"


def test_a_run_that_gathers_nothing_ahead_is_told_to_gather_ahead(late: RunRecord) -> None:
    """At 150 MB/s bf16 gains 65 %, and gathering ahead 61 % without another precision."""
    spec = RunSpec(strategy="full_shard", prefetch=0, link="150MB/s", device="cpu", sequence_length=128)
    found = gains(spec)
    assert (found["precision"].gain or 0) > (found["prefetch"].gain or 0)
    assert best_change(spec).words == "gather the next unit ahead (prefetch 1)"
    slow = replace(late, spec={**late.spec, "link": "150MB/s", "sequence_length": 128})
    (advice,) = costliest([slow], most=1)
    assert advice.remedy.startswith("Gather the next unit ahead")

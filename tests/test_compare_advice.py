"""The advice below a comparison: ordered by what a change gains on the steady card, and only what the run can take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdplab import RunSpec
from fsdplab.figures.conclusion import costliest
from fsdplab.profiling.findings import findings
from fsdplab.records import RunRecord
from fsdplab.sessions.changes import LEAST_GAIN, gains

pytestmark = pytest.mark.quick
DATA = Path(__file__).parents[1] / "data"


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

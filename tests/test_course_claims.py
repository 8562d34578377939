"""What lessons 07, 11 and 12 say about time holds while every core of the machine is busy.

A process a core computes without end while this module runs. Ranks are real and wake late; the sentences and the
winners of the lessons come from the steady card and from bytes, so they are those of a quiet machine.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdplab.sessions import RunSpec, compare
from fsdplab.sessions.steady_card import steady
from fsdplab.teaching import overlapping_axes, reading_choices
from fsdplab.teaching.core import registry
from tests.busy import busy_cores
from tests.lesson_cells import run_cell

SMALL = dict(model="gpt-tiny", batch_size=2, sequence_length=32, steps=1, warmup=1, link="20MB/s", device="cpu")


@pytest.fixture(scope="module", autouse=True)
def load():
    """A computing process a core until the module's tests are over."""
    with busy_cores():
        yield


@pytest.fixture(scope="module")
def strategies():
    """Short runs of lesson 11's strategies."""
    return compare([RunSpec(**{**SMALL, "warmup": 2, "strategy": name}) for name in reading_choices.STRATEGIES])


@pytest.mark.timeout(300)
def test_shoot_out_bytes_and_times_do_not_know_the_load(strategies):
    on_card = reading_choices.on_steady_card(strategies)
    sent = {run.spec["strategy"]: run.summary.comm.bytes_per_step for run in strategies}
    # a whole model is gathered twice by full_shard; the root once
    assert sent["no_shard"] == sent["zero1"] == sent["zero2"] == sent["shard_grad_op"] < sent["full_shard"]
    for ran, card in zip(strategies, on_card, strict=True):
        assert reading_choices.on_the_link(card) == pytest.approx(reading_choices.on_the_link(ran), rel=0.01)
        assert reading_choices.peak(card) == reading_choices.peak(ran)
        assert card.provenance["peak_memory_bytes"] == "measured" and card.provenance["step_time_s"] == "simulated"


def test_the_choices_of_the_shoot_out_are_right_on_the_card():
    """What the answers of 11.defend claim of the lesson's own job, and what the recap says."""
    options = registry.find("11.defend").options
    cards = {name: steady(reading_choices.job(strategy=name)) for name in reading_choices.STRATEGIES}
    steps = {name: card.summary.step_time_s.median for name, card in cards.items()}
    exposed = {name: card.summary.comm.exposed_s for name, card in cards.items()}
    assert steps["zero2"] == pytest.approx(min(steps.values()), rel=0.01), options["d"]
    assert cards["full_shard"].summary.comm.overlap > 0.5, options["c"]
    assert exposed["no_shard"] > 1.01 * min(exposed.values())
    assert exposed["full_shard"] / exposed["no_shard"] == pytest.approx(1.41, abs=0.01)


def test_overlap_without_prefetch_everything_is_exposed():
    job = RunSpec(sequence_length=64, link="400MB/s")
    late = steady(replace(job, prefetch=0))
    carried = late.summary.comm.bytes_per_step / 400e6
    assert late.summary.comm.on_link_s == pytest.approx(carried, rel=0.01)
    assert late.summary.comm.exposed_s / steady(job).summary.comm.exposed_s == pytest.approx(5.88, abs=0.01)


def test_hybrid_sharding_exposes_less_and_what_is_left_of_it_is_the_all_reduce():
    """The factor that 12 predicts and the rows of its table, on the card."""
    axes = overlapping_axes
    job = RunSpec(model="gpt-20m", world_size=4, batch_size=1, sequence_length=32)
    full = steady(replace(job, strategy="full_shard", link=axes.RING))
    across = dict(link=axes.WITHIN, link_across=axes.ACROSS)
    hybrid = steady(replace(job, strategy="hybrid_shard", shard_size=2, **across))
    assert full.summary.comm.exposed_s / hybrid.summary.comm.exposed_s == pytest.approx(2.45, abs=0.01)
    rows = run_cell("12", "waits", full_card=full, hybrid_card=hybrid)["_"].rows
    shown = {(run, what): float(ms) for run, what, _, ms in rows}
    assert shown["hybrid_shard", "all_reduce in backward"] > 10 * shown["hybrid_shard", "all_gather in backward"]
    assert shown["full_shard", "all_gather in backward"] > 50 * shown["hybrid_shard", "all_gather in backward"]


def test_prefetch_leaves_the_edges_of_the_step_and_its_middle_exposed():
    """What 08 predicts, and what it says of the figure: on the card, whatever the machine does."""
    job = RunSpec(model="gpt-tiny", batch_size=16, sequence_length=128, link="150mbit", profile=1, device="cpu")
    late, early = (steady(replace(job, prefetch=prefetch)) for prefetch in (0, 1))
    assert 1 - early.summary.comm.exposed_s / late.summary.comm.exposed_s == pytest.approx(0.464, abs=1e-3)
    shown = {(row["unit"], row["phase"], row["kind"]): row["exposed_ns"] / 1e6 for row in early.table("exposed")}
    assert shown["blocks.0", "backward", "all_gather"] == 0, "it travels while blocks.1 computes its backward"
    edges = {("root", "forward", "all_gather"), ("blocks.0", "forward", "all_gather")}
    edges |= {(unit, "backward", "reduce_scatter") for unit in ("blocks.0", "root")}
    turn = ("blocks.1", "backward", "all_gather")
    assert sum(shown[place] for place in {*edges, turn}) > 0.98 * sum(shown.values())
    names = run_cell("08", "remedy-figure", both=[], on_card=[late, early], compare=lambda specs: [late, early])
    assert [row[2] for row in names["_"].rows] == ["40.8", "21.8"]

"""Notebook 13: checkpoint and offload are threaded from RunSpec to the measured peak."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fsdplab.common.names import OVER_ALL_RANKS
from fsdplab.figures import alt_text
from fsdplab.figures.style import page, words_width
from fsdplab.planning.planner import plan_of, plan_spec
from fsdplab.profiling import MemoryRecorder
from fsdplab.sessions import RunSpec, SpecError, run
from fsdplab.teaching import trading
from fsdplab.teaching.core import registry
from fsdplab.teaching.lessons.nb13_trading import on_ranks
from fsdplab.workloads import build_model, loss_of
from fsdplab.workloads.twin import replay_gradients
from tests.lesson_cells import run_cell
from tests.solutions import right_answers

BYTES = registry.find("13.bytes_each").module().bytes_each


def norms() -> list[float]:
    """The reference's norms of the exercise's cases."""
    exercise = registry.find("13.global_norm").module()
    return [float(exercise.global_norm(given)) for _, given in exercise.cases(dist.get_rank(), 2)]


def sharded_beside_whole() -> tuple[dict, torch.Tensor, int]:
    """What the reference of 13.shard_tied leads to; the tied weight's gradient in the unsharded twin, and its size."""
    exercise, model = registry.find("13.shard_tied").module(), build_model(on_ranks.TIED)
    replay_gradients(model, [[on_ranks.batch(0, rank, 2)] for rank in range(2)], loss_of)
    facts = exercise.observe(exercise.shard_tied)
    return facts, model.token_embedding.weight.grad, sum(parameter.nbytes for parameter in model.parameters())


def adapters_trained() -> tuple[dict, int]:
    """What the reference of 13.fine_tune leads to, and the bytes of all adapters."""
    exercise, model = registry.find("13.fine_tune").module(), on_ranks.adapted_model()
    names = on_ranks.adapters_of(model)
    nbytes = sum(parameter.nbytes for name, parameter in model.named_parameters() if name in names)
    return exercise.observe(exercise.fine_tune), nbytes


def test_worked_examples(ranks):
    assert BYTES(["optimizer"], 4) == {"working copy": 2, "gradient": 4, "master": 1, "moments": 2}
    small = 100 * float(torch.tensor(0.0123).bfloat16())
    assert ranks(2, norms) == [pytest.approx([13, 5, small])] * 2
    for facts, gradient, nbytes in ranks(2, sharded_beside_whole):
        torch.testing.assert_close(facts.pop("gradient of the tied weight"), gradient)
        assert list(facts.values()) == [on_ranks.TIED.layers, True, on_ranks.TIED.layers, True, nbytes]
    for facts, nbytes in ranks(2, adapters_trained):
        assert list(facts.values()) == [True, True, [], [], nbytes, nbytes]  # two moments, of half the rows


def test_accounts_and_prices():
    assert sum(BYTES((), 8).values()) == 16
    assert trading.cut_by("zero1") == ["optimizer"] and trading.cut_by("no_shard") == []
    assert sum(BYTES(trading.cut_by("full_shard"), 8).values()) == 16 / 8
    spec = {"offload": "cpu", "precision": "fp32", "model": "gpt-20m", "world_size": 2}
    assert trading.bus_bytes(spec) == 12 * 21_589_248 / 2
    assert (
        trading.bus_bytes({**spec, "precision": "bf16"}) == 6 * 21_589_248 / 2
        and trading.bus_bytes({**spec, "offload": "none"}) == 0
    )
    over_the_bus = run_cell("13", "explore-bus", explore=lambda *_, **__: None, ask=lambda name: None)["over_the_bus"]
    assert over_the_bus(7, 8, 25).rows == (("10.50", "0.42", "14.0"),)


@pytest.mark.parametrize("strategy", OVER_ALL_RANKS)
def test_the_reference_keeps_what_the_planner_says_that_the_engine_keeps(strategy):
    spec = plan_spec("gpt-20m", "h100", gpus=8, seq=64, param_dtype="bf16", strategy=strategy)
    resting = plan_of(spec).memory.resting.by_category
    kept, parameters = BYTES(trading.cut_by(strategy), 8), spec.model.parameters
    held = kept["working copy"] + kept["master"]
    assert held == pytest.approx(resting["sharded_parameters"] / parameters, rel=0.01)
    assert kept["moments"] == pytest.approx(resting["optimizer_state"] / parameters, rel=0.01)


def test_the_kept_figure_says_its_numbers():
    figure = trading.kept_figure(BYTES)
    assert "no_shard 16 bytes" in alt_text(figure) and "full_shard 2 bytes" in alt_text(figure)


def test_runs_are_named_by_their_choices():
    fake = SimpleNamespace(spec={"precision": "bf16", "checkpoint": "full", "offload": "cpu"})
    assert trading.choices_of(fake) == "bf16, full checkpoint, offload"


@pytest.mark.timeout(300)
def test_frozen_parameters_are_gathered_but_not_reduced(course):
    frozen = trading.frozen_costs()
    whole, adapters = frozen["everything"], frozen["adapters only"]
    sent = {which: kept["unsharded"] + kept["reduced"] for which, kept in frozen.items()}
    assert 0.6 < sent["adapters only"] / sent["everything"] < 0.7 and adapters["unsharded"] == whole["unsharded"]
    assert adapters["reduced"] < 0.02 * whole["reduced"] and adapters["optimizer state"] == 2 * adapters["gradients"]
    score = SimpleNamespace(score=lambda percent: None)
    shown = run_cell("13", "run-frozen", share=score, trading=SimpleNamespace(frozen_costs=lambda: frozen))["_"]
    assert shown.rows[1][0] == "adapters only" and len(shown.rows[0]) == len(shown.header)


# --- what RunSpec says reaches the engine and the measurement


@pytest.mark.parametrize(
    "fields,says",
    [
        ({"checkpoint": "all"}, "unknown checkpoint"),
        ({"offload": "gpu"}, "unknown offload"),
        ({"checkpoint": "full", "engine": "torch-fsdp2"}, "only the lab's engine"),
        ({"offload": "cpu", "engine": "twin"}, "only the lab's engine"),
        ({"offload": "cpu", "strategy": "zero2"}, "keeps parameters whole"),
    ],
)
def test_impossible_choices_are_refused_before_anything_runs(fields, says):
    with pytest.raises(SpecError, match=says):
        RunSpec(**fields)


@pytest.fixture(scope="module")
def small_runs():
    common = dict(model="gpt-tiny", steps=1, batch_size=2, sequence_length=64, device="cpu")
    return {name: run(RunSpec(**common, **choices)) for name, choices in {
        "plain": {}, "full": {"checkpoint": "full"}, "offload": {"offload": "cpu"},
    }.items()}  # fmt: skip


def no_run(small_runs):
    """Names with which the cell that trains in bf16 trains nothing."""
    trading = SimpleNamespace(trained=lambda spec: small_runs["full"], memory_figure=lambda runs: None)
    low = SimpleNamespace(score=lambda peak: None)
    return dict(runs=[small_runs["plain"]], job=RunSpec(), trading=trading, low=low, show=lambda figure: None)


@pytest.mark.timeout(300)
def test_recomputation_and_offload_change_memory_and_nothing_else(small_runs):
    peaks = {name: record.summary.peak_memory_bytes.split for name, record in small_runs.items()}
    losses = {tuple(record.summary.losses) for record in small_runs.values()}
    assert len(losses) == 1 and len({record.summary.comm.bytes_per_step for record in small_runs.values()}) == 1
    assert peaks["full"]["activations"] < 0.7 * peaks["plain"]["activations"]
    assert peaks["plain"]["optimizer_state"] > 0
    assert not any(peaks["offload"][name] for name in ("sharded_parameters", "sharded_gradients", "optimizer_state"))
    assert peaks["offload"]["activations"] == peaks["plain"]["activations"]


@pytest.mark.timeout(300)
def test_offload_is_emulated_on_cpu_ranks_and_said_so(small_runs, capsys):
    assert small_runs["offload"].provenance["host_memory_beside_the_card"] == "emulated"
    assert "host_memory_beside_the_card" not in small_runs["plain"].provenance
    first, *_, last = small_runs.values()
    totals = [run.summary.peak_memory_bytes.total / 1e6 for run in (first, last)]
    changes = run_cell("13", "run-bf16", **no_run(small_runs))["changes"]
    changes(first, last)
    told = capsys.readouterr().out
    assert f"from {totals[0]:.0f} to {totals[1]:.0f} MB" in told
    changes(on_ranks.bf16_run("none", "none"), on_ranks.bf16_run("none", "cpu"))
    assert "optimizer state" in capsys.readouterr().out
    changes(first, first)
    assert len(capsys.readouterr().out.splitlines()) == 1, "nothing changed"
    table = str(run_cell("13", "checkpoint-prices", runs=list(small_runs.values()))["_"])
    assert "full checkpoint" in table and "offload" in table
    figure = trading.memory_figure(list(small_runs.values()))
    below = figure.layout.title.subtitle.text
    assert "fp32, full checkpoint" in alt_text(figure) and "a host memory beside it" in below.replace("<br>", " ")
    assert words_width(below) <= page(), "the words added are broken into lines, not cut at the figure's end"
    twice = [view.label for view in trading.named([small_runs["plain"]] * 2)]
    assert twice == ["fp32", "fp32 (again)"], "bars of one name would be drawn as one"


def test_what_rests_elsewhere_is_left_out_of_a_measurement():
    model = torch.nn.Linear(1000, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    totals = {}
    for offloaded in (False, True):
        for measured in (False, True):
            recorder = MemoryRecorder(
                model=model, optimizer=optimizer, engine="lab", device=torch.device("cpu"), offloaded=offloaded
            )
            if measured:
                with recorder:
                    model(torch.ones(1, 1000)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                totals[offloaded] = recorder.timeline.peak
            else:
                model(torch.ones(1, 1000)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert totals[False]["sharded_parameters"] == 40_000 and totals[False]["optimizer_state"] >= 80_000
    assert totals[True]["sharded_parameters"] == totals[True]["optimizer_state"] == 0


def test_the_lesson_says_where_freezing_may_stand():
    """`right_answers/nb13.py` freezes on either side, and the check takes both."""
    lesson = next((Path(__file__).parents[1] / "notebooks").glob("13_*.ipynb")).read_text(encoding="utf-8")
    assert "Freezing may come before sharding or after it" in lesson and "three lines are in" not in lesson
    assert "freezes after sharding" in right_answers(registry.find("13.fine_tune"))

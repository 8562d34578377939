"""The one sentence of a comparison, the clock beside it, the change that gains most, and settings of a single run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdplab.cli.compare import _variant
from fsdplab.figures.conclusion import change_words, clock_words, conclusion, why_it_differs
from fsdplab.figures.view import RunView
from fsdplab.records import Spread, Summary
from fsdplab.records.summary import Card, Change, Comm, Peak, Steady
from fsdplab.sessions import RunSpec
from fsdplab.sessions.changes import best_change
from fsdplab.sessions.spec import SpecError
from fsdplab.sessions.steady_card import SteadyCardError, steady, steady_step

JOB = dict(model="gpt-20m", world_size=2, batch_size=2, sequence_length=128, link="150MB/s", device="cpu")
BEFORE, WHOLE = Steady(0.855, 0.212, 0.63), Steady(0.919, 0.300, 0.65)


def seen(strategy: str, megabytes: int, sent: int, clock: Steady = Steady(), steps: tuple[float, ...] = ()) -> RunView:
    summary = Summary(
        Spread.of(steps), peak_memory_bytes=Peak(megabytes * 10**6), comm=Comm(bytes_per_step=sent), steady=clock
    )
    return RunView(strategy, "lab", 2, summary)


def test_the_sentence_tells_memory_traffic_overlap_and_step() -> None:
    runs = [seen("no_shard", 373, 86, BEFORE), seen("zero1", 280, 86, BEFORE), seen("full_shard", 232, 129, WHOLE)]
    assert conclusion(runs) == (
        "FSDP (full_shard) needs 232 MB a rank instead of 373 MB (38 % less), sends 1.5 times as much and hides 65 % of"
        " it, and its step is 7 % longer."
    )
    over = replace(runs[0], summary=replace(runs[0].summary, card=Card(330_000_000, True)))
    assert "(38 % less, and no_shard is over the card of 330 MB)" in conclusion([over, *runs[1:]])


def test_a_measured_difference_is_claimed_only_beyond_its_spread() -> None:
    slow, fast = (0.50, 0.51, 0.52, 0.53), (0.40, 0.41, 0.42, 0.43)
    base, sharded = seen("no_shard", 2, 2, steps=fast), seen("full_shard", 1, 3, steps=slow)
    assert "its step is 24 % longer" in conclusion([base, sharded])
    alike = conclusion([base, seen("full_shard", 1, 3, steps=(0.41, 0.42, 0.43, 0.44))])
    assert "no difference of their steps is seen" in alike and "longer" not in alike
    busy = [replace(run, summary=replace(run.summary, cpu_share=0.4)) for run in (base, sharded)]
    assert "step" not in conclusion(busy)


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([], ""),
        ([RunView("full_shard", "twin", 2)], ""),
        ([RunView("full_shard", "lab", 2, status="failed")], ""),
        ([seen("z", 9, 8, steps=(0.4,))], "z needs 9.00 MB a rank, sends 8 B a step, and its step takes 400 ms."),
        ([RunView("worker0", "trace", 8, Summary(Spread.of([0.0429])))], "trace worker0: its step takes 42.9 ms."),
    ],
    ids=["none", "twin", "failed", "one", "traces"],
)  # fmt: skip
def test_what_is_not_known_is_not_said(runs: list[RunView], said: str) -> None:
    assert conclusion(runs) == said and not clock_words(runs)


def test_a_step_that_differs_from_the_simulated_one_has_its_largest_reason() -> None:
    def run(step: float, **comm: float) -> RunView:
        view = seen("full_shard", 232, 129, WHOLE, steps=(step,) * 4)
        return replace(view, summary=replace(view.summary, comm=Comm(**comm)))

    assert why_it_differs(run(0.93)) == "The measured steps agree with it within 2 %."
    copies = why_it_differs(run(1.2, exposed_s=0.6, copying_s=0.25, waiting_s=0.01))
    assert copies.startswith("The measured step of full_shard is 31 % longer: packing and unpacking take 250 ms")
    late = why_it_differs(run(1.2, exposed_s=0.6, copying_s=0.01, waiting_s=0.25))
    assert "ranks wait for each other for 250 ms" in late
    assert "take longer than on" in why_it_differs(run(1.2)) and "take less time than" in why_it_differs(run(0.6))
    assert why_it_differs(replace(run(1.2), summary=replace(run(1.2).summary, cpu_share=0.4))) == ""
    assert clock_words([run(0.93)]).startswith("Simulated: the steady card computes 60 GFLOP/s")


def test_the_steady_cards_clock_is_the_same_everywhere_and_known_for_the_labs_cpu_runs_alone() -> None:
    table = {name: steady_step(RunSpec(strategy=name, **JOB)) for name in ("no_shard", "zero2", "full_shard")}
    assert {name: round(each.step_time_s, 3) for name, each in table.items()} == {
        "no_shard": 0.855, "zero2": 0.755, "full_shard": 0.919,
    }  # fmt: skip
    assert steady_step(RunSpec(prefetch=0, **JOB)).overlap == 0 and round(table["full_shard"].overlap, 2) == 0.65
    no_link, peer, whole = dict(link=None), dict(engine="torch-fsdp2"), dict(units="model")
    for other in (no_link, peer, whole, dict(offload="cpu"), dict(compile="blocks")):
        assert steady_step(RunSpec(**JOB | other)) == Steady(), other
    with pytest.raises(SteadyCardError, match="expected a link such as '400MB/s'"):
        steady(RunSpec(**JOB | no_link))


def test_the_change_that_gains_most_fits_the_card() -> None:
    spec = RunSpec(card=330_000_000, **JOB)
    assert best_change(spec).words == "compute and send in bf16, with fp32 masters"
    assert best_change(replace(spec, precision="bf16")).words == "twice the batch"
    full = best_change(replace(spec, precision="bf16", card=200_000_000))
    assert full.words != "twice the batch" and (full.peak_bytes or 0) <= 200_000_000
    assert best_change(replace(spec, link=None)) == Change(), "nothing is simulated without a link"
    run = seen("full_shard", 232, 129, WHOLE)
    twice = replace(run.summary, change=Change("twice the batch", 0.4, 310_000_000))
    told = change_words([replace(run, summary=twice)])
    assert told == (
        "Most valuable change to full_shard: twice the batch: 40 % more tokens/s (simulated), 310 MB instead of 232 MB"
        " (predicted)."
    )
    assert change_words([run]) == change_words([]) == ""


def test_settings_of_a_single_run_follow_its_strategy() -> None:
    common = RunSpec(**JOB).as_dict()
    ahead, behind = (_variant(text, common) for text in ("full_shard", "full_shard:prefetch=0"))
    assert behind == replace(ahead, prefetch=0)
    assert _variant("zero2 : precision=bf16 : link=1GB/s", common).precision == "bf16"


@pytest.mark.parametrize("text", ["full_shard:prefetch", "full_shard:fast=1", "full_shard:model=gpt2", "full_shard:=1"])
def test_a_setting_that_is_none_is_refused_in_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _variant(text, RunSpec(**JOB).as_dict())
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "expected settings such as full_shard:prefetch=0" in said


def test_a_setting_with_a_wrong_value_is_refused() -> None:
    with pytest.raises(SpecError, match="prefetch is 'many'"):
        _variant("full_shard:prefetch=many", RunSpec(**JOB).as_dict())

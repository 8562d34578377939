"""The one sentence of a comparison, the clock beside it, the change that gains most, and settings of a single run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdplab.cli.compare import _pairs
from fsdplab.figures.conclusion import change_words, clock_words, conclusion, why_they_differ
from fsdplab.figures.view import RunView
from fsdplab.records import Spread, Summary
from fsdplab.records.summary import Card, Change, Comm, Peak, Steady
from fsdplab.sessions import RunSpec
from fsdplab.sessions.changes import best_change
from fsdplab.sessions.spec import SpecError
from fsdplab.sessions.steady_card import SteadyCardError, steady, steady_step

pytestmark = pytest.mark.quick
JOB = dict(model="gpt-20m", world_size=2, batch_size=2, sequence_length=128, link="150MB/s", device="cpu")
BEFORE, WHOLE = Steady(0.855, 0.212, 0.63), Steady(0.919, 0.300, 0.65)


def seen(strategy: str, megabytes: int, sent: int, clock: Steady = Steady(), steps: tuple[float, ...] = ()) -> RunView:
    summary = Summary(
        Spread.of(steps), peak_memory_bytes=Peak(megabytes * 10**6), comm=Comm(bytes_per_step=sent), steady=clock
    )
    return RunView(strategy, "lab", 2, summary)


def test_the_answer_tells_memory_and_traffic_then_the_simulated_time_beside_the_measured_one() -> None:
    runs = [seen("no_shard", 373, 86, BEFORE), seen("zero1", 280, 86, BEFORE), seen("full_shard", 232, 129, WHOLE)]
    assert conclusion(runs) == (
        "FSDP (full_shard) needs 232 MB a rank instead of 373 MB (38 % less), and sends 1.5 times as much. Simulated on"
        " the steady card, it hides 65 % of that, and its step is 7 % longer."
    )
    timed = [seen("no_shard", 373, 86, BEFORE, (0.9,) * 4), seen("full_shard", 232, 129, WHOLE, (1.08,) * 4)]
    assert conclusion(timed).endswith("its step is 7 % longer; measured here, its step is 20 % longer.")
    assert conclusion(timed[1:]).endswith(
        "65 % of that, and its step takes 919 ms; measured here, its step takes 1.08 s."
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


def test_without_a_link_nothing_is_said_to_be_hidden() -> None:
    def alone(overlap: float, **spec: str) -> str:
        run = seen("full_shard", 199, 129_000_000)
        return conclusion(
            [replace(run, spec=spec, summary=replace(run.summary, comm=Comm(129_000_000, overlap=overlap)))]
        )

    assert "129 MB a step (no link is emulated, so there is nothing to hide; --link 150MB/s emulates one)" in alone(0.0)
    assert "hides 0 % of it" in alone(0.0, link="150MB/s") and "hides 44 % of it" in alone(0.44)


def test_a_step_that_differs_from_the_simulated_one_is_explained_by_parts_that_add_up() -> None:
    def run(step: float, **comm: float) -> RunView:
        view = seen("full_shard", 232, 129, WHOLE, steps=(step,) * 4)
        return replace(view, summary=replace(view.summary, comm=Comm(**comm)))

    assert why_they_differ([run(0.93)]) == "The measured steps agree with it within 2 %."
    told = why_they_differ([run(1.2, exposed_s=0.61, on_link_s=0.35, copying_s=0.25, waiting_s=0.01), run(0.93)])
    assert told == (  # 281 ms = 250 + 50 on the link + 10 of waiting - 29 of computing; a tenth is told
        "The measured step of full_shard, which differs most, is 281 ms (31 %) longer: +250 ms of packing and unpacking"
        " (the steady card does none), +50.0 ms of exposed time on the link, -29.0 ms of computing and of Python"
        " between the operators."
    )
    assert why_they_differ([run(1.2)]) == "The measured step of full_shard is 281 ms (31 %) longer.", "no profile"
    assert "shorter: -" in why_they_differ([run(0.6, exposed_s=0.3, on_link_s=0.3)])
    busy = replace(run(1.2), summary=replace(run(1.2).summary, cpu_share=0.4))
    assert why_they_differ([busy, run(0.93)]) == why_they_differ([]) == ""
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
    unmeasured = replace(twice, peak_memory_bytes=Peak())
    assert change_words([replace(run, summary=unmeasured)]).endswith("(simulated), 310 MB (predicted).")
    assert change_words([run]) == change_words([]) == ""


def specs_of(*strategies: str) -> list[RunSpec]:
    """The runs of the lab's engine that `--strategies` asks for."""
    return _pairs([*strategies], ["lab"], RunSpec(**JOB).as_dict())[0]


def test_settings_of_a_single_run_follow_its_strategy() -> None:
    ahead, behind, bf16 = specs_of("full_shard", "full_shard:prefetch=0", "zero2 : precision=bf16 : link=1GB/s")
    assert behind == replace(ahead, prefetch=0) and bf16.precision == "bf16"


@pytest.mark.parametrize("text", ["full_shard:prefetch", "full_shard:fast=1", "full_shard:model=gpt2", "full_shard:=1"])
def test_a_setting_that_is_none_is_refused_in_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        specs_of(text)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "expected settings such as full_shard:prefetch=0" in said


def test_a_setting_with_a_wrong_value_is_refused() -> None:
    with pytest.raises(SpecError, match="prefetch is 'many'"):
        specs_of("full_shard:prefetch=many")

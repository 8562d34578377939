"""Where bf16 is slow on the CPU, doctor says so, and bench and lesson 13 take other sizes.

The measurement is replaced.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fsdplab.cli import bench
from fsdplab.sessions import RunSpec, bf16_speed, capabilities
from fsdplab.sessions.bf16_speed import bf16_slowdown, smaller_batch
from fsdplab.teaching import trading
from fsdplab.teaching.core import registry
from fsdplab.teaching.core.checking import feedback_on_failure
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.lessons.nb13_trading import lesson, on_ranks

pytestmark = pytest.mark.quick
BF16 = dict(precision="bf16", device="cpu", batch_size=4, sequence_length=256)


@pytest.fixture
def measured(monkeypatch):
    """Replace the measurement: `measured(43)` is a processor on which bf16 takes 43 times as long."""

    def replace(times: float) -> None:
        for module in (bf16_speed, lesson):
            monkeypatch.setattr(module, "bf16_slowdown", lambda: times)

    return replace


def test_it_is_measured_in_a_fraction_of_a_second():
    bf16_slowdown.cache_clear()
    assert 0.01 < bf16_slowdown() < 1000 and bf16_slowdown.cache_info().misses == 1


def test_it_is_measured_on_one_thread_as_threads_that_wait_for_a_core_hide_it(monkeypatch):
    seen, threads = [], torch.get_num_threads()
    monkeypatch.setattr(bf16_speed, "fastest", lambda work, times: seen.append(torch.get_num_threads()) or 1.0)
    bf16_slowdown.cache_clear()
    torch.set_num_threads(2)
    try:
        assert bf16_slowdown() == 1.0 and seen == [1, 1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
        bf16_slowdown.cache_clear()


@pytest.mark.parametrize(
    ("times", "batch", "sized"),
    [(0.5, (4, 256), (4, 256)), (7, (4, 256), (4, 256)), (43, (4, 256), (1, 23)), (43, (64, 32), (1, 32)),
     (43, (256, 32), (5, 32)), (100, (1, 64), (1, 8)), (1e6, (1, 4), (1, 4))],
)  # fmt: skip
def test_a_batch_shrinks_as_bf16_is_slow(measured, times, batch, sized):
    measured(times)
    assert smaller_batch(*batch) == sized


@pytest.mark.parametrize(("times", "there"), [(0.6, True), (43.0, False)])
def test_doctor_says_how_long_bf16_takes(measured, times, there):
    measured(times)
    found = capabilities._bf16()
    assert found.present is there and found.value == f"{times:.2g} times the time of fp32"
    assert ("use fp32" in found.note) is not there


def test_bench_times_smaller_batches_and_says_so(measured):
    measured(43)
    common, told = bench._sized(BF16)
    assert (common["batch_size"], common["sequence_length"]) == (1, 23)
    assert "43 times as long" in told and "1 x 23 tokens were timed, not of 4 x 256" in told
    assert bench._sized(BF16 | {"precision": "fp32"}) == (BF16 | {"precision": "fp32"}, "")
    assert bench._sized(BF16 | {"device": "cuda"}) == (BF16 | {"device": "cuda"}, "")
    measured(0.5)
    assert bench._sized(BF16) == (BF16, "")


def test_lesson_13_takes_recorded_runs_instead_of_minutes(measured, capsys):
    measured(43)
    job = RunSpec(**on_ranks.JOB, precision="bf16", offload="cpu")
    run = trading.trained(job)
    assert run.status == "finished" and trading.choices_of(run) == "bf16, offload"
    assert "43 times as long as fp32" in capsys.readouterr().out


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_every_choice_in_bf16_was_recorded_with_the_memory_that_is_predicted(checkpoint, offload):
    run = on_ranks.bf16_run(checkpoint, offload)
    peak, predicted = run.summary.peak_memory_bytes.total, run.summary.predicted.peak_memory_bytes.total
    assert run.spec["checkpoint"] == checkpoint and run.spec["offload"] == offload
    assert peak == pytest.approx(predicted, rel=0.01)


def test_the_check_of_13_fit_reads_the_recorded_peak(measured, monkeypatch):
    measured(43)
    monkeypatch.setattr(on_ranks.dist, "all_reduce", lambda *_: None)
    total, held = on_ranks.peak_of({"precision": "bf16", "offload": "cpu"})
    assert total == on_ranks.bf16_run(offload="cpu").summary.peak_memory_bytes.total < on_ranks.CARD
    assert sum(held.values()) == pytest.approx(total, rel=0.01)


@pytest.mark.parametrize(("exercise", "blamed"), [("13.fit", False), ("01.ring_all_gather", True)])
def test_isend_is_not_blamed_for_a_training_that_takes_long(exercise, blamed):
    message = "LeftUnfinished: it returned, but 92 s later the ranks could still not meet"
    report = SimpleNamespace(message=message, kind="raised", rank=0, step=None, traceback=None)
    cause = feedback_on_failure(registry.find(exercise, Exercise), report).cause
    assert ("isend" in cause) is blamed and ("fsdplab doctor" in cause) is not blamed

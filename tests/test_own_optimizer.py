"""An optimizer of one's own: what a step holds is known before it runs, or it is said why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fsdplab
from fsdplab.sessions import RunSpec, run
from fsdplab.sessions.own_optimizer import OwnStep, own_step
from fsdplab.sessions.prediction import predict
from tests.own_models import zoo

PARAMETERS = sum(each.numel() for each in zoo.stack().parameters())
LARGEST = 4 * max(each.numel() for each in zoo.stack().parameters())


def stepped(make: Callable[[list[nn.Parameter]], Any]) -> OwnStep:
    return own_step(fsdplab.Workload(zoo.stack, zoo.numbers, zoo.squares, optimizer=make), 0)


@pytest.mark.quick
@pytest.mark.parametrize(
    "make,state,scratch",
    [
        (lambda given: torch.optim.SGD(given, lr=0.1), 0, 0),
        (lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9), 4, 0),
        (lambda given: torch.optim.AdamW(given, fused=True), 8, 0),
        (lambda given: torch.optim.Adam(given), 8, 2 * LARGEST),
        (lambda given: torch.optim.AdamW(given, amsgrad=True), 12, 2 * LARGEST),
        (lambda given: torch.optim.AdamW(given, foreach=True), 8, 4 * PARAMETERS),
    ],
)
def test_state_and_temporaries_are_those_of_a_step(make: Any, state: float, scratch: int) -> None:
    found = stepped(make)
    assert not found.why_not and found.state_bytes == pytest.approx(state, rel=0.001)
    assert found.scratch == pytest.approx(scratch, rel=0.05, abs=1024)


@pytest.mark.quick
@pytest.mark.parametrize(
    "make,why",
    [
        (lambda given: torch.optim.Muon([each for each in given if each.ndim == 2]), "give --optimizer muon"),
        (lambda given: torch.optim.LBFGS(given), "missing 1 required positional argument: 'closure'"),
        (lambda given: [torch.optim.SGD(given, lr=0.1)] * 2, "returned a list; expected one torch.optim.Optimizer"),
        (lambda given: torch.optim.Adafactor(given), "could not be recorded: DataDependentOutputException"),
    ],
)
def test_what_is_not_known_is_said(make: Any, why: str) -> None:
    assert why in stepped(make).why_not
    work = fsdplab.Workload(zoo.stack, zoo.numbers, zoo.squares, optimizer=make)
    found = predict(RunSpec(model=work, card=10**9))
    assert found.by_category is None and found.fits is None and why in found.why_not and found.bytes_per_step


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_measured_memory_is_as_predicted(strategy: str) -> None:
    work = fsdplab.Workload(
        zoo.stack, zoo.numbers, zoo.squares, optimizer=lambda given: torch.optim.AdamW(given, lr=0.01, foreach=True)
    )
    spec = RunSpec(model=work, strategy=strategy, steps=1, profile=0, device="cpu")
    found, measured = predict(spec), run(spec).summary.peak_memory_bytes
    assert found.peak_bytes == pytest.approx(measured.total, rel=0.03)
    assert found.by_category["optimizer_state"] == pytest.approx(measured.split["optimizer_state"], rel=0.01)

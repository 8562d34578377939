"""`against_pytorch.py` on made-up files in the manner of PyTorch's: verdicts, reasons, and what it leaves behind."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fsdplab.common.processes import gone

HERE = Path(__file__).parent

TWO_TESTS = """
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.common_distributed import skip_if_lt_x_gpu
from torch.testing._internal.common_fsdp import FSDPTest


class TestMadeUp(FSDPTest):
    @property
    def world_size(self):
        return 2

    def _model(self):
        return fully_shard(nn.Linear(4, 2, bias=False))

    @skip_if_lt_x_gpu(2)
    def test_gradient(self):
        model = self._model()
        self.assertIsInstance(model, FSDPModule)
        model(torch.full((1, 4), float(self.rank))).sum().backward()
        self.assertEqual(model.weight.grad.full_tensor(), torch.full((2, 4), 0.5))

    @skip_if_lt_x_gpu(2)
    def test_private(self):
        self.assertIsInstance(fully_shard.state(self._model())._fsdp_param_group, FSDPParamGroup)
"""

ONE_THAT_WAITS = """
import os, signal
from collections import Counter
from pathlib import Path
from torch.testing._internal.common_fsdp import FSDPTest


class TestWaits(FSDPTest):
    @property
    def world_size(self):
        return 2

    def test_for_ever(self):
        Path(__file__).with_suffix(f".{self.rank}").write_text(str(os.getpid()))
        signal.pause()
"""


def _against_pytorch(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, HERE / "against_pytorch.py", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)


@pytest.mark.full("starts PyTorch's tests as a developer does")
def test_the_table_says_what_differs_and_why(tmp_path: Path) -> None:
    (tmp_path / "test_fully_shard_made_up.py").write_text(TWO_TESTS)
    (tmp_path / "test_fully_shard_newer.py").write_text("from torch.distributed.fsdp import what_comes_later")
    table = tmp_path / "table.csv"
    ended = _against_pytorch(tmp_path, "--table", table)
    assert ended.returncode == 0, ended.stdout
    with table.open(newline="") as lines:
        gradient, private, newer = csv.DictReader(lines)
    verdicts = ("stock", "gloo", "shm")
    assert [gradient[engine] for engine in verdicts] == ["passed"] * 3 and gradient["kind"] == ""
    assert [private[engine] for engine in verdicts] == ["passed", "failed", "failed"]
    assert private["kind"] == "private" and "_fsdp_param_group" in private["reason"]
    assert newer["stock"] == "not imported" and newer["kind"] == "not counted" and "ImportError" in newer["reason"]
    assert "over shm: 1 of 2 pass" in ended.stdout


@pytest.mark.parametrize("name, words", [("nowhere", "no folder"), ("", "no files test_fully_shard_")])
def test_a_folder_without_tests_is_refused_in_words(tmp_path: Path, name: str, words: str) -> None:
    ended = _against_pytorch(tmp_path / name)
    assert ended.returncode == 2
    assert words in " ".join(ended.stdout.split()) and "Traceback" not in ended.stdout


def test_ranks_that_wait_for_ever_are_ended(tmp_path: Path) -> None:
    file = tmp_path / "test_fully_shard_waits.py"
    file.write_text(ONE_THAT_WAITS)
    worker = [sys.executable, HERE / "upstream_tests.py", file, "stock", "3", ""]
    said = subprocess.run(worker, capture_output=True, text=True, timeout=300, cwd=tmp_path).stdout.splitlines()
    assert json.loads(said[-1])["verdict"] == "timed out"
    for rank in tmp_path.glob("test_fully_shard_waits.[01]"):
        assert gone(int(rank.read_text()))


def test_the_engines_page_counts_what_the_committed_table_holds():
    with (HERE.parent / "data" / "against-torch-2.13.0.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    counted = [row for row in rows if row["stock"] == "passed"]
    gloo, shm = (sum(row[engine] == "passed" for row in counted) for engine in ("gloo", "shm"))
    kinds = Counter(row["kind"] for row in counted if row["kind"])
    said = (HERE.parent / "docs" / "engine.md").read_text(encoding="utf-8").replace("\n", " ")
    assert f"Of {len(rows)} tests, {len(counted)} pass with PyTorch's engine" in said
    assert f"passes {gloo} of them over gloo and {shm} over shared memory. {kinds['private']} ask for parts" in said
    assert f"and {kinds['deliberate']} are differences on purpose" in said and kinds.keys() == {"private", "deliberate"}

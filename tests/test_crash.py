"""Ten kills of docs/examples/pretrain.py; `python -m tests.crash_test --kills 200` has the rest, and `--torchrun`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.full("ten kills")
@pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers 5.23 needs Python 3.11")
@pytest.mark.timeout(900)
def test_ten_kills_lose_nothing() -> None:
    """In a process of its own, which mounts the disk that is filled up where it is allowed to."""
    words = [sys.executable, "-m", "tests.crash_test", "--kills", "10", "--seed", "41"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.match(r"10 kills \(.*\): 0 lost\. \d+ steps, \d+ computed again with equal losses", done.stdout)
    # Whether one of ten kills finds two checkpoints, to damage one, is chance: other tests damage for certain.
    assert re.search(r"Damages: .*; \d+ checkpoints set aside\. All \d+ losses are those of a job", done.stdout)

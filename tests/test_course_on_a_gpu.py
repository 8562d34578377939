"""The notebooks on a GPU, as `fsdplab course test` runs them: their ranks share the one GPU of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("[01][0-9]_*.ipynb"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize(
    "notebook", [path for path in NOTEBOOKS if 1 <= int(path.name[:2]) <= 13], ids=lambda p: p.stem
)
def test_a_notebook_runs_to_its_end_on_the_gpu(notebook: Path, tmp_path: Path) -> None:
    pytest.importorskip("nbval", reason="needs the notebook tools: pip install fsdplab[test]")
    shutil.copy(notebook, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "fsdplab.teaching", "test", "--edition", "teacher", str(tmp_path)],
        env={**os.environ, "FSDPLAB_SHARE_A_GPU": "1"}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr

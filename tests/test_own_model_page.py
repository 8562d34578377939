"""docs/your_model.md: its file is taken from the page, and each of its commands and lines is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fsdplab

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "your_model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line.strip() for line in re.findall(r"^    fsdplab .*$", PAGE, re.MULTILINE)]


def written(folder: Path) -> None:
    """What the page's commands name."""
    (folder / "mine.py").write_text(BLOCKS[0])
    if any("path/to" in command for command in COMMANDS) and sys.version_info >= (3, 11):
        from transformers import LlamaConfig

        sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=300)
        LlamaConfig(**sizes).save_pretrained(folder / "path" / "to" / "folder")
        (folder / "path" / "to" / "config.json").write_text(
            (folder / "path" / "to" / "folder" / "config.json").read_text()
        )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(tmp_path, command):
    if "path/to" in command and sys.version_info < (3, 11):
        pytest.skip("transformers has no release for this Python")
    written(tmp_path)
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "compare" not in command or "Losses agree with the unsharded twin's." in done.stdout


def test_the_lines_for_a_notebook_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "a_notebook"}
    exec(compile(BLOCKS[0], "mine.py", "exec"), names)
    sys.modules["a_notebook"] = type(sys)("a_notebook")  # a module that ranks cannot import, as a notebook is
    try:
        exec(compile(BLOCKS[1], "cell", "exec"), names)
        exec(compile(BLOCKS[2], "lab", "exec"), names)
    finally:
        del sys.modules["a_notebook"]
    assert len(names["records"]) == 6 and names["record"].spec["strategy"] == "zero2"
    assert "Workload" in fsdplab.__all__ and len(COMMANDS) == 6

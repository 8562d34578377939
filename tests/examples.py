"""Runs a file of docs/examples/ on the ranks of a test, with this engine or, by its one import line, with PyTorch's."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def tiny_llama(folder: Path, **changed: object) -> Path:
    """A folder with the config.json of a small Llama over bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **changed}))
    return folder


def source(name: str, engine: str) -> str:
    """The file; for PyTorch's engine one line is replaced by the one that its comment gives, or left out."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    if engine == "lab":
        return text
    found = re.search(r"^# (?:PyTorch's own engine: (.+)|.* leave the line out)\n.+$", text, re.MULTILINE)
    assert found, f"{name} has no comment that says how PyTorch's own engine runs it"
    return text.replace(found[0], found[1] or "")


def run_on_this_rank(name: str, engine: str, *words: str, machines: int = 1, file_bytes: int | None = None) -> str:
    """What the example prints on this rank, whose process group the test has started, and "exit CODE" where it ends so;
    `file_bytes` of an exported file.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    there = {"RANK": rank, "LOCAL_RANK": rank % (ranks // machines), "WORLD_SIZE": ranks}
    os.environ.update({key: str(value) for key, value in there.items()}, LOCAL_WORLD_SIZE=str(ranks // machines))
    torch.set_num_threads(1)
    text = source(name, engine)
    if file_bytes is not None:
        text, replaced = re.subn(r"^FILE_BYTES = 1 << 30", f"FILE_BYTES = {file_bytes}", text, flags=re.MULTILINE)
        assert replaced == 1
    group = mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
    with group, mock.patch.object(sys, "argv", [name, *words]), contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(compile(text, name, "exec"), {"__name__": "__main__"})  # noqa: S102  what a user copies
        except SystemExit as end:
            print(f"exit {end.code}")
    return out.getvalue()


def losses(printed: str) -> dict[int, str]:
    """Step -> loss, as pretrain.py prints them."""
    return {int(step): loss for step, loss in re.findall(r"^step (\d+) loss (\S+)", printed, re.MULTILINE)}

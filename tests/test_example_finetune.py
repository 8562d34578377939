"""docs/examples/finetune.py: LoRA by transformers' Trainer has the losses of PyTorch's engine, and goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import run_on_this_rank
from tests.test_works_with import CPU_RANKS, ImportedByTheMother, llama

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers 5.23 needs Python 3.11")
FLAGS = (
    "--fsdp", "full_shard auto_wrap", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2",
    "--learning_rate", "1e-2", "--max_steps", "6", "--save_steps", "3", "--logging_steps", "1", "--report_to", "none",
    "--disable_tqdm", "True", "--use_cpu",
)  # fmt: skip


def job(folder: Path, *more: str) -> list[str]:
    """The words of a job in a folder, which has the base and the rows already."""
    words = ["--model_name_or_path", str(folder / "base"), "--train_file", str(folder / "rows.jsonl")]
    return [*words, "--output_dir", str(folder / "out"), *FLAGS, *more]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "base")
    rows = [{"input_ids": [(7 * row + at) % 128 for at in range(8 + row % 3)]} for row in range(32)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return tmp_path


def run(_: object, engine: str, words: list[str]) -> str:
    import fsdplab.engine

    os.environ.update(CPU_RANKS)
    run_on_this_rank("finetune.py", engine, *words)
    used = torch.distributed.fsdp.fully_shard is fsdplab.engine.fully_shard
    return "lab" if used else "torch"


def killed_in_a_save(_: object, words: list[str]) -> None:
    """Rank 1 is killed in its second save, before all its files are written."""
    from transformers import Trainer

    save, saves = Trainer._save_rng_state, []

    def saving(self: Trainer, folder: str) -> None:
        saves.append(1)
        if torch.distributed.get_rank() == 1 and len(saves) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, folder)

    Trainer._save_rng_state = saving
    run(None, "lab", words)


def asked_to_end(_: object, words: list[str], which: int) -> str:
    """One rank alone gets a signal, in its second step."""
    step, steps = torch.optim.AdamW.step, []

    def stepping(self: torch.optim.AdamW, *arguments: Any) -> Any:
        steps.append(1)
        if torch.distributed.get_rank() == 1 and len(steps) == 2:
            os.kill(os.getpid(), which)
        return step(self, *arguments)

    torch.optim.AdamW.step = stepping
    os.environ.update(CPU_RANKS)
    return run_on_this_rank("finetune.py", "lab", *words)


def trained(ranks: Any, folder: Path, engine: str, *more: str) -> list[float]:
    """Loss and norm of the gradient of each step that is in the last state."""
    assert ranks(2, run, ImportedByTheMother(), engine, job(folder, *more)) == [engine] * 2
    state = json.loads((folder / "out" / "checkpoint-6" / "trainer_state.json").read_text())
    return [(each["loss"], each["grad_norm"]) for each in state["log_history"] if "loss" in each]


@pytest.mark.parametrize("more", [(), ("--bf16",)], ids=["fp32", "bf16"])
def test_losses_equal_those_of_pytorch_s_engine(ranks: Any, folder: Path, more: tuple[str, ...]) -> None:
    ours = trained(ranks, folder, "lab", *more)
    shutil.rmtree(folder / "out")
    theirs = trained(ranks, folder, "torch", *more)
    assert len(ours) == 6 and ours[-1][0] < ours[0][0]
    assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-2 if more else 1e-6)


def test_it_goes_on_from_the_newest_checkpoint_and_the_adapter_opens(ranks: Any, folder: Path) -> None:
    import peft
    from safetensors.torch import load_file

    whole = trained(ranks, folder, "lab")
    shutil.move(folder / "out", folder / "whole")
    # a kill in a save, and the same command again; --save_total_limit 1 must not remove the whole one before
    ends = ranks.ends(2, killed_in_a_save, ImportedByTheMother(), job(folder, "--save_total_limit", "1"))
    assert "died with exit code -9" in ends[1]
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["checkpoint-3", "checkpoint-6"]
    assert trained(ranks, folder, "lab", "--save_total_limit", "1") == whole
    assert [path.name for path in (folder / "out").glob("*checkpoint*")] == ["checkpoint-6"]
    # a signal to one rank saves on all and ends with a code; then it goes on
    shutil.rmtree(folder / "out")
    for which in (signal.SIGTERM, signal.SIGINT):
        printed = ranks(2, asked_to_end, ImportedByTheMother(), job(folder), which)
        assert all(text.endswith("exit 143\n") for text in printed)
    saved = sorted(path.name for path in (folder / "out").iterdir())
    assert saved == ["checkpoint-2", "checkpoint-3"], "torch's loading of an optimizer takes a step of it, too"
    assert trained(ranks, folder, "lab") == whole
    adapter = load_file(folder / "out" / "adapter_model.safetensors")
    for name, value in load_file(folder / "whole" / "adapter_model.safetensors").items():
        assert torch.equal(adapter[name], value), name
    base = llama()
    before = base(torch.arange(8)[None]).logits
    model = peft.PeftModel.from_pretrained(base, folder / "out")
    assert not torch.equal(model(torch.arange(8)[None]).logits, before)


def refused(_: object, words: list[str]) -> str:
    os.environ.update(CPU_RANKS)
    return run_on_this_rank("finetune.py", "lab", *words)


def test_a_checkpoint_of_another_job_is_refused_by_name_unless_it_is_forced(ranks: Any, folder: Path) -> None:
    short = ("--max_steps", "3")
    ranks(2, run, ImportedByTheMother(), "lab", job(folder, *short))
    printed = ranks(2, refused, ImportedByTheMother(), job(folder, *short, "--lora_r", "4", "--learning_rate", "1e-3"))
    assert "checkpoint-3 is of another job: learning_rate was 0.01 and is 0.001; lora_r was 8 and is 4" in printed[0]
    assert "--force" in printed[0] and "of another job" not in printed[1]
    with (folder / "rows.jsonl").open("a") as rows:
        rows.write(json.dumps({"input_ids": [1, 2, 3]}) + "\n")
    printed = ranks(2, refused, ImportedByTheMother(), job(folder, *short))
    assert "is of another job: rows was " in printed[0]
    printed = ranks(2, refused, ImportedByTheMother(), job(folder, *short, "--force", "True"))
    assert "another job" not in printed[0]

"""docs/examples/pretrain.py: the losses of PyTorch's engine, and a job that is cut in two is the job in one piece."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fsdplab.checkpoint import published
from tests.examples import EXAMPLES, losses, run_on_this_rank, tiny_llama
from tests.test_works_with import ImportedByTheMother

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers 5.23 needs Python 3.11")
ROOT = Path(__file__).resolve().parents[1]
TEXT = Path(__file__).read_bytes()
ALWAYS = ("--sequence-length", "16", "--micro-batch-size", "2", "--lr", "1e-2", "--warmup", "2")


def job(folder: Path, **options: Any) -> list[str]:
    """The words of a job in a folder; `save_every=5` gives --save-every 5, `bf16=True` --bf16."""
    tiny_llama(folder, tie_word_embeddings=options.pop("tied", False))
    (folder / "text.txt").write_bytes(TEXT)
    words = ["--config", str(folder), "--data", str(folder / "text.txt"), *ALWAYS]
    words += ["--checkpoints", str(folder / options.pop("checkpoints", "checkpoints"))]
    for name, value in {"steps": 6, "batch_size": 6, "save_every": 4, **options}.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def run(_: object, engine: str, words: list[str], machines: int) -> str:
    return run_on_this_rank("pretrain.py", engine, *words, machines=machines)


def printed(ranks: Any, number: int, words: list[str], engine: str = "lab", machines: int = 1) -> str:
    """What rank 0 printed; the others print nothing."""
    first, *others = ranks(number, run, ImportedByTheMother(), engine, words, machines)
    assert others == [""] * (number - 1)
    return first


@pytest.mark.parametrize(
    "machines,options",
    [
        (1, {"tied": True}),
        (1, {}),
        (1, {"bf16": True}),
        (1, {"strategy": "shard_grad_op"}),
        (1, {"strategy": "no_shard"}),
        (2, {"strategy": "hybrid_shard"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) or "full_shard" if isinstance(value, dict) else "",
)
def test_losses_equal_those_of_pytorch_s_engine(ranks: Any, tmp_path: Path, machines: int, options: dict) -> None:
    number = 2 * machines
    ours = losses(printed(ranks, number, job(tmp_path / "lab", **options), machines=machines))
    theirs = losses(printed(ranks, number, job(tmp_path / "torch", **options), "torch", machines))
    assert len(ours) == 6 and float(ours[6]) < float(ours[1]) - 0.5
    if options.get("bf16"):  # sums of gradients are in fp32 here, and rounded at each addition by gloo
        assert [float(ours[at]) for at in ours] == pytest.approx([float(theirs[at]) for at in theirs], rel=1e-2)
    else:
        assert ours == theirs


@pytest.mark.parametrize("before,after", [(2, 2), (2, 1), (2, 3), (3, 2)])
def test_a_job_that_goes_on_is_the_job_in_one_piece(ranks: Any, tmp_path: Path, before: int, after: int) -> None:
    """Batches are those of the step, so on other ranks losses differ by the order of sums alone; 5 rows are uneven."""
    words = job(tmp_path, batch_size=5, save_every=3, keep=1, steps=7)
    whole = losses(printed(ranks, before, [*words, "--checkpoints", str(tmp_path / "whole"), "--keep", "9"]))
    (tmp_path / "checkpoints").mkdir()
    shutil.copytree(published(tmp_path / "whole")[3], tmp_path / "checkpoints" / "step-00000003")
    again = printed(ranks, after, words)
    assert again.startswith(f"begin 3 on {after} ranks\n") and list(published(tmp_path / "checkpoints")) == [7]
    rest = losses(again)
    assert list(rest) == [4, 5, 6, 7]
    if after == before:
        assert rest == {step: whole[step] for step in rest}
    else:
        assert [float(rest[at]) for at in rest] == pytest.approx([float(whole[at]) for at in rest], rel=1e-5)


def asked_to_end(_: object, words: list[str]) -> str:
    """Rank 1 alone gets SIGTERM, in its second step."""
    step, steps = torch.optim.AdamW.step, []

    def stepping(self: torch.optim.AdamW, *arguments: Any) -> Any:
        steps.append(1)
        if dist.get_rank() == 1 and len(steps) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *arguments)

    torch.optim.AdamW.step = stepping
    return run_on_this_rank("pretrain.py", "lab", *words)


def test_sigterm_to_one_rank_saves_and_ends(ranks: Any, tmp_path: Path) -> None:
    first, _ = ranks(2, asked_to_end, ImportedByTheMother(), job(tmp_path, steps=50, export=tmp_path / "out"))
    assert list(losses(first)) == [1, 2] and list(published(tmp_path / "checkpoints")) == [2]
    assert not (tmp_path / "out").exists()


def exported(_: object, words: list[str], folder: Path) -> tuple[int, bool]:
    """How many parameters `from_pretrained` finds, and whether they are those of the newest checkpoint."""
    from transformers import AutoModelForCausalLM

    run_on_this_rank("pretrain.py", "lab", *words, "--export", str(folder))
    dist.barrier()
    found, notes = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(notes.values()), notes
    step, path = list(published(folder.parent / "checkpoints").items())[-1]
    saved = {name: torch.empty_like(value) for name, value in found.state_dict().items()}
    dcp.load({"model": saved}, checkpoint_id=str(path))
    return step, all(torch.equal(saved[name], value) for name, value in found.state_dict().items())


@pytest.mark.parametrize("tied", [False, True])
def test_what_it_exports_opens_in_transformers(ranks: Any, tmp_path: Path, tied: bool) -> None:
    words = job(tmp_path, tied=tied)
    assert ranks(2, exported, ImportedByTheMother(), words, tmp_path / "out") == [(6, True)] * 2


def facts_of(process: int) -> tuple[int, int, int]:
    """Resident bytes, open files and threads of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    resident, threads = (int(re.search(rf"^{name}:\s+(\d+)", status, re.M)[1]) for name in ("VmRSS", "Threads"))
    return 1024 * resident, len(os.listdir(f"/proc/{process}/fd")), threads


@pytest.mark.full("five hundred steps")
@pytest.mark.timeout(900)
def test_twenty_saves_in_five_hundred_steps_leave_memory_files_and_threads_as_they_were(tmp_path: Path) -> None:
    """Looked at from outside, every 25 steps, half-way between two saves."""
    words = [str(EXAMPLES / "pretrain.py"), *job(tmp_path, steps=500, save_every=25, batch_size=4)]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.forking_starter", "2", *words],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    ) as starter:  # fmt: skip
        found: list[list[tuple[int, int, int]]] = []
        for line in starter.stdout:
            if (step := re.match(r"step (\d+) ", line)) and int(step[1]) % 25 == 12:
                ranks = Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split()
                found.append([facts_of(int(rank)) for rank in ranks])
    assert len(found) == 20 and list(published(tmp_path / "checkpoints")) == [475, 500]
    for rank in range(2):
        resident, files, threads = zip(*(each[rank] for each in found))
        print(f"rank {rank}, MB every 25 steps:", *(f"{each / 1e6:.1f}" for each in resident))
        print(f"open files {files}, threads {threads}")
        assert max(resident[4:]) - resident[4] < 4e6
        assert max(files[10:]) <= max(files[:10]) and max(threads[10:]) <= max(threads[:10])


def grown(_: object, words: list[str]) -> tuple[int, int]:
    """Bytes of the model, and by how much this rank's memory was larger than before at the most, in bytes."""
    import transformers

    made = []
    build = transformers.AutoModelForCausalLM.from_config
    transformers.AutoModelForCausalLM.from_config = lambda *a, **k: made.append(build(*a, **k)) or made[0]
    before = 1024 * int(re.search(r"^VmRSS:\s+(\d+)", Path("/proc/self/status").read_text(), re.M)[1])
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present
    run_on_this_rank("pretrain.py", "lab", *words, file_bytes=8 << 20)
    peak = 1024 * int(re.search(r"^VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(), re.M)[1])
    return sum(each.numel() * 4 for each in made[0].parameters()), peak - before


def test_no_rank_holds_the_whole_model(ranks: Any, tmp_path: Path) -> None:
    """From the first weights to the exported files: a quarter of 237 MB, a block, rank 0 one file of 8 MB;
    some 90 MB are no weights.
    """
    words = job(tmp_path, steps=0, export=tmp_path / "out")
    tiny_llama(tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=60, num_attention_heads=4)
    found = ranks(4, grown, ImportedByTheMother(), words)
    model = found[0][0]
    print([f"{each / 1e6:.0f} of {model / 1e6:.0f} MB" for _, each in found])
    assert model > 200e6 and max(each for _, each in found) < 0.9 * model
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 20

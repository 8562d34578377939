"""docs/examples/pretrain.py: the losses of PyTorch's engine, and a job that is cut in two is the job in one piece."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fsdplab.checkpoint import published
from tests.examples import EXAMPLES, losses, run_on_this_rank, source, tiny_llama
from tests.forking_starter import _free_port
from tests.leftovers import left_of
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


def asked_to_end(_: object, words: list[str], which: int) -> str:
    """Rank 1 alone gets a signal, in its second step."""
    step, steps = torch.optim.AdamW.step, []

    def stepping(self: torch.optim.AdamW, *arguments: Any) -> Any:
        steps.append(1)
        if dist.get_rank() == 1 and len(steps) == 2:
            os.kill(os.getpid(), which)
        return step(self, *arguments)

    torch.optim.AdamW.step = stepping
    return run_on_this_rank("pretrain.py", "lab", *words)


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_saves_and_ends(ranks: Any, tmp_path: Path, which: int) -> None:
    words = job(tmp_path, steps=50, export=tmp_path / "out")
    first, second = ranks(2, asked_to_end, ImportedByTheMother(), words, which)
    assert list(losses(first)) == [1, 2] and list(published(tmp_path / "checkpoints")) == [2]
    assert first.endswith("exit 143\n") and second == "exit 143\n"
    assert not (tmp_path / "out").exists()


# ---- what a job that nobody watches meets


def test_tensorboard_shows_what_the_log_has(ranks: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    printed(ranks, 2, job(tmp_path, steps=3, tensorboard=tmp_path / "board"))
    rows = [json.loads(line) for line in (tmp_path / "checkpoints" / "log.jsonl").read_text().splitlines()]
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    for name in ("loss", "lr", "grad_norm"):
        logged = {row["step"]: row[name] for row in rows if name in row}
        shown = {event.step: event.value for event in board.Scalars(name)}
        assert list(logged) == [1, 2, 3] and shown == pytest.approx(logged, rel=1e-6)


LIKE_LLAMA = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "gpt_neox", "starcoder2", "olmo", "stablelm",
    "mixtral", "granite", "cohere",
)  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 2,
    "n_positions": 64, "vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.1,
}  # fmt: skip


def in_two(_: object, words: list[str]) -> tuple[dict[int, str], dict[int, str]]:
    """The losses of a job in one piece, and of the rest of one that went on from the middle."""
    folder = Path(words[words.index("--checkpoints") + 1])
    whole = losses(run_on_this_rank("pretrain.py", "lab", *words, "--keep", "9"))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(published(folder)[max(published(folder))])
    dist.barrier()
    return whole, losses(run_on_this_rank("pretrain.py", "lab", *words))


def test_with_dropout_a_job_that_goes_on_is_the_job_in_one_piece(ranks: Any, tmp_path: Path) -> None:
    """With every flag that changes how a step is computed."""
    words = job(tmp_path, steps=6, save_every=3, recompute=True, eval_data=tmp_path / "text.txt", eval_every=2)
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    (whole, rest), others = ranks(2, in_two, ImportedByTheMother(), words)
    assert list(rest) == [4, 5, 6] and rest == {step: whole[step] for step in rest} and others == ({}, {})
    rows = [json.loads(line) for line in (tmp_path / "checkpoints" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, *range(1, 7), 3, *range(4, 7)]
    assert {*rows[-1]} == {
        "step", "loss", "lr", "grad_norm", "tokens_per_s", "tokens_per_s_with_saves", "eval_loss"
    }  # fmt: skip
    assert rows[6]["eval_loss"] == rows[-1]["eval_loss"] and "eval_loss" not in rows[5]


def ends(_: object, changes: list[tuple[str, list[str]]]) -> list[list[str]]:
    """The last line of jobs, one after the other."""
    said = []
    for _, words in changes:
        said.append(run_on_this_rank("pretrain.py", "lab", *words).splitlines()[-1:])
        dist.barrier()
    return said


def test_what_cannot_be_right_ends_in_one_line(ranks: Any, tmp_path: Path) -> None:
    words = job(tmp_path, steps=2)
    (tmp_path / "short.txt").write_bytes(b"short")
    (tmp_path / "odd.bin").write_bytes(bytes(1001))
    (tmp_path / "high.bin").write_bytes(bytes(200) + b"\x01\x01" + bytes(1000))
    other = tmp_path / "other"
    tiny_llama(other, num_attention_heads=4, num_key_value_heads=4)
    text = tmp_path / "other.txt"
    text.write_bytes(TEXT[:-1] + b"?")
    two = ["--token-bytes", "2", "--checkpoints", str(tmp_path / "two")]
    changes = [
        ("step 2 loss", words),
        (r"exit .*short.txt has 5 tokens", [*words, "--data", str(tmp_path / "short.txt")]),
        (r"exit .*nowhere has 0 tokens", [*words, "--data", str(tmp_path / "nowhere")]),
        (r"exit .*odd.bin has 500 tokens and 1 bytes", [*words, *two, "--data", str(tmp_path / "odd.bin")]),
        (r"exit .*high.bin has the token 257 .* less than 256", [*words, *two, "--data", str(tmp_path / "high.bin")]),
        (r"exit The model takes at most 64 tokens", [*words, "--sequence-length", "65"]),
        (r"exit AnotherJob: .*batch_size is 6 in it and 4 here; .*force", [*words, "--batch-size", "4"]),
        (r"exit AnotherJob: .*seed is 0 in it and 1 here", [*words, "--seed", "1"]),
        (r"exit AnotherJob: .*lr is 0.01 in it and 0.02 here", [*words, "--lr", "2e-2"]),
        (r"exit AnotherJob: .*sequence_length is 16 in it and 8 here", [*words, "--sequence-length", "8"]),
        (r"exit AnotherJob: .*config.num_attention_heads is 2 in it and 4 here", [*words, "--config", str(other)]),
        (r"exit AnotherJob: .*data.digest is", [*words, "--data", str(text)]),
        (r"exit AnotherJob: .*steps is 2 in it and 3 here", [*words, "--steps", "3"]),
        (r"step 3 loss", [*words, "--steps", "3", "--force"]),
    ]
    for said in zip(changes, *ranks(2, ends, ImportedByTheMother(), changes)):
        (expected, _), (first,), _ = said
        assert re.match(expected, first), said


def not_a_number(_: object, words: list[str]) -> str:
    """The loss of the fifth step is not a number."""
    cross_entropy, calls = torch.nn.functional.cross_entropy, []

    def spoilt(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        return cross_entropy(*arguments, **options) * (float("nan") if len(calls) == 5 else 1.0)

    torch.nn.functional.cross_entropy = spoilt
    return run_on_this_rank("pretrain.py", "lab", *words)


def test_a_loss_that_is_no_number_ends_the_job_and_is_not_saved(ranks: Any, tmp_path: Path) -> None:
    words = job(tmp_path, steps=8, batch_size=4, save_every=2, keep=1)
    first, second = ranks(2, not_a_number, ImportedByTheMother(), words)
    assert list(losses(first)) == [1, 2, 3, 4, 5] and losses(first)[5] == "nan"
    assert re.match("exit NotFinite: the loss of step 5 is nan; nothing was saved after it", first.splitlines()[-1])
    assert second.startswith("exit NotFinite") and list(published(tmp_path / "checkpoints")) == [4]


def full_disk(_: object, words: list[str]) -> tuple[str, str]:
    """No manifest can be written; and then the disk has room again."""
    from fsdplab.checkpoint import folder as folders

    full = mock.patch.object(folders, "write_manifest", side_effect=OSError(28, "No space left on device"))
    hurried = functools.partialmethod(folders.CheckpointFolder.__init__, patience_s=0.5)
    with full, mock.patch.object(folders.CheckpointFolder, "__init__", hurried):
        first = run_on_this_rank("pretrain.py", "lab", *words)
    dist.barrier()
    return first, run_on_this_rank("pretrain.py", "lab", *words)


def test_a_full_disk_at_the_end_has_a_code_of_its_own(ranks: Any, tmp_path: Path) -> None:
    words = job(tmp_path, steps=3, save_every=9)
    for first, again in ranks(2, full_disk, ImportedByTheMother(), words):
        assert first.endswith("exit 75\n") and "exit" not in again
    assert list(published(tmp_path / "checkpoints")) == [3]


ORPHANS = """
import os, subprocess, sys
subprocess.Popen([sys.executable, *sys.argv[1:]]).wait()
"""


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    """kill -9 of what started a rank; no orphan trains on, and the same command goes on at once."""
    words = [str(EXAMPLES / "pretrain.py"), *job(tmp_path, steps=1000000, save_every=5)]
    there = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **{name: str(value) for name, value in there.items()}, "HF_HUB_OFFLINE": "1"}
    environment |= {"MASTER_PORT": str(_free_port()), "PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen(
        [sys.executable, "-c", ORPHANS, *words], stdout=subprocess.PIPE, text=True, env=environment
    )
    with launcher:
        assert any(line.startswith("step 6 ") for line in launcher.stdout)
        launcher.kill()
    assert left_of(tmp_path) == []


def buffers_of(_: object, folder: Path, configs: dict[str, dict[str, Any]]) -> list[str]:
    """What differs between models that pretrain.py builds, block by block, and those that transformers builds."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    names: dict[str, Any] = {"__name__": "pretrain"}
    exec(compile(source("pretrain.py", "lab"), "pretrain.py", "exec"), names)  # noqa: S102
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    wrong = []
    for name, sizes in configs.items():
        CONFIG_MAPPING[name](**sizes).save_pretrained(folder / name)
        with mock.patch.object(sys, "argv", ["pretrain.py", "--config", str(folder / name), "--data", ""]):
            args = names["arguments"]()
        args.sequence_length = 16
        model = names["build"](args, torch.device("cpu"))
        plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        expected = dict(plain.named_buffers())
        for place, value in model.named_buffers():
            if not torch.equal(value, expected[place]):
                wrong.append(f"{name}: {place}")
        for place, value in model.named_parameters():
            there, here = plain.get_parameter(place), value.full_tensor()
            if abs(there.std() - here.std()) > 0.1 * there.std() + 1e-6 or not here.isfinite().all():
                wrong.append(f"{name}: {place} {there.std()} {here.std()}")
        model.eval()
        inputs = torch.zeros(1, 8, dtype=torch.long)
        if not model(input_ids=inputs, use_cache=False).logits.isfinite().all():
            wrong.append(f"{name}: logits")
    return wrong


def test_models_of_transformers_are_built_block_by_block(ranks: Any, tmp_path: Path) -> None:
    """21 types; gpt2 and six others have no `.layers`."""
    common = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 256}
    common |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 64}
    llamas = {**common, "intermediate_size": 64, "num_key_value_heads": 2}
    old = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 256}
    old |= {"bos_token_id": 0, "eos_token_id": 0}
    configs: dict[str, dict[str, Any]] = dict.fromkeys(LIKE_LLAMA, llamas)
    configs |= {
        "gpt2": old, "gptj": {**old, "rotary_dim": 8}, "codegen": {**old, "n_head": 4, "rotary_dim": 8},
        "gpt_bigcode": old, "opt": {**common, "ffn_dim": 64, "word_embed_proj_dim": 64}, "bloom": common,
        "falcon": common, "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 2, "vocab_size": 256, "max_seq_len": 64},
        "gpt_neo": {**common, "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]},
    }  # fmt: skip
    assert ranks(1, buffers_of, ImportedByTheMother(), tmp_path, configs) == [[]]


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

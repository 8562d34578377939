"""Libraries that shard with PyTorch's `fully_shard` train the same with ours, by the lines of docs/works_with.md.

Each program trains a tiny random Llama twice, with PyTorch's FSDP2 as the library has it, and after the page's own
lines. The libraries are imported once, in the process that forks the ranks.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="transformers 5.23 needs Python 3.11")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "works_with.md"
SIZES = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=128, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
STEPS = 4
CPU_RANKS = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def imported_offline(*names: str) -> tuple[str, ...]:
    """Import libraries that must not look for anything on a network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in names:
        importlib.import_module(name)
    return names


class ImportedByTheMother:
    """An argument for `ranks`: the process that forks the ranks imports the libraries when it reads it."""

    def __reduce__(self) -> Any:
        return imported_offline, ("transformers.trainer", "transformers.distributed.fsdp", "accelerate", "peft")


def lines_of(heading: str) -> str:
    """The first Python block below a heading of the page."""
    below = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", below, re.DOTALL)
    assert found, f"{PAGE.name} has no Python lines under {heading!r}"
    return found[1]


def replaced(heading: str, engine: str, **names: Any) -> dict[str, Any]:
    """Run the page's lines, where `engine` is ours; the names that they leave."""
    if engine == "lab":
        exec(lines_of(heading), names)  # noqa: S102  what a reader would paste
    return names


def is_ours(model: Any) -> bool:
    from fsdplab.engine import FSDPModule

    return isinstance(model, FSDPModule)


# ---- what runs on a rank


def llama(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def tokens(seed: int) -> torch.Tensor:
    """Rows that a model can learn: each counts up from somewhere."""
    starts = torch.randint(0, 128, (2, 1), generator=torch.Generator().manual_seed(seed))
    return (starts + torch.arange(16)) % 128


def as_torchrun_starts_it() -> None:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(CPU_RANKS, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)


def trainer_of(model: Any, folder: str, **arguments: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for seed in range(4) for row in tokens(seed)]
    chosen = TrainingArguments(
        folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, **arguments,
    )  # fmt: skip
    return Trainer(model=model, args=chosen, train_dataset=rows)


def logged(trainer: Any) -> list[tuple[float, float]]:
    """Loss and norm of the gradient, of each step."""
    return [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]


def by_trainer(_: object, engine: str, folder: str) -> tuple[bool, Any, float]:
    """Sharded when it is loaded, trained and saved by transformers alone."""
    as_torchrun_starts_it()
    replaced("transformers' Trainer", engine)
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        llama().save_pretrained(f"{folder}/start")
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(
        f"{folder}/start", dtype=torch.float32, distributed_config=DistributedConfig(fsdp_size=dist.get_world_size())
    )
    trainer = trainer_of(model, folder)
    trainer.train()
    trainer.save_model(f"{folder}/end")
    dist.barrier()
    saved = LlamaForCausalLM.from_pretrained(f"{folder}/end", dtype=torch.float32)
    return is_ours(model), logged(trainer), sum(float(each.detach().square().sum()) for each in saved.parameters())


def accelerate_by_itself(_: object) -> tuple[str, Any, str]:
    """The kind of run that accelerate takes CPU ranks for, the plugin it keeps, and what it makes of a model."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    as_torchrun_starts_it()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    prepared = accelerator.prepare(torch.nn.Linear(4, 4))
    kept = getattr(accelerator.state, "fsdp_plugin", None)
    return accelerator.distributed_type.name, kept, type(prepared).__name__


def by_accelerate(_: object, engine: str, folder: str) -> tuple[bool, Any, str]:
    """Sharded by accelerate, as `TrainingArguments(fsdp=True)` asks it to; on CPU ranks it must be told to."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    as_torchrun_starts_it()
    replaced("accelerate", engine)
    units = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    trainer = trainer_of(llama(), folder, fsdp=True, fsdp_config=units)
    state = trainer.accelerator.state
    # what accelerate does by itself on GPUs
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    trainer.is_fsdp_enabled = True
    trainer.train()
    return is_ours(trainer.model), logged(trainer), type(trainer.optimizer).__name__


def steps_of(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        rows = tokens(10 * (step % 2) + dist.get_rank())
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded(model: Any, engine: str) -> Any:
    """A unit each decoder layer, and the rest."""
    from torch.distributed.fsdp import fully_shard as of_torch

    from fsdplab.engine import fully_shard as of_ours

    fully_shard = of_ours if engine == "lab" else of_torch
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def by_peft(_: object, engine: str) -> tuple[bool, Any, bool]:
    """Adapters on a base that stays as it was."""
    import peft
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    before = {name: each.detach().clone() for name, each in model.named_parameters() if not each.requires_grad}
    if engine == "torch":
        for layer in model.get_base_model().model.layers:
            torch.distributed.fsdp.fully_shard(layer)
        torch.distributed.fsdp.fully_shard(model)
    replaced("peft", engine, model=model, LlamaDecoderLayer=LlamaDecoderLayer)
    trained = [each for each in model.parameters() if each.requires_grad]
    losses = steps_of(model, torch.optim.AdamW(trained, lr=1e-2), range(STEPS))
    after = {name: each.full_tensor() for name, each in model.named_parameters() if not each.requires_grad}
    return is_ours(model), losses, all(torch.equal(after[name], before[name]) for name in before)


def by_checkpoint(_: object, saving: str, loading: str, folder: str) -> tuple[list[float], list[float]]:
    """Losses of the steps after a checkpoint: of the model that was saved, and of another one that loaded it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def trainee(engine: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
        model = sharded(llama(seed), engine)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    first, second = trainee(saving, 0), trainee(loading, 1)
    steps_of(*first, range(2))
    names = dict(get_state_dict=get_state_dict, set_state_dict=set_state_dict, dcp=dcp, folder=folder)
    save, load = lines_of("torch.distributed.checkpoint").split("\n\n")
    exec(save, {**names, "model": first[0], "optimizer": first[1]})  # noqa: S102
    exec(load, {**names, "model": second[0], "optimizer": second[1]})  # noqa: S102
    return steps_of(*first, range(2, 4)), steps_of(*second, range(2, 4))


# ---- the tests


Program = Callable[..., tuple[bool, Any, Any]]


def with_both(ranks: Any, program: Program, *arguments: Any) -> dict[str, list[tuple[bool, Any, Any]]]:
    """What two ranks found, with each engine."""
    return {engine: ranks(2, program, ImportedByTheMother(), engine, *arguments) for engine in ("torch", "lab")}


def check_same(found: dict[str, list[tuple[bool, Any, Any]]]) -> None:
    """Ours was used where it was asked for, the model learned, and all numbers are equal."""
    assert {engine: [ours for ours, *_ in each] for engine, each in found.items()} == {
        "torch": [False, False],
        "lab": [True, True],
    }
    assert [each[1:] for each in found["lab"]] == [each[1:] for each in found["torch"]]
    losses = torch.tensor(found["lab"][0][1]).reshape(STEPS, -1)[:, 0]
    assert losses[0] > 4.5 and losses[-1] < losses[0] - 0.005


def test_trainer_trains_and_saves_the_same(ranks, tmp_path):
    check_same(with_both(ranks, by_trainer, str(tmp_path)))


def test_accelerate_shards_the_same(ranks, tmp_path):
    check_same(with_both(ranks, by_accelerate, str(tmp_path)))


def test_accelerate_leaves_cpu_ranks_out_by_itself(ranks):
    """The page says so: should a later version take them, the page and the program above become simpler."""
    found = ranks(2, accelerate_by_itself, ImportedByTheMother())
    assert found == [("MULTI_CPU", None, "DistributedDataParallel")] * 2


def test_adapters_on_a_frozen_base_train_the_same(ranks):
    found = with_both(ranks, by_peft)
    check_same(found)
    assert all(base_unchanged for *_, base_unchanged in found["lab"])


@pytest.mark.parametrize("saving,loading", [("torch", "lab"), ("lab", "torch")])
def test_a_checkpoint_of_one_engine_continues_under_the_other(ranks, tmp_path, saving, loading):
    for went_on, loaded in ranks(2, by_checkpoint, ImportedByTheMother(), saving, loading, str(tmp_path)):
        assert went_on == loaded and went_on[0] < 4.9


def test_the_page_names_the_versions_that_the_tests_run():
    pinned = dict(
        line.split("==")
        for line in (PAGE.parents[1] / ".ci" / "constraints.txt").read_text().split("\n")
        if "==" in line
    )
    text = PAGE.read_text(encoding="utf-8")
    named = dict(re.findall(r"(transformers|accelerate|peft) (\d[\w.]*\d)", text))
    assert named == {name: pinned[name].split(";")[0] for name in ("transformers", "accelerate", "peft")}

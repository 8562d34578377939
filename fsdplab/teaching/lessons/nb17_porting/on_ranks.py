"""The part of lesson 17 that runs on ranks: transformers' Trainer and a LoRA adapter, under either engine."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdplab.engine import fully_shard, shard_model
from fsdplab.engine.compat import local_of

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
STEPS = 4


def hugging_face(payload: dict[str, Any]) -> dict[str, Any]:
    """Return losses of Trainer under PyTorch's engine and under the lab's, and what a LoRA adapter leaves to train.

    The libraries look for nothing on a network: the model is a tiny Llama with random weights.
    """
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    # what torchrun would set, which Trainer reads from the environment
    os.environ.update(ACCELERATE_USE_CPU="true", HF_HUB_OFFLINE="1", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    import transformers.distributed.fsdp as loads

    # transformers calls `fully_shard` of its own module: replacing it there changes the engine, and nothing else
    pytorchs = loads.fully_shard
    if dist.get_rank() == 0:
        _llama().save_pretrained(f"{payload['folder']}/start")
    dist.barrier()
    losses = {}
    for name, engine in (("PyTorch's FSDP2", pytorchs), ("the lab's engine", fully_shard)):
        loads.fully_shard = engine
        losses[name] = _trainer_losses(payload["folder"])
    loads.fully_shard = pytorchs
    return {"losses": losses, "lora": _lora(), "versions": _versions()}


def _llama() -> Any:
    """Build a tiny Llama with random weights, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def _tokens(seed: int) -> Tensor:
    """Return rows that a model can learn, int64 [2, 16]: each counts up from somewhere."""
    starts = torch.randint(0, 128, (2, 1), generator=torch.Generator().manual_seed(seed))
    return (starts + torch.arange(16)) % 128


def _trainer_losses(folder: str) -> list[float]:
    """Train with transformers' Trainer under the engine that is in use; return its losses by step."""
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments
    from transformers.distributed import DistributedConfig

    sharded = DistributedConfig(fsdp_size=dist.get_world_size())
    model = LlamaForCausalLM.from_pretrained(f"{folder}/start", dtype=torch.float32, distributed_config=sharded)
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    # 8 rows of 16 tokens, the same on every rank; the model moves the labels by one itself
    rows = [{"input_ids": row, "labels": row} for seed in range(4) for row in _tokens(seed)]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _lora() -> dict[str, Any]:
    """Train a frozen base with adapters, sharded by blocks: what is trained, what moved, and losses."""
    from peft import LoraConfig, get_peft_model
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model = get_peft_model(_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    shard_model(model, "full_shard", units=[LlamaDecoderLayer])
    before = {name: local_of(parameter).detach().clone() for name, parameter in model.named_parameters()}
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    losses = []
    for step in range(STEPS):
        rows = _tokens(dist.get_rank() + 10 * step)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    # rows of this rank, before and after: frozen ones must be equal in every bit
    frozen_moved = 0
    for name, parameter in model.named_parameters():
        if "lora" not in name and not torch.equal(local_of(parameter), before[name]):
            frozen_moved += 1
    state_elements = 0
    for state in optimizer.state.values():
        for value in state.values():
            if value.dim():  # a step counter has none
                state_elements += local_of(value).numel()
    return {
        "trained": trained,
        "frozen": frozen,
        "frozen that moved": frozen_moved,
        "state": state_elements,
        "losses": losses,
    }


def _versions() -> dict[str, str]:
    """Return the versions of the libraries."""
    import peft
    import transformers

    return {"transformers": transformers.__version__, "peft": peft.__version__, "torch": str(torch.__version__)}

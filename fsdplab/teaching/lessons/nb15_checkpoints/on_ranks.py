"""The part of lesson 15 that runs on the ranks: forms of a state dict, a job that may be killed, and an export.

The job reads the same twelve sequences in a step on 1, 2, 3 or 4 ranks, so its losses may be compared whatever ran it.
Losses stand in a file, since a killed job returns nothing.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from fsdplab import checkpoint
from fsdplab.checkpoint import CheckpointFolder
from fsdplab.engine import shard_model
from fsdplab.engine.compat import local_of
from fsdplab.workloads import ByteText, block_types, build_model, loss_of
from fsdplab.workloads.shapes import preset

SEQUENCES, LENGTH = 12, 32  # of a step, over all ranks
LOSSES = "losses.jsonl"


def _sharded(model_name: str, seed: int = 0) -> nn.Module:
    """Build a preset, the same on every rank, and shard it by blocks."""
    torch.manual_seed(seed)
    model = build_model(preset(model_name))
    shard_model(model, "full_shard", units=block_types(model))
    return model


def _held(state: dict[str, Any]) -> int:
    """Return the bytes of the tensors of a state dict that are on this rank."""
    return sum(local_of(value).nbytes for value in state.values())


# ---- forms


def forms(payload: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of parameters that this rank holds in each form of a model's state dict."""
    model = _sharded(payload["model"])
    everywhere = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {
        "sharded": _held(get_model_state_dict(model)),
        "full, on rank 0": _held(checkpoint.full_state_dict(model)),
        "full, on every rank": _held(everywhere),
    }


def save_and_read(payload: dict[str, Any]) -> dict[str, Any]:
    """Train a model and save it, if `payload["saves"]`; else load it on this many ranks.

    Returns the bytes that this rank holds, and whether the whole is, bit for bit, what was saved.
    """
    folder, saves = Path(payload["folder"]), payload["saves"]
    # other weights, so that equal bits can only come from the checkpoint
    model = _sharded("gpt-tiny", seed=0 if saves else 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if saves:
        for step in range(2):
            _step(model, optimizer, step)
        checkpoint.save(model, optimizer, folder / "saved")
    else:
        checkpoint.load(model, optimizer, folder / "saved")
    whole = checkpoint.full_state_dict(model)
    # what was saved, for comparison: the ranks that load it read a copy that rank 0 wrote
    saved = whole
    if not saves:
        saved = torch.load(folder / "whole.pt", weights_only=True)
    elif dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")
    equal = all(torch.equal(value, saved[name]) for name, value in whole.items())
    return {"bytes": _held(get_model_state_dict(model)), "equal": equal}


# ---- a job that may be killed


def train(payload: dict[str, Any]) -> list[int]:
    """Train to `payload["steps"]`, from the newest checkpoint of the folder, saving every `payload["every"]` steps.

    `payload["kill"]` is (rank, step): that rank is killed while it writes that step's checkpoint. Returns, for each
    save, how many steps were done before it was published.
    """
    folder, kill, last = Path(payload["folder"]), payload["kill"], payload["steps"]
    model = _sharded("gpt-tiny")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoints = CheckpointFolder(folder / "checkpoints", keep=2)
    # 0 where the folder has no checkpoint yet
    start = checkpoints.load(model, optimizer)
    steps_behind = []
    unpublished: int | None = None  # the step whose save is under way
    for step in range(start + 1, last + 1):
        loss = _step(model, optimizer, step)
        if dist.get_rank() == 0:
            row = {"step": step, "loss": loss, "ranks": dist.get_world_size()}
            with open(folder / LOSSES, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        # a save ends in the background: its folder is there once the checkpoint is complete
        if unpublished is not None and (folder / "checkpoints" / f"step-{unpublished:08d}").is_dir():
            steps_behind.append(step - unpublished)
            unpublished = None
        if step % payload["every"] == 0 or step == last:
            if kill and [dist.get_rank(), step] == list(kill):
                # this rank dies when it begins to write
                dcp.FileSystemWriter.write_data = _killed
            checkpoints.save(model, optimizer, step)
            unpublished = step
    checkpoints.close()
    return steps_behind


def _killed(*_: Any) -> Any:
    """End this process as a crash would, in place of writing."""
    os.kill(os.getpid(), signal.SIGKILL)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Take one step on this rank's part of the step's sequences; return the mean loss of all of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # all 12 sequences, int64 [12, 32]; of 3 ranks rank 1 takes 1, 4, 7 and 10
    tokens, targets = ByteText.from_standard_library().batch(step, 0, 1, SEQUENCES, LENGTH)
    loss = loss_of(model, tokens[rank::ranks], targets[rank::ranks])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return float(mean) / ranks


# ---- for others


def exported(payload: dict[str, Any]) -> dict[str, Any] | None:
    """Train a small Llama of transformers, sharded, for two steps; rank 0 writes it as safetensors.

    One parameter is whole at a time. Returns the logits of a text on rank 0.
    """
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(payload["folder"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    shard_model(model, "full_shard", units=(type(model.model.layers[0]),))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(64).reshape(2, 32) + dist.get_rank()
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = checkpoint.full_state_dict(model)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(16).reshape(1, 16)).logits
    if dist.get_rank():
        return None
    config.save_pretrained(folder)
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    return {"logits": logits, "names": len(whole)}

"""The last check of notebook 20, on ranks: PyTorch's own program over a learner's `fully_shard`, beside the unsharded
twin and the lab's engine.
"""

from __future__ import annotations

import gc
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.utils import clip_grad_norm_

from fsdplab.profiling import MemoryRecorder
from fsdplab.sessions import RunSpec
from fsdplab.sessions.prediction import predict
from fsdplab.teaching.lessons.nb20_own_fully_shard.on_ranks import (
    GATHERS,
    LOSSES,
    NEAR,
    PARAMETERS,
    REDUCTIONS,
    Facts,
    FullyShard,
    gathers_beyond,
    likeness,
)
from fsdplab.teaching.lessons.nb20_own_fully_shard.steady_order import Order
from fsdplab.workloads import ByteText, block_types, build_model, loss_of
from fsdplab.workloads.twin import replay_gradients

SMALL, STEPS, SAVED_AFTER = "gpt-tiny", 4, 2
LARGE = RunSpec(
    model="gpt-20m", strategy="full_shard", world_size=2, batch_size=1, sequence_length=32, steps=2, optimizer="adamw"
)
MARGIN = 1.10
NORMS = "gradient norms that differ from the twin's"
AFTER_LOADING = "losses after the checkpoint that differ from the twin's"
PEAK = "MB more at the peak than the lab's engine and 10 %"
ADDED_UP = "gradients that two backwards leave"
RESTING = "MB between steps beyond the lab's shards and optimizer state"
AS_IT_SHOULD: Facts = {
    LOSSES: [],
    NORMS: [],
    AFTER_LOADING: [],
    PARAMETERS: [],
    GATHERS: 0,
    REDUCTIONS: 0,
    ADDED_UP: "twice those of one",
    RESTING: 0.0,
    PEAK: 0.0,
}


def in_pytorchs_loop(fully_shard: FullyShard) -> Facts:
    """Train a small GPT, save it, load it into a second model and train on; then measure the memory of a larger one."""
    text, twin = ByteText.from_standard_library(), _Twin()
    first = _Trained(fully_shard, seed=0)
    results = [first.step(text, step) for step in range(SAVED_AFTER)]
    # other weights: what a checkpoint does not bring would show in the losses
    second = _Trained(fully_shard, seed=1)
    _handed_over(first, second)
    results += [second.step(text, step) for step in range(SAVED_AFTER, STEPS)]

    wrong_losses, wrong_norms = [], []  # steps that differ from the twin's
    for step, (loss, norm) in enumerate(results):
        twin_loss, twin_norm = twin.step(text, step)
        # norms of a step whose loss is wrong say nothing more
        if not _close(loss, twin_loss):
            wrong_losses.append(step)
        elif not _close(norm, twin_norm):
            wrong_norms.append(step)
    units = len(first.units)
    facts: Facts = {
        LOSSES: [f"step {step}" for step in wrong_losses if step < SAVED_AFTER],
        NORMS: [f"step {step}" for step in wrong_norms],
        AFTER_LOADING: [f"step {step}" for step in wrong_losses if step >= SAVED_AFTER],
        PARAMETERS: second.wrong_parameters(twin.model),
        GATHERS: gathers_beyond(first.order, units - 1),
        # of the first model's last step
        REDUCTIONS: first.order.count("reduce_scatter") - units,
        ADDED_UP: second.added_up(text),
    }
    del first, second
    gc.collect()  # a model under hooks is garbage in cycles
    return facts | _memory(fully_shard, text)


class _Trained:
    """A GPT under the learner's function with AdamW, and PyTorch's own loop."""

    def __init__(self, fully_shard: FullyShard, seed: int, model: str = SMALL) -> None:
        self.model = build_model(model, seed=seed)
        blocks = [module for module in self.model.modules() if isinstance(module, block_types(self.model))]
        self.units = [*blocks, self.model]
        for unit in self.units:
            fully_shard(unit)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True)

    def step(self, text: ByteText, step: int, batch_size: int = 2, length: int = 32) -> tuple[float, float]:
        """Take one step; return (this rank's loss, the norm of all gradients)."""
        given = text.batch(step, dist.get_rank(), dist.get_world_size(), batch_size, length, seed=0)
        # sizes do not matter here, collectives are only counted
        with Order(1) as self.order:
            loss = loss_of(self.model, *given)
            loss.backward()
        norm = _number(clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm

    def added_up(self, text: ByteText) -> str:
        """Return how large the gradients of two equal backwards without a `zero_grad` between them are."""
        given = text.batch(STEPS, dist.get_rank(), dist.get_world_size(), 2, 32, seed=0)
        norms = []
        for _ in range(2):
            loss_of(self.model, *given).backward()
            norms.append(_number(clip_grad_norm_(self.model.parameters(), float("inf"))))  # clips nothing
        self.optimizer.zero_grad()
        # the same batch twice: gradients that add up have twice the norm
        factor = norms[1] / norms[0]
        if abs(factor - 2) < 1e-3:
            return "twice those of one"
        return f"{factor:.3g} times those of one"

    def wrong_parameters(self, twin: nn.Module) -> list[str]:
        """Return the parameters that are not the twin's, and what they are like."""
        wrong = []
        right = dict(twin.named_parameters())
        for name, value in self.model.named_parameters():
            difference = likeness(_whole(value), right[name])
            # a key's bias moves all scores of a query alike: its gradient is mere rounding, which Adam makes a step
            if difference and not name.endswith("key.bias"):
                wrong.append(f"{name}: {difference}")
        return wrong


class _Twin:
    """The same training on one process, gradients averaged in rank order."""

    def __init__(self) -> None:
        self.model = build_model(SMALL, seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True)

    def step(self, text: ByteText, step: int) -> tuple[float, float]:
        """Take one step; return (the loss of this process's rank, the norm of all gradients)."""
        ranks = dist.get_world_size()
        batches = [text.batch(step, rank, ranks, 2, 32, seed=0) for rank in range(ranks)]
        # this rank's own loss, which the replay of all ranks does not return
        with torch.no_grad():
            loss = loss_of(self.model, *batches[dist.get_rank()])
        replay_gradients(self.model, [[batch] for batch in batches], loss_of)
        norm = _number(clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm


def _whole(value: Tensor) -> Tensor:
    """Return a DTensor's whole tensor; a plain tensor as it is."""
    if hasattr(value, "full_tensor"):
        whole: Tensor = value.full_tensor()
        return whole
    return value


def _number(value: Tensor) -> float:
    """Return a tensor of one element as a number, whole where it is sharded."""
    return float(_whole(value))


def _close(got: float, expected: float) -> bool:
    """Return whether a number is the twin's but for rounding."""
    return abs(got - expected) <= 5 * NEAR * abs(expected)


def _handed_over(first: _Trained, second: _Trained) -> None:
    """Save one model and its optimizer with torch.distributed.checkpoint, and load them into another."""
    with tempfile.TemporaryDirectory() as folder_of_rank:
        folders = [folder_of_rank]
        dist.broadcast_object_list(folders)  # all ranks use that of rank 0
        for trained, move in ((first, dcp.save), (second, dcp.load)):
            # shards; `load` writes into those of the second model
            model, optimizer = get_state_dict(trained.model, trained.optimizer)
            move({"model": model, "optimizer": optimizer}, checkpoint_id=folders[0])
        set_state_dict(second.model, second.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        dist.barrier()  # rank 0 removes the folder


def _memory(fully_shard: FullyShard, text: ByteText) -> Facts:
    """Return the second step's memory beside that of the lab's engine, which is predicted byte by byte."""
    trained = _Trained(fully_shard, seed=0, model=LARGE.model)
    trained.step(text, 0, 1, 8)  # makes the optimizer's state, and tells an engine the order of its units
    recorder = MemoryRecorder(
        model=trained.model,
        optimizer=trained.optimizer,
        engine="my_fsdp",
        device=torch.device("cpu"),
        ignore=[text.data],
    )
    with recorder:
        trained.step(text, 1, LARGE.batch_size, LARGE.sequence_length)
    timeline, lab = recorder.timeline, predict(LARGE)
    assert lab.peak_bytes is not None and lab.by_category is not None, "the lab's engine is predicted on CPU ranks"
    # what must be in memory between two steps, and no more than 10 % beyond it
    resting = lab.by_category["sharded_parameters"] + lab.by_category["optimizer_state"]
    collectives = trained.order.count("all_gather") + trained.order.count("reduce_scatter")
    return {
        RESTING: _over(timeline.baseline_total, MARGIN * resting),
        PEAK: _over(timeline.peak_total, MARGIN * lab.peak_bytes),
        "_held": dict(timeline.peak),
        "_peak": timeline.peak_total,
        "_lab": lab.peak_bytes,
        "_leaderboard": {"peak_mb": round(timeline.peak_total / 1e6, 1), "collectives": collectives},
    }


def _over(nbytes: float, most: float) -> float:
    """Return the MB beyond `most` bytes, to a tenth."""
    return round(max(0.0, nbytes - most) / 1e6, 1)

"""The last check of notebook 20, on ranks: PyTorch's own program over a learner's `fully_shard`, beside the unsharded
twin and the lab's engine.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterable

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
MOST_MESSAGES = 5  # of a unit: an all-gather and a reduction under way, of which gloo makes a copy each, and a shard
NORMS = "gradient norms that differ from the twin's"
AFTER_LOADING = "losses after the checkpoint that differ from the twin's"
PEAK = "MB more at the peak than the lab's engine and 10 %, without messages"
BUFFERS = "MB of messages at the peak, too many"
RESTING = "MB of shards and optimizer state beyond the lab's"
AS_IT_SHOULD: Facts = {
    LOSSES: [], NORMS: [], AFTER_LOADING: [], PARAMETERS: [], GATHERS: 0, REDUCTIONS: 0, RESTING: 0.0, PEAK: 0.0,
    BUFFERS: 0.0,
}  # fmt: skip


def in_pytorchs_loop(fully_shard: FullyShard) -> Facts:
    """A small GPT trained, saved, loaded into a second model and trained on; then the memory of a larger one."""
    text, twin = ByteText.from_standard_library(), _Twin()
    first = _Trained(fully_shard, seed=0)
    early = [first.step(text, step) for step in range(SAVED_AFTER)]
    second = _Trained(fully_shard, seed=1)
    _handed_over(first, second)
    late = [second.step(text, step) for step in range(SAVED_AFTER, STEPS)]
    right = [twin.step(text, step) for step in range(STEPS)]
    apart = [_apart(got, want) for got, want in zip([*early, *late], right, strict=True)]
    units = len(first.units)
    facts: Facts = {
        LOSSES: [f"step {step}" for step in range(SAVED_AFTER) if apart[step][0]],
        NORMS: [f"step {step}" for step in range(STEPS) if apart[step][1] and not apart[step][0]],
        AFTER_LOADING: [f"step {step}" for step in range(SAVED_AFTER, STEPS) if apart[step][0]],
        PARAMETERS: second.wrong_parameters(twin.model),
        GATHERS: gathers_beyond(first.order, units - 1),
        REDUCTIONS: first.order.count("reduce_scatter") - units,
    }
    del first, second
    gc.collect()  # a model under hooks is garbage in cycles
    return facts | _memory(fully_shard, text)


class _Trained:
    """A GPT under the learner's function with AdamW, and PyTorch's own loop."""

    def __init__(self, fully_shard: FullyShard, seed: int, model: str = SMALL, clipped: bool = True) -> None:
        self.model, self.clipped = build_model(model, seed=seed), clipped
        self.units = [*(each for each in self.model.modules() if isinstance(each, block_types(self.model))), self.model]
        for unit in self.units:
            fully_shard(unit)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True)

    def step(self, text: ByteText, step: int, batch_size: int = 2, length: int = 32) -> tuple[float, float]:
        """One step: (this rank's loss, the norm of all gradients)."""
        given = text.batch(step, dist.get_rank(), dist.get_world_size(), batch_size, length, seed=0)
        with Order(1) as self.order:
            loss = loss_of(self.model, *given)
            loss.backward()
        norm = _number(clip_grad_norm_(self.model.parameters(), 1.0)) if self.clipped else 0.0
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm

    def wrong_parameters(self, twin: nn.Module) -> list[str]:
        """The parameters that are not the twin's, and what they are like."""
        found = []
        right = dict(twin.named_parameters())
        for name, value in self.model.named_parameters():
            what = likeness(getattr(value, "full_tensor", lambda value=value: value)(), right[name])
            # a key's bias moves all scores of a query alike: its gradient is mere rounding, which Adam makes a step
            found += [f"{name}: {what}"] if what and not name.endswith("key.bias") else []
        return found


class _Twin:
    """The same training on one process, gradients averaged in rank order."""

    def __init__(self) -> None:
        self.model = build_model(SMALL, seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, fused=True)

    def step(self, text: ByteText, step: int) -> tuple[float, float]:
        ranks, losses = dist.get_world_size(), list[float]()

        def noted(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
            loss = loss_of(model, tokens, targets)
            losses.append(loss.item())
            return loss

        replay_gradients(self.model, [[text.batch(step, rank, ranks, 2, 32, seed=0)] for rank in range(ranks)], noted)
        norm = _number(clip_grad_norm_(self.model.parameters(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses[dist.get_rank()], norm


def _number(value: Tensor) -> float:
    return float(getattr(value, "full_tensor", lambda: value)())


def _apart(got: Iterable[float], want: Iterable[float]) -> list[bool]:
    return [not abs(one - other) <= 5 * NEAR * abs(other) for one, other in zip(got, want, strict=True)]


def _handed_over(first: _Trained, second: _Trained) -> None:
    """Save one model and its optimizer with torch.distributed.checkpoint, and load them into another."""
    with tempfile.TemporaryDirectory() as own:
        place = [own]
        dist.broadcast_object_list(place)
        for trained, move in ((first, dcp.save), (second, dcp.load)):
            model, optimizer = get_state_dict(trained.model, trained.optimizer)
            move({"model": model, "optimizer": optimizer}, checkpoint_id=place[0])
        set_state_dict(second.model, second.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        dist.barrier()  # rank 0 removes the folder


def _memory(fully_shard: FullyShard, text: ByteText) -> Facts:
    """The second step's memory beside that of the lab's engine, which is predicted byte by byte."""
    trained = _Trained(fully_shard, seed=0, model=LARGE.model, clipped=False)
    shape = (LARGE.batch_size, LARGE.sequence_length)
    trained.step(text, 0, 1, 8)  # makes the optimizer's state, and tells an engine the order of its units
    recorder = MemoryRecorder(
        model=trained.model, optimizer=trained.optimizer, engine="my_fsdp", device=torch.device("cpu"),
        ignore=[text.data],
    )  # fmt: skip
    with recorder:
        trained.step(text, 1, *shape)
    lab, held = predict(LARGE), recorder.timeline.peak
    assert lab.peak_bytes is not None and lab.by_category is not None, "the lab's engine is predicted on CPU ranks"
    resting = sum(held[name] - lab.by_category[name] for name in ("sharded_parameters", "optimizer_state"))
    messages, theirs = held["communication_buffers"], lab.by_category["communication_buffers"]
    peak, unit = (
        recorder.timeline.peak_total,
        sum(each.numel() * 4 for each in build_model(LARGE.model).blocks[0].parameters()),
    )
    return {
        RESTING: _over(resting, 0),
        PEAK: _over(peak - messages, MARGIN * (lab.peak_bytes - theirs)),
        BUFFERS: _over(messages, MOST_MESSAGES * unit),
        "_held": dict(held),
        "_peak": peak,
        "_lab": lab.peak_bytes,
        "_leaderboard": {
            "peak_mb": round(peak / 1e6, 1),
            "collectives": trained.order.count("all_gather") + trained.order.count("reduce_scatter"),
        },
    }


def _over(nbytes: float, most: float) -> float:
    """MB beyond `most` bytes, to a tenth."""
    return round(max(0.0, nbytes - most) / 1e6, 1)

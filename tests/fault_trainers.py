"""The fault bench's job under a trainer: torchrun -m tests.fault_trainers --by NAME --fault NAME

The trainers are `trainer` (transformers'), `lightning` (its DDP), `fsdp2` (its ModelParallelStrategy, under which the
model calls fully_shard) and `deepspeed`. Each has the faults in its own words: an evaluation in each step is an
argument of `TrainingArguments`, or of Lightning's `Trainer`.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

WIDTH, DEPTH, TOKENS, STEPS, BATCH = 64, 3, 32, 27, 4
FAULTS = ("none", "loader", "evaluate", "checkpoint", "loss-all-reduce", "collect", "recompute")


class Network(nn.Module):
    """Layers with a residual, and a loss as transformers' models return it."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        inner = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(DEPTH)
        ]
        self.layers, self.recomputes = nn.ModuleList(inner), recomputes

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss and the output; shape of both tensors (batch, tokens, width)."""
        for layer in self.layers:
            inner = checkpoint(layer, x, use_reentrant=False) if self.recomputes and self.training else layer(x)
            x = x + inner
        return {"loss": nn.functional.mse_loss(x, labels), "logits": x}


class Samples(Dataset):
    """Random samples; a slow one sleeps."""

    def __init__(self, size: int, slow: bool) -> None:
        self.size, self.slow = size, slow

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.slow:
            time.sleep(0.02)
        values = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(index))
        return {"x": values, "labels": -values}


def act(fault: str) -> None:
    """What a callback of the job does after each step."""
    if fault == "loss-all-reduce":
        dist.all_reduce(torch.ones(1))
    if fault == "collect":
        gc.collect()


# ---- the trainers


def by_trainer(fault: str, folder: str) -> None:
    """transformers' Trainer, which wraps the model in DistributedDataParallel."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Acts(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            act(fault)

    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=BATCH, logging_steps=1000, report_to=[], use_cpu=True,
        disable_tqdm=True, eval_strategy="steps" if fault == "evaluate" else "no", eval_steps=1,
        save_strategy="steps" if fault == "checkpoint" else "no", save_steps=1, save_total_limit=1,
        optim="adamw_torch_fused", max_grad_norm=0.0,
    )  # fmt: skip
    data = Samples(2 * STEPS * BATCH, fault == "loader")
    model = Network(fault == "recompute")
    Trainer(model, arguments, train_dataset=data, eval_dataset=Samples(32, False), callbacks=[Acts()]).train()


def by_lightning(fault: str, folder: str, strategy: str) -> None:
    """Lightning with `ddp`, or with its ModelParallelStrategy."""
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from torch.distributed.fsdp import fully_shard

    class Acts(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            act(fault)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network(fault == "recompute")

        def configure_model(self) -> None:
            if self.device_mesh is not None and not hasattr(self.network.layers[0], "unshard"):
                mesh = self.device_mesh["data_parallel"]
                for layer in self.network.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(self, mesh=mesh)

        def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
            return self.network(**batch)["loss"]

        def validation_step(self, batch: dict[str, torch.Tensor], number: int) -> None:
            self.network(**batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)

    saves = [ModelCheckpoint(folder, every_n_train_steps=1)] if fault == "checkpoint" else []
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=2, strategy=strategy, logger=False, default_root_dir=folder,
        enable_checkpointing=bool(saves), enable_progress_bar=False, callbacks=[Acts(), *saves], num_sanity_val_steps=0,
        val_check_interval=1 if fault == "evaluate" else 1.0, limit_val_batches=4 if fault == "evaluate" else 0,
    )  # fmt: skip
    loader = DataLoader(Samples(2 * STEPS * BATCH, fault == "loader"), BATCH)
    trainer.fit(Module(), loader, DataLoader(Samples(32, False), BATCH))


def by_deepspeed(fault: str, folder: str) -> None:
    """DeepSpeed's engine, ZeRO stage 2."""
    import deepspeed

    # an operator for inference, for which ranks wait where a killed one was compiling it
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("gloo")
    model = Network(fault == "recompute")
    config = {
        "train_micro_batch_size_per_gpu": BATCH, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )
    samples = Samples(2 * STEPS * BATCH, fault == "loader")
    for batch in DataLoader(samples, BATCH, sampler=DistributedSampler(samples)):
        engine.backward(engine(**batch)["loss"])
        engine.step()
        act(fault)
        if fault == "checkpoint":
            engine.save_checkpoint(folder, tag="last")
        if fault == "evaluate":
            engine.eval()
            with torch.no_grad():
                for _ in range(4):
                    engine(**batch)
            engine.train()


def main() -> None:
    """Train with one fault."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--by", choices=("trainer", "lightning", "fsdp2", "deepspeed"), default="trainer")
    parser.add_argument("--fault", choices=FAULTS, default="none")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        if options.by == "trainer":
            by_trainer(options.fault, folder)
        elif options.by == "deepspeed":
            by_deepspeed(options.fault, folder)
        else:
            from lightning.pytorch.strategies import ModelParallelStrategy

            strategy = ModelParallelStrategy() if options.by == "fsdp2" else "ddp"
            by_lightning(options.fault, folder, strategy)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A small training job with one fault: python -m tests.fault_job --engine fsdp2|ddp|fsdp1 --fault NAME [--steps N]

It forks two ranks of its own, so that torch is imported once, and is written as any job is: nothing in it knows that it
is recorded. `none` has no fault, `accumulates` none either: it accumulates four micro-batches and reduces once.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import os
import tempfile
import threading
import time

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

WIDTH, DEPTH, TOKENS = 128, 4, 64
EPOCHS = 4  # of the jobs that have any
MICRO_BATCHES = 4  # of the jobs that accumulate
ADAPTERS = ("adapters", "adapters-apart")  # of frozen blocks
HYBRID = ("own-start", "one-start")  # replicas of shards
ACCUMULATE = ("accumulates", "reduce-each", "loss-all-reduce", "item-each", "item-micro", "reduce-first", "ended-decay")


class Block(nn.Module):
    """Attention's products are left out: a norm and two layers are enough."""

    def __init__(self, recomputes: bool, has_adapter: bool = False) -> None:
        super().__init__()
        self.adapter = None
        if has_adapter:
            self.adapter = nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False))
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, tokens, width), as it came."""
        if self.recomputes and self.training:
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        computed = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return computed if self.adapter is None else computed + self.adapter(x)


class Network(nn.Module):
    """Blocks and a head; `positions` is a buffer that never changes."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(fault == "recompute", fault in ADAPTERS) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 10)
        self.dropout = nn.Dropout(0.1 if fault in ("eval-mode", "same-data-dropout", "dropout") else 0.0)
        if fault in ADAPTERS:
            for name, parameter in self.blocks.named_parameters():
                parameter.requires_grad_("adapter" in name)
        self.fault = fault
        if fault == "frozen-part":
            self.blocks[: DEPTH // 2].requires_grad_(False)
        if fault == "broadcast-buffers":
            self.register_buffer("positions", torch.randn(TOKENS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, tokens, width) to (batch, 10)."""
        if hasattr(self, "positions"):
            x = x + self.positions
        first, others = self.blocks[: DEPTH // 2], self.blocks[DEPTH // 2 :]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.fault not in ("no-grad-part", "frozen-part")):
            for block in first:
                x = block(x)
        for block in others:
            through = block(x)
            x = 0.0 * through + x if self.fault == "dead-experts" else through
        return self.head(self.dropout(x.mean(1)))


class Samples(Dataset):
    """Random samples; a slow one sleeps, as one does that decodes an image."""

    def __init__(self, size: int, fault: str) -> None:
        self.size, self.fault = size, fault

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.fault == "loader":
            time.sleep(0.01)
        if self.fault == "worker-tokenises":  # so little that it is ahead also where ranks and workers share two cores
            tokenised(TEXT[:100])
        generator = torch.Generator().manual_seed(index)
        return torch.randn(TOKENS, WIDTH, generator=generator), index % 10


TEXT = 3000 * "shard and gather "


def tokenised(text: str) -> list[int]:
    """The numbers of a text's words, in Python."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(word.strip(".,").lower(), len(numbers)) for word in text.split()]


def dtype_of(fault: str) -> torch.dtype:
    """The type of parameters and samples."""
    if fault == "fp64":
        return torch.float64
    return torch.bfloat16 if fault in ("bf16", "bf16-large-rate") else torch.float32


# ---- the model as each engine has it


def sharded(model: Network, fault: str) -> nn.Module:
    """The model under PyTorch's FSDP2."""
    mesh = None
    if fault in HYBRID:
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicas", "shards"))
    if fault == "tiny-units":
        for module in [each for each in model.modules() if isinstance(each, (nn.Linear, nn.LayerNorm))]:
            fully_shard(module)
    elif fault != "one-unit":
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=fault != "keep")
    if fault != "no-root":
        fully_shard(model, mesh=mesh)
    if fault not in ("no-prefetch", "one-unit", "tiny-units", "no-root"):
        for block, following in zip(model.blocks, list(model.blocks)[1:]):
            block.set_modules_to_forward_prefetch([following])
    return model


def replicated(model: Network, fault: str) -> nn.Module:
    """The model under DistributedDataParallel."""
    return nn.parallel.DistributedDataParallel(
        model,
        bucket_cap_mb={"small-buckets": 0.05, "one-bucket": 1000}.get(fault),
        find_unused_parameters=fault in ("find-unused", "static-graph"),
        static_graph=fault == "static-graph",
        broadcast_buffers=fault == "broadcast-buffers",
        gradient_as_bucket_view=fault != "kept-gradients",
    )


def wrapped(model: Network, fault: str) -> nn.Module:
    """The model under FullyShardedDataParallel, PyTorch's FSDP1."""
    policy = None if fault == "one-unit" else ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


ENGINES = {"fsdp2": sharded, "ddp": replicated, "fsdp1": wrapped}


def add_hook(model: nn.Module, fault: str) -> None:
    """Hooks of the job's own, which stop the host in every module."""

    def check(module: nn.Module, args: object, output: torch.Tensor) -> None:
        if not bool(torch.isfinite(output).all()):
            raise FloatingPointError(type(module).__name__)

    def meet(module: nn.Module, args: object, output: torch.Tensor) -> None:
        dist.barrier()

    if fault in ("hook-check", "hook-barrier"):
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                module.register_forward_hook(check if fault == "hook-check" else meet)


def optimizer_of(model: nn.Module, fault: str) -> torch.optim.Optimizer:
    """AdamW, in one pass where it can: for tensors that are all sharded, or all whole."""
    fused = fault not in ("loop-optimizer", "no-root", "many-groups")
    foreach = {"loop-optimizer": False, "many-groups": True}.get(fault)
    trained = model.parameters()
    if fault == "head-only":
        trained = getattr(model, "module", model).head.parameters()
    if fault == "many-groups":
        trained = [{"params": [parameter], "weight_decay": 0.01 * (parameter.ndim > 1)} for parameter in trained]
    if fault == "two-groups":
        matrices, others = [], []
        for parameter in trained:
            (matrices if parameter.ndim > 1 else others).append(parameter)
        trained = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    rate = {"bf16": 1e-5, "bf16-large-rate": 1e-2}.get(fault, 1e-3)
    return torch.optim.AdamW(trained, lr=rate, fused=fused, foreach=foreach)


def scheduler_of(optimizer: torch.optim.Optimizer, fault: str) -> torch.optim.lr_scheduler.LRScheduler | None:
    """A warm-up or a decay, for the jobs that have one."""
    factors = {
        "no-warm-up": lambda step: min(1, step // 100),
        "warm-up": lambda step: min(1.0, step / 100),
        "ended-decay": lambda step: max(0.0, 1 - step / 28),
    }
    if fault not in factors:
        return None
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factors[fault])


# ---- the loop


class Loop:
    """One rank's training."""

    def __init__(self, engine: str, fault: str, folder: str) -> None:
        self.engine, self.fault, self.folder, self.rank = engine, fault, folder, dist.get_rank()
        torch.manual_seed(self.rank if fault == "own-start" else 0)
        network = Network(fault).to(dtype_of(fault))
        torch.autograd.set_detect_anomaly(fault == "anomaly")
        self.averaged = copy.deepcopy(network) if fault == "average-weights" else None
        self.optimizer = optimizer_of(network, fault)
        self.model = ENGINES[engine](network, fault)
        add_hook(network, fault)
        torch.manual_seed(7)
        if fault == "all-load" or (fault == "one-loads" and self.rank == 0):
            network.load_state_dict(Network(fault).state_dict())
        if fault != "optimizer-first":
            self.optimizer = optimizer_of(self.model, fault)
        self.scaler = torch.amp.GradScaler("cpu") if fault in ("clips-scaled", "unscales", "skips") else None
        self.scheduler = scheduler_of(self.optimizer, fault)
        self.micro_batches = MICRO_BATCHES if fault in ACCUMULATE else 1
        self.batch = 64 if fault == "reshard" else 8 // self.micro_batches
        self.running: float | torch.Tensor = 0.0
        self.has_ended = False

    def train(self, steps: int) -> None:
        """All steps."""
        size = 2 * steps * self.micro_batches * self.batch
        begun_anew = self.fault == "begin-loader"
        samples = Samples(size, self.fault)
        has_same_data = self.fault in ("same-data", "same-data-dropout")
        has_epochs = self.fault in ("no-set-epoch", "set-epoch")
        if has_epochs:
            samples = Samples(size // EPOCHS, self.fault)
        part = None if has_same_data else DistributedSampler(samples, shuffle=has_epochs)
        workers = int(self.fault in ("begin-loader", "worker-tokenises"))
        data = DataLoader(samples, batch_size=self.batch, sampler=part, num_workers=workers)
        if self.fault == "set-epoch":
            next(iter(data))
        loader = iter(data)
        if self.fault in ("python-thread", "sleepy-thread"):
            threading.Thread(target=self.beside, name="metrics", daemon=True).start()
        torch.manual_seed(self.rank)
        self.model.train(self.fault != "eval-mode")
        for step in range(steps):
            if has_epochs and step and step % (steps // EPOCHS) == 0:
                if self.fault == "set-epoch":
                    part.set_epoch(step)
                loader = iter(data)
            for micro in range(self.micro_batches):
                batch = next(iter(data) if begun_anew else loader)
                reduced = 0 if self.fault == "reduce-first" else self.micro_batches - 1
                self.micro_batch(*batch, is_last=micro == reduced)
            self.update()
            self.after_update(step)
        self.has_ended = True

    def beside(self) -> None:
        """A thread beside the loop: one of pure Python keeps the interpreter, one that sleeps and writes does not."""
        while not self.has_ended:
            tokenised(TEXT[:1000])
            if self.fault == "sleepy-thread":
                time.sleep(0.01)

    def update(self) -> None:
        """The optimizer's step, and gradients are set to zero."""
        self.before_update()
        if self.fault == "new-optimizer":
            self.optimizer = optimizer_of(self.model, self.fault)
        if self.fault == "zero-first":
            self.optimizer.zero_grad()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaled_step(self.scaler)
        if self.fault == "second-step":
            self.optimizer.step()
        if self.scheduler is not None:
            for _ in range(self.micro_batches):  # more than one is the fault of the decay
                self.scheduler.step()
        if self.fault != "no-zero":
            self.optimizer.zero_grad(set_to_none=self.fault != "kept-gradients")

    def scaled_step(self, scaler: torch.amp.GradScaler) -> None:
        """The optimizer's step of gradients that are scaled, and clipped."""
        if self.fault == "unscales":
            scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0 if self.fault != "skips" else torch.inf)
        scaler.step(self.optimizer)
        scaler.update()

    def micro_batch(self, x: torch.Tensor, y: torch.Tensor, is_last: bool) -> None:
        """Forward and backward of one micro-batch."""
        if self.fault == "tokenises":
            for _ in range(24):
                tokenised(TEXT)
        x = x.to(dtype_of(self.fault))
        if self.fault == "imbalance" and self.rank == 1:
            x, y = x.repeat(6, 1, 1), y.repeat(6)
        if self.fault == "sleepy" and self.rank == 1:
            time.sleep(0.3)
        with self.accumulation(is_last), self.autocast():
            loss = self.loss(x, y) / self.micro_batches
            if self.fault in ("loss-all-reduce", "loss-each-step"):
                total = loss.detach().clone()
                dist.all_reduce(total)
                self.running += total.item()
            if self.fault == "item-each":
                self.running += sum(each.item() for each in loss.detach().expand(50))
            if self.fault == "item-micro":
                self.running += loss.item()
            if self.fault == "keeps-graph":
                self.running = self.running + loss
            if self.scaler is not None:
                loss = self.scaler.scale(loss)
            loss.backward(retain_graph=self.fault in ("keeps-graph", "two-losses", "retains"))
            if self.fault == "two-losses":
                (0.1 * loss).backward()
        if self.fault == "sharpness":
            self.step_of_sam(x, y)

    def step_of_sam(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """The gradient at the worst point nearby, in place of the one that is there."""
        weights = [local(parameter.detach()) for parameter in self.model.parameters()]
        up = [0.1 * local(parameter.grad) for parameter in self.model.parameters()]
        torch._foreach_add_(weights, up)
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        torch._foreach_sub_(weights, up)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch."""
        if self.fault == "unwrapped":
            return nn.functional.cross_entropy(self.model.module(x), y)
        if self.fault == "sample-by-sample":
            losses = [nn.functional.cross_entropy(self.model(x[i : i + 1]), y[i : i + 1]) for i in range(len(x))]
            return torch.stack(losses).mean()
        features = self.model(x)
        if self.fault == "nan":  # no class is left to some samples
            features = features.masked_fill((y == 3)[:, None], -torch.inf)
        if self.fault == "contrastive":
            gathered = [torch.empty_like(features) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, features)
            gathered[self.rank] = features
            every = torch.cat(gathered)
            return nn.functional.cross_entropy(every @ every.T, torch.arange(len(every)))
        loss = nn.functional.cross_entropy(features, y)
        if self.fault == "skips":  # a distance to what is the same at first
            loss = loss + 1e-3 * (features - features.detach()).pow(2).sum(-1).sqrt().mean()
        if self.fault == "norms-in-loss":
            loss = loss + 1e-4 * sum(parameter.norm() ** 2 for parameter in self.model.parameters())
        return loss

    def accumulation(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Inside, gradients are reduced only in the last micro-batch."""
        if self.fault == "reduce-each" or is_last:
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(True)
            return contextlib.nullcontext()
        if self.engine == "fsdp2":
            self.model.set_requires_gradient_sync(False)
            return contextlib.nullcontext()
        return self.model.no_sync()

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Products in bf16, beside messages in fp32."""
        if self.fault == "fp32-messages":
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()

    def before_update(self) -> None:
        """What some loops do between the backward and the optimizer's step."""
        if self.fault == "clip-each":
            for parameter in self.model.parameters():
                torch.nn.utils.clip_grad_norm_(parameter, 1.0)
        if self.fault == "clip-once" and self.engine == "fsdp1":
            self.model.clip_grad_norm_(1.0)
        elif self.fault in ("clip-once", "clip-twice"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

        if self.fault == "clip-twice":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
        if self.fault == "log-norms":
            self.running = sum(local(parameter.grad).norm() for parameter in self.model.parameters())
        if self.fault == "reduce-again":
            for parameter in self.model.parameters():
                dist.all_reduce(local(parameter.grad))

    def after_update(self, step: int) -> None:
        """What some loops do after each step."""
        act = getattr(self, self.fault.replace("-", "_"), None)
        if callable(act):
            act()
        if self.rank == 0 and step % 10 == 0:
            print(f"step {step}", flush=True)

    def validation_loss(self) -> None:
        """The loss of other samples, with a graph of which no backward is called."""
        samples = torch.randn(self.batch, TOKENS, WIDTH)
        self.running += float(nn.functional.cross_entropy(self.model(samples), torch.zeros(self.batch).long()))

    def new_group(self) -> None:
        """A group of all ranks for a metric."""
        dist.new_group()

    def summons(self) -> None:
        """A moving average of whole weights, for which FSDP1 gathers all of them."""
        with FullyShardedDataParallel.summon_full_params(self.model, writeback=False), torch.no_grad():
            weights = [parameter.detach() for parameter in self.model.parameters()]
            self.shards = getattr(self, "shards", None) or [each.clone() for each in weights]
            torch._foreach_lerp_(self.shards, weights, 0.01)

    def metric_forward(self) -> None:
        """A metric of the same kind of samples, by a forward of its own."""
        with torch.no_grad():
            self.running += float(self.model(torch.randn(self.batch, TOKENS, WIDTH)).argmax(-1).float().mean())

    def deep_copy(self) -> None:
        """The weights of this step are kept as a copy of the model."""
        self.averaged = copy.deepcopy(self.model.module)

    def empty_cache(self) -> None:
        """Memory is given back to the driver."""
        torch.cuda.empty_cache()

    def histograms(self) -> None:
        """Statistics of each parameter."""
        for parameter in self.model.parameters():
            numpy.histogram(local(parameter.detach()).numpy(), bins=64)

    def average_in_place(self) -> None:
        """A moving average of this rank's own shards, which is no fault."""
        with torch.no_grad():
            shards = [local(parameter.detach()) for parameter in self.model.parameters()]
            self.shards = getattr(self, "shards", None) or [each.clone() for each in shards]
            torch._foreach_lerp_(self.shards, shards, 0.01)

    def prints(self) -> None:
        """A tensor is printed."""
        print(local(next(self.model.parameters())), flush=True)

    def optimizer_checkpoint(self) -> None:
        """Every rank writes its optimizer's state after each step."""
        torch.save(self.optimizer.state_dict(), f"{self.folder}/optimizer{self.rank}.pt")

    def waits(self) -> None:
        """Every rank does something outside of PyTorch."""
        time.sleep(0.1)

    def barrier(self) -> None:
        """Ranks meet after each step."""
        dist.barrier()

    def metrics(self) -> None:
        """Objects of all ranks are gathered after each step."""
        dist.all_gather_object([None] * dist.get_world_size(), {"rank": self.rank})

    def broadcast_weights(self) -> None:
        """Rank 0's weights are sent again, although they are the same everywhere."""
        for parameter in self.model.parameters():
            dist.broadcast(parameter.data, 0)

    def writes(self) -> None:
        """Rank 1 alone writes a file."""
        if self.rank == 1:
            with open(f"{self.folder}/log", "wb") as file:
                for _ in range(20):
                    file.write(os.urandom(1_000_000))
                    os.fsync(file.fileno())

    def state_dict(self) -> None:
        """The whole state is gathered after each step."""
        get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))

    def checkpoint(self) -> None:
        """Every rank writes its state after each step."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, f"{self.folder}/rank{self.rank}.pt")

    def average_weights(self) -> None:
        """A moving average of whole weights, gathered in each step."""
        state = self.model.state_dict()
        for name, average in self.averaged.state_dict().items():
            value = state[name] if name in state else state[f"module.{name}"]
            average.lerp_(value.full_tensor() if hasattr(value, "full_tensor") else value, 0.01)

    def evaluate(self) -> None:
        """An evaluation after each step."""
        self.model.eval()
        self._evaluated()

    def train_false(self) -> None:
        """The same, as some trainers write it."""
        self.model.train(False)
        self._evaluated()

    def _evaluated(self) -> None:
        with torch.no_grad():
            for _ in range(4):
                self.model(torch.randn(self.batch, TOKENS, WIDTH))
        self.model.train()

    def collect(self) -> None:
        """The garbage collector, called by hand."""
        for _ in range(3):
            gc.collect()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter or a gradient."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# ---- two ranks


def be_rank(rank: int, store: str, options: argparse.Namespace, folder: str) -> None:
    """Train as this rank, and end the process."""
    torch.set_num_threads(8 if options.fault == "threads" else 1)
    if options.fault == "one-core":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    Loop(options.engine, options.fault, folder).train(options.steps)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Fork two ranks, and wait for them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=tuple(ENGINES), default="fsdp2")
    parser.add_argument("--fault", default="none")
    parser.add_argument("--steps", type=int, default=28)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("fork")
        arguments = (f"{folder}/store", options, folder)
        ranks = [context.Process(target=be_rank, args=(rank, *arguments)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    if any(rank.exitcode for rank in ranks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Pretrain a causal language model of transformers: a plain loop for jobs that run for days, to copy and to change.

    torchrun --standalone --nproc-per-node 2 pretrain.py --config FOLDER --data text.txt --steps 1000

FOLDER has a model's config.json. The data are raw tokens in one file: `--token-bytes 1` reads a text as its bytes, 2
and 4 read the ids that a tokenizer gave. Start the same command again after any crash, also with another number of
ranks: it goes on from the newest complete checkpoint, with the batches that come next. SIGTERM saves and ends.
`--export OUT` writes safetensors that `from_pretrained(OUT)` opens. Several machines and restarts:
docs/training_for_real.md.
"""

import argparse
import json
import math
import os
import signal
import time
from functools import cache
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from fsdplab.checkpoint import CheckpointFolder

# PyTorch's own engine: from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from fsdplab.engine import MixedPrecisionPolicy, fully_shard

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard")
IGNORED = -100  # the target of a row that only fills a batch up
FILE_BYTES = 1 << 30  # of an exported file, which rank 0 holds in memory


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--config", required=True, help="folder with a config.json of transformers")
    add("--data", required=True, help="file of raw tokens")
    add("--token-bytes", type=int, default=1, choices=(1, 2, 4), help="bytes of one token in --data")
    add("--strategy", default="full_shard", choices=STRATEGIES)
    add("--bf16", action="store_true", help="compute in bf16 over fp32 parameters")
    add("--steps", type=int, default=1000)
    add("--batch-size", type=int, default=16, help="sequences of one step, over all ranks")
    add("--micro-batch-size", type=int, default=4, help="sequences of one forward of one rank")
    add("--sequence-length", type=int, default=256)
    add("--lr", type=float, default=3e-4)
    add("--warmup", type=int, default=100, help="steps")
    add("--seed", type=int, default=0)
    add("--checkpoints", default="checkpoints", help="folder that all ranks share")
    add("--save-every", type=int, default=100, help="steps")
    add("--keep", type=int, default=2, help="checkpoints that stay")
    add("--export", help="folder for safetensors, written after the last step")
    return parser.parse_args()


# ---- the model: one block at a time is whole on a rank, and equal on all ranks


def mesh_of(strategy: str, kind: str) -> object:
    """Replicas x shards: replicas of a whole machine for hybrid_shard, of one rank for no_shard."""
    ranks = dist.get_world_size()
    shards = {"hybrid_shard": int(os.environ["LOCAL_WORLD_SIZE"]), "no_shard": 1}.get(strategy, ranks)
    if shards == ranks:
        return init_device_mesh(kind, (ranks,))
    return init_device_mesh(kind, (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))


def build(args: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.config), dtype=torch.float32)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    mesh = mesh_of(args.strategy, device.type)
    torch.manual_seed(args.seed)
    for part in [*model.get_decoder().layers, model]:
        for module in part.modules():
            own = chain(module.parameters(recurse=False), module.buffers(recurse=False))
            if any(each.is_meta for each in own):
                module.to_empty(device=device, recurse=False)
                model._init_weights(module)  # transformers' own initialization
        if part is model:
            model.tie_weights()
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=args.strategy != "shard_grad_op")
    return model.train()


# ---- the data: a function of the step alone, so that a job which goes on reads what would have come next


class Tokens:
    """Windows of one file, in an order that is shuffled anew in each epoch."""

    def __init__(self, args: argparse.Namespace) -> None:
        kind = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}[args.token_bytes]
        count = os.path.getsize(args.data) // args.token_bytes
        self.tokens = torch.from_file(args.data, size=count, dtype=kind)  # mapped, not read
        self.length, self.seed = args.sequence_length, args.seed
        self.windows = (count - 1) // self.length

    @cache  # noqa: B019  an epoch or two, as long as the program runs
    def order(self, epoch: int) -> torch.Tensor:
        return torch.randperm(self.windows, generator=torch.Generator().manual_seed(self.seed + epoch))

    def row(self, number: int) -> torch.Tensor:
        """The tokens of sample `number`, and one more: [length + 1]."""
        epoch, place = divmod(number, self.windows)
        start = int(self.order(epoch)[place]) * self.length
        return self.tokens[start : start + self.length + 1].long()

    def micro_batches(self, step: int, args: argparse.Namespace) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's inputs and targets of a step, [micro batch, length] each; equally many on every rank."""
        rank, ranks, size = dist.get_rank(), dist.get_world_size(), args.micro_batch_size
        turns = math.ceil(args.batch_size / (ranks * size))
        rows = [self.row(step * args.batch_size + at) for at in range(rank, args.batch_size, ranks)]
        filler = torch.full((self.length + 1,), IGNORED)
        rows += [filler] * (turns * size - len(rows))
        stacked = torch.stack(rows).view(turns, size, self.length + 1)
        return [(each[:, :-1].clamp(min=0), each[:, 1:]) for each in stacked]


# ---- training


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine to a tenth: a function of the step alone, too."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list, tokens: int) -> torch.Tensor:
    """One update; returns this rank's part of the mean loss."""
    device, mine = next(model.parameters()).device, torch.zeros(())
    for inputs, targets in batches:
        logits = model(input_ids=inputs.to(device), use_cache=False).logits.float()
        total = F.cross_entropy(
            logits.flatten(0, 1), targets.to(device).flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss = total / tokens
        (loss * dist.get_world_size()).backward()  # gradients are averaged over the ranks
        mine = mine + loss.detach().cpu()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return mine


def check_restarts() -> None:
    """End where torchrun's restarts would meet the addresses of ranks that are gone, and wait for them (torch 2.13)."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise SystemExit("For --max-restarts set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started.")


def main() -> None:
    args = arguments()
    check_restarts()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    first = dist.get_rank() == 0
    asked = torch.zeros(())  # by SIGTERM: the scheduler's, or torchrun's when ranks join or leave
    signal.signal(signal.SIGTERM, lambda *_: asked.fill_(1))

    data, model = Tokens(args), build(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    checkpoints = CheckpointFolder(args.checkpoints, keep=args.keep)
    done = checkpoints.load(model, optimizer)
    if first:
        print(f"begin {done} on {dist.get_world_size()} ranks", flush=True)

    ending = False
    while done < args.steps and not ending:
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, args)
        tokens = args.batch_size * args.sequence_length
        mine = train_step(model, optimizer, data.micro_batches(done, args), tokens)
        done += 1
        facts = torch.stack([mine, asked])
        dist.all_reduce(facts)  # all ranks must decide alike
        loss, ending = facts[0].item(), facts[1].item() > 0
        if first:
            print(f"step {done} loss {loss:.9g} tokens/s {tokens / (time.perf_counter() - start):.0f}", flush=True)
        if ending or done % args.save_every == 0 or done == args.steps:
            checkpoints.save(model, optimizer, done)
    checkpoints.close()
    if args.export and not ending:
        export(model, Path(args.export))
    dist.destroy_process_group()


# ---- the end: whole weights, file by file


def export(model: torch.nn.Module, folder: Path) -> None:
    """Write config.json, safetensors and their index; rank 0 holds one file's weights at a time, no rank the model."""
    first = dist.get_rank() == 0
    files, whole, size = {}, {}, 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        model.config.save_pretrained(folder)
    state = get_model_state_dict(model)
    for left, (name, value) in zip(range(len(state) - 1, -1, -1), state.items()):
        value = value.full_tensor() if isinstance(value, DTensor) else value
        whole[name], size = value.to("cpu", copy=True) if first else None, size + value.nbytes
        if size >= FILE_BYTES or not left:
            file = f"model-{len(set(files.values())) + 1:05d}.safetensors"
            files.update(dict.fromkeys(whole, file))
            if first:
                save_file(whole, folder / file, metadata={"format": "pt"})
            whole, size = {}, 0
    if first:
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


if __name__ == "__main__":
    main()

"""Pretrain a causal language model of transformers: a plain loop for jobs that run for days, to copy and to change.

    torchrun --standalone --nproc-per-node 2 pretrain.py --config FOLDER --data text.txt --steps 1000

FOLDER has a model's config.json. The data are raw tokens in one file: `--token-bytes 1` reads a text as its bytes, 2
and 4 read the ids that a tokenizer gave. Start the same command again after any crash, also with another number of
ranks: it goes on from the newest good checkpoint, with the batches that come next. `--export OUT` writes safetensors
that `from_pretrained(OUT)` opens. Several machines, restarts and exit codes: docs/training_for_real.md.
"""

import argparse
import ctypes
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import time
from datetime import timedelta
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

from fsdplab.checkpoint import AnotherJob, CheckpointFolder, CheckpointNotSaved, FolderInUse, NotFinite

# PyTorch's own engine: from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from fsdplab.engine import MixedPrecisionPolicy, fully_shard

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard")
IGNORED = -100  # the target of a row that only fills a batch up
FILE_BYTES = 1 << 30  # of an exported file, which rank 0 holds in memory
PATIENCE_S = 20  # for a save on a full disk after SIGTERM: torchrun kills after 30 s
ASKED_TO_END, NOT_SAVED = 128 + signal.SIGTERM, 75  # exit codes; 75 is sysexits.h's "try again later"
# what changes the result, beside the model and the data
SETTINGS = ("steps", "batch_size", "sequence_length", "token_bytes", "seed", "bf16", "lr", "warmup", "betas",
            "weight_decay", "clip")  # fmt: skip
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json",
             "merges.txt", "chat_template.jinja", "generation_config.json")  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--config", required=True, help="folder with a config.json of transformers")
    add("--data", required=True, help="file of raw tokens")
    add("--token-bytes", type=int, default=1, choices=(1, 2, 4), help="bytes of one token in --data")
    add("--steps", type=int, default=1000)
    add("--batch-size", type=int, default=16, help="sequences of one step, over all ranks")
    add("--micro-batch-size", type=int, default=4, help="sequences of one forward of one rank")
    add("--sequence-length", type=int, default=256)
    add("--seed", type=int, default=0)
    # how it is computed
    add("--strategy", default="full_shard", choices=STRATEGIES)
    add("--bf16", action="store_true", help="compute in bf16 over fp32 parameters")
    add("--recompute", action="store_true", help="keep no activations of a block, compute them again (checkpointing)")
    add("--compile", action="store_true", help="torch.compile each block")
    add("--sync-each", action="store_true", help="reduce gradients after each micro batch: less memory, more traffic")
    add("--timeout", type=float, default=10.0, help="minutes until a collective that hangs ends the job")
    # the optimizer
    add("--lr", type=float, default=3e-4)
    add("--warmup", type=int, default=100, help="steps")
    add("--betas", type=float, nargs=2, default=(0.9, 0.95))
    add("--weight-decay", type=float, default=0.1, help="of matrices; norms and biases have none")
    add("--clip", type=float, default=1.0, help="norm of the gradient")
    # what is looked at
    add("--eval-data", help="file of raw tokens that are not trained on")
    add("--eval-every", type=int, default=100, help="steps")
    add("--eval-batches", type=int, default=8, help="batches of one evaluation")
    add("--peak-tflops", type=float, help="of one device, for the model flops utilization (MFU)")
    add("--tensorboard", help="folder for TensorBoard, beside log.jsonl in --checkpoints")
    add("--wandb", help="project of Weights & Biases, the same")
    # what stays
    add("--checkpoints", default="checkpoints", help="folder that all ranks share")
    add("--save-every", type=int, default=100, help="steps")
    add("--keep", type=int, default=2, help="checkpoints that stay")
    add("--force", action="store_true", help="go on from a checkpoint of other settings")
    add("--allow-nan", action="store_true", help="go on after a loss that is not a number")
    add("--export", help="folder for safetensors and the tokenizer's files, written after the last step")
    return parser.parse_args()


# ---- the model: one block at a time is whole on a rank, and equal on all ranks


def mesh_of(strategy: str, kind: str) -> object:
    """Replicas x shards: replicas of a whole machine for hybrid_shard, of one rank for no_shard."""
    ranks = dist.get_world_size()
    shards = {"hybrid_shard": int(os.environ["LOCAL_WORLD_SIZE"]), "no_shard": 1}.get(strategy, ranks)
    if shards == ranks:
        return init_device_mesh(kind, (ranks,))
    return init_device_mesh(kind, (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that transformers itself keeps whole, the outermost ones."""
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    inside = {id(module) for block in blocks for module in block.modules() if module is not block}
    if not blocks:
        sys.exit(f"{type(model).__name__} names no blocks (_no_split_modules); list what to shard in blocks_of()")
    return [block for block in blocks if id(block) not in inside]


def build(args: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.config), dtype=torch.float32)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and args.sequence_length > longest:
        sys.exit(f"The model takes at most {longest} tokens, got --sequence-length {args.sequence_length}.")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    mesh = mesh_of(args.strategy, device.type)
    if args.recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(args.seed)
    for part in [*blocks_of(model), model]:
        fresh = [each for each in part.modules() if any(t.is_meta for t in chain(each.parameters(), each.buffers()))]
        for module in fresh:
            module.to_empty(device=device, recurse=False)
        for module in reversed(fresh):  # a parent may change what its children have
            model._init_weights(module)  # transformers' own initialization
        if part is model:
            model.tie_weights()
        elif args.compile:
            part.compile()
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=args.strategy != "shard_grad_op")
    torch.manual_seed(1 + args.seed * 1_000_003 + dist.get_rank())  # each rank has dropout masks of its own
    return model.train()


def optimizer_of(model: torch.nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    matrices = [each for each in model.parameters() if each.ndim >= 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=args.lr, betas=tuple(args.betas))


# ---- the data: a function of the step alone, so that a job which goes on reads what would have come next


class Tokens:
    """Windows of one file, in an order that is shuffled anew in each epoch."""

    def __init__(self, path: str, vocabulary: int, args: argparse.Namespace) -> None:
        kind = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}[args.token_bytes]
        count, rest = divmod(os.path.getsize(path) if os.path.isfile(path) else 0, args.token_bytes)
        if rest or count <= args.sequence_length:
            sys.exit(f"{path} has {count} tokens and {rest} bytes, expected whole tokens, at least a sequence and one.")
        self.tokens = torch.from_file(path, size=count, dtype=kind)  # mapped, not read
        self.path, self.vocabulary, self.length, self.seed = path, vocabulary, args.sequence_length, args.seed
        self.windows = (count - 1) // self.length
        self.digest = hashlib.sha256()  # of 64 pieces, since the file may be large
        for start in range(0, count, max(1, count // 64)):
            piece = self.checked(start, start + 16_384)
            self.digest.update(piece.numpy().tobytes())

    def checked(self, start: int, end: int) -> torch.Tensor:
        piece = self.tokens[start:end].long()
        if piece.max() >= self.vocabulary or piece.min() < 0:
            wrong = next(token for token in piece.tolist() if not 0 <= token < self.vocabulary)
            sys.exit(f"{self.path} has the token {wrong} after {start}, expected less than {self.vocabulary}.")
        return piece

    @cache  # noqa: B019  an epoch or two, as long as the program runs
    def order(self, epoch: int) -> torch.Tensor:
        return torch.randperm(self.windows, generator=torch.Generator().manual_seed(self.seed + epoch))

    def row(self, number: int) -> torch.Tensor:
        """The tokens of sample `number`, and one more: [length + 1]."""
        epoch, place = divmod(number, self.windows)
        start = int(self.order(epoch)[place]) * self.length
        return self.checked(start, start + self.length + 1)

    def micro_batches(self, step: int, args: argparse.Namespace) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's inputs and targets of a step, [micro batch, length] each; equally many on every rank."""
        rank, ranks, size = dist.get_rank(), dist.get_world_size(), args.micro_batch_size
        turns = math.ceil(args.batch_size / (ranks * size))
        rows = [self.row(step * args.batch_size + at) for at in range(rank, args.batch_size, ranks)]
        filler = torch.full((self.length + 1,), IGNORED)
        rows += [filler] * (turns * size - len(rows))
        stacked = torch.stack(rows).view(turns, size, self.length + 1)
        return [(each[:, :-1].clamp(min=0), each[:, 1:]) for each in stacked]


def job_of(args: argparse.Namespace, data: Tokens) -> dict[str, object]:
    """What changes the result; a checkpoint of other settings is refused by name."""
    job = {name: getattr(args, name) for name in SETTINGS}
    config = json.loads((Path(args.config) / "config.json").read_text(encoding="utf-8"))
    job |= {f"config.{name}": value for name, value in config.items() if name not in ("transformers_version", "dtype")}
    return job | {"data.tokens": len(data.tokens), "data.digest": data.digest.hexdigest()}


# ---- training


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine to a tenth: a function of the step alone, too."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor, tokens: int) -> torch.Tensor:
    """This micro batch's part of the mean over all tokens of a step."""
    device = next(model.parameters()).device
    logits = model(input_ids=inputs.to(device), use_cache=False).logits.float()
    total = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten(), ignore_index=IGNORED, reduction="sum")
    return total / tokens


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list, tokens: int, args: argparse.Namespace
) -> tuple[torch.Tensor, float]:
    """One update; returns this rank's part of the mean loss, and the norm of the gradient."""
    rank_loss = torch.zeros(())
    for turn, (inputs, targets) in enumerate(batches, start=1):
        model.set_requires_gradient_sync(args.sync_each or turn == len(batches))
        loss = loss_of(model, inputs, targets, tokens)
        (loss * dist.get_world_size()).backward()  # gradients are averaged over the ranks
        rank_loss = rank_loss + loss.detach().cpu()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    optimizer.zero_grad()
    return rank_loss, (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


@torch.no_grad()
def evaluate(model: torch.nn.Module, data: Tokens, args: argparse.Namespace) -> float:
    """The mean loss of the first batches of the evaluation's data."""
    model.eval()
    total = torch.zeros(())
    for step in range(args.eval_batches):
        for inputs, targets in data.micro_batches(step, args):
            total += loss_of(model, inputs, targets, args.eval_batches * args.batch_size * data.length).cpu()
    dist.all_reduce(total)
    model.train()
    return total.item()


class Log:
    """One line a step for people, the same in log.jsonl for programs; written by rank 0. A full disk ends no job."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.path, self.writer, self.run = Path(args.checkpoints) / "log.jsonl", None, None
        self.first = dist.get_rank() == 0
        if args.tensorboard and self.first:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(args.tensorboard)
        if args.wandb and self.first:
            import wandb

            self.run = wandb.init(project=args.wandb, config=vars(args))

    def write(self, text: str, **row: float) -> None:
        if not self.first:
            return
        try:
            print(text, flush=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            print(f"log.jsonl: {error.strerror}", file=sys.stderr)
        if self.writer:
            for name, value in row.items():
                self.writer.add_scalar(name, value, row["step"])
        if self.run:
            self.run.log(row, step=int(row["step"]))

    def close(self) -> None:
        """What is still in memory is written."""
        if self.writer:
            self.writer.close()
        if self.run:
            self.run.finish()


def flops_of_a_token(model: torch.nn.Module, length: int) -> float:
    """Forward and backward: 6 a parameter, and attention over half the sequence, as PaLM counts them."""
    config = model.config.get_text_config()
    parameters = sum(each.numel() for each in model.parameters())
    return 6 * parameters + 12 * config.num_hidden_layers * config.hidden_size * length


def train(args: argparse.Namespace, device: torch.device, asked: torch.Tensor) -> bool:
    """Train to the last step; returns whether it was asked to end before."""
    ranks, model = dist.get_world_size(), build(args, device)
    vocabulary = model.config.get_text_config().vocab_size
    data = Tokens(args.data, vocabulary, args)
    eval_data = Tokens(args.eval_data, vocabulary, args) if args.eval_data else None
    optimizer = optimizer_of(model, args)
    checkpoints = CheckpointFolder(args.checkpoints, keep=args.keep, job=job_of(args, data), allow_nan=args.allow_nan)
    # random states are saved with model and optimizer; what else a job of yours has goes in here
    extra = {"totals": {"seconds": 0.0, "tokens": 0}}
    done = checkpoints.load(model, optimizer, extra=extra, force=args.force)
    totals, log, ending = extra["totals"], Log(args), False
    log.write(f"begin {done} on {ranks} ranks", step=done, ranks=ranks)
    tokens = args.batch_size * args.sequence_length

    before = time.perf_counter()
    while done < args.steps and not ending:
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, args)
        rank_loss, norm = train_step(model, optimizer, data.micro_batches(done, args), tokens, args)
        done += 1

        now = time.perf_counter()
        facts = torch.stack([rank_loss, asked, torch.tensor(now - before)])
        dist.all_reduce(facts)  # all ranks must decide alike
        loss, ending = facts[0].item(), facts[1].item() > 0
        totals["seconds"] += facts[2].item() / ranks
        totals["tokens"] += tokens
        before = now

        row = {"step": done, "loss": loss, "lr": optimizer.param_groups[0]["lr"], "grad_norm": norm}
        row["tokens_per_s"] = tokens / (now - start)  # of the step alone
        row["tokens_per_s_with_saves"] = totals["tokens"] / totals["seconds"]
        text = f"step {done} loss {loss:.9g} lr {row['lr']:.3g} norm {norm:.3g} tokens/s {row['tokens_per_s']:.0f}"
        if args.peak_tflops:
            flops = flops_of_a_token(model, args.sequence_length)
            row["mfu"] = flops * row["tokens_per_s"] / (ranks * args.peak_tflops * 1e12)
            text += f" mfu {row['mfu']:.1%}"
        if eval_data and (done % args.eval_every == 0 or done == args.steps):
            row["eval_loss"] = evaluate(model, eval_data, args)
            text += f" eval {row['eval_loss']:.9g}"
        log.write(text, **row)

        checkpoints.check_loss(loss, done)
        if ending or done == args.steps:
            checkpoints.save_last(model, optimizer, done, extra=extra, patience_s=PATIENCE_S if ending else None)
        elif done % args.save_every == 0:
            checkpoints.save(model, optimizer, done, extra=extra)
    checkpoints.close()
    log.close()
    if args.export and not ending:
        export(model, Path(args.config), Path(args.export))
    return ending


# ---- the beginning and the end


def check_restarts() -> None:
    """End where torchrun's restarts would meet the addresses of ranks that are gone, and wait for them (torch 2.13)."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        sys.exit("For --max-restarts set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started.")


def end_with_launcher() -> None:
    """Let Linux kill this rank when torchrun is killed, so that no orphan trains on beside the next job."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    args = arguments()
    check_restarts()
    end_with_launcher()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(minutes=args.timeout))
    asked = torch.zeros(())  # to save and to end: by the scheduler, by Ctrl-C, by torchrun when ranks join or leave
    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, lambda *_: asked.fill_(1))
    try:
        ending = train(args, device, asked)
    except CheckpointNotSaved as error:
        print(error, file=sys.stderr)
        sys.exit(NOT_SAVED)
    except (AnotherJob, FolderInUse, NotFinite) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()
    if ending:
        sys.exit(ASKED_TO_END)


def export(model: torch.nn.Module, config: Path, folder: Path) -> None:
    """Write config.json, safetensors and their index; rank 0 holds one file's weights at a time, no rank the model."""
    first = dist.get_rank() == 0
    files, whole, size = {}, {}, 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        model.config.save_pretrained(folder)
        for name in TOKENIZER:
            if (config / name).exists():
                shutil.copy(config / name, folder / name)
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

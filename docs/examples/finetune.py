"""Finetune a model of transformers with LoRA: transformers' Trainer and its own flags, to copy and to change.

    torchrun --standalone --nproc-per-node 2 finetune.py --model_name_or_path FOLDER --train_file rows.jsonl \
        --output_dir out --fsdp "full_shard auto_wrap" --per_device_train_batch_size 4 \
        --gradient_accumulation_steps 2 --bf16 --save_steps 100 --max_steps 1000

Each line of rows.jsonl is `{"text": "..."}`, or `{"input_ids": [...]}` where no tokenizer is wanted. Start the same
command again after a crash, on as many ranks: it goes on from the newest whole checkpoint in --output_dir, and refuses
one of other settings or other rows (--force takes it). SIGTERM and Ctrl-C save and end with the exit code 143. The
adapter is saved there at the end, by rank 0; `PeftModel.from_pretrained(model, "out")` opens it.
"""

import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import fsdplab.engine

# accelerate then calls this engine; for PyTorch's own leave the line out
torch.distributed.fsdp.fully_shard = fsdplab.engine.fully_shard

WHOLE = "whole.json"  # in a checkpoint's folder: its files' sizes and the job, written when all ranks have saved
SETTINGS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "max_steps", "num_train_epochs", "weight_decay", "max_grad_norm", "optim", "seed", "bf16",
)  # fmt: skip
ASKED_TO_END = 128 + signal.SIGTERM  # exit code


@dataclass
class Job:
    """What Trainer's own arguments do not have."""

    model_name_or_path: str
    train_file: str = field(metadata={"help": "JSON lines with a text or with input_ids"})
    max_length: int = 512
    lora_r: int = 8
    lora_alpha: float = 16.0
    lora_targets: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])
    force: bool = field(default=False, metadata={"help": "go on from a checkpoint of other settings"})


def settings_of(job: Job, args: TrainingArguments, model: torch.nn.Module) -> dict[str, object]:
    """What changes the result; a checkpoint of other settings is refused by name."""
    settings = {name: str(getattr(args, name)) for name in SETTINGS}
    settings |= {name: getattr(job, name) for name in ("max_length", "lora_r", "lora_alpha", "lora_targets")}
    settings["base model"] = hashlib.sha256(model.config.to_json_string(use_diff=False).encode()).hexdigest()
    settings["rows"] = hashlib.sha256(Path(job.train_file).read_bytes()).hexdigest()
    return settings | {"ranks": dist.get_world_size()}


def rows_of(job: Job, vocabulary: int) -> list[dict[str, list[int]]]:
    rows = [json.loads(line) for line in Path(job.train_file).read_text(encoding="utf-8").splitlines() if line]
    if rows and "input_ids" not in rows[0]:
        tokenizer = AutoTokenizer.from_pretrained(job.model_name_or_path)
        rows = [{"input_ids": tokenizer(row["text"])["input_ids"]} for row in rows]
    highest = max((max(row["input_ids"], default=0) for row in rows), default=-1)
    if not 0 <= highest < vocabulary:
        sys.exit(
            f"{job.train_file}: {len(rows)} rows, the highest token is {highest}, expected less than {vocabulary}."
        )
    return [{"input_ids": row["input_ids"][: job.max_length]} for row in rows]


def batch_of(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows filled up to the longest; what only fills up is attended to by nothing and has no loss."""
    longest = max(len(row["input_ids"]) for row in rows)
    inputs, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    for at, row in enumerate(rows):
        tokens = torch.tensor(row["input_ids"])
        inputs[at, : len(tokens)] = labels[at, : len(tokens)] = tokens
    return {"input_ids": inputs, "labels": labels, "attention_mask": (labels != -100).long()}


# ---- checkpoints that a kill may cut short


def sizes_in(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != WHOLE)
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def checkpoints_in(folder: Path) -> list[Path]:
    """Trainer's checkpoints, the oldest first."""
    names = {int(path.name[11:]): path for path in folder.glob("checkpoint-*") if re.fullmatch(r"\d+", path.name[11:])}
    return [names[step] for step in sorted(names)]


def newest_whole(folder: Path) -> str | None:
    """The newest checkpoint all of whose files are there; newer ones, which a kill has cut short, are renamed."""
    for path in reversed(checkpoints_in(folder)):
        try:
            if json.loads((path / WHOLE).read_text(encoding="utf-8"))["sizes"] == sizes_in(path):
                return str(path)
        except (FileNotFoundError, ValueError, KeyError):
            pass  # the kill came before the sizes were written
        aside = folder / f"cut-{path.name}"
        print(f"{path} is not whole, and renamed to {aside}", file=sys.stderr)
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    return None


def refuse_other_settings(checkpoint: Path, settings: dict[str, object]) -> None:
    saved = json.loads((checkpoint / WHOLE).read_text(encoding="utf-8"))["settings"]
    changed = [name for name, value in settings.items() if saved.get(name) != value]
    if not changed:
        return
    told = "; ".join(f"{name} was {saved.get(name)} and is {settings[name]}" for name in changed)
    refusal = f"{checkpoint} is of another job: {told}. Choose another --output_dir, or give --force."
    sys.exit(refusal if dist.get_rank() == 0 else 1)


class Unattended(TrainerCallback):
    """Marks a checkpoint as whole, and only then removes older ones; saves and ends when a signal asks for it."""

    def __init__(self, keep: int | None, settings: dict[str, object]) -> None:
        self.keep, self.settings, self.asked, self.ending = keep, settings, torch.zeros(()), False
        for which in (signal.SIGTERM, signal.SIGINT):
            signal.signal(which, lambda *_: self.asked.fill_(1))

    def on_step_end(self, args, state, control, **_) -> None:
        anybody = self.asked.clone().to(args.device)
        dist.all_reduce(anybody)  # all ranks must decide alike
        if anybody.item() > 0:
            self.ending = control.should_save = control.should_training_stop = True

    def on_save(self, args, state, control, **_) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            saved = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            whole = {"sizes": sizes_in(saved), "settings": self.settings}
            (saved / WHOLE).write_text(json.dumps(whole), encoding="utf-8")
            old = checkpoints_in(Path(args.output_dir))[: -self.keep] if self.keep else []
            for path in [*old, *Path(args.output_dir).glob("cut-checkpoint-*")]:
                shutil.rmtree(path)


def end_with_launcher() -> None:
    """Let Linux kill this rank when torchrun is killed, so that no orphan trains on beside the next job."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


# ---- training


def shard_on_cpu_ranks(trainer: Trainer) -> None:
    """Turn accelerate's FSDP on for CPU ranks, which it does by itself on GPUs only."""
    state = trainer.accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    if trainer.args.bf16:
        state.fsdp_plugin.set_mixed_precision("bf16")
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


def main() -> None:
    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"  # as --use_cpu says it too late for torchrun's ranks
    end_with_launcher()
    job, args = HfArgumentParser((Job, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)  # equal adapters on all ranks
    model = AutoModelForCausalLM.from_pretrained(job.model_name_or_path, dtype=torch.float32)
    settings = settings_of(job, args, model)
    unattended = Unattended(args.save_total_limit, settings)
    args.save_total_limit = None  # Trainer's own would remove the older one before the newer is known to be whole
    lora = LoraConfig(r=job.lora_r, lora_alpha=job.lora_alpha, target_modules=job.lora_targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    rows = rows_of(job, model.config.get_text_config().vocab_size)
    trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=batch_of, callbacks=[unattended])
    if args.fsdp and trainer.accelerator.distributed_type == DistributedType.MULTI_CPU:
        shard_on_cpu_ranks(trainer)
    newest = [newest_whole(Path(args.output_dir)) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(newest)
    if newest[0] and not job.force:
        refuse_other_settings(Path(newest[0]), settings)
    trainer.train(resume_from_checkpoint=newest[0])
    if not unattended.ending:
        trainer.save_model()  # the adapter alone
    dist.destroy_process_group()
    if unattended.ending:
        sys.exit(ASKED_TO_END)


if __name__ == "__main__":
    main()

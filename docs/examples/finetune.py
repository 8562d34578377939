"""Finetune a model of transformers with LoRA: transformers' Trainer and its own flags, to copy and to change.

    torchrun --standalone --nproc-per-node 2 finetune.py --model_name_or_path FOLDER --train_file rows.jsonl \
        --output_dir out --fsdp "full_shard auto_wrap" --per_device_train_batch_size 4 \
        --gradient_accumulation_steps 2 --bf16 --save_steps 100 --max_steps 1000

Each line of rows.jsonl is `{"text": "..."}`, or `{"input_ids": [...]}` where no tokenizer is wanted. Start the same
command again after a crash, on as many ranks: it goes on from the newest checkpoint in --output_dir. The adapter is
saved there at the end, by rank 0; `PeftModel.from_pretrained(model, "out")` opens it.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.fsdp
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

import fsdplab.engine

# accelerate then calls this engine; for PyTorch's own leave the line out
torch.distributed.fsdp.fully_shard = fsdplab.engine.fully_shard


@dataclass
class Job:
    """What Trainer's own arguments do not have."""

    model_name_or_path: str
    train_file: str = field(metadata={"help": "JSON lines with a text or with input_ids"})
    max_length: int = 512
    lora_r: int = 8
    lora_alpha: float = 16.0
    lora_targets: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])


def rows_of(job: Job) -> list[dict[str, list[int]]]:
    rows = [json.loads(line) for line in Path(job.train_file).read_text(encoding="utf-8").splitlines() if line]
    if "input_ids" in rows[0]:
        return [{"input_ids": row["input_ids"][: job.max_length]} for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(job.model_name_or_path)
    return [{"input_ids": tokenizer(row["text"])["input_ids"][: job.max_length]} for row in rows]


def batch_of(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows filled up to the longest; what only fills up is attended to by nothing and has no loss."""
    longest = max(len(row["input_ids"]) for row in rows)
    inputs, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), -100)
    for at, row in enumerate(rows):
        tokens = torch.tensor(row["input_ids"])
        inputs[at, : len(tokens)] = labels[at, : len(tokens)] = tokens
    return {"input_ids": inputs, "labels": labels, "attention_mask": (labels != -100).long()}


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
    job, args = HfArgumentParser((Job, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)  # equal adapters on all ranks
    model = AutoModelForCausalLM.from_pretrained(job.model_name_or_path, dtype=torch.float32)
    lora = LoraConfig(r=job.lora_r, lora_alpha=job.lora_alpha, target_modules=job.lora_targets, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    trainer = Trainer(model=model, args=args, train_dataset=rows_of(job), data_collator=batch_of)
    if args.fsdp and trainer.accelerator.distributed_type == DistributedType.MULTI_CPU:
        shard_on_cpu_ranks(trainer)
    newest = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
    trainer.train(resume_from_checkpoint=newest)
    trainer.save_model()  # the adapter alone
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

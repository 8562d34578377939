"""transformers' Trainer on a small language model with random weights: torchrun --nproc-per-node 2 trainer.py"""

import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        ids = torch.randint(256, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def main(callbacks=(), shards=1):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    arguments = TrainingArguments(
        sys.argv[1], max_steps=20, per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=5,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if shards > 1:  # by FSDP2, as transformers does it while it loads a model
        model.save_pretrained(f"{sys.argv[1]}_model")  # which rank 0 does
        dist.barrier()
        how = DistributedConfig(fsdp_size=shards)
        model = LlamaForCausalLM.from_pretrained(f"{sys.argv[1]}_model", distributed_config=how)
    Trainer(model, arguments, train_dataset=Texts(), callbacks=list(callbacks)).train()


if __name__ == "__main__":
    main()

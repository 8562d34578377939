"""transformers' Trainer on a small language model with random weights: torchrun --nproc-per-node 2 trainer.py"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        ids = torch.randint(256, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    arguments = TrainingArguments(
        sys.argv[1], max_steps=20, per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=5,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=Texts()).train()


if __name__ == "__main__":
    main()

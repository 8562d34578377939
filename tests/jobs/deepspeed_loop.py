"""A loop with DeepSpeed's engine: torchrun --nproc-per-node 2 deepspeed_loop.py [STAGE] [KEY=NUMBER of ZeRO ...]"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


def main():
    stage = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    zero = {key: int(number) for key, number in (each.split("=") for each in sys.argv[2:])}
    # an operator for inference, for which ranks wait where a killed one was compiling it
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)) for _ in range(3)))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 500_000, **zero},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )
    for number in range(40):
        loss = engine(torch.randn(8, 128)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 0 and number % 2:
            print(f"step {number // 2} loss {loss.item()!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

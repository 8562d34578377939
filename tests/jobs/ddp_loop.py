"""A loop with DistributedDataParallel: a data loader, accumulation, clipping, a schedule, evaluation."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 2


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        total = sum(nn.functional.mse_loss(model(x), y).item() for x, y in loader)
    model.train()
    return total / len(loader)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(2048, 64), torch.randn(2048, 8))
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 32)
    for number, (x, y) in enumerate(loader):
        last = number % ACCUMULATE == ACCUMULATE - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y) / ACCUMULATE
            loss.backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step = number // ACCUMULATE
            print(f"rank {dist.get_rank()} step {step} loss {loss.item()!r}", flush=True)
            if step in (4, 14):
                print(f"evaluation {evaluate(model.module, loader):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

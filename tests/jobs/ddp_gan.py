"""Two models and two optimizers that take turns under DDP: torchrun --nproc-per-node 2 ddp_gan.py [micro_batches]"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main():
    micro_batches = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    generator = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32)))
    critic = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, fused=True)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(20):
        for _ in range(micro_batches):
            real, noise = torch.randn(32, 32), torch.randn(32, 16)
            wrong = critic(torch.cat([generator(noise).detach(), real]))
            (wrong[:32].mean() - wrong[32:].mean()).backward()
        of_critic.step()
        of_critic.zero_grad()
        for _ in range(micro_batches):
            (-critic(generator(torch.randn(32, 16))).mean()).backward()
        of_generator.step()
        of_generator.zero_grad()
        of_critic.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

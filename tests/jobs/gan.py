"""Two optimizers that take turns, in one process, with gradient scaling: python gan.py"""

import torch
from torch import nn


def main():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
    critic = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(20):
        real, noise = torch.randn(32, 32), torch.randn(32, 16)
        wrong = critic(generator(noise).detach()).mean() - critic(real).mean()
        scaler.scale(wrong).backward()
        scaler.step(of_critic)
        of_critic.zero_grad()
        fooled = -critic(generator(noise)).mean()
        scaler.scale(fooled * float("inf") if step == 5 else fooled).backward()
        scaler.step(of_generator)  # which step 5 skips
        of_generator.zero_grad()
        scaler.update()
        print(f"step {step} loss {wrong.item() + fooled.item()!r}", flush=True)


if __name__ == "__main__":
    main()

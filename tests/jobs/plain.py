"""A loop in one process: python plain.py"""

import argparse
import os
import signal
import sys

import torch
from torch import nn


def step_at_once(optimizer):
    optimizer.step()
    optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ends-by", default="itself", help="itself, exit, exception or kill: how the job ends")
    parser.add_argument("--profile", type=int, nargs="*", default=[], help="the steps under the job's own profiler")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--in-backward", action="store_true", help="optimizers step as soon as a gradient is there")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 4))
    if options.in_backward:
        for parameter in model.parameters():
            own = torch.optim.Adam([parameter], lr=1e-3)
            parameter.register_post_accumulate_grad_hook(lambda _, own=own: step_at_once(own))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step_optimizer = torch.compile(optimizer.step, backend="eager") if options.compile else optimizer.step
    for step in range(options.steps):
        profiler = torch.profiler.profile() if step in options.profile else None
        if profiler is not None:
            profiler.start()
        with torch.profiler.record_function("train"):
            loss = nn.functional.mse_loss(model(torch.randn(16, 32)), torch.randn(16, 4))
            loss.backward()
            if not options.in_backward:
                step_optimizer()
                optimizer.zero_grad()
        if profiler is not None:
            profiler.stop()
        print(f"step {step} loss {loss.item()!r}", flush=True)
    if options.ends_by == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if options.ends_by == "exception":
        raise RuntimeError("the job failed")
    if options.ends_by == "exit":
        sys.exit(7)


if __name__ == "__main__":
    main()

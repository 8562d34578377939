"""Offload with real pinned memory and copies that take time: the program of `test_offload.py`.

python -m tests.fake_cuda.offload RANKS     one line of JSON for each case
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.engine import clip_grad_norm_
from fsdplab.engine.features import offload
from tests.fake_cuda.order import Case, policy_of, run_on_ranks, sharded

_end_to_end = offload.end_to_end


def marked(values: Sequence[torch.Tensor], make: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """Host memory for gradients, full of NaNs; the gradients on the device become ones, for no kernel has made them."""
    for value in values:
        value.copy_(torch.ones(value.shape))
    landings = _end_to_end(values, make)
    for landing in landings:
        landing.fill_(torch.nan)
    return landings


def is_stale(gradient: torch.Tensor, expected: float) -> bool:
    """Whether a gradient holds anything but what has arrived."""
    return bool((gradient != expected).any())


def found_in(case: Case, folder: str, hooks: bool, waits: bool) -> dict[str, Any]:
    """Where things are after two backwards, and the share of gradients that were read too early. Without `waits` the
    host does not wait for copies.
    """
    policy = policy_of(case, folder)
    synchronize, offload.end_to_end = torch.cuda.Event.synchronize, marked
    if not waits:
        torch.cuda.Event.synchronize = lambda _: None
    model = sharded(case, policy)
    stale: list[bool] = []
    for parameter in model.parameters() if hooks else ():
        parameter.register_post_accumulate_grad_hook(lambda each: stale.append(is_stale(each.grad.to_local(), number)))
    for number in (1, 2):  # the second adds to what the first has left
        model(torch.ones(4, 32, device="cuda")).float().square().mean().backward()
        stale += [is_stale(each.grad.to_local(), number) for each in model.parameters()]
    devices = {each.device.type for each in model.parameters()} | {each.grad.device.type for each in model.parameters()}
    torch.cuda.Event.synchronize, offload.end_to_end = synchronize, _end_to_end
    torch.cuda.synchronize()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.step()
    model.load_state_dict(model.state_dict())
    pinned = [parameter.to_local().is_pinned() for parameter in model.parameters() if parameter.to_local().numel()]
    return {
        "devices": sorted(devices), "stale": sum(stale) / len(stale), "norm": norm.device.type, "pinned": all(pinned),
    }  # fmt: skip


def rank_main(folder: str) -> None:
    for name in ("pinned", "pageable", "nvme"):
        for by_columns in (False, True):
            for hooks in (False, True):
                case = Case(offload=name, by_columns=by_columns)
                found = found_in(case, folder, hooks, waits=True)
                if dist.get_rank() == 0:
                    print(json.dumps({"case": case.name, "hooks": hooks, **found}), flush=True)
    found = found_in(Case(offload="pinned"), folder, hooks=False, waits=False)
    if dist.get_rank() == 0:
        print(json.dumps({"case": "no waits", **found}), flush=True)


if __name__ == "__main__":
    sys.exit(run_on_ranks(int(sys.argv[1]), lambda rank, folder: rank_main(folder)))

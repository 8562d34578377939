"""Memory on CUDA: model state and gathered units by arithmetic against what the allocator counts; the same bytes in
every run; categories.

The lab's full_shard runs in a group of one that gathers and reduces all the same. On CPU, where no allocator counts,
the living tensors are asked for their storages instead.

The arithmetic: what `full_shard` with AdamW in bf16 over fp32 masters must hold on each of n ranks.

    slices          4 P / n      masters
    optimizer       8 P / n      two moments
    gradients       4 P / n      after a backward, until they are zeroed
    gathered        2 U          U: parameters of the units that are gathered at that instant, whole
    in flight       2 W          W: parameters of the units whose gather is in flight, in the buffer that it fills

No padding: at n = 1 there is none, and it is below a thousandth where n divides the rows. Activations are not model
state.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fsdplab.profiling import MemoryRecorder, TagLog
from fsdplab.profiling.memory.live_storages import living_storages
from fsdplab.workloads import ModelConfig, block_parameter_count, parameter_count, preset, root_parameter_count

from .contestants import Case, Contestant, batches_of, built, group_of_one, synchronise, text
from .part import Sheet, part_main

TOLERANCE = 0.03
_SAME_FOR_S, _SETTLES_WITHIN_S = 0.1, 5.0
_OTHER_LIMIT = 0.05  # of the peak may have no category


@dataclass(frozen=True)
class Size:
    """`state`: the model whose bytes are counted; `step`: the one that is trained again and again, `runs` times."""

    state: Case
    step: Case
    runs: int


SIZES = {
    "cuda": Size(Case("llama-1b", 1, 64), Case("llama-0.3b", 4, 1024), runs=20),
    "cpu": Size(Case("llama-20m", 1, 16), Case("llama-tiny", 2, 64), runs=3),
}


def work(sheet: Sheet, device: torch.device) -> None:
    """The whole part; each of its three measures may fail alone."""
    size = SIZES[device.type]
    sheet.note(
        f"Bytes in use: {'torch.cuda.memory_allocated' if device.type == 'cuda' else 'storages of living tensors'};"
        " slices over one rank, so whole."
    )
    with group_of_one(device):
        text()
        _wake_libraries(device)
        for measure in (by_arithmetic, by_category, run_after_run):
            with sheet.trying(measure.__name__):
                measure(sheet, size, device)
            gc.collect()


def by_arithmetic(sheet: Sheet, size: Size, device: torch.device) -> None:
    """At rest, in the middle of a forward, and with gradients: expected bytes, bytes in use, and how far they are
    apart.
    """
    case, shape = size.state, StateBytes(preset(size.state.model))
    before = in_use(device)
    contestant, batches = built("lab-gathering", case, device), batches_of(case, device)
    for _ in range(2):  # the second forward gathers ahead
        contestant.step(*next(batches))
    rest = in_use(device)
    middle = shape.config.layers // 2
    seen = _during_block(contestant, middle, next(batches), device)
    contestant.model(next(batches)[0]).float().mean().backward()
    reduced = in_use(device)
    for what, expected, got in (
        ("parameter slices and optimizer state at rest", shape.at_rest, rest - before),
        ("units gathered and in flight in a forward", shape.in_forward(middle), seen - rest),
        ("gradient slices after a backward", shape.gradients, reduced - rest),
    ):
        far = apart(got, expected)
        sheet.row(measure="arithmetic", model=case.model, what=what, expected_bytes=expected, bytes=got, apart=far)
        allowed = f"{expected} bytes within {TOLERANCE:.0%}"
        sheet.check(f"{case.model}: {what}", far <= TOLERANCE, f"{got} bytes", allowed)


def by_category(sheet: Sheet, size: Size, device: torch.device) -> None:
    """The peak of one step split by category, from allocator events; its total against the allocator's own peak."""
    with TagLog() as tags:
        contestant, batches = built("lab-gathering", size.step, device), batches_of(size.step, device)
        contestant.step(*next(batches))
        batch = next(batches)
        recorder = MemoryRecorder(
            model=contestant.model, optimizer=contestant.optimizer, engine="lab", device=device, tags=tags,
            ignore=[text().data],
        )  # fmt: skip
        with recorder:
            contestant.step(*batch)
    timeline = recorder.timeline
    for category, held in timeline.peak.items():
        sheet.row(
            measure="categories", model=size.step.model, what=category, expected_bytes=None, bytes=held, apart=None
        )
    other = timeline.other_share
    told, allowed = f"{other:.1%} other", f"at most {_OTHER_LIMIT:.0%}"
    sheet.check(f"{size.step.model}: peak by category", other <= _OTHER_LIMIT, told, allowed)
    if timeline.allocated_peak is not None:
        far = apart(timeline.peak_total, timeline.allocated_peak)
        name = f"{size.step.model}: categories sum to the allocator's peak"
        sheet.check(name, far <= TOLERANCE, f"{far:.2%} apart", f"within {TOLERANCE:.0%}")


def run_after_run(sheet: Sheet, size: Size, device: torch.device) -> None:
    """Build, train two steps and read the peak, again and again: a peak that differs means that timing decides about
    memory.
    """
    peaks, model = list[int](), size.step.model
    while len(peaks) < size.runs and sheet.left() > 2:
        peaks.append(_peak_of_a_run(size.step, device))
    for peak in sorted(set(peaks)):
        what, far = f"peak of {peaks.count(peak)} runs", apart(peak, peaks[0])
        sheet.row(measure="runs", model=model, what=what, expected_bytes=peaks[0], bytes=peak, apart=far)
    whole = len(peaks) == size.runs and len(set(peaks)) == 1
    got = f"{len(set(peaks))} in {len(peaks)} runs"
    sheet.check(f"{model}: the same peak in {size.runs} runs", whole, got, f"1 in {size.runs} runs")


@dataclass(frozen=True)
class StateBytes:
    """The arithmetic for one shape on `ranks` ranks, in bytes.

    A model of 1,000 parameters on 2 ranks: slices 2,000, optimizer 4,000, at rest 6,000, gradients 2,000.
    """

    config: ModelConfig
    ranks: int = 1

    @property
    def slices(self) -> int:
        """Masters at rest."""
        return 4 * parameter_count(self.config) // self.ranks

    @property
    def at_rest(self) -> int:
        """Masters and optimizer state: what a rank holds between two steps."""
        return self.slices + 8 * parameter_count(self.config) // self.ranks

    @property
    def gradients(self) -> int:
        """Gradient slices."""
        return self.slices

    def in_forward(self, block: int, prefetch: int = 1) -> int:
        """What comes on top while `block` (from 0) computes.

        The root and this block are gathered, `prefetch` blocks after it are in flight.
        """
        root, each = root_parameter_count(self.config), block_parameter_count(self.config)
        ahead = min(prefetch, self.config.layers - 1 - block)
        return 2 * (root + each * (1 + ahead))


def apart(got: int, expected: int) -> float:
    """How far `got` is from `expected`, as a part of it: 0.02 is 2 % too much or too little."""
    return abs(got - expected) / expected


def in_use(device: torch.device) -> int:
    """Bytes in use now: the allocator's figure, or on CPU the living storages'."""
    gc.collect()
    if device.type != "cuda":
        return _settled(lambda: sum(storage.nbytes() for storage in living_storages(device).values()))
    synchronise(device)
    return torch.cuda.memory_allocated(device)


def _settled(read: Callable[[], int]) -> int:
    """The figure once it stays the same: a thread of gloo lets go of what it carried a moment after the message has
    arrived.
    """
    before, deadline = read(), time.monotonic() + _SETTLES_WITHIN_S
    while time.monotonic() < deadline:
        time.sleep(_SAME_FOR_S)
        now = read()
        if now == before:
            break
        before = now
    return before


def _during_block(
    contestant: Contestant, block: int, batch: tuple[torch.Tensor, torch.Tensor], device: torch.device
) -> int:
    """Bytes in use while `block` is about to compute, in a forward that keeps no activations."""
    seen: list[int] = []
    hook = contestant.model.blocks[block].register_forward_pre_hook(lambda *_: seen.append(in_use(device)))
    with torch.no_grad():
        contestant.model(batch[0])
    hook.remove()
    return seen[0]


def _peak_of_a_run(case: Case, device: torch.device) -> int:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = in_use(device)
    contestant, batches = built("lab-gathering", case, device), batches_of(case, device)
    for _ in range(2):
        contestant.step(*next(batches))
    if device.type != "cuda":
        return in_use(device) - before
    synchronise(device)
    return torch.cuda.max_memory_allocated(device) - before


def _wake_libraries(device: torch.device) -> None:
    """Have the libraries take the workspaces that they keep for good, in the forward's thread and in the backward's,
    before anything is counted.
    """
    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(64, 64, device=device, dtype=dtype)
        layer(torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)).sum().backward()


if __name__ == "__main__":
    sys.exit(part_main("memory", work))

"""One rank, one GPU: the lab's engine against PyTorch's FSDP2 and DDP, and against no engine at all.

The engines share one process and take turns step by step, so that whatever the machine does, it does to all of them.
Memory is measured before, each engine alone on the device. At world size 1 nothing is communicated: what is compared is
what an engine adds to the training itself, casts, copies, hooks and the host's time. `lab-gathering` adds the gathers
and reductions, as copies.

How much arithmetic a step is, and which part of a GPU's peak that uses (MFU):

    FLOP of a step = tokens x (6 N + 6 L C T)

N: parameters that multiply: all but the table of token embeddings (and of positions), which is looked up; the output
head counts. Each is one multiplication and one addition in the forward, twice that in the backward: 6 (Kaplan et al.
2020). L layers of width C, T tokens of a sequence: query times key and weights times value are 2 T C FLOP each, a token
and layer, of which a causal mask needs half; three times that with the backward. What checkpointing computes again is
not counted: MFU is about the work that was asked for (Chowdhery et al. 2022, appendix B). The peak is the data sheet's,
dense, in bf16 (`planning/hardware.py`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdplab.planning.hardware import gpu_of
from fsdplab.workloads import ModelConfig, parameter_count, preset
from fsdplab.workloads.compiled import missing_compiler

from .contestants import (
    Case,
    Contestant,
    Timed,
    batches_of,
    built,
    group_of_one,
    host_syncs,
    medians,
    synchronise,
    timed,
)
from .part import Sheet, part_main

ALL = ("lab", "torch-fsdp2", "torch-ddp", "alone")
TWO = ("lab", "torch-fsdp2")  # of a 3 B model two fit side by side
_WARMUP = 3
_ENOUGH_S = {False: 15.0, True: 40.0}  # what a case needs at least, eager and compiled
_AIM_TIME, _AIM_MFU, _AIM_MODEL = 0.97, 0.5, "llama-1b"
_LOSS_TOLERANCE = 0.02  # bf16 rounds differently in each engine; a wrong gradient shows by far more
FORMULA = (
    "FLOP = tokens x (6 N + 6 L C T), N without the embedding table, causal half of attention, recomputation not"
    " counted"
)


@dataclass(frozen=True)
class Plan:
    """A case, the engines in it, and how many steps of each are timed."""

    case: Case
    engines: tuple[str, ...]
    rounds: int


def plans(device_type: str) -> list[Plan]:
    """What is compared, the most telling first: whatever does not fit into the limit is left out from the end."""
    if device_type == "cpu":
        tiny = [Case("llama-tiny", 2, 64), Case("llama-tiny", 2, 64, checkpoint="full")]
        return [
            Plan(tiny[0], (*ALL, "lab-gathering"), 2),
            Plan(tiny[1], ALL, 2),
            Plan(Case("llama-tiny", 2, 64, compiled=True), TWO, 2),
        ]
    one, small, large = ("llama-1b", 8, 2048), ("llama-0.3b", 16, 2048), ("llama-3b", 4, 2048)
    return [
        Plan(Case(*one), ALL, 8),
        Plan(Case(*one, compiled=True), ALL, 8),
        Plan(Case(*large, checkpoint="full"), TWO, 5),
        Plan(Case(*small), (*ALL, "lab-gathering"), 6),
        Plan(Case(*one, checkpoint="full"), ALL, 5),
        Plan(Case(*one, checkpoint="full", compiled=True), ALL, 5),
        Plan(Case(*small, compiled=True), ALL, 6),
        Plan(Case(*large, checkpoint="full", compiled=True), TWO, 5),
        Plan(Case("llama-3b", 2, 2048), TWO, 5),
    ]


def work(sheet: Sheet, device: torch.device) -> None:
    """The whole part; a case that fails is a failed check, and the next one runs."""
    gpu = gpu_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    peak = gpu.bf16_flops if gpu else None
    known = (
        f"{peak / 1e12:.0f} TFLOP/s dense bf16 of {gpu.name} (data sheet)"
        if gpu and peak
        else "not known for this device"
    )
    sheet.note(f"{FORMULA}; peak: {known}.")
    sheet.note(
        "World size 1: nothing is communicated, but by lab-gathering, which copies to itself. Times are medians of"
        " steps taken in turn."
    )
    torch._dynamo.config.recompile_limit = 64  # each engine makes a class of its own, and so a graph of its own
    torch._dynamo.config.optimize_ddp = False  # a block is one graph under DDP too, which would cut it at its buckets
    missing = missing_compiler(device.type) if device.type == "cuda" else None
    with group_of_one(device):
        for plan in plans(device.type):
            if plan.case.compiled and missing:
                sheet.note(f"left out: {plan.case.words}: torch.compile needs {missing}, which this machine lacks")
            elif sheet.left() < _ENOUGH_S[plan.case.compiled] and device.type == "cuda":
                sheet.note(f"left out: {plan.case.words}: {sheet.left():.0f} s of the limit remained")
            else:
                with sheet.trying(plan.case.words):
                    compare(sheet, plan, device, peak)
            _tidy(device)


def compare(sheet: Sheet, plan: Plan, device: torch.device, peak: float | None) -> None:
    """One case: memory of each engine alone, then all in turn; a row an engine, and the checks."""
    batches = batches_of(plan.case, device)
    memory: dict[str, dict[str, int | None]] = {}
    for engine in plan.engines:
        # one that cannot is left out, and the others are compared
        with sheet.trying(f"{plan.case.words}: {engine} trains alone"):
            memory[engine] = memory_alone(engine, plan.case, device, batches)
    engines = tuple(memory)
    contestants = [built(engine, plan.case, device) for engine in engines]
    steps, losses = take_turns(contestants, plan.rounds, device, batches)
    batch = next(batches)  # before the count: to bring it to the device is a wait of its own
    waits = [host_syncs(lambda: each.step(*batch), device) for each in contestants]
    rows = []
    for index, engine in enumerate(engines):
        times, waited = medians(steps[index]), waits[index]
        row = {
            "model": plan.case.model, "compiled": plan.case.compiled, "checkpoint": plan.case.checkpoint,
            "engine": engine,
            "batch": plan.case.batch, "sequence": plan.case.sequence, "rounds": plan.rounds, **times,
            "tokens_per_s": plan.case.tokens / times["step_s"],
            "mfu": mfu(preset(plan.case.model), plan.case.tokens, plan.case.sequence, times["step_s"], peak),
            **memory[engine],
            "host_syncs": None if waited is None else len(waited), "loss": losses[index],
        }  # fmt: skip
        sheet.row(**row)
        rows.append(row)
        for place in sorted(set(waited or ())):
            sheet.note(f"{plan.case.words}: {engine} waits on the host at {place}")
    for judged in judge(rows, plan.case, on_gpu=device.type == "cuda"):
        sheet.check(**judged)


def take_turns(
    contestants: Sequence[Contestant], rounds: int, device: torch.device, batches: Iterator[tuple[Tensor, Tensor]]
) -> tuple[list[list[Timed]], list[float]]:
    """Timed steps and last loss of each contestant; who goes first changes from round to round, all read the same
    batch.
    """
    steps: list[list[Timed]] = [[] for _ in contestants]
    losses: list[Tensor] = [torch.zeros(()) for _ in contestants]
    for number in range(_WARMUP + rounds):
        tokens, targets = next(batches)
        for turn in range(len(contestants)):
            index = (turn + number) % len(contestants)

            def step() -> None:
                losses[index] = contestants[index].step(tokens, targets)

            took = timed(step, device)
            if number >= _WARMUP:
                steps[index].append(took)
    return steps, [loss.item() for loss in losses]


def memory_alone(
    engine: str, case: Case, device: torch.device, batches: Iterator[tuple[Tensor, Tensor]]
) -> dict[str, int | None]:
    """Peak bytes, allocated and reserved, of a third step with nothing else on the device; None on CPU, where the
    allocator counts nothing.

    Both are what the engine added: what was there before it was built is subtracted.
    """
    if device.type != "cuda":
        return {"allocated_peak": None, "reserved_peak": None}
    _tidy(device)
    before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    contestant = built(engine, case, device)
    for _step in range(3):
        torch.cuda.reset_peak_memory_stats(device)
        contestant.step(*next(batches))
    synchronise(device)
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    del contestant
    _tidy(device)
    return {"allocated_peak": peaks[0] - before[0], "reserved_peak": peaks[1] - before[1]}


def judge(rows: Sequence[dict[str, Any]], case: Case, on_gpu: bool) -> list[dict[str, Any]]:
    """What the rows of one case must show; speed and memory are judged on a GPU only. Pure: rows in, checks out."""
    by = {row["engine"]: row for row in rows}
    lab, peer = by["lab"], by["torch-fsdp2"]
    apart = abs(lab["loss"] - peer["loss"])
    agree, theirs = apart <= _LOSS_TOLERANCE * abs(peer["loss"]), f"{peer['loss']:.4f} (torch-fsdp2)"
    checks = [_check(f"{case.words}: losses agree", agree, f"{lab['loss']:.4f}", theirs)]
    if not on_gpu:
        return checks
    ratio, memory = lab["step_s"] / peer["step_s"], lab["allocated_peak"] / peer["allocated_peak"]
    checks += [
        _check(f"{case.words}: no host sync inside a step", lab["host_syncs"] == 0, lab["host_syncs"], 0),
        _check(
            f"{case.words}: step time over torch-fsdp2's", ratio <= _AIM_TIME, f"{ratio:.3f}", f"at most {_AIM_TIME}"
        ),
        _check(f"{case.words}: peak memory over torch-fsdp2's", memory <= 1, f"{memory:.4f}", "at most 1"),
    ]
    if case.model == _AIM_MODEL and case.compiled and case.checkpoint == "none" and lab["mfu"] is not None:
        checks.append(_check(f"{case.words}: MFU", lab["mfu"] >= _AIM_MFU, f"{lab['mfu']:.3f}", f"at least {_AIM_MFU}"))
    return checks


def _check(name: str, passed: bool, got: object, expected: object) -> dict[str, Any]:
    return {"name": name, "passed": passed, "got": got, "expected": expected}


def _tidy(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def multiplying_parameters(config: ModelConfig) -> int:
    """Parameters that take part in a product, N; norms and biases, a few thousandths, are left in."""
    looked_up = 0 if config.tie_embeddings else config.vocabulary * config.width
    positions = config.context * config.width if config.family == "gpt" else 0
    return parameter_count(config) - looked_up - positions


def step_flops(config: ModelConfig, tokens: int, sequence_length: int) -> int:
    """FLOP of one training step on `tokens` tokens in sequences of `sequence_length`.

    A model of N = 1000, L = 2, C = 8 on 10 tokens in sequences of 5: 10 x (6,000 + 6 x 2 x 8 x 5) = 64,800.
    """
    attention = config.layers * config.width * sequence_length
    return tokens * (6 * multiplying_parameters(config) + 6 * attention)


def mfu(config: ModelConfig, tokens: int, sequence_length: int, seconds: float, peak: float | None) -> float | None:
    """The part of `peak` FLOP/s that a step of `seconds` used, 0 to 1; None where the peak is not known."""
    return None if not peak else step_flops(config, tokens, sequence_length) / seconds / peak


if __name__ == "__main__":
    sys.exit(part_main("one_rank", work))

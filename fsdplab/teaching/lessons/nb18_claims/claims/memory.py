"""What is said about memory: states, activations, gathered units, checkpoints, cards that are too small."""

from __future__ import annotations

from typing import Any

from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.common.sizes import seconds, size
from fsdplab.planning import plan
from fsdplab.planning.host import host_crossing
from fsdplab.planning.links import parse_link
from fsdplab.planning.planner import Plan

from .claim import Finding, Measured, Subject, conditional_if, confirmed_if, in_mb

CLAIMS = Subject()
_STATES = ("sharded_parameters", "sharded_gradients", "optimizer_state")
PARAMETERS = 70e9  # of the model that most texts speak of
MODEL = "llama-3.1-70b"  # 70.6 billion
LARGE = {"model": MODEL, "gpu": "h100", "checkpointing": "full", "masters": "separate"}


def states(found: Plan) -> float:
    """Bytes of parameters, gradients and optimizer state that rest on a rank while the optimizer steps."""
    held = found.memory.moments[-1].by_category
    return sum(nbytes for name, nbytes in held.items() if name not in ("activations", "other", "communication_buffers"))


@CLAIMS.claim("C1", "computed", "02_where_memory_goes")
def _(measured: Measured) -> Finding:
    """70 billion parameters in bf16 with Adam take 1.12 TB: 140 GB of parameters, as much of gradients, 560 GB of
    Adam's moments, 280 GB of fp32 masters.
    """
    parts = {"parameters": 2, "gradients": 2, "moments": 8, "masters": 4}
    total = sum(parts.values()) * PARAMETERS
    listed = ", ".join(f"{name} {size(each * PARAMETERS)}" for name, each in parts.items())
    return confirmed_if(abs(total / 1.12e12 - 1) < 0.005, f"{listed}: {size(total)}, {sum(parts.values())} bytes each")


@CLAIMS.claim("C2", "computed", "02_where_memory_goes")
def _(measured: Measured) -> Finding:
    """Under DDP each of 16 GPUs needs all of it."""
    alone, many = (states(plan(**LARGE, gpus=gpus, strategy="no_shard")) for gpus in (1, 16))
    return confirmed_if(many == alone, f"{size(many)} a GPU on 16 GPUs, {size(alone)} on one (70.6 billion parameters)")


@CLAIMS.claim("C3", "computed", "02_where_memory_goes")
def _(measured: Measured) -> Finding:
    """Sharded over 16 GPUs of 80 GB it is 70 GB a GPU, which fits comfortably."""
    found = plan(**LARGE, gpus=16, strategy="full_shard")
    peak, card, held = found.memory.peak.total, found.spec.gpu.memory_bytes, states(found)
    text = (
        f"{size(held)} of states, as said; with the units that are gathered, activations and buffers {size(peak)} of a"
        f" card's {size(card)}: it {'fits' if found.fits else 'does not fit'}"
    )
    return confirmed_if(peak < 0.9 * card, text)


@CLAIMS.claim("C4", "computed", "19_planning_at_scale")
def _(measured: Measured) -> Finding:
    """Of 70 billion parameters each of 512 GPUs holds about 280 MB instead of 140 GB."""
    each = 2 * PARAMETERS / 512
    return confirmed_if(abs(each / 280e6 - 1) < 0.05, f"{size(each)} in bf16; FSDP2 keeps fp32, twice as much")


@CLAIMS.claim("C5", "measured", "06_a_whole_model")
def _(measured: Measured) -> Finding:
    """What a rank holds between steps falls from O(model) to O(model / ranks)."""
    peaks = {int(ranks): told["peak"] for ranks, told in measured["ranks"].items()}
    held = {ranks: sum(peak[name] for name in _STATES) for ranks, peak in peaks.items()}
    others = {ranks: peak["activations"] + peak["unsharded_parameters"] for ranks, peak in peaks.items()}
    listed = ", ".join(f"{in_mb(nbytes)} on {ranks}" for ranks, nbytes in held.items())
    divided = all(abs(held[ranks] * ranks / held[1] - 1) < 0.15 for ranks in held)
    text = (
        f"states of gpt-tiny at the peak: {listed} rank(s). Not divided: activations and gathered units,"
        f" {in_mb(others[2])} on 2 and {in_mb(others[4])} on 4"
    )
    return conditional_if(divided and others[4] > 0.9 * others[2], text)


@CLAIMS.claim("C12", "measured", "11_strategy_shoot_out")
def _(measured: Measured) -> Finding:
    """ZeRO-1 shards the optimizer's state, ZeRO-2 gradients too, ZeRO-3 parameters too; ZeRO-3 is FSDP."""
    peaks = {name: told["peak"] for name, told in measured["strategies"].items()}
    kinds = {"optimizer_state": "optimizer", "sharded_parameters": "parameters"}
    whole = {kind: max(peak[kind] for peak in peaks.values()) for kind in kinds}
    holds = all(
        (peak[kind] < 0.6 * whole[kind]) == (state in STRATEGY_ROWS[name].cuts)
        for name, peak in peaks.items()
        for kind, state in kinds.items()
    )
    listed = ", ".join(f"{name} {in_mb(sum(peak[kind] for kind in _STATES))}" for name, peak in peaks.items())
    return confirmed_if(holds, f"states at the peak: {listed}")


@CLAIMS.claim("C11", "measured", "11_strategy_shoot_out")
def _(measured: Measured) -> Finding:
    """SHARD_GRAD_OP is ZeRO-2: it replicates parameters and shards gradients and optimizer state."""
    ours, zero2 = (measured["strategies"][name] for name in ("shard_grad_op", "zero2"))
    slices, whole = (told["peak"]["sharded_parameters"] for told in (ours, zero2))
    text = (
        f"the same {in_mb(ours['bytes'])} sent; but SHARD_GRAD_OP also shards parameters between steps: at rest"
        f" {in_mb(slices)}, where ZeRO-2 keeps {in_mb(whole)}"
    )
    return conditional_if(ours["bytes"] == zero2["bytes"] and slices < whole, text)


@CLAIMS.claim("C16", "measured", "13_precision_checkpointing_offload")
def _(measured: Measured) -> Finding:
    """Recomputation is a part of what FSDP costs."""
    kept = {name: told["peak"]["activations"] for name, told in measured["checkpointing"].items()}
    saves = {name: kept[f"{name}, full"] / kept[f"{name}, none"] for name in ("no_shard", "full_shard")}
    text = (
        "activation checkpointing is a choice of its own, with or without sharding: activations at the peak fall to"
        f" {saves['no_shard']:.0%} under DDP and to {saves['full_shard']:.0%} under full sharding"
    )
    return confirmed_if(saves["no_shard"] > 0.99, text)


@CLAIMS.claim("C17", "measured and computed", "16_composition")
def _(measured: Measured) -> Finding:
    """Activations are not sharded; where they dominate, tensor parallelism is the answer."""
    kept = {name: told["peak"]["activations"] for name, told in measured["sequences"].items()}
    longer, more = kept["128 tokens, 2 ranks"] / kept["64 tokens, 2 ranks"], kept["128 tokens, 4 ranks"]
    wider = more / kept["128 tokens, 2 ranks"]
    usual, cut = (
        plan("llama-3.1-8b", "h100", gpus=8, seq=8192, tensor_parallel=ways).memory.peak.by_category["activations"]
        for ways in (1, 8)
    )
    text = (
        f"twice the tokens hold {longer:.1f} times the activations, twice the ranks {wider:.1f} times; tensor"
        f" parallelism over 8 GPUs leaves {cut / usual:.0%} of {size(usual)} (Llama 3.1 8B, computed)"
    )
    return confirmed_if(longer > 1.8 and abs(wider - 1) < 0.05 and cut < 0.5 * usual, text)


@CLAIMS.claim("C18", "measured and computed", "13_precision_checkpointing_offload")
def _(measured: Measured) -> Finding:
    """CPU offload trades step time for memory."""
    peaks = {where: sum(told["peak"].values()) for where, told in measured["offload"].items()}
    usual, moved = (plan("llama-3.1-8b", "h100", gpus=8, micro_batch=1, offload=away) for away in (False, True))
    assert usual.time is not None, "FLOP/s of an H100 are known"
    crossing, bus = host_crossing(moved.spec), parse_link("pcie5")
    bus_s, step_s = crossing / bus.bytes_per_s, usual.time.step_s
    text = (
        f"gpt-tiny's peak beside the host's memory: {in_mb(peaks['cpu'])} instead of {in_mb(peaks['none'])} (measured);"
        f" Llama 3.1 8B on 8 H100: {size(moved.memory.peak.total)} instead of {size(usual.memory.peak.total)}, and"
        f" {size(crossing)} a step over {bus.name}, at least {seconds(bus_s)} beside a step of {seconds(step_s)}"
    )
    return confirmed_if(peaks["cpu"] < peaks["none"] and bus_s > 0.1 * step_s, text)


@CLAIMS.claim("C22", "computed", "19_planning_at_scale")
def _(measured: Measured) -> Finding:
    """70 billion parameters can be fine-tuned on four cards of 24 GB: 35 GB a GPU drop to about 20 GB."""
    settings = {"gpus": 4, "checkpointing": "full", "seq": 1024}
    whole = plan(MODEL, "rtx-4090", **settings)
    adapted = plan(MODEL, "rtx-4090", **settings, lora_rank=16, base_dtype="nf4")
    card = whole.spec.gpu.memory_bytes
    text = (
        f"a rank's part of the bf16 parameters alone is {size(2 * whole.spec.model.parameters / 4)}, and with fp32"
        f" masters, gradients and moments {size(whole.memory.peak.total)}, on a {size(card)} card. What fits is a"
        f" frozen base in 4 bits with adapters: {size(adapted.memory.peak.total)}"
    )
    return confirmed_if(whole.fits, text)


@CLAIMS.claim("C36", "computed", "19_planning_at_scale")
def _(measured: Measured) -> Finding:
    """FSDP lets people fine-tune large models on cards of 16 to 24 GB."""
    settings = {"gpus": 4, "checkpointing": "full", "seq": 2048}
    ways: dict[str, dict[str, Any]] = {
        "all parameters": {},
        "adapters on bf16": {"lora_rank": 16},
        "adapters on 4 bits": {"lora_rank": 16, "base_dtype": "nf4"},
    }
    found = {name: plan("llama-3.1-8b", "rtx-4090", **settings, **way) for name, way in ways.items()}
    listed = ", ".join(
        f"{name} {size(each.memory.peak.total)} ({'fits' if each.fits else 'does not fit'})"
        for name, each in found.items()
    )
    fits = [each.fits for each in found.values()]
    return conditional_if(not fits[0] and fits[-1], f"Llama 3.1 8B on four 24 GB cards: {listed}")


@CLAIMS.claim("C20", "measured", "15_save_reshard_resume")
def _(measured: Measured) -> Finding:
    """A full state dict gathers the model on rank 0, fatal for large models; sharded checkpoints do not."""
    held = measured["checkpoints"]["rank 0 holds"]
    text = (
        f"rank 0 of 4 holds {in_mb(held['full'])} of gpt-tiny in the full form and {in_mb(held['sharded'])} in the"
        f" sharded one; of 70 billion parameters in fp32 that is {size(4 * PARAMETERS)} and {size(PARAMETERS)}"
    )
    return confirmed_if(held["full"] > 3.9 * held["sharded"], text)


@CLAIMS.claim("C21", "measured", "15_save_reshard_resume")
def _(measured: Measured) -> Finding:
    """A checkpoint saved on N ranks loads on M."""
    loads = {name: ranks for name, ranks in measured["checkpoints"].items() if name.startswith("on ")}
    equal = all(rank["equal"] for ranks in loads.values() for rank in ranks)
    numbers = ", ".join(name.removeprefix("on ") for name in loads)
    return confirmed_if(equal, f"saved on 4 ranks, loaded on {numbers}: every bit of every parameter is the one saved")


@CLAIMS.claim("C35", "measured", "15_save_reshard_resume")
def _(measured: Measured) -> Finding:
    """Loading rebuilds the full state from the slices that each rank wrote."""
    held = measured["checkpoints"]
    two = max(rank["bytes"] for rank in held["on 2"])
    text = (
        f"a rank of 2 loads {in_mb(two)} of {in_mb(held['rank 0 holds']['full'])}, its own slices; the whole appears"
        " only where somebody asks for a full state dict"
    )
    return conditional_if(two < 0.6 * held["rank 0 holds"]["full"], text)

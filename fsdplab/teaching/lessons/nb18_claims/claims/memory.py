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


def states(planned: Plan) -> float:
    """Return the bytes of parameters, gradients and optimizer state on a rank while the optimizer steps."""
    total = 0.0
    # the last moment of a step is the optimizer's
    for name, nbytes in planned.memory.moments[-1].by_category.items():
        if name not in ("activations", "other", "communication_buffers"):
            total += nbytes
    return total


def _activations(runs: dict[str, Any]) -> dict[str, float]:
    """Return the bytes of activations at the peak of each measured run."""
    return {name: run["peak"]["activations"] for name, run in runs.items()}


@CLAIMS.claim("C1", "computed", "02_where_memory_goes")
def _(measured: Measured) -> Finding:
    """70 billion parameters in bf16 with Adam take 1.12 TB: 140 GB of parameters, as much of gradients, 560 GB of
    Adam's moments, 280 GB of fp32 masters.
    """
    # bytes of an element: bf16 parameters and gradients, two fp32 moments, fp32 masters
    bytes_each = {"parameters": 2, "gradients": 2, "moments": 8, "masters": 4}
    together = sum(bytes_each.values())
    total = together * PARAMETERS
    listed = ", ".join(f"{name} {size(nbytes * PARAMETERS)}" for name, nbytes in bytes_each.items())
    return confirmed_if(abs(total / 1.12e12 - 1) < 0.005, f"{listed}: {size(total)}, {together} bytes each")


@CLAIMS.claim("C2", "computed", "02_where_memory_goes")
def _(measured: Measured) -> Finding:
    """Under DDP each of 16 GPUs needs all of it."""
    alone = states(plan(**LARGE, gpus=1, strategy="no_shard"))
    many = states(plan(**LARGE, gpus=16, strategy="no_shard"))
    return confirmed_if(many == alone, f"{size(many)} a GPU on 16 GPUs, {size(alone)} on one (70.6 billion parameters)")


@CLAIMS.claim("C3", "computed", "02_where_memory_goes")
def _(measured: Measured) -> Finding:
    """Sharded over 16 GPUs of 80 GB it is 70 GB a GPU, which fits comfortably."""
    planned = plan(**LARGE, gpus=16, strategy="full_shard")
    peak, card = planned.memory.peak.total, planned.spec.gpu.memory_bytes
    verdict = "fits" if planned.fits else "does not fit"
    text = (
        f"{size(states(planned))} of states, as said; with the units that are gathered, activations and buffers"
        f" {size(peak)} of a card's {size(card)}: it {verdict}"
    )
    return confirmed_if(peak < 0.9 * card, text)


@CLAIMS.claim("C4", "computed", "19_planning_at_scale")
def _(measured: Measured) -> Finding:
    """Of 70 billion parameters each of 512 GPUs holds about 280 MB instead of 140 GB."""
    # 2 bytes an element: 140 GB over 512 GPUs are 273 MB
    shard = 2 * PARAMETERS / 512
    return confirmed_if(abs(shard / 280e6 - 1) < 0.05, f"{size(shard)} in bf16; FSDP2 keeps fp32, twice as much")


@CLAIMS.claim("C5", "measured", "06_a_whole_model")
def _(measured: Measured) -> Finding:
    """What a rank holds between steps falls from O(model) to O(model / ranks)."""
    state_bytes, others = {}, {}  # by the number of ranks
    for ranks, run in measured["ranks"].items():
        peak = run["peak"]
        state_bytes[int(ranks)] = sum(peak[name] for name in _STATES)
        others[int(ranks)] = peak["activations"] + peak["unsharded_parameters"]
    listed, is_divided = [], True
    for ranks, nbytes in state_bytes.items():
        listed.append(f"{in_mb(nbytes)} on {ranks}")
        # what is divided is the same on all ranks together, but for padding
        of_all_ranks = nbytes * ranks
        is_divided = is_divided and abs(of_all_ranks / state_bytes[1] - 1) < 0.15
    on_two, on_four = others[2], others[4]
    text = (
        f"states of gpt-tiny at the peak: {', '.join(listed)} rank(s). Not divided: activations and gathered units,"
        f" {in_mb(on_two)} on 2 and {in_mb(on_four)} on 4"
    )
    return conditional_if(is_divided and on_four > 0.9 * on_two, text)


@CLAIMS.claim("C12", "measured", "11_strategy_shoot_out")
def _(measured: Measured) -> Finding:
    """ZeRO-1 shards the optimizer's state, ZeRO-2 gradients too, ZeRO-3 parameters too; ZeRO-3 is FSDP."""
    peaks = {name: run["peak"] for name, run in measured["strategies"].items()}
    holds = True
    for kind, state in (("optimizer_state", "optimizer"), ("sharded_parameters", "parameters")):
        # what a strategy that does not shard it keeps; on 2 ranks a shard is half of it
        whole = max(peak[kind] for peak in peaks.values())
        for name, peak in peaks.items():
            is_sharded = peak[kind] < 0.6 * whole
            said_to_be = state in STRATEGY_ROWS[name].cuts
            holds = holds and is_sharded == said_to_be
    listed = []
    for name, peak in peaks.items():
        state_bytes = sum(peak[kind] for kind in _STATES)
        listed.append(f"{name} {in_mb(state_bytes)}")
    return confirmed_if(holds, f"states at the peak: {', '.join(listed)}")


@CLAIMS.claim("C11", "measured", "11_strategy_shoot_out")
def _(measured: Measured) -> Finding:
    """SHARD_GRAD_OP is ZeRO-2: it replicates parameters and shards gradients and optimizer state."""
    shard_grad_op, zero2 = measured["strategies"]["shard_grad_op"], measured["strategies"]["zero2"]
    shards, whole = shard_grad_op["peak"]["sharded_parameters"], zero2["peak"]["sharded_parameters"]
    nbytes = shard_grad_op["bytes"]
    text = (
        f"the same {in_mb(nbytes)} sent; but SHARD_GRAD_OP also shards parameters between steps: at rest"
        f" {in_mb(shards)}, where ZeRO-2 keeps {in_mb(whole)}"
    )
    return conditional_if(nbytes == zero2["bytes"] and shards < whole, text)


@CLAIMS.claim("C16", "measured", "13_precision_checkpointing_offload")
def _(measured: Measured) -> Finding:
    """Recomputation is a part of what FSDP costs."""
    activations = _activations(measured["checkpointing"])
    under_ddp = activations["no_shard, full"] / activations["no_shard, none"]
    under_fsdp = activations["full_shard, full"] / activations["full_shard, none"]
    text = (
        "activation checkpointing is a choice of its own, with or without sharding: activations at the peak fall to"
        f" {under_ddp:.0%} under DDP and to {under_fsdp:.0%} under full sharding"
    )
    return confirmed_if(under_ddp > 0.99, text)


@CLAIMS.claim("C17", "measured and computed", "16_composition")
def _(measured: Measured) -> Finding:
    """Activations are not sharded; where they dominate, tensor parallelism is the answer."""
    activations = _activations(measured["sequences"])
    usual_run = activations["128 tokens, 2 ranks"]
    # about 2 where activations grow with the tokens; `wider` is about 1 where more ranks do not help
    longer = usual_run / activations["64 tokens, 2 ranks"]
    wider = activations["128 tokens, 4 ranks"] / usual_run

    def planned(ways: int) -> float:
        peak = plan("llama-3.1-8b", "h100", gpus=8, seq=8192, tensor_parallel=ways).memory.peak
        return peak.by_category["activations"]

    # bytes of activations without tensor parallelism, and with 8 ways
    usual, cut = planned(1), planned(8)
    text = (
        f"twice the tokens hold {longer:.1f} times the activations, twice the ranks {wider:.1f} times; tensor"
        f" parallelism over 8 GPUs leaves {cut / usual:.0%} of {size(usual)} (Llama 3.1 8B, computed)"
    )
    grows_with_tokens, stays_with_ranks = longer > 1.8, abs(wider - 1) < 0.05
    return confirmed_if(grows_with_tokens and stays_with_ranks and cut < 0.5 * usual, text)


@CLAIMS.claim("C18", "measured and computed", "13_precision_checkpointing_offload")
def _(measured: Measured) -> Finding:
    """CPU offload trades step time for memory."""
    offload = measured["offload"]
    peak = sum(offload["none"]["peak"].values())
    peak_offloaded = sum(offload["cpu"]["peak"].values())

    usual = plan("llama-3.1-8b", "h100", gpus=8, micro_batch=1, offload=False)
    moved = plan("llama-3.1-8b", "h100", gpus=8, micro_batch=1, offload=True)
    assert usual.time is not None, "FLOP/s of an H100 are known"
    planned_peak, planned_offloaded = usual.memory.peak.total, moved.memory.peak.total
    # bytes that cross between host and GPU in a step, in both directions together
    crossing, bus = host_crossing(moved.spec), parse_link("pcie5")
    bus_s, step_s = crossing / bus.bytes_per_s, usual.time.step_s
    text = (
        f"gpt-tiny's peak beside the host's memory: {in_mb(peak_offloaded)} instead of {in_mb(peak)} (measured);"
        f" Llama 3.1 8B on 8 H100: {size(planned_offloaded)} instead of {size(planned_peak)}, and"
        f" {size(crossing)} a step over {bus.name}, at least {seconds(bus_s)} beside a step of {seconds(step_s)}"
    )
    return confirmed_if(peak_offloaded < peak and bus_s > 0.1 * step_s, text)


@CLAIMS.claim("C22", "computed", "19_planning_at_scale")
def _(measured: Measured) -> Finding:
    """70 billion parameters can be fine-tuned on four cards of 24 GB: 35 GB a GPU drop to about 20 GB."""
    settings = {"gpus": 4, "checkpointing": "full", "seq": 1024}
    whole = plan(MODEL, "rtx-4090", **settings)
    adapted = plan(MODEL, "rtx-4090", **settings, lora_rank=16, base_dtype="nf4")
    spec = whole.spec
    card, shard = size(spec.gpu.memory_bytes), size(2 * spec.model.parameters / 4)
    text = (
        f"a rank's part of the bf16 parameters alone is {shard}, and with fp32"
        f" masters, gradients and moments {size(whole.memory.peak.total)}, on a {card} card. What fits is a"
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
    # all parameters must not fit and 4 bits must: then it depends on what is trained
    fits, listed = [], []
    for name, way in ways.items():
        planned = plan("llama-3.1-8b", "rtx-4090", **settings, **way)
        fits.append(planned.fits)
        verdict = "fits" if planned.fits else "does not fit"
        listed.append(f"{name} {size(planned.memory.peak.total)} ({verdict})")
    return conditional_if(not fits[0] and fits[-1], f"Llama 3.1 8B on four 24 GB cards: {', '.join(listed)}")


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
    numbers, equal = [], True
    for name, ranks in measured["checkpoints"].items():
        if name.startswith("on "):
            numbers.append(name.removeprefix("on "))
            equal = equal and all(rank["equal"] for rank in ranks)
    text = f"saved on 4 ranks, loaded on {', '.join(numbers)}: every bit of every parameter is the one saved"
    return confirmed_if(equal, text)


@CLAIMS.claim("C35", "measured", "15_save_reshard_resume")
def _(measured: Measured) -> Finding:
    """Loading rebuilds the full state from the slices that each rank wrote."""
    checkpoints = measured["checkpoints"]
    loaded = max(rank["bytes"] for rank in checkpoints["on 2"])
    whole = checkpoints["rank 0 holds"]["full"]
    text = (
        f"a rank of 2 loads {in_mb(loaded)} of {in_mb(whole)}, its own slices; the whole appears"
        " only where somebody asks for a full state dict"
    )
    return conditional_if(loaded < 0.6 * whole, text)

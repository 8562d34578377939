"""What is said about communication: how many bytes, of what, over which links."""

from __future__ import annotations

from fsdplab.common.sizes import size
from fsdplab.planning import plan
from fsdplab.planning.plan_traffic import bytes_by_axis

from .claim import Finding, Measured, Subject, conditional_if, confirmed_if, in_mb

CLAIMS = Subject()


@CLAIMS.claim("C6", "measured and computed", "06_a_whole_model")
def _(measured: Measured) -> Finding:
    """FSDP communicates 1.3 to 1.5 times as much as DDP: two more all-gathers."""
    runs = measured["strategies"]
    small = runs["full_shard"]["bytes"] / runs["no_shard"]["bytes"]

    def planned_bytes(strategy: str, param_dtype: str, reduce_dtype: str) -> float:
        dtypes = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
        planned = plan("llama-3.1-8b", "h100", gpus=8, strategy=strategy, **dtypes)
        return sum(bytes_by_axis(planned.traffic).values())

    ddp_in_fp32 = planned_bytes("no_shard", "fp32", "fp32")
    # one dtype: two all-gathers and a reduce-scatter over an all-reduce, 3 / 2
    one = planned_bytes("full_shard", "fp32", "fp32") / ddp_in_fp32
    mixed = planned_bytes("full_shard", "bf16", "fp32")
    # (2 x 2 + 4) / (2 x 4) bytes of an element: 1
    usual = mixed / ddp_in_fp32
    # (2 x 2 + 4) / (2 x 2): 2
    low = mixed / planned_bytes("no_shard", "bf16", "bf16")
    text = (
        f"{small:.2f} times for gpt-tiny, whose root is gathered once (measured); for Llama 3.1 8B {one:.2f} with one"
        f" dtype, {usual:.2f} with bf16 gathers beside DDP in fp32, {low:.2f} beside DDP in bf16. An all-reduce is a"
        " reduce-scatter and an all-gather, so it is one all-gather more, not two"
    )
    return conditional_if(1.3 < one < 1.5 and not 1.3 < usual < 1.5, text)


@CLAIMS.claim("C8", "measured", "11_strategy_shoot_out")
def _(measured: Measured) -> Finding:
    """FSDP reduces the communication by exchanging only what is needed."""
    full, ddp = measured["strategies"]["full_shard"]["bytes"], measured["strategies"]["no_shard"]["bytes"]
    return confirmed_if(full < ddp, f"a rank sends {in_mb(full)} a step under full sharding and {in_mb(ddp)} under DDP")


@CLAIMS.claim("C9", "measured", "08_reading_a_trace")
def _(measured: Measured) -> Finding:
    """FSDP synchronises with all-reduce and broadcast."""
    kinds = _kinds(measured["strategies"]["full_shard"]["collectives"])
    listed = " and ".join(f"{count} {kind}s" for kind, count in sorted(kinds.items()))
    return confirmed_if("all_reduce" in kinds or "broadcast" in kinds, f"a step of gpt-tiny has {listed}, no other")


@CLAIMS.claim("C10", "measured", "08_reading_a_trace")
def _(measured: Measured) -> Finding:
    """The backward pass gathers gradients."""
    backward = {}
    for name, count in measured["strategies"]["full_shard"]["collectives"].items():
        # "backward all_gather"
        phase, kind = name.split()
        if phase == "backward":
            backward[kind] = count
    text = (
        f"it gathers parameters ({backward['all_gather']} all_gathers) and reduces gradients"
        f" ({backward['reduce_scatter']} reduce_scatters): no rank ever has the sum of all gradients"
    )
    return confirmed_if(backward.get("all_reduce", 0) > 0 or "reduce_scatter" not in backward, text)


@CLAIMS.claim("C13", "measured", "11_strategy_shoot_out")
def _(measured: Measured) -> Finding:
    """NO_SHARD is DDP."""
    lab, torchs = measured["strategies"]["no_shard"], measured["torch_ddp"]
    apart = max(abs(a - b) for a, b in zip(lab["losses"], torchs["losses"], strict=True))
    nbytes = lab["bytes"]
    text = (
        f"beside torch's DDP: losses of {len(lab['losses'])} steps differ by at most {apart:.1g}, and each rank sends"
        f" {in_mb(nbytes)}, torch's {in_mb(torchs['bytes'] or nbytes)}"
    )
    return confirmed_if(apart < 1e-5 and torchs["bytes"] in (None, nbytes), text)


@CLAIMS.claim("C14", "computed", "12_hybrid_and_slow_links")
def _(measured: Measured) -> Finding:
    """HYBRID_SHARD keeps the heavy all-gathers on fast links, and only all-reduces between nodes."""
    full = bytes_by_axis(plan("llama-3.1-8b", "h100", gpus=64, strategy="full_shard").traffic)
    hybrid = bytes_by_axis(plan("llama-3.1-8b", "h100", gpus=64, strategy="hybrid_shard").traffic)
    # bytes that one GPU sends; full_shard has one axis, which spans the nodes
    over_all, between, inside = sum(full.values()), hybrid["replicate"], hybrid["shard"]
    text = (
        f"Llama 3.1 8B on 8 nodes of 8: between nodes a rank sends {size(between)} a step instead of"
        f" {size(over_all)}; {size(inside)} stay inside its node"
    )
    return confirmed_if(between < 0.5 * over_all and inside > between, text)


@CLAIMS.claim("C26", "measured", "11_strategy_shoot_out")
def _(measured: Measured) -> Finding:
    """Gradient accumulation changes what each strategy costs."""
    factors = {}
    for name, nbytes in measured["micro_batches"].items():
        # 1 where a strategy sends nothing more for further micro-batches, up to 8
        factors[name] = nbytes / measured["strategies"][name]["bytes"]
    listed = ", ".join(f"{name} {factor:.1f}" for name, factor in factors.items())
    text = f"bytes of a step of 8 micro-batches over those of one: {listed} (by default)"
    return confirmed_if(max(factors.values()) > 2 * min(factors.values()), text)


@CLAIMS.claim("C37", "measured", "21_whole_matrices")
def _(measured: Measured) -> Finding:
    """FSDP works with any optimizer."""
    stock, owners = measured["muon"]["torch.optim.Muon"], measured["muon"]["owners"]
    text = (
        "true where each element is updated alone, as by AdamW: no collective. Muon needs whole matrices: a step of"
        f" torch.optim.Muon on gpt-tiny's shards takes {stock} collectives, and {owners} where each matrix has an owner"
    )
    return conditional_if(stock > 10 * owners, text)


def _kinds(issued: dict[str, int]) -> dict[str, int]:
    """Return the collectives of a step by kind, whatever their phase: `{"backward all_gather": 2}` is 2 all_gathers."""
    by_kind: dict[str, int] = {}
    for name, count in issued.items():
        kind = name.split()[1]
        by_kind[kind] = by_kind.get(kind, 0) + count
    return by_kind

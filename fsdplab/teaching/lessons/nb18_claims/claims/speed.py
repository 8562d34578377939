"""What is said about time: overhead, links, scaling. Computed by the planner, whose errors docs/planning.md
shows, or read from published measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from fsdplab.common.places import shared_folder
from fsdplab.planning.hardware import find_gpu
from fsdplab.planning.links import parse_link
from fsdplab.planning.planner import Plan, plan, plan_of, plan_spec
from fsdplab.planning.published import Case, read_published

from .claim import Finding, Measured, Subject, conditional_if, confirmed_if

CLAIMS = Subject()
SMALL, LARGE = ("gpt2", "llama-3.2-1b"), "llama-3.1-8b"


def _step(planned: Plan) -> float:
    """Return the predicted step in seconds."""
    assert planned.time is not None, "the claims are about cards of known FLOP/s"
    return planned.time.step_s


def _slower(model: str, gpus: int = 8, **settings: int) -> float:
    """Return a predicted step under full sharding over one under DDP, on H100s."""
    # 1.1: a step under full sharding takes 10 % longer
    full = plan(model, "h100", gpus=gpus, strategy="full_shard", **settings)
    ddp = plan(model, "h100", gpus=gpus, strategy="no_shard", **settings)
    return _step(full) / _step(ddp)


def _span(values: Sequence[float]) -> str:
    """Return the smallest and the largest of some factors: `0.94 to 1.02`."""
    return f"{min(values):.2f} to {max(values):.2f}"


def _behind(link: str, **settings: int) -> Plan:
    """Return a plan of the larger model on 8 H100 with another link between them."""
    spec = plan_spec(LARGE, "h100", gpus=8, checkpointing="full", **settings)
    return plan_of(replace(spec, gpu=replace(spec.gpu, link=parse_link(link))))


def _rate(planned: Plan) -> float:
    """Return the predicted tokens a second and GPU."""
    assert planned.tokens_per_s_per_gpu is not None, "the claims are about cards of known FLOP/s"
    return planned.tokens_per_s_per_gpu


@CLAIMS.claim("C7", "computed", "10_when_does_it_hide")
def _(measured: Measured) -> Finding:
    """Inside an NVLink node FSDP is usually 5 to 15 % slower than DDP."""
    # two models that fit whole on a card, each with one and with four sequences a rank
    factors = [_slower(model, micro_batch=count) for model in SMALL for count in (1, 4)]
    text = (
        f"a step on 8 H100 takes {_span(factors)} of DDP's where DDP fits ({' and '.join(SMALL)}): gathers hide behind"
        " compute, and each rank steps an eighth of the parameters"
    )
    return confirmed_if(all(1.05 <= factor <= 1.15 for factor in factors), text)


@CLAIMS.claim("C23", "computed", "12_hybrid_and_slow_links")
def _(measured: Measured) -> Finding:
    """Without a fast interconnect throughput may halve."""

    def share(link: str, micro_batch: int) -> float:
        """Return the tokens a second of NVLink's."""
        slow, fast = (
            _behind(link, seq=4096, micro_batch=micro_batch),
            _behind("nvlink4", seq=4096, micro_batch=micro_batch),
        )
        return _rate(slow) / _rate(fast)

    # of NVLink's tokens a second: 0.5 is half the throughput
    shares = {link: share(link, 1) for link in ("pcie5", "pcie4", "eth100", "eth10")}
    listed = ", ".join(f"{link} {part:.0%}" for link, part in shares.items())
    more = share("pcie4", 8)
    text = (
        f"Llama 3.1 8B on 8 H100, one sequence of 4,096 tokens a rank, of NVLink's tokens a second: {listed}. With 8"
        f" sequences a rank pcie4 keeps {more:.0%}"
    )
    return conditional_if(min(shares.values()) < 0.5 < more, text)


@CLAIMS.claim("C31", "computed", "12_hybrid_and_slow_links")
def _(measured: Measured) -> Finding:
    """Four RTX 4090 with NVLink reach a throughput that halves without it."""
    card = find_gpu("rtx-4090")
    spec = plan_spec("llama-3.2-1b", card.name, gpus=4, seq=2048, checkpointing="full")
    without = plan_of(spec)
    # the same cards with a link that they do not have
    with_it = plan_of(replace(spec, gpu=replace(card, link=parse_link("nvlink4"))))
    text = (
        f"the card has no NVLink: its GPUs are joined by {card.link.name}, {card.link.bytes_per_s / 1e9:.0f} GB/s. A"
        f" 1B model gets {_rate(without):,.0f} tokens/s a GPU there; with an H100's NVLink it would get"
        f" {_rate(with_it):,.0f}"
    )
    return confirmed_if("nvlink" in card.link.name, text)


@CLAIMS.claim("C24", "computed", "10_when_does_it_hide")
def _(measured: Measured) -> Finding:
    """FSDP has a large overhead for small models."""
    # from the smallest model to the largest
    factors = {model: _slower(model, gpus=64, seq=128) for model in ("gpt-tiny", "gpt-20m", "gpt2", "gpt2-large")}
    listed = ", ".join(f"{model} {factor - 1:+.0%}" for model, factor in factors.items())
    text = f"a step beside DDP's on 64 H100, one sequence of 128 tokens a rank: {listed}"
    return conditional_if(factors["gpt-tiny"] > 1.1 > factors["gpt2-large"], text)


@CLAIMS.claim("C25", "published", "19_planning_at_scale")
def _(measured: Measured) -> Finding:
    """It scales nearly linearly to hundreds of GPUs."""
    small_model, large_model = _series("MPT-7b", 2048), _series("MPT-70b", 2048)
    # tokens a second and GPU on 512 over those on 8: 1 is linear scaling
    small = small_model[512] / small_model[8]
    large = large_model[512] / large_model[128]
    few = _rate(plan(LARGE, "h100", gpus=64, strategy="full_shard"))
    many = _rate(plan(LARGE, "h100", gpus=4096, strategy="full_shard"))
    text = (
        f"MosaicML's runs on H100 keep {small:.0%} of the tokens a second and GPU from 8 to 512 GPUs (7B) and"
        f" {large:.0%} from 128 to 512 (70B); predicted, an 8B model with one sequence a rank keeps"
        f" {many / few:.0%} from 64 to 4,096"
    )
    return conditional_if(small > 0.9 and large > 0.9 and many < 0.8 * few, text)


@CLAIMS.claim("C30", "computed", "11_strategy_shoot_out")
def _(measured: Measured) -> Finding:
    """FSDP speeds up training."""
    # on 8 GPUs of one node, and on 512 with little work for each
    near, far = _slower("llama-3.2-1b"), _slower("llama-3.2-1b", gpus=512, seq=1024)
    text = (
        f"a 1B model's step takes {near:.2f} of DDP's on 8 H100 with NVLink, since each rank steps an eighth of the"
        f" parameters, and {far:.2f} on 512 with 1,024 tokens a rank. What it gives besides is room for larger batches"
    )
    return conditional_if(near < 0.99 and far > 1.01, text)


@CLAIMS.claim("C34", "computed", "12_hybrid_and_slow_links")
def _(measured: Measured) -> Finding:
    """ZeRO scales better than FSDP beyond 1,000 GPUs."""
    full = _rate(plan(LARGE, "h100", gpus=2048, strategy="full_shard"))
    hybrid = _rate(plan(LARGE, "h100", gpus=2048, strategy="hybrid_shard"))
    text = (
        "ZeRO-3 and full sharding send the same bytes; what decides is over which ranks. Llama 3.1 8B on 2,048 H100:"
        f" {full:,.0f} tokens/s a GPU sharded over all of them, {hybrid:,.0f} inside nodes (hybrid_shard)"
    )
    return confirmed_if(hybrid <= full, text)


@lru_cache(maxsize=1)
def _published() -> tuple[Case, ...]:
    """Load the published measurements."""
    return tuple(read_published(shared_folder("data") / "published.csv")[0])


def _series(model: str, sequence: int) -> dict[int, float]:
    """Return GPUs -> published tokens a second and GPU of MosaicML's runs of a model on H100s.

    Of several runs on a number of GPUs it is the fastest.
    """
    rates: dict[int, float] = {}
    for case in _published():
        spec = case.spec
        is_of_series = spec.model.name == model and spec.seq == sequence and spec.gpu.name == "H100 SXM 80GB"
        if is_of_series and case.tokens_per_s:
            rates[spec.gpus] = max(rates.get(spec.gpus, 0.0), case.tokens_per_s)
    return rates

"""Two sentences beside a plan: whether hybrid sharding pays, and from which batch on communication hides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdplab.common.sizes import seconds, three_digits

from .elsewhere import elsewhere
from .memory import fits_card
from .overlap import overlap_of
from .peers import peerless_band
from .plan_spec import PlanSpec, changed
from .remedies import remedies
from .step_time import has_known_flops, step_time

if TYPE_CHECKING:
    from .planner import Plan

ALIKE = 0.99  # less than a percent is no difference in speed


def hybrid_sentence(spec: PlanSpec) -> str:
    """Say whether hybrid_shard in groups of a node has a shorter step than full_shard; "" in one node.

    >>> from fsdplab.planning.planner import plan_spec
    >>> hybrid_sentence(plan_spec("llama-3.1-8b", "h100", gpus=8))
    ''
    """
    node = spec.gpus_per_node
    compares = spec.row.reshards_after_forward and spec.gpus > node and spec.gpus % node == 0
    ranks_a_node = node // (spec.tensor_parallel * spec.context_parallel)
    if not compares or ranks_a_node < 2 or spec.pipeline_parallel > 1 or not has_known_flops(spec.gpu):
        return ""
    full = changed(spec, strategy="full_shard", shard_size=None)
    hybrid = changed(spec, strategy="hybrid_shard", shard_size=ranks_a_node)
    if full is None or hybrid is None:  # experts or heads that such groups do not divide
        return ""
    full_s, hybrid_s = step_time(full).step_s, step_time(hybrid).step_s
    pays = hybrid_s < ALIKE * full_s
    verdict = _VERDICTS[pays, fits_card(hybrid)]
    steps = f"a step takes {seconds(hybrid_s)}, {seconds(full_s)} under full_shard"
    return f"hybrid_shard in groups of {ranks_a_node} {verdict}: {steps}"


# whether it pays and whether it fits -> what is said of hybrid sharding
_VERDICTS = {
    (True, True): "pays",
    (True, False): "would pay, but does not fit a card",
    (False, True): "does not pay",
    (False, False): "does not pay, nor does it fit a card",
}


def hiding_sentence(spec: PlanSpec) -> str:
    """Say from how many tokens of a micro-batch on a block's communication hides behind its compute.

    It is "" for a pipeline, whose stages wait for each other, and where nothing is sent or no times are known.
    """
    if spec.pipeline_parallel > 1 or not has_known_flops(spec.gpu):
        return ""
    crossover = overlap_of(spec).crossover_tokens
    if not crossover:
        return ""
    state = "hidden" if spec.tokens >= crossover else "exposed"
    if not spec.prefetch:
        state = "exposed, without prefetch"
    return f"from {three_digits(crossover)} tokens a micro-batch on; here it has {spec.tokens:,}: {state}"


def plan_json(plan: Plan, tokens: float | None = None) -> dict[str, Any]:
    """Return the plan with both sentences, what it needs elsewhere, and what makes it fit where it does not.

    It is what `plan --json` writes and the planner's page shows.
    """
    advice: dict[str, Any] = {"hiding": hiding_sentence(plan.spec), "hybrid": hybrid_sentence(plan.spec)}
    ways = () if plan.fits else remedies(plan.spec)
    peers = peerless_band(plan.spec)
    beside = {
        "without_peer_access": peers and peers.as_dict(),
        "elsewhere": elsewhere(plan.spec).as_dict(),
        "remedies": [remedy.as_dict() for remedy in ways],
    }
    return plan.as_dict(tokens) | advice | beside

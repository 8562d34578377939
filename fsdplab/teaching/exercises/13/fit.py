"""Fit a model that did not fit

Write fit(): a precision, a checkpoint and an offload with which the job fits a card of 150 MB.

1. Read the bars: which segments rest between steps, and how many MB are they together? Can bf16 or recomputation touch
   them?
2. Parameters, moments and gradients at rest are 173 MB, more than the card. They must go elsewhere; then the
   activations are too many.
3. "offload": "cpu", and with it either "precision": "bf16" or some checkpointing.
"""


def fit():
    """What to give up so that the job fits its card."""
    return {
        ### BEGIN SOLUTION
        ## "precision": "fp32",  # "fp32", "bf16"
        ## "checkpoint": "none",  # "none", "selective", "full"
        ## "offload": "none",  # "none", "cpu"
        "precision": "bf16",  # "fp32", "bf16"
        "checkpoint": "none",  # "none", "selective", "full"
        "offload": "cpu",  # "none", "cpu"
        ### END SOLUTION
    }


# ---- check: on 2 ranks, in 90 s, facts only

from fsdplab.teaching.core.training_on_ranks import complaint
from fsdplab.teaching.lessons.nb13_trading.on_ranks import CARD, CHOICES, JOB, peak_of

EXPECTED = {"choices": "", "bytes over the card": 0}


def cases(rank, n):
    yield (f"two steps of {JOB['model']} on a card of {CARD / 1e6:g} MB",)


def observe(fit):
    choices = fit()
    if refused := complaint(choices, JOB, CHOICES):
        return {"choices": refused}
    total, held = peak_of(choices)
    return {"choices": "", "bytes over the card": max(0, total - CARD), "_held": held}


REMEDIES = {
    "activations": "activations are the largest part: compute them again, or in fewer bits",
    "optimizer_state": "the optimizer state is the largest part: neither bf16 nor checkpointing touches what rests, so"
    " it must go elsewhere",
}


def too_much(got, right):
    held = sorted(((nbytes, name) for name, nbytes in got["_held"].items() if nbytes > 1e6), reverse=True)
    parts = ", ".join(f"{name.replace('_', ' ')} {nbytes / 1e6:.0f} MB" for nbytes, name in held)
    remedy = REMEDIES.get(held[0][1], "look at the largest part: which of the three choices touches it?")
    return f"{got['bytes over the card'] / 1e6:.0f} MB too many; at the peak {parts}. So {remedy}"


SAYS = {"choices": lambda got, right: got["choices"], "bytes over the card": too_much}

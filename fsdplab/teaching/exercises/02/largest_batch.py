"""The batch that fits

Write largest_batch(card, moments): the most sequences with which every instant of a step fits.

1. With how many sequences is one single instant full?
2. (card - fixed) / each, rounded down. Several instants: which of them decides? And if each is 0?
3. Count up from 0 while `all(fixed + (batch + 1) * each <= card for fixed, each in moments)`.
"""


def largest_batch(card, moments):
    """The most sequences with which each instant of a step fits a card of `card` MB; 0 where none fits.

    moments: pairs (MB that do not depend on the batch, MB a sequence), one for each instant of a step.
    """
    ### BEGIN SOLUTION
    batch = 0
    while all(fixed + (batch + 1) * each <= card for fixed, each in moments):
        batch += 1
    return batch
    ### END SOLUTION


# ---- check: on 1 rank, pure


def cases(rank, n):
    yield "one instant", 113, [(25, 10)]
    yield "an instant that is filled to the last MB", 100, [(40, 10)]
    yield "three instants", 300, [(130, 20), (200, 2), (148, 21)]
    yield "an instant without activations", 300, [(130, 20), (250, 0)]
    yield "states alone are over the card", 300, [(130, 20), (310, 0)]
    yield "not even one sequence", 140, [(130, 20)]
    yield "nothing fits", 100, [(130, 20), (90, 1)]
    yield "the run of this notebook", 320.0, [(130.8, 19.3), (147.7, 19.7), (187.8, 0.4), (186.2, 2.4)]


def observe(largest_batch, card, moments):
    return {"the returned value": largest_batch(card, list(moments)), "_moments": moments}


def say(got, right):
    batch, moments = got["the returned value"], right["_moments"]
    if not isinstance(batch, (int, float)):
        return "return one whole number: sequences"
    if batch < 0:
        return (
            "a batch cannot be negative: 0 is the answer wherever an instant is over the card with no sequence at all"
        )
    if batch < right["the returned value"]:
        peak = max(fixed + (batch + 1) * each for fixed, each in moments)
        return f"one sequence more still fits: with {batch + 1:g} the highest instant needs {peak:g} MB of {moments}"
    if batch > 1000 * (right["the returned value"] + 1):
        return "far too many sequences: is everything in MB? `card` and both numbers of `moments` are"
    fixed, each = max(moments, key=lambda moment: moment[0] + batch * moment[1])
    return f"with {batch:g} sequences an instant needs {fixed:g} + {batch:g} x {each:g} = {fixed + batch * each:g} MB"


SAYS = {"the returned value": say}

"""The statistics of late ranks, on arrays of arrivals: (..., steps, collectives, ranks), in ns.

A delay of one's own is what a rank took from one collective to the next, on a clock of its own that stands still while
it waits for others: from its release to its next arrival. Where the rows do not say how long a rank waited, it is
estimated from the arrivals alone (`own_delays`), which is less sharp. `verdict` says which rank delays the steps most
by its own delays, and how probable that is by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = Any  # a numpy array of floats

WORTH_NAMING = 0.02  # part of a step below which a delay is not mentioned
_STANDARD_ERRORS = 2.0  # by which the effect may be overestimated
_MOST_STEPS = 0.75  # part of the steps in which the rank must be late
_LEVELS = 100  # of ranked delays that are told apart


def lateness(times: Array) -> Array:
    """By how much each rank came after the median of the other ranks; below 0 where it was early. Same shape.

    >>> lateness(np.array([[[0.0, 10.0, 40.0]]])).tolist()
    [[[-25.0, -10.0, 35.0]]]
    """
    # Nobody has to be taken out to find a median of the others: the n-th of them is the n-th of all, or the next one
    # where the rank itself comes before. Of 0, 10, 40 the others of the second are 0 and 40, so it came 10 early.
    ordered = np.sort(times, axis=-1)
    ranks = times.shape[-1]
    # of an odd number of others both places are the same, of an even number the median is between the two
    places = ((ranks - 2) // 2, (ranks - 1) // 2)
    middles = []
    for place in places:
        at_place = ordered[..., place, None]
        behind_place = ordered[..., place + 1, None]
        is_before = times <= at_place
        middles.append(np.where(is_before, behind_place, at_place))
    median_of_others = (middles[0] + middles[1]) / 2
    return times - median_of_others


def own_delays_by_clock(
    times: Array,  # (..., steps, collectives, ranks): the arrivals, since the begin of their step
    own_clock: Array,  # of the same shape: the arrivals on the ranks' own clocks, which stand still while they wait
    steps: Sequence[tuple[int, int]],  # of each step its number, and when it began, in ns
) -> Array:
    """By how much longer than the others each rank took, on its own clock, since the collective before. Same shape.

    A first collective whose step before is not known counts with its whole lateness. A delay counts as far as the rank
    came late by it: who works longer while the others wait elsewhere delays nobody.
    """
    # from one collective of a step to the next one; the first of each step is filled in below
    took = np.diff(own_clock, axis=-2, prepend=own_clock[..., :1, :])
    took[..., 0, 0, :] = times[..., 0, 0, :]
    for place in range(1, len(steps)):
        before, began = steps[place - 1]
        step, begin = steps[place]
        if step == before + 1:
            # it follows the last collective of the step before, whose times count from an earlier begin
            came = own_clock[..., place, 0, :] + (begin - began)
            took[..., place, 0, :] = came - own_clock[..., place - 1, -1, :]
        else:
            took[..., place, 0, :] = times[..., place, 0, :]
    # a rank that took 5 longer, and came 3 late by it, has delayed the others by 3
    late = np.maximum(lateness(times), 0.0)
    own: Array = np.minimum(lateness(took), late)
    return own


def own_delays(times: Array, kinds: Sequence[str]) -> Array:
    """The part of each lateness that arose since the previous collective. `kinds` are the collectives'. Same shape.

    If ranks wait for each other at every collective, all of a lateness is new. If they run ahead, a rank that is late
    once stays late, and only what it adds is new: of a rank that comes 1, 2, 3 ms late, 1 ms each time. The others run
    ahead to the next collective of the same kind at most, so a longer lateness has made them wait.
    """
    late = lateness(times)
    released = times.max(axis=-1, keepdims=True)  # (..., steps, collectives, 1): when the last rank came
    horizon = _until_next_alike(released, kinds)  # (..., steps, collectives - 1, 1)
    # What ranks do not wait for, they keep: of a lateness of 4 ms with a quarter waited for, 3 are still there at the
    # next collective. One number for all of its steps, collectives and ranks.
    waited = _waited(times, released, horizon)
    kept = 1.0 - waited[..., None, None, None]
    late_before = np.clip(late[..., :-1, :], -horizon, horizon)
    own: Array = late.copy()
    own[..., 1:, :] -= kept * late_before  # nothing comes before the first collective
    return own


def _until_next_alike(released: Array, kinds: Sequence[str]) -> Array:
    """The time from each collective but the last to the next one of its kind, infinite if there is none.

    Of a gather at 0, a reduction at 10 and a gather at 40: 40 and infinite. `released`: (..., steps, collectives, 1).
    """
    horizon = np.full_like(released[..., 1:, :], np.inf)
    for place, kind in enumerate(kinds[:-1]):
        if kind in kinds[place + 1 :]:
            following = kinds.index(kind, place + 1)
            until_then = released[..., following, :] - released[..., place, :]
            horizon[..., place, :] = np.maximum(until_then, 0.0)
    return horizon


def _waited(times: Array, released: Array, horizon: Array) -> Array:
    """Which part of the time until a collective's last rank came the other ranks wait for it, from 0 to 1. Shape (...).

    It is the slope of a rank's time from one arrival to the next over the time for which it had to wait, if it did:
    from step to step at the same collective, after removing how slow the whole step was.
    """
    if times.shape[-2] < 2:
        return np.ones(times.shape[:-3])  # with one collective a step no interval lies within a step
    # both (..., steps, collectives - 1, ranks)
    ahead = (released - times)[..., :-1, :]  # for how long it had to wait, if it did
    interval = np.diff(times, axis=-2)  # to its next arrival

    # of each interval what is left without the usual one of a step that was as slow
    usual = np.median(interval, axis=-3, keepdims=True)  # (..., 1, collectives - 1, ranks)
    pace = np.divide(interval, usual, out=np.ones_like(interval), where=usual > 0)
    pace_of_step = np.median(pace, axis=(-2, -1), keepdims=True)  # (..., steps, 1, 1): 1.1 for a step 10 % slower
    interval = interval - pace_of_step * usual

    clear = ahead < horizon / 2  # beyond it a rank that runs ahead may have to wait, too
    ahead = _around_mean(ahead, clear)
    interval = _around_mean(interval, clear)
    # The slope of a line through the origin: sum(x y) / sum(x x). It is 1 where each ns that a rank came earlier is a
    # ns longer until its next arrival, since it waited, and 0 where coming early changes nothing.
    of_all = (-3, -2, -1)
    as_if_waiting = 1.0  # ns^2: decides only where no time varies from step to step
    together = (ahead * interval).sum(of_all)
    alone = (ahead**2).sum(of_all)
    slope = (together + as_if_waiting) / (alone + as_if_waiting)
    return np.clip(slope, 0.0, 1.0)


def _around_mean(values: Array, clear: Array) -> Array:
    """The values less their mean over the steps, both of the clear ones only; 0 for the others. Same shape."""
    number = np.maximum(clear.sum(axis=-3, keepdims=True), 1)  # (..., 1, collectives, ranks); no division by 0
    mean = np.where(clear, values, 0).sum(axis=-3, keepdims=True) / number
    return np.where(clear, values - mean, 0)


def effects(own: Array) -> Array:
    """By how much each rank delays a step: at each collective the median over the steps, summed. Shape (..., ranks).

    Of a rank whose own delays at two collectives are 1, 1, 9 and 2, 2, 2 ms in three steps: 3 ms.
    """
    return np.median(own, axis=-3).sum(axis=-2)


def _errors(own: Array, usual: Array) -> Array:
    """By how much each effect may be overestimated. Shape (..., ranks).

    It is twice the standard error of what scatters at each collective by itself, or once that of whole steps, which
    clocks and temperatures make slower or faster at all their collectives together.
    """
    steps = own.shape[-3]
    of_steps = usual.std(axis=-2, ddof=1) / steps**0.5
    of_collectives = _STANDARD_ERRORS * _standard_errors(own)
    return np.maximum(of_collectives, of_steps)


def _standard_errors(own: Array) -> Array:
    """The standard error of each effect, from how much the delays at each collective scatter over the steps."""
    steps = own.shape[-3]
    distance = np.abs(own - np.median(own, axis=-3, keepdims=True))
    deviation = np.median(distance, axis=-3)  # (..., collectives, ranks)
    # of normal noise: its standard deviation is 1.4826 median deviations, and a median's error 1.2533 of a mean's
    error = 1.4826 * 1.2533 * deviation / steps**0.5
    # an effect is a sum over collectives, whose errors are independent, so their squares add up
    return np.sqrt((error**2).sum(axis=-2))


def verdict(
    own: Array,  # (..., steps, collectives, ranks): the ranks' own delays
    step_ns: float,  # how long a step lasts: decides which delay is worth naming
    candidates: int,  # among how many ranks the latest one was looked for
) -> tuple[Array, Array]:
    """(index of the rank with the largest effect, its p-value corrected for the candidates), each of shape (...).

    The p-value is 1 where the effect is too small or does not repeat.
    """
    worth = WORTH_NAMING * step_ns
    whole = effects(own)  # (..., ranks)
    index = whole.argmax(axis=-1)  # (...): the rank that the rest asks about
    usual = _usual_delays(own)  # (..., steps, ranks)

    # effect: large enough also without its error
    sure_effects = whole - _errors(own, usual)
    sure = np.take_along_axis(sure_effects, index[..., None], axis=-1)[..., 0]

    # repetition: in both halves of the steps, and in most of the steps
    half = own.shape[-3] // 2
    first_half = effects(own[..., :half, :, :])
    second_half = effects(own[..., half:, :, :])
    is_largest_in_both = (first_half.argmax(axis=-1) == index) & (second_half.argmax(axis=-1) == index)
    delays_of_rank = np.take_along_axis(usual, index[..., None, None], axis=-1)[..., 0]  # (..., steps)
    late_steps = (delays_of_rank >= worth / 2).mean(axis=-1)  # the part of them
    repeats = is_largest_in_both & (late_steps >= _MOST_STEPS)

    # Bonferroni: the latest of four ranks is as late by chance four times as often as a rank named beforehand
    chance = np.minimum(1.0, candidates * probability(usual, index))
    return index, np.where((sure >= worth) & repeats, chance, 1.0)


def _usual_delays(own: Array) -> Array:
    """Each rank's delay in each step, without what is unusual. Shape (..., steps, ranks).

    A delay at a collective counts for no more than the usual delay there of the rank that is latest, so that one long
    disturbance does not outweigh a step.
    """
    # Of a rank with 1, 1, 90 ms at a collective and another one with 2, 2, 2: 2 ms at most, so 1, 1, 2 and 2, 2, 2.
    usual_delay = np.median(np.abs(own), axis=-3, keepdims=True)  # (..., 1, collectives, ranks)
    most = usual_delay.max(axis=-1, keepdims=True)  # (..., 1, collectives, 1)
    return np.clip(own, -most, most).sum(axis=-2)


def probability(delays: Array, index: Array) -> Array:
    """The probability that a rank's delays are, by chance, together as high as those of the rank `index`. Shape (...).

    `delays`: (..., steps, ranks). All delays, each less the mean of its step, are ranked together, so that a long delay
    counts more than a short one, and none counts without limit. If no rank were slower than another, a rank would have
    any of a step's ranks with the same probability: the sum over the steps has the distribution computed here.

    Of two ranks, of which the second is later in all of 8 steps: 0.5^8.
    """
    steps, ranks = delays.shape[-2:]
    within_step = delays - delays.mean(axis=-1, keepdims=True)
    # whole numbers below `_LEVELS`, so that the distribution of their sum can be computed
    scores = _ranked(within_step) * _LEVELS // (steps * ranks)
    # The sum's distribution is that of the steps' scores, one convolved with the other: a product of transforms. Of two
    # steps in which a rank has 0 or 1 with the same probability, the sum is 0, 1 or 2 with 1/4, 1/2 and 1/4.
    of_step = (scores[..., None] == np.arange(_LEVELS)).mean(axis=-2)  # (..., steps, levels): how probable each is
    size = steps * (_LEVELS - 1) + 1  # sums from 0 to all steps' highest score
    transformed = np.fft.rfft(of_step, size, axis=-1).prod(axis=-2)
    of_sum = np.fft.irfft(transformed, size, axis=-1)
    at_least = np.cumsum(of_sum[..., ::-1], axis=-1)[..., ::-1]  # of 1/4, 1/2, 1/4: 1, 3/4, 1/4

    # the rank's own sum, and how probable one at least as high is
    own = np.take_along_axis(scores, index[..., None, None], axis=-1)[..., 0]  # (..., steps)
    as_high = np.take_along_axis(at_least, own.sum(axis=-1)[..., None], axis=-1)[..., 0]
    # the highest sum of all is rarer than rounding: it is the product over the steps
    is_highest = (own == scores.max(axis=-1)).all(axis=-1)
    of_highest = (own[..., None] == scores).mean(axis=-1).prod(axis=-1)
    rarest = float(ranks) ** -steps  # one rank in each step
    return np.where(is_highest, of_highest, np.clip(as_high, rarest, 1.0))


def _ranked(values: Array) -> Array:
    """How many of all values (..., steps, ranks) are lower than each. Same shape, whole numbers."""
    # the comments show what becomes of 5, 3, 5, 9
    flat = values.reshape(*values.shape[:-2], -1)  # steps and ranks as one axis
    order = np.argsort(flat, axis=-1, kind="stable")  # 1, 0, 2, 3
    ordered = np.take_along_axis(flat, order, axis=-1)  # 3, 5, 5, 9
    place = np.arange(flat.shape[-1])
    is_new = np.diff(ordered, axis=-1, prepend=-np.inf) > 0  # yes, yes, no, yes
    # equal values have the first one's place: 0, 1, 1, 3
    below = np.maximum.accumulate(np.where(is_new, place, 0), axis=-1)
    # back in the order of the values: 1, 0, 1, 3
    lower = np.empty_like(order)
    np.put_along_axis(lower, order, below, axis=-1)
    return lower.reshape(values.shape)

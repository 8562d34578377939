"""Right answers to the exercises of notebook 10, besides the references."""

import math

import numpy as np


def crossover__the_parameters_cancel_in_whole_tokens(parameters, ranks, flops, bandwidth, param_bytes, reduce_bytes):
    rate = flops / bandwidth * (1 - 1 / ranks)
    return math.ceil(rate * max(param_bytes / 2, (param_bytes + reduce_bytes) / 4))


def crossover__by_halving_in_numpy(parameters, ranks, flops, bandwidth, param_bytes, reduce_bytes):
    gather, reduce = (np.float64(b) * parameters * (ranks - 1) / ranks / bandwidth for b in (param_bytes, reduce_bytes))
    low, high = 0, 2**40
    while high - low > 1:
        tokens = (low + high) // 2
        compute = np.array([2.0, 4.0]) * parameters * tokens / flops
        hidden = np.all(compute >= [gather, gather + reduce])
        low, high = (low, tokens) if hidden else (tokens, high)
    return np.int64(high)

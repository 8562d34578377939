"""Right answers to the exercises of notebook 02, besides the references."""

import math
from fractions import Fraction
from math import ceil

import numpy as np
import torch


def model_state_bytes__one_line_a_state_in_numpy(strategy, parameters, ranks, param_dtype):
    size = np.int64(2 if param_dtype == "bf16" else 4)
    optimizer = (12 if size == 2 else 8) / (1 if strategy == "no_shard" else ranks)
    gradient = size / (ranks if strategy in ("zero2", "full_shard") else 1)
    parameter = size / (ranks if strategy == "full_shard" else 1)
    return np.float64(parameters) * (optimizer + gradient + parameter)


def model_state_bytes__whole_slices(strategy, parameters, ranks, param_dtype):
    slice_ = ceil(parameters / ranks)
    o, g, p = {
        "no_shard": (parameters,) * 3,
        "zero1": (slice_, parameters, parameters),
        "zero2": (slice_, slice_, parameters),
        "full_shard": (slice_,) * 3,
    }[strategy]
    return 8 * o + 4 * (g + p) if param_dtype == "fp32" else 12 * o + 2 * g + 2 * p


def model_state_bytes__a_tensor(strategy, parameters, ranks, param_dtype):
    cut = {"no_shard": [1, 1, 1], "zero1": [ranks, 1, 1], "zero2": [ranks, ranks, 1]}
    each = torch.tensor([8.0, 4, 4] if param_dtype == "fp32" else [12.0, 2, 2], dtype=torch.float64)
    return (each / torch.tensor(cut.get(strategy, [ranks] * 3))).sum() * parameters


def largest_batch__by_division(card, moments):
    if any(fixed > card for fixed, _ in moments):
        return 0
    return min(math.floor((card - fixed) / each) for fixed, each in moments if each)


def largest_batch__by_halving_in_numpy(card, moments):
    fixed, each = np.array(moments).T
    low, high = 0, 4096
    while high - low > 1:
        middle = (low + high) // 2
        if np.all(fixed + middle * each <= card):
            low = middle
        else:
            high = middle
    return np.int32(low)


def model_state_bytes__in_fractions(strategy, parameters, ranks, param_dtype):
    size, optimizer = (4, 8) if param_dtype == "fp32" else (2, 12)
    whole = {"no_shard": 16, "zero1": 2 * size, "zero2": size, "full_shard": 0}[strategy]
    return parameters * (whole + Fraction(2 * size + optimizer - whole, ranks))

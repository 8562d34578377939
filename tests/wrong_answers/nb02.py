"""Wrong answers to the exercises of notebook 02, written from their statements alone."""


def model_state_bytes__or_a_text(strategy, parameters, ranks, param_dtype):
    size, optimizer = (4, 8) if param_dtype == "fp32" else (2, 12)
    gradient = size / ranks if strategy == "zero2" or "full_shard" else size  # noqa: SIM222
    parameter = size / ranks if strategy == "full_shard" else size
    return parameters * (parameter + gradient + (optimizer if strategy == "no_shard" else optimizer / ranks))


def model_state_bytes__other_names(strategy, parameters, ranks, param_dtype):
    size, optimizer = (4, 8) if param_dtype == "fp32" else (2, 12)
    whole = 2 * size if strategy == "ZeRO-1" else size if strategy == "ZeRO-2" else 0
    return parameters * (whole + (2 * size + optimizer - whole) / (1 if strategy == "no_shard" else ranks))


def model_state_bytes__gradients_in_fp32(strategy, parameters, ranks, param_dtype):
    size, optimizer = (4, 8) if param_dtype == "fp32" else (2, 12)
    gradient = 4 / ranks if strategy in ("zero2", "full_shard") else 4
    parameter = size / ranks if strategy == "full_shard" else size
    return parameters * (parameter + gradient + (optimizer if strategy == "no_shard" else optimizer / ranks))


def model_state_bytes__times_the_ranks(strategy, parameters, ranks, param_dtype):
    size, optimizer = (4, 8) if param_dtype == "fp32" else (2, 12)
    return parameters * (2 * size + optimizer * ranks)


def largest_batch__the_largest_of_both(card, moments):
    fixed, each = max(fixed for fixed, _ in moments), max(each for _, each in moments)
    return max(0, int((card - fixed) // each))


def largest_batch__pairs_the_other_way_round(card, moments):
    batch = 0
    while all(fixed + (batch + 1) * each <= card for each, fixed in moments):
        batch += 1
    return batch


def largest_batch__in_bytes(card, moments):
    return min(int((1e6 * card - fixed) // each) for fixed, each in moments if each)


def model_state_bytes__a_master_beside_fp32(strategy, parameters, ranks, param_dtype):
    size = {"fp32": 4, "bf16": 2}[param_dtype]
    divided = {"no_shard": 0, "zero1": 1, "zero2": 2, "full_shard": 3}[strategy]
    return parameters * sum(each / (ranks if place < divided else 1) for place, each in enumerate((12, size, size)))


def model_state_bytes__whole_masters(strategy, parameters, ranks, param_dtype):
    size, master = {"fp32": (4, 0), "bf16": (2, 4)}[param_dtype]
    cut = {"no_shard": (1, 1, 1), "zero1": (ranks, 1, 1), "zero2": (ranks, ranks, 1), "full_shard": (ranks,) * 3}
    moments, gradient, parameter = cut[strategy]
    master /= ranks if strategy == "full_shard" else 1
    return parameters * (8 / moments + size / gradient + size / parameter + master)


def largest_batch__the_first_that_does_not_fit(card, moments):
    batch = 0
    while all(fixed + batch * each <= card for fixed, each in moments):
        batch += 1
    return batch

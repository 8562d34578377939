"""Wrong answers to the exercise of notebook 10, written from its statement alone."""


def crossover__six_operations(parameters, ranks, flops, bandwidth, param_bytes, reduce_bytes):
    sent = parameters * (ranks - 1) / ranks
    forward = param_bytes * sent / bandwidth / (2 * parameters / flops)
    backward = (param_bytes + reduce_bytes) * sent / bandwidth / (6 * parameters / flops)
    return max(forward, backward)


def crossover__the_longer_message(parameters, ranks, flops, bandwidth, param_bytes, reduce_bytes):
    sent = parameters * (ranks - 1) / ranks
    forward = param_bytes * sent / bandwidth / (2 * parameters / flops)
    backward = max(param_bytes, reduce_bytes) * sent / bandwidth / (4 * parameters / flops)
    return max(forward, backward)


def crossover__of_the_recap(parameters, ranks, flops, bandwidth, param_bytes, reduce_bytes):
    return 1.5 * flops / bandwidth * (ranks - 1) / ranks


def crossover__half_of_the_products(parameters, ranks, flops, bandwidth, param_bytes, reduce_bytes):
    sent = parameters * (ranks - 1) / ranks / bandwidth * flops / parameters
    return max(2 * param_bytes * sent, (param_bytes + reduce_bytes) * sent)

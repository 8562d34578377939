"""Wrong answers to the exercises of notebook 06, written from their statements alone."""


def choose_units__compares_a_class_with_a_text(name, module):
    return type(module) == "CausalAttention" or type(module) == "GPTFeedForward"  # noqa: E721


def choose_units__finds_the_name_in_longer_ones(name, module):
    return "attention" in name or "feed_forward" in name


def schedule__all_unshards_first(n):
    steps = [("unshard", i) for i in range(n)] + [("forward", i) for i in range(n)]
    for i in reversed(range(n)):
        steps += [("backward", i), ("reshard", i), ("reduce", i)]
    return steps


def schedule__waits_in_backward(n):
    steps = [("unshard", 0)]
    for i in range(n):
        if i + 1 < n:
            steps.append(("unshard", i + 1))
        steps += [("forward", i), ("reshard", i)]
    for i in reversed(range(n)):
        steps += [("unshard", i), ("backward", i), ("reshard", i), ("reduce", i)]
    return steps

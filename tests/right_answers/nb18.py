"""Right answers to the exercises of notebook 18, besides the references."""


def ratio__by_units(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    blocks = (1 - root) * (2 * parameter_bytes + reduce_bytes)
    return (blocks + root * (parameter_bytes + reduce_bytes)) / 2 / ddp_bytes


def ratio__in_ring_steps(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    n, elements = 4, 1000.0
    hops = (n - 1) / n
    sent = elements * hops * (parameter_bytes + (1 - root) * parameter_bytes + reduce_bytes)
    return sent / (2 * hops * elements * ddp_bytes)


def verdicts__by_groups():
    refuted, conditional = ("C8", "C9", "C10", "C16", "C22", "C31"), ("C6", "C36", "C37")
    found = dict.fromkeys(refuted, "refuted") | dict.fromkeys(conditional, "under conditions")
    return found | {"C21": "confirmed"}

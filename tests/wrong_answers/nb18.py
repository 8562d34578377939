"""Wrong answers to the exercises of notebook 18, written from their statements alone."""


def ratio__three_messages_of_ddp(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    return ((2 - root) * parameter_bytes + reduce_bytes) / (3 * ddp_bytes)


def ratio__in_percent(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    return 100 * ((2 - root) * parameter_bytes + reduce_bytes) / (2 * ddp_bytes)


def ratio__a_whole_number(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    return ((2 - root) * parameter_bytes + reduce_bytes) // (2 * ddp_bytes)


def ratio__one_digit(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    return round(((2 - root) * parameter_bytes + reduce_bytes) / (2 * ddp_bytes), 1)


def ratio__a_text(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    return f"{((2 - root) * parameter_bytes + reduce_bytes) / (2 * ddp_bytes):.2f}"


def ratio__the_bytes(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    return (2 - root) * parameter_bytes + reduce_bytes


def ratio__of_one_dtype(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    return 1.5 - root / 2


def ratio__root_in_percent(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    return ((2 - root / 100) * parameter_bytes + reduce_bytes) / (2 * ddp_bytes)

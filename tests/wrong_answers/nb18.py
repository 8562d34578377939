"""Wrong answers to the exercises of notebook 18, written from their statements alone."""


def ratio__three_messages_of_ddp(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    """this is 0.6667 times what is expected"""
    return ((2 - root) * parameter_bytes + reduce_bytes) / (3 * ddp_bytes)


def ratio__in_percent(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    """100 times too large: another unit"""
    return 100 * ((2 - root) * parameter_bytes + reduce_bytes) / (2 * ddp_bytes)


def ratio__a_whole_number(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    """these are whole numbers, and what is expected has fractions"""
    return ((2 - root) * parameter_bytes + reduce_bytes) // (2 * ddp_bytes)


def ratio__one_digit(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    """the numbers are rounded"""
    return round(((2 - root) * parameter_bytes + reduce_bytes) / (2 * ddp_bytes), 1)


def ratio__a_text(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    """a number is expected, this is '1.50'"""
    return f"{((2 - root) * parameter_bytes + reduce_bytes) / (2 * ddp_bytes):.2f}"


def ratio__the_bytes(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    """divide them by DDP's"""
    return (2 - root) * parameter_bytes + reduce_bytes


def ratio__of_one_dtype(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    """never reads `parameter_bytes` and `reduce_bytes` and `ddp_bytes`"""
    return 1.5 - root / 2


def ratio__root_in_percent(parameter_bytes, reduce_bytes, ddp_bytes, root=0.0):
    """`root` is a part between 0 and 1"""
    return ((2 - root / 100) * parameter_bytes + reduce_bytes) / (2 * ddp_bytes)

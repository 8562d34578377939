"""20.backward: a shorter dtype"""


def averaged(mine, unit):
    return mine.bfloat16().float() / unit.n

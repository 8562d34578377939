"""20.backward: divided by the number of ranks twice"""


def averaged(mine, unit):
    return mine / unit.n / unit.n

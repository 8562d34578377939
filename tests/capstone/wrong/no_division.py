"""20.backward: the sum over the 4 ranks

The reduce-scatter adds up, and nothing divides.
"""


def averaged(mine, unit):
    return mine
